"""Make `config.pbtxt`, Triton's configuration of a model, from a bundle's manifest.

A configuration is a nested dict with the fields of Triton's protocol buffer; `to_text` writes it as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Input, Output

from txl_deploy.triton.inside import tables

QUEUE_DELAY = 300
"""Microseconds for which the server waits for requests of further sequences, to run all of them in one step."""

SESSIONS = 1024
"""Maximum number of conversations of a generating model at once; the runtime parks conversations without a row."""


class Word(str):
    """A name of an enumeration, which a configuration has without quotes."""

    __slots__ = ()


CPU = Word("KIND_CPU")
TYPES = {
    "bool": Word("TYPE_BOOL"),
    "int32": Word("TYPE_INT32"),
    "float32": Word("TYPE_FP32"),
}
"""The server's names of data types, by the manifest's names."""
STRING, INT64 = Word("TYPE_STRING"), Word("TYPE_INT64")

Config = dict[str, Any]
"""A configuration: values, lists and nested configurations by field name."""


def stepping_config(manifest: Manifest, sequences: int, idle_seconds: float, backend: str) -> Config:
    """Configure the model that is stepped: its sequences continue from request to request.

    The server batches requests of different sequences that arrive together.

    Args:
        manifest: the bundle's manifest.
        sequences: maximum number of sequences at once; further sequences wait for a place.
        idle_seconds: seconds after which an idle sequence loses its place.
        backend: the runtime's backend inside the server.
    """
    inputs = manifest.given
    outputs = [_tensor(output, manifest) for output in manifest.outputs]
    if tables.speaks(manifest):
        outputs += [
            {"name": tables.LAST, "data_type": TYPES["float32"], "dims": [manifest.vocab_size]},
            {"name": tables.NEXT, "data_type": TYPES["int32"], "dims": [1]},
        ]
    return {
        "backend": "python",
        "max_batch_size": manifest.batch_size if tables.together(manifest) else 1,
        "input": [_tensor(entry, manifest) for entry in inputs],
        "output": outputs,
        # requests of one sequence go to one instance, the oldest request first, in any free slot
        "sequence_batching": {
            "max_sequence_idle_microseconds": round(idle_seconds * 1e6),
            "oldest": {"max_candidate_sequences": sequences, "max_queue_delay_microseconds": QUEUE_DELAY},
        },
        **_python("stepping", backend, sequences=str(sequences)),
    }


def generation_config(backend: str, idle_seconds: float) -> Config:
    """Configure the model that generates: it answers one request with a response for each token."""
    options = [("temperature", TYPES["float32"]), ("top_k", TYPES["int32"]), ("top_p", TYPES["float32"])]
    options += [("seed", INT64), ("stop_tokens", TYPES["int32"])]
    inputs: list[Config] = [
        {"name": "tokens", "data_type": TYPES["int32"], "dims": [-1]},
        {"name": "max_new_tokens", "data_type": TYPES["int32"], "dims": [1]},
    ]
    inputs += [
        {"name": name, "data_type": kind, "dims": [-1 if name == "stop_tokens" else 1], "optional": True}
        for name, kind in options
    ]
    return {
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": inputs,
        "output": [
            {"name": "tokens", "data_type": TYPES["int32"], "dims": [-1]},
            {"name": "logprobs", "data_type": TYPES["float32"], "dims": [-1]},
            {"name": "finish_reason", "data_type": STRING, "dims": [1]},
        ],
        **_python("generating", backend, sessions=str(SESSIONS), idle_seconds=str(idle_seconds)),
    }


def _python(serves: str, backend: str, **more: str) -> Config:
    """Configure the Python backend: one process, and the parameters that the model in this process reads."""
    parameters = {"serves": serves, "backend": backend, "threads": "1", **more}
    return {
        "instance_group": [{"kind": CPU, "count": 1}],
        "parameters": [{"key": key, "value": {"string_value": value}} for key, value in parameters.items()],
    }


def _tensor(entry: Input | Output, manifest: Manifest) -> Config:
    """Configure an input or output without the axis of sequences, which the server adds in front."""
    sizes = list(entry.axes.alone.filled(-1, -1))
    tensor: Config = {"name": entry.name, "data_type": TYPES[entry.dtype], "dims": sizes or [1]}
    if not sizes:
        tensor["reshape"] = {"shape": []}
    if isinstance(entry, Input) and -1 in sizes and tables.ragged(manifest):
        tensor["allow_ragged_batch"] = True
    return tensor


def to_text(config: Mapping[str, Any], indent: str = "") -> str:
    """Write a configuration in protocol buffers' text format."""
    lines = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name} {{", to_text(value, indent + "  "), f"{indent}}}"]
        elif isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            each = [f"{indent}  {{\n{to_text(entry, indent + '    ')}\n{indent}  }}" for entry in value]
            lines += [f"{indent}{name} [", ",\n".join(each), f"{indent}]"]
        elif isinstance(value, list | tuple):
            lines.append(f"{indent}{name}: [ {', '.join(_scalar(size) for size in value)} ]")
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}")
    return "\n".join(lines)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not isinstance(value, Word):
        signs = "".join(f"\\{ord(sign):03o}" if sign in '\\"\n\r\t' else sign for sign in value)
        return f'"{signs}"'
    return str(value)
