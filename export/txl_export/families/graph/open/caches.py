"""Caches that grow in every call, cut to a window: `--window NAME=ROWS`.

Example: of an input past [B, P, 32] that comes back as present [B, P + L, 32], 6 rows are kept: past is [B, 6, 32] then,
and present its last 6 rows. A stream begins with 6 rows of zeros, which the file's attention reads as rows: that is not
what it computes of an empty cache. So the reference is the file itself, fed with the cut cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from txl_runtime.errors import UsageError, some
from txl_runtime.types import Array

from txl_export.families.graph.find.naming import likeness
from txl_export.families.graph.open.measuring import Fold, measure
from txl_export.families.graph.take.file_module import Call
from txl_export.graphs.quantised_matmul import initializer

_END = 2**63 - 1


@dataclass(frozen=True)
class Cut:
    """A cache that was cut.

    Attributes:
        input, output: names of what goes in, and of what comes back.
        axis, rows: where it grew, and how many rows it has now.
    """

    input: str
    output: str
    axis: int
    rows: int


def window_caches(model: ir.Model, windows: Mapping[str, int], states: Mapping[str, str], fold: Fold) -> list[Cut]:
    """Fix the rows of caches that grow, in place: of what comes back, the last ones are left.

    Args:
        model: with constants folded.
        windows: rows by the name of an input.
        states: outputs by inputs, as far as the user has said them; names decide where several have grown.
        fold: computes what is always the same in a graph.

    Raises:
        UsageError: an input does not come back longer, comes back as one of several, or gets no whole number of rows.
        EndedError: see `Fold`.
    """
    grown = _grown(model, fold) if windows else {}
    cuts = []
    for name, rows in windows.items():
        found = grown.get(name, {})
        if not found or states.get(name, next(iter(found))) not in found:
            told = f"an input that comes back longer: {some([*grown], 9)}" if grown else "none, because no cache grows"
            raise UsageError(f"--window is {name}={rows}, expected {told}; check it")
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise UsageError(f"--window is {name}={rows!r}, expected a whole number of rows from 1; check it")
        scores = {output: likeness(name, output) for output in found}
        best = [output for output, score in scores.items() if score == max(scores.values())]
        if name not in states and len(best) > 1:
            raise UsageError(f"{name} may come back as {' or '.join(best)}; give --state {name}={best[0]}, or another")
        output = states.get(name, best[0])
        axis, more = found[output]
        cuts.append(Cut(name, output, axis, rows))
        _cut(model.graph, cuts[-1], more)
    return cuts


def by_hand(call: Call, cuts: Sequence[Cut]) -> Call:
    """The file itself, of whose outputs the caches are cut afterwards: what a cut graph is held against."""

    def cut(feeds: dict[str, Array]) -> Mapping[str, Array]:
        found = dict(call(feeds))
        for one in cuts:
            rows = found[one.output].shape[one.axis]
            found[one.output] = found[one.output].take(np.arange(rows - one.rows, rows), one.axis)
        return found

    return cut if cuts else call


def _grown(model: ir.Model, fold: Fold) -> dict[str, dict[str, tuple[int, int | None]]]:
    """By input, outputs of its type that are longer along one axis, and as long along the others; with that axis and by
    how much, None where it depends on other sizes.
    """
    graph, found = model.graph, dict[str, dict[str, tuple[int, int | None]]]()
    ends = [*graph.inputs, *graph.outputs]
    one, two = (measure(model, {}, fold, ends, 1, attempt) for attempt in (0, 1))
    for given in graph.inputs:
        for made in graph.outputs if given in one and given in two else ():
            if made not in one or made not in two or given.dtype != one[made].dtype:
                continue
            apart = [_apart(each[given].sizes, each[made].sizes) for each in (one, two)]
            if [*apart[0]] == [*apart[1]] and len(apart[0]) == 1 and min(*apart[0].values(), *apart[1].values()) > 0:
                (axis, more), (again,) = next(iter(apart[0].items())), apart[1].values()
                found.setdefault(str(given.name), {})[str(made.name)] = axis, more if more == again else None
    return found


def _apart(given: Sequence[int | None], made: Sequence[int | None]) -> dict[int, int]:
    """By how much sizes differ, by axis; none where ranks do, or one is not known."""
    if len(given) != len(made) or None in given or None in made:
        return {}
    pairs = enumerate(zip(given, made, strict=True))
    return {axis: b - a for axis, (a, b) in pairs if a is not None and b is not None and a != b}


def _cut(graph: ir.Graph, cut: Cut, more: int | None) -> None:
    given = next(value for value in graph.inputs if value.name == cut.input)
    at, whole = next((at, value) for at, value in enumerate(graph.outputs) if value.name == cut.output)
    grown, before = (None if one.shape is None else one.shape[cut.axis] for one in (whole, given))
    for value in graph.inputs:
        value.shape = ir.Shape(
            [_now(size, _symbol(before), _symbol(grown), cut.rows, more) for size in (value.shape or ())]
        )
    sizes = [*(given.shape or ())]
    sizes[cut.axis] = cut.rows
    given.shape = ir.Shape(sizes)
    whole.name = f"{cut.output}.whole"
    numbers = [initializer(graph, f"cut.is.{n}", np.array([n], np.int64)) for n in (-cut.rows, _END, cut.axis)]
    node = ir.node("Slice", [whole, *numbers], name=f"cut.{cut.output}")
    node.outputs[0].name, node.outputs[0].type = cut.output, whole.type
    graph.append(node)
    graph.outputs[at] = node.outputs[0]


def _now(size: int | ir.SymbolicDim, before: str, grown: str, rows: int, more: int | None) -> int | str | None:
    """A size of an input: of a mask, which has as many columns as the cache has rows, or as it has with the new ones."""
    if isinstance(size, int) or size.value is None:
        return size if isinstance(size, int) else None
    if size.value == grown and more is not None:
        return rows + more
    parts = [str(rows) if part == before else part for part in re.split(r"\s*\+\s*", size.value)]
    return sum(map(int, parts)) if all(part.isdecimal() for part in parts) else " + ".join(parts)


def _symbol(size: int | ir.SymbolicDim | None) -> str:
    """The name of an open size; "" where it is a number, or has none."""
    return size.value or "" if isinstance(size, ir.SymbolicDim) else ""
