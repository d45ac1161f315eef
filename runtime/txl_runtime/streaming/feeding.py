"""A function that feeds any number of positions: it cuts arrays into segments with look-ahead, runs these, and joins
the outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.streaming.inputs import Checked, check_cuttable, strict_cuts
from txl_runtime.types import Array, Arrays, Ids

Segment = Callable[[Arrays, Ids], dict[str, Array]]
"""A function that runs one segment of checked inputs, given the counts of positions [b], and returns
outputs by name.
"""


def feed_arrays(found: Checked, manifest: Manifest, batch_size: int, run: Segment, last: bool) -> dict[str, Array]:
    """Feed inputs by name: an array [b, 20, F] runs as segments of 8, 8 and 4 positions if segments have 8.

    Args:
        found: checked inputs, with T positions (plus look-ahead) along each axis of positions. An input without such an
            axis is given to every segment.
        batch_size: number of sequences, b.
        run: the function that runs a segment.
        last: whether to return only each sequence's last position; results then have no axis of positions.

    Returns:
        Outputs by name, e.g. [b, T, F]. An output without an axis of positions comes from the sequence's last segment.

    Raises:
        UsageError: the inputs cannot be cut into segments; nothing was run.
    """
    arrays, counts, columns, whole = found
    if whole and not last:
        return run(arrays, counts)
    cuts = strict_cuts(columns, counts, manifest)
    axes = {entry.name: entry.axes for entry in manifest.inputs}
    check_cuttable(cuts, manifest, "run its segments one by one with run({...})")
    results = {
        output.name: np.zeros((output.axes.still if last else output.axes).sizes(batch_size, columns), output.dtype)
        for output in manifest.outputs
    }
    for first, end, inside in cuts:
        some = run({name: array[axes[name].window(first, end)] for name, array in arrays.items()}, inside)
        for output in manifest.outputs:
            _place(output.axes, some[output.name], results[output.name], first, inside, last)
    return results


def _place(axes: Axes, values: Array, result: Array, first: int, counts: Ids, last: bool) -> None:
    """Copy a segment's output to its positions in the whole result."""
    if not axes.positions:
        live = axes.at(counts > 0)
        result[live] = values[live]
    elif not last:
        result[axes.window(first, first + axes.length(values))] = values
    elif axes.batch is None:
        result[...] = values[axes.at(positions=int(counts.max()) - 1)]
    else:
        for row in np.flatnonzero(counts).tolist():
            result[axes.still.at(row)] = values[axes.at(row, int(counts[row]) - 1)]
