"""Reads a folder of LEAPP, NVIDIA's exporter of policies: ONNX files, their states, and initial values.

A YAML file says what each node takes and returns, and which output is which input of the next call; a safetensors file
holds initial values. LEAPP itself is not needed. `find.stepping` checks that the tables fit the graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, MsgspecError, Struct, convert, field
from numpy.typing import NDArray
from txl_runtime.bundle.tensor_file import read_whole
from txl_runtime.errors import CheckpointError, one_line, some

from txl_export.checkpoints.files.pickle_names import shown
from txl_export.checkpoints.files.yaml_files import MOST_BYTES, read_yaml
from txl_export.regular import read_regular

MOST_FILE_BYTES = 2**31 - 1
"""Maximum number of bytes of an ONNX file or a file of initial values, which lie beside the YAML file."""
AGAIN = "export it again with LEAPP"


class _Tensor(Struct):
    name: str
    kind: Any = None
    element_names: Any = None


class _Node(Struct):
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    parameters: dict[str, Any]


class _Configs(Struct):
    frequency: Annotated[float, Meta(gt=0, le=1e9)] | None = None


class _Pipeline(Struct):
    feedback_flow: dict[str, list[str]]
    initial_values: str = ""
    configs: _Configs = field(default_factory=_Configs)


class _Document(Struct):
    models: Annotated[dict[str, _Node], Meta(min_length=1)]
    pipeline: _Pipeline


@dataclasses.dataclass(frozen=True)
class Leapp:
    """One node of a LEAPP folder, or an ONNX file without tables.

    Attributes:
        path: the ONNX file.
        states: for the input of a state, the output that is its next value.
        initial: initial values by the names of inputs; {} means zeros.
        rate: calls per second; None if unknown.
        facts: the meaning of inputs and outputs that are no states, for the manifest's `family`.
    """

    path: Path
    states: dict[str, str] = dataclasses.field(default_factory=dict)
    initial: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    rate: float | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def is_leapp(path: Path) -> bool:
    """Return whether `read_leapp` reads a path: its YAML file begins like LEAPP's. This needs no package."""
    return bool(_texts(path)[0])


def read_leapp(path: Path) -> Leapp:
    """Read one node of a folder that LEAPP 0.6 or 0.7 wrote.

    Args:
        path: the folder or its YAML file. If there are several nodes, append `:NODE`.

    Raises:
        BackendError: PyYAML is not installed.
        CheckpointError: the node is missing, or files are damaged, too large, or contradict each other.
    """
    texts, name = _texts(path)
    if len(texts) != 1:
        what = f"{len(texts)} YAML files of LEAPP's with at most {MOST_BYTES} bytes"
        raise CheckpointError(f"{path}: {what}, expected one; give its path")
    ((table, text),) = texts.items()
    document = _read(table, text)
    nodes, flow = document.models, document.pipeline
    name = next(iter(nodes)) if len(nodes) == 1 and not name else name
    if name not in nodes:
        raise CheckpointError(f"{path}: has the nodes {some([*map(shown, nodes)])}, expected one of them: FOLDER:NODE")
    node, pairs = nodes[name], _pairs(table, nodes, flow.feedback_flow)
    returned = {f"{name}/{tensor.name}": tensor.name for tensor in node.outputs}
    sources = {tensor.name: pairs.get(f"{name}/{tensor.name}") for tensor in node.inputs}
    states = {entry: returned[source] for entry, source in sources.items() if source in returned}
    if {*states.values()} == {*returned.values()}:
        what = f"{table}: all that {shown(name)} returns is given to it again ({some([*states.values()])})"
        raise CheckpointError(f"{what}, expected an output beside; have LEAPP return it twice, as state and as output")
    initial = _first_values(table, flow.initial_values, name, states) if flow.initial_values else {}
    facts = {
        "observations": [_meaning(tensor) for tensor in node.inputs if tensor.name not in states],
        "actions": [_meaning(tensor) for tensor in node.outputs if tensor.name not in states.values()],
    }
    return Leapp(_graph(table, name, node), states, initial, flow.configs.frequency, facts)


