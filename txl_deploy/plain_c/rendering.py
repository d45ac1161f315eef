"""Render the files of a package from templates: a step and its numbers as names, types and sizes of C."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.tables import Input, Output, StateTensor
from txl_runtime.types import Array

from txl_deploy.extras import version_of
from txl_deploy.plain_c.generating import KINDS, WEIGHTS, Generated
from txl_deploy.plain_c.step import PlainStep

FLAGS = "-O3 -march=native -fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno"
"""Compiler flags for the generated C: sums in any order, NaN kept."""
ALIGNED = 64
"""Weights in a file of their own begin at multiples of this number of bytes."""
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
"""Keywords of C and C++, and names that the functions use themselves."""


def identifier(name: str) -> str:
    """Turn a name of the bundle's into a name of C."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    found = f"m_{found}" if not found[:1].isalpha() else found
    return f"{found}_" if found in _TAKEN else found


def context_of(step: PlainStep, generated: Generated, name: str, weights_file: bool) -> dict[str, Any]:
    """Build the values that the templates read, without what is measured and stored later."""
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
    offset = 0
    for state in step.states:
        values, start, ctype = math.prod(state.shape), step.starts[state.name], KINDS[state.dtype]
        outer = math.prod(state.shape[: state.batch_axis or 0])
        one = math.prod(state.sequence_shape)
        states.append(
            {"name": names[state.name], "ctype": ctype, "shape": state.shape, "many": values, "outer": outer}
            | {"one": one, "bytes": f"{one // outer} * sizeof({ctype})", "shared": state.batch_axis is None}
            | {"start": "" if start is None else literals(start), "table": state}
        )
    for number, array in enumerate(generated.weights):
        text = "" if weights_file else literals(array)
        weights.append(
            {"name": f"weight_{number}", "ctype": WEIGHTS[array.dtype], "many": array.size, "text": text}
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
    arguments = [_cast(where[spec.name], KINDS[spec.dtype], spec.fixed, True) for spec in program.inputs]
    for each in weights:
        place = f"(const void *)((const char *)state->weights + {each['offset']})" if weights_file else each["name"]
        arguments.append(_cast(place, each["ctype"], each["array"].shape, True))
    arguments += [_cast(where[spec.name], KINDS[spec.dtype], spec.fixed, False) for spec in program.outputs]
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
        "inputs": inputs,
        "outputs": outputs,
        "states": states,
        "counters": counters,
        "weights": weights,
        "weights_file": weights_file,
        "weight_bytes": offset,
        "state_bytes": -(-plain // 8) * 8 if weights_file else plain,
        "multiply_adds": generated.multiply_adds,
        "program": generated.source,
        "arguments": arguments,
        "flags": FLAGS,
    }


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
    found = {"name": name, "ctype": ctype, "shape": shape, "many": math.prod(shape), "ahead": entry.axes.ahead}
    found["vocab"] = entry.vocab if isinstance(entry, Input) else None
    return found | {"blanks": _blanks(entry.axes, shape, ctype), "table": entry}


def _blanks(axes: Axes, shape: Sequence[int], ctype: str) -> list[dict[str, str]]:
    """Build the tables by which `blank` walks through an array: one per position axis, or one for sequences alone."""
    if axes.batch is None:
        return []
    found = []
    for position in axes.positions or (None,):
        near, far = sorted((axes.batch, axes.batch if position is None else position))
        sizes = [math.prod(shape[:near]), shape[near], math.prod(shape[near + 1 : far])]
        sizes += [shape[far] if far > near else 1, math.prod(shape[far + 1 :])]
        first = position is not None and position < axes.batch
        text = f"{{{', '.join(map(str, sizes))} * sizeof({ctype})}}"
        found.append({"text": text, "first": "true" if first else "false"})
    return found


def _cast(value: str, ctype: str, shape: Sequence[int], read: bool) -> str:
    """Cast a pointer to values to a pointer to an array of a shape, e.g. [4, 3] to `(float (*)[3])`."""
    inner = "".join(f"[{size}]" for size in shape[1:])
    const = "const " if read else ""
    return f"({const}{ctype} (*){inner}){value}" if inner else f"({const}{ctype} *){value}"


def _distinct(names: Iterable[str], model: str) -> dict[str, str]:
    """Choose names of C for the bundle's names: distinct even in capitals, and none that the package uses itself."""
    found: dict[str, str] = {}
    own = re.compile(rf"(read|start|weight|{model})_|(u?int|idx|size)\w*_t$")
    for name in names:
        plain = identifier(name)
        plain = f"m_{plain}" if own.match(plain) else plain
        while plain.upper() in map(str.upper, found.values()):
            plain += "_"
        found[name] = plain
    return found


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("txl_deploy.plain_c")
    return Environment(  # noqa: S701  # C and Markdown, in which every name is one of C
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
