"""Any number of positions of named arrays: cut into segments with their look-ahead, and results put together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.streaming.inputs import Checked, check_cuttable, strict_cuts
from txl_runtime.types import Array, Arrays, Ids

Segment = Callable[[Arrays, Ids], dict[str, Array]]
"""Runs one segment of checked inputs."""


def feed_arrays(found: Checked, manifest: Manifest, batch_size: int, run: Segment, last: bool) -> dict[str, Array]:
    """Feed inputs by name.

    Args:
        found: inputs by name, T positions (and look-ahead) along the axis of each that has positions. Those without
            such an axis are given to every segment.
        batch_size: b.
        run: what runs a segment.
        last: whether only each sequence's last position is asked for; results then have no axis of positions.

    Returns:
        Outputs by name; those without positions are of the last segment in which a sequence had any.

    Raises:
        UsageError: what is given cannot be cut into segments; nothing was run then.
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


def _place(axes: Axes, found: Array, result: Array, first: int, counts: Ids, last: bool) -> None:
    """Put a segment's output where it belongs in the whole."""
    if not axes.positions:
        live = axes.at(counts > 0)
        result[live] = found[live]
    elif not last:
        result[axes.window(first, first + axes.length(found))] = found
    elif axes.batch is None:
        result[...] = found[axes.at(positions=int(counts.max()) - 1)]
    else:
        for row in np.flatnonzero(counts).tolist():
            result[axes.still.at(row)] = found[axes.at(row, int(counts[row]) - 1)]