def _meaning(tensor: _Tensor) -> dict[str, Any]:
    meaning = {"kind": tensor.kind, "elements": tensor.element_names}
    return {"name": tensor.name, **{key: value for key, value in meaning.items() if value}}


def _texts(path: Path) -> tuple[dict[Path, str], str]:
    """Return the text of each YAML file like LEAPP's, by path, and the node that is appended to `path`, or ""."""
    (head, _, node), texts = path.name.rpartition(":"), dict[Path, str]()
    with suppress(OSError):  # the name may be too long for the file system
        path, node = (path.with_name(head), node) if head and not path.exists() else (path, "")
        if (path / "config.json").exists():  # a Hugging Face folder: do not search it
            return texts, node
        for file in sorted(path.glob("*.yaml")) if path.is_dir() else [path]:
            with suppress(OSError, CheckpointError, UnicodeDecodeError):
                text = read_regular(file, MOST_BYTES).decode()
                texts |= {file: text} if "\nmodels:" in f"\n{text}" else {}
    return texts, node


def _read(table: Path, text: str) -> _Document:
    """Parse YAML into texts, lists and tables."""
    try:
        return convert(read_yaml(table, text), _Document, strict=False)
    except (ValueError, MsgspecError) as error:
        raise CheckpointError(f"{table}: {shown(one_line(error))}; expected YAML of LEAPP's: {AGAIN}") from None


def _pairs(table: Path, nodes: dict[str, _Node], flow: dict[str, list[str]]) -> dict[str, str]:
    """Return the feedback table: for an input NODE/NAME, the output NODE/NAME that it gets in the next call."""
    outputs = {f"{name}/{tensor.name}" for name, node in nodes.items() for tensor in node.outputs}
    inputs = {f"{name}/{tensor.name}" for name, node in nodes.items() for tensor in node.inputs}
    pairs = dict[str, str]()
    for source, target in ((source, target) for source, targets in flow.items() for target in targets):
        if source not in outputs or target not in inputs or pairs.setdefault(target, source) != source:
            leads = f"{table}: leads {shown(source)} to {shown(target)}"
            raise CheckpointError(f"{leads}, expected one output of a node for an input of one; {AGAIN}")
    return pairs


def _graph(table: Path, name: str, node: _Node) -> Path:
    """Return the ONNX file of a node; its SHA-256 must be the recorded SHA-256."""
    backend, named, expected = (str(node.parameters.get(key)) for key in ("backend", "model_path", "sha256sum"))
    if backend != "onnx":
        raise CheckpointError(f"{table}: {shown(name)} is saved as {shown(backend)}, expected onnx; {AGAIN} as that")
    file, sha256 = _beside(table, named, lambda data: hashlib.sha256(data).hexdigest())
    if sha256 != expected:
        raise CheckpointError(f"{file}: its SHA-256 is not the one in {table.name}, expected LEAPP's own file; {AGAIN}")
    return file


def _first_values(table: Path, named: str, name: str, states: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return the states' initial values; a file that lacks some of them is refused."""
    file, arrays = _beside(table, named, lambda data: read_whole(io.BytesIO(data), len(data), MOST_BYTES)[1])
    if lacking := [state for state in states if f"{name}/{state}" not in arrays]:
        raise CheckpointError(f"{file}: nothing for {shown(f'{name}/{lacking[0]}')}, expected an array; {AGAIN}")
    return {state: arrays[f"{name}/{state}"] for state in states}


def _beside(table: Path, named: str, read: Callable[[bytes], Any]) -> tuple[Path, Any]:
    """Return the path and content of a file that a YAML file names.

    With links resolved, the file must lie in the YAML file's folder.
    """
    file, place = table.parent / named, os.path.realpath(table.parent)
    if not named.isprintable() or len(named) > 255 or not Path(os.path.realpath(file)).is_relative_to(place):
        raise CheckpointError(f"{table}: names {shown(named)}, expected a file in its folder; copy it there")
    try:
        return file, read(read_regular(file, MOST_FILE_BYTES))
    except (CheckpointError, OSError, ValueError, MsgspecError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise CheckpointError(f"{file}: {reason}; expected the file that LEAPP wrote: copy it again") from None
