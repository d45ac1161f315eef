"""Render the files of a package from templates: a step and its numbers as names, types and sizes of C."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.tables import Input, Output, StateTensor
from txl_runtime.types import Array

from txl_deploy.extras import version_of
from txl_deploy.plain_c.generating import KINDS, WEIGHTS, Generated, apart
from txl_deploy.plain_c.native import Packed, native_context, native_source
from txl_deploy.plain_c.step import PlainStep

FLAGS = "-O3 -march=native -fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno"
"""Compiler flags for the generated C: the compiler may change the order of sums, and keeps NaN."""
NATIVE_FLAGS = "-O3 -march=native -ffp-contract=fast -fno-trapping-math -fno-math-errno"
"""Compiler flags for a Transformer-XL's native step: the compiler keeps the order of sums that the source gives."""
ALIGNED = 64
"""In a file of weights, each weight begins at a multiple of this number of bytes."""
TYPES = WEIGHTS | {np.dtype(np.int8): "int8_t", np.dtype(np.int32): "int32_t"}
"""Types of weights, and their names in C."""
TOLD = ("trainer", "normaliser", "clip_actions", "rescale_actions", "clip_observations", "rest")
"""Fields of a manifest's `family` that a comment in the C header shows."""
_TAKEN = re.findall(
    r"\S+",
    """
alignas alignof and asm auto bitand bitor bool break case catch char class compl complex concept const consteval
constexpr constinit continue decltype default delete do double dynamic else enum explicit export extern false float
for friend goto if imaginary inline int long mutable namespace new noexcept not nullptr operator or private protected
public register reinterpret requires restrict return short signed sizeof static struct switch template this thread
throw true try typedef typeid typename typeof union unsigned using virtual void volatile wchar_t while xor INFINITY
NAN NULL state counts which weights side row some whole running old next all main step resets worst top wanted blank
begin memcpy memset i linux unix
""",
)
"""Names that a package may not choose: keywords of C and C++, and names in the package's own functions."""


