"""Any number of positions of named arrays: cut into segments with their look-ahead, and results put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.streaming.inputs import check_cuttable, check_inputs, strict_cuts
from txl_runtime.types import Array, Arrays, Ids

Segment = Callable[[Arrays, Ids], Mapping[str, Array]]
"""Runs one segment of checked inputs."""


def feed_arrays(
    inputs: object, lengths: ArrayLike | None, manifest: Manifest, batch_size: int, run: Segment, last: bool
) -> dict[str, Array]:
    """Feed inputs by name.

    Args:
        inputs: by name, T positions (and look-ahead) along the axis of each that has positions. Those without such an
            axis are given to every segment.
        lengths: int [b], the positions that count.
        manifest: of the bundle.
        batch_size: b.
        run: what runs a segment.
        last: whether only each sequence's last position is asked for; results then have no axis of positions.

    Returns:
        Outputs by name; those without positions are of the last segment in which a sequence had any.

    Raises:
        UsageError: what is given does not fit the tables, or cannot be cut into segments; nothing was run then.
    """
    arrays, counts, columns = check_inputs(inputs, lengths, manifest, batch_size)
    cuts = strict_cuts(columns, counts, manifest)
    axes = {entry.name: entry.axes for entry in manifest.inputs}
    check_cuttable(cuts, manifest, "run its segments one by one with run({...})")
    results = {
        output.name: np.zeros((output.axes.still if last else output.axes).sizes(batch_size, columns), output.dtype)
        for output in manifest.outputs
    }
    for first, end, inside in cuts:
        found = run({name: array[axes[name].window(first, end)] for name, array in arrays.items()}, inside)
        for output in manifest.outputs:
            _place(output.axes, found[output.name], results[output.name], first, inside, last)
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
