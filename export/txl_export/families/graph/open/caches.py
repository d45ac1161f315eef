"""Caches that grow in every call, cut to a window: `--window NAME=ROWS`.

Example: of an input past [B, P, 32] that comes back as present [B, P + L, 32], 6 rows are kept: past is [B, 6, 32]
then, and present its last 6 rows. A stream begins with 6 rows of zeros, which the file's attention reads as rows: that
is not what it computes of an empty cache. So the reference is the file itself, fed with the cut cache.
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
class Cut:
    """A cache that was cut: names of what goes in and comes back, the axis that grew, and the rows that it has now."""

    input: str
    output: str
    axis: int
    rows: int


def window_caches(model: ir.Model, windows: Mapping[str, int], states: Mapping[str, str], fold: Fold) -> list[Cut]:
    """Fix the rows of caches that grow, in place: what comes back is cut to its last rows.

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
            told = f"of {some([*grown], 9)}" if grown else "and none is seen to"
            raise UsageError(
                f"--window is {name}={rows}, expected an input that comes back longer, {told}; check it, or give sizes "
                "that hang together by --fix NAME=SIZE"
            )
        if not is_whole(rows) or rows < 1:
            raise UsageError(f"--window is {name}={rows!r}, expected a whole number of rows from 1; check it")
        scores = {output: likeness(name, output) for output in found}
        best = [output for output, score in scores.items() if score == max(scores.values())]
        if name not in states and len(best) > 1:
            raise UsageError(f"{name} may come back as {' or '.join(best)}; give --state {name}={best[0]}, or another")
        output = states.get(name, best[0])
        cuts.append(Cut(name, output, found[output], rows))
        _cut(model.graph, cuts[-1])
    return cuts


def by_hand(call: Call, cuts: Sequence[Cut]) -> Call:
    """The file itself, of whose outputs the caches are cut afterwards: what a cut graph is held against."""

    def cut(feeds: dict[str, Array]) -> Mapping[str, Array]:
        found = dict(call(feeds))
        for one in cuts:
            rows = found[one.output].shape[one.axis]
            found[one.output] = found[one.output].take(np.arange(rows - one.rows, rows), one.axis)
        return found

    return cut


def _grown(model: ir.Model, fold: Fold) -> dict[str, dict[str, int]]:
    """Find for each input the outputs of its type that are longer along one axis alone, with that axis."""
    graph, found = model.graph, dict[str, dict[str, int]]()
    sizes = Sizes(model, {}, fold, [*graph.inputs, *graph.outputs])
    for given, made in product(graph.inputs, graph.outputs):
        one, two = sizes.of(given), sizes.of(made)
        apart = [axis for axis, (a, b) in enumerate(zip(one, two, strict=False)) if a is None or a != b]
        more = sizes.less(made, given, apart[0]) if len(apart) == 1 and len(one) == len(two) else None
        if given.dtype == sizes.dtype(made) and more and (isinstance(more, str) or more > 0):
            found.setdefault(str(given.name), {})[str(made.name)] = apart[0]
    return found


def _cut(graph: ir.Graph, cut: Cut) -> None:
    given = next(value for value in graph.inputs if value.name == cut.input)
    at, whole = next((at, value) for at, value in enumerate(graph.outputs) if value.name == cut.output)
    before = str(given.shape and given.shape[cut.axis])
    for value in graph.inputs:  # a mask has as many columns as the cache has rows with the new ones
        sizes = [size if isinstance(size, int) else _now(size.value, before, cut.rows) for size in value.shape or ()]
        if value is given:
            sizes[cut.axis] = cut.rows
        value.shape = value.shape and ir.Shape(sizes)
    whole.name = f"{cut.output}.whole"
    numbers = [initializer(graph, f"cut.is.{n}", np.array([n], np.int64)) for n in (-cut.rows, END, cut.axis)]
    graph.append(node := ir.node("Slice", [whole, *numbers], name=f"cut.{cut.output}"))
    node.outputs[0].name, node.outputs[0].type = cut.output, whole.type
    graph.outputs[at] = node.outputs[0]


def _now(symbol: str | None, before: str, rows: int) -> int | str | None:
    """An open size where one of its parts became a number: "past + L" is "6 + L"."""
    parts = [str(rows) if part.strip() == before else part.strip() for part in (symbol or "").split("+")]
    return sum(map(int, parts)) if all(map(str.isdecimal, parts)) else " + ".join(parts) or None
