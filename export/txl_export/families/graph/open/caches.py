"""Cuts caches that grow in every call to a window: `--window NAME=ROWS`.

For example, an input past [B, P, 32] comes back as present [B, P + L, 32]. With 6 rows, past becomes [B, 6, 32], and
present its last 6 rows. A stream begins with 6 rows of zeros, which the file's attention reads as real rows, unlike an
empty cache. So the reference is the file itself, fed with the cut cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import onnx_ir as ir
from txl_runtime.errors import UsageError, some
from txl_runtime.streaming.checks import is_whole
from txl_runtime.types import Array

from txl_export.families.graph.find.naming import likeness
from txl_export.families.graph.open.measuring import END, Fold, Sizes
from txl_export.families.graph.take.file_module import Call
from txl_export.graphs.quantised_matmul import initializer


@dataclass(frozen=True)
class CutCache:
    """A cache that was cut: names of its input and output, the axis that grew, and its fixed number of rows."""

    input: str
    output: str
    axis: int
    rows: int


def window_caches(model: ir.Model, windows: Mapping[str, int], states: Mapping[str, str], fold: Fold) -> list[CutCache]:
    """Fix the number of rows of growing caches, in place: outputs are cut to their last rows.

    Args:
        model: the graph, with constants folded.
        windows: number of rows by the name of an input.
        states: the user's states: for each input, the output that is its next value. For an input that is not listed,
            names decide if several outputs have grown.
        fold: computes constants of a graph.

    Raises:
        UsageError: no output, or more than one, is a longer version of an input, or the number of rows is no integer
            from 1.
        EndedError: see `Fold`.
    """
    grown = _grown(model, fold) if windows else {}
    cuts = []
    for name, rows in windows.items():
        lengths = grown.get(name, {})
        if not lengths or states.get(name, next(iter(lengths))) not in lengths:
            named = f"of {some([*grown], 9)}" if grown else "and none is seen to"
            raise UsageError(
                f"--window is {name}={rows}, expected an input that comes back longer, {named}; check it, or give "
                "sizes that hang together by --fix NAME=SIZE"
            )
        if not is_whole(rows) or rows < 1:
            raise UsageError(f"--window is {name}={rows!r}, expected a whole number of rows from 1; check it")
        scores = {output: likeness(name, output) for output in lengths}
        best = [output for output, score in scores.items() if score == max(scores.values())]
        if name not in states and len(best) > 1:
            raise UsageError(f"{name} may come back as {' or '.join(best)}; give --state {name}={best[0]}, or another")
        output = states.get(name, best[0])
        cuts.append(CutCache(name, output, lengths[output], rows))
        _cut(model.graph, cuts[-1])
    return cuts


def by_hand(call: Call, cuts: Sequence[CutCache]) -> Call:
    """Return a call of the file itself whose cache outputs are cut afterwards: the reference for the cut graph."""

    def cut(feeds: dict[str, Array]) -> Mapping[str, Array]:
        results = dict(call(feeds))
        for one in cuts:
            rows = results[one.output].shape[one.axis]
            results[one.output] = results[one.output].take(np.arange(rows - one.rows, rows), one.axis)
        return results

    return cut


def _grown(model: ir.Model, fold: Fold) -> dict[str, dict[str, int]]:
    """Return for each input the outputs of its dtype that are longer along exactly one axis, with that axis."""
    graph, lengths = model.graph, dict[str, dict[str, int]]()
    sizes = Sizes(model, {}, fold, [*graph.inputs, *graph.outputs])
    for entry, result in product(graph.inputs, graph.outputs):
        one, two = sizes.of(entry), sizes.of(result)
        apart = [axis for axis, (a, b) in enumerate(zip(one, two, strict=False)) if a is None or a != b]
        more = sizes.less(result, entry, apart[0]) if len(apart) == 1 and len(one) == len(two) else None
        if entry.dtype == sizes.dtype(result) and more and (isinstance(more, str) or more > 0):
            lengths.setdefault(str(entry.name), {})[str(result.name)] = apart[0]
    return lengths


def _cut(graph: ir.Graph, cut: CutCache) -> None:
    entry = next(value for value in graph.inputs if value.name == cut.input)
    at, whole = next((at, value) for at, value in enumerate(graph.outputs) if value.name == cut.output)
    before = str(entry.shape and entry.shape[cut.axis])
    for value in graph.inputs:  # a mask has a column for each row of the cache and each new position
        sizes = [size if isinstance(size, int) else _now(size.value, before, cut.rows) for size in value.shape or ()]
        if value is entry:
            sizes[cut.axis] = cut.rows
        value.shape = value.shape and ir.Shape(sizes)
    whole.name = f"{cut.output}.whole"
    numbers = [initializer(graph, f"cut.is.{n}", np.array([n], np.int64)) for n in (-cut.rows, END, cut.axis)]
    graph.append(node := ir.node("Slice", [whole, *numbers], name=f"cut.{cut.output}"))
    node.outputs[0].name, node.outputs[0].type = cut.output, whole.type
    graph.outputs[at] = node.outputs[0]


def _now(symbol: str | None, before: str, rows: int) -> int | str | None:
    """Return a symbolic size after one of its parts became a number: "past + L" becomes "6 + L"."""
    parts = [str(rows) if part.strip() == before else part.strip() for part in (symbol or "").split("+")]
    return sum(map(int, parts)) if all(map(str.isdecimal, parts)) else " + ".join(parts) or None