def identifier(name: str) -> str:
    """Turn a name in the bundle into a name that C and C++ allow, e.g. "2-layer" into "m_2_layer"."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    plain = f"m_{plain}" if not plain[:1].isalpha() else plain
    return f"{plain}_" if plain in _TAKEN else plain


def context_of(step: PlainStep, generated: Sequence[Generated], name: str, weights_file: bool) -> dict[str, Any]:
    """Return the values that the templates read, without measurements and test vectors, which are added later.

    Args:
        step: the step, which may have shorter steps.
        generated: the C of the step, then of each shorter step.
        name: the model's name in C.
        weights_file: True if the weights get a file of their own.
    """
    manifest, program = step.manifest, step.program
    batch, length = manifest.batch_size, program.segment_length
    lockstep, exact = not manifest.can.run_apart, not manifest.can.run_ragged
    tensors: list[Input | Output | StateTensor] = [*manifest.given, *manifest.outputs, *step.states]
    counted = [entry for entry in manifest.inputs if entry.role in manifest.counters]
    names = _distinct([*(each.name for each in tensors), *(entry.name for entry in counted)], name)
    inputs = [_entry(each, names[each.name], batch, length) for each in manifest.given]
    outputs = [_entry(each, names[each.name], batch, length) for each in manifest.outputs]
    states: list[dict[str, Any]] = []
    weights: list[dict[str, Any]] = []
    offset = start_bytes = 0
    for state in step.states:
        values, start, ctype = math.prod(state.shape), step.starts[state.name], KINDS[state.dtype]
        outer = math.prod(state.shape[: state.batch_axis or 0])
        one = math.prod(state.sequence_shape)
        start_bytes += 0 if start is None else start.nbytes
        states.append(
            {"name": names[state.name], "ctype": ctype, "shape": state.shape, "many": values, "outer": outer}
            | {"one": one, "bytes": f"{one // outer} * sizeof({ctype})", "shared": state.batch_axis is None}
            | {"start": "" if start is None else literals(start), "table": state}
        )
    distinct = {key: array for one in generated for key, array in zip(keys_of(one.weights), one.weights, strict=True)}
    for number, array in enumerate(distinct.values()):
        text = "" if weights_file else literals(array)
        weights.append(
            {"name": f"weight_{number}", "ctype": TYPES[array.dtype], "many": array.size, "text": text}
            | {"offset": offset, "array": array}
        )
        offset += -(-array.nbytes // ALIGNED) * ALIGNED if weights_file else array.nbytes
    counters: list[dict[str, Any]] = [
        {"name": names[entry.name], "role": entry.role, "input": entry.name}
        | {"first": manifest.counters[entry.role].start, "most": manifest.counters[entry.role].most}
        for entry in counted
    ]
    values_of_state = 2 * sum(state["many"] * np.dtype(state["table"].dtype).itemsize for state in states)
    plain = values_of_state + 4 * batch * len(counters) + 4 + 8 * weights_file
    where = dict(names)
    where |= {each.input: f"state->{names[each.name]}[old]" for each in step.states}
    where |= {each.output: f"state->{names[each.name]}[next]" for each in step.states}
    where |= {each["input"]: f"state->{each['name']}" for each in counters}
    where |= {each.name: "running" for each in manifest.inputs if each.role == "valid"}
    stored = {
        key: (f"(const void *)((const char *)state->weights + {each['offset']})" if weights_file else each["name"])
        for key, each in zip(distinct, weights, strict=True)
    }
    programs = []
    for number, part_in_c in enumerate(generated):
        part = (step, *step.shorter)[number].program
        arguments = [_cast(where[spec.name], KINDS[spec.dtype], spec.fixed, True) for spec in part.inputs]
        for key, array in zip(keys_of(part_in_c.weights), part_in_c.weights, strict=True):
            arguments.append(_cast(stored[key], TYPES[array.dtype], array.shape, True))
        arguments += [_cast(where[spec.name], KINDS[spec.dtype], spec.fixed, False) for spec in part.outputs]
        size, called = part.segment_length, f"{name}_{part.segment_length}" if number else name
        programs.append(
            {
                "name": f"{called}_program",
                "length": size,
                "arguments": arguments,
                "multiply_adds": part_in_c.multiply_adds,
            }
            | {"text": apart(part_in_c.source, size) if number else part_in_c.source}
        )
    return {
        "name": name,
        "upper": name.upper(),
        "model_id": manifest.model_id,
        "made_by": version_of("txl-deploy"),
        "batch_size": batch,
        "length": length,
        "lockstep": lockstep,
        "exact": exact,
        "shared": any(state["shared"] for state in states),
        "partial": (batch > 1 and not lockstep) or (length > 1 and not exact),
        "several": bool(step.shorter),
        "told": _comment_lines(manifest.family),
        **{key: _number(manifest.family.get(key)) for key in ("rate", "clip_actions")},
        "latency": 0 if step.shorter else max((each["ahead"] for each in inputs), default=0) + length - 1,
        "inputs": inputs,
        "outputs": outputs,
        "states": states,
        "counters": counters,
        "weights": weights,
        "weights_file": weights_file,
        "weight_bytes": offset,
        "start_bytes": start_bytes,
        "state_bytes": -(-plain // 8) * 8 if weights_file else plain,
        "multiply_adds": generated[0].multiply_adds,
        "programs": programs,
        "flags": FLAGS,
        "native": None,
    }


def keys_of(arrays: Iterable[Array]) -> list[tuple[Any, bytes, int]]:
    """Return a key for each array: its dtype, its bytes, and the number of equal arrays before it.

    Programs share arrays with equal keys. For example, two equal arrays of one program have keys that end with 0 and 1:
    they stay two arrays, because a program's parameters are `restrict`, and the native step finds arrays by number.
    """
    met, keys = Counter[tuple[Any, bytes]](), list[tuple[Any, bytes, int]]()
    for array in arrays:
        key = array.dtype, array.tobytes()
        keys.append((*key, met[key]))
        met[key] += 1
    return keys


def native_context_of(step: PlainStep, packed: Packed, name: str, weights_file: bool) -> dict[str, Any]:
    """Return the values that the templates read for a Transformer-XL's native step."""
    native = native_context(packed, step)
    generated = Generated(native_source(), tuple(packed.arrays), native["products"])
    context = context_of(step, [generated], name, weights_file)
    state_bytes = native["state_bytes"]
    if weights_file:
        state_bytes = -(-state_bytes // 8) * 8 + 8
    return context | {"native": native, "state_bytes": state_bytes, "start_bytes": 0, "flags": NATIVE_FLAGS}


def _comment_lines(family: Mapping[str, Any]) -> list[str]:
    """Return the facts in `TOLD`, observations and actions as lines of a C comment.

    A stranger's bundle may hold any text, so marks that begin or end a comment are broken up.
    """
    facts: list[tuple[str, Any]] = [(key, family[key]) for key in TOLD if key in family]
    for key in ("observations", "actions"):
        entries = family.get(key)
        facts += [(key, entry) for entry in (entries if isinstance(entries, list) else [])]
    return [f"{key}: {json.dumps(value)}".replace("*/", "* /").replace("/*", "/ *") for key, value in facts]


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if known else None


def render(template: str, context: Mapping[str, Any]) -> str:
    """Render one file of a package."""
    return str(_environment().get_template(template).render(context))


def literals(array: Array) -> str:
    """Write the values of an array as C literals, exactly: [0.5, 2.0] as "5.00000000e-01f, 2.00000000e+00f"."""
    flat = array.ravel().tolist()
    written = [_float(value) for value in flat] if array.dtype.kind == "f" else [str(int(value)) for value in flat]
    return ",\n".join(", ".join(written[first : first + 8]) for first in range(0, len(written), 8))


def _float(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.8e}f"
    return "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"


def _entry(entry: Input | Output, name: str, batch: int, length: int) -> dict[str, Any]:
    shape, ctype = entry.sizes(batch, length), KINDS[entry.dtype]
    entry_context = {"name": name, "ctype": ctype, "shape": shape, "many": math.prod(shape), "ahead": entry.axes.ahead}
    entry_context["each"] = (
        math.prod(shape) // (length + entry.axes.ahead) if entry.axes.positions else math.prod(shape)
    )
    entry_context["vocab"] = entry.vocab if isinstance(entry, Input) else None
    return entry_context | {"blanks": _blanks(entry.axes, shape, ctype), "table": entry}


def _blanks(axes: Axes, shape: Sequence[int], ctype: str) -> list[dict[str, str]]:
    """Return the tables by which `blank` in C walks through an array: one per position axis, or one for sequences."""
    if axes.batch is None:
        return []
    tables = []
    for position in axes.positions or (None,):
        near, far = sorted((axes.batch, axes.batch if position is None else position))
        sizes = [math.prod(shape[:near]), shape[near], math.prod(shape[near + 1 : far])]
        sizes += [shape[far] if far > near else 1, math.prod(shape[far + 1 :])]
        first = position is not None and position < axes.batch
        text = f"{{{', '.join(map(str, sizes))} * sizeof({ctype})}}"
        tables.append({"text": text, "first": "true" if first else "false"})
    return tables


def _cast(value: str, ctype: str, shape: Sequence[int], read: bool) -> str:
    """Cast a pointer to values to a pointer to an array of a shape, e.g. [4, 3] to `(float (*)[3])`."""
    inner = "".join(f"[{size}]" for size in shape[1:])
    const = "const " if read else ""
    return f"({const}{ctype} (*){inner}){value}" if inner else f"({const}{ctype} *){value}"


def _distinct(names: Iterable[str], model: str) -> dict[str, str]:
    """Return a name in C for each of the bundle's names: none is in `_TAKEN`, and no two differ only in capitals."""
    names_in_c: dict[str, str] = {}
    own = re.compile(rf"(read|start|weight|{model})_|(u?int|idx|size)\w*_t$")
    for name in names:
        plain = identifier(name)
        plain = f"m_{plain}" if own.match(plain) else plain
        while plain.upper() in map(str.upper, names_in_c.values()):
            plain += "_"
        names_in_c[name] = plain
    return names_in_c


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("txl_deploy.plain_c")
    return Environment(  # noqa: S701  # C and Markdown, in which every name is one of C
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
