"""Any number of positions of named arrays: cut into segments with their look-ahead, and results put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Input, Output
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
    table = {entry.name: entry for entry in manifest.inputs}
    check_cuttable(cuts, manifest, "run its segments one by one with run({...})")
    results = {
        output.name: np.zeros(_shape(output, batch_size, columns, last), np.dtype(output.dtype))
        for output in manifest.outputs
    }
    for first, end, inside in cuts:
        found = run({name: _window(table[name], array, first, end) for name, array in arrays.items()}, inside)
        for output in manifest.outputs:
            _place(output, found[output.name], results[output.name], first, inside, last)
    return results


def _shape(output: Output, batch_size: int, columns: int, last: bool) -> tuple[int, ...]:
    known = {"B": batch_size, "L": columns}
    return tuple(known[size] if isinstance(size, str) else size for size in output.shape if not (last and size == "L"))


def _window(entry: Input, array: Array, first: int, end: int) -> Array:
    """What one segment reads of an input."""
    part: Array = array[
        tuple(slice(first, end + entry.lookahead) if size == "L" else slice(None) for size in entry.shape)
    ]
    return part


def _place(output: Output, found: Array, result: Array, first: int, counts: Ids, last: bool) -> None:
    """Put a segment's output where it belongs in the whole."""
    shape = output.shape
    if "L" in shape and not last:
        end = first + found.shape[shape.index("L")]
        result[tuple(slice(first, end) if size == "L" else slice(None) for size in shape)] = found
        return
    if "L" in shape:
        found = np.moveaxis(found, shape.index("L"), 0)
        if "B" not in shape:
            result[...] = found[int(counts.max()) - 1]
            return
        batch = [size for size in shape if size != "L"].index("B")
        whole = np.moveaxis(found, batch + 1, 1)
        for row in np.flatnonzero(counts).tolist():
            np.moveaxis(result, batch, 0)[row] = whole[counts[row] - 1, row]
    elif "B" in shape:
        live, batch = counts > 0, shape.index("B")
        np.moveaxis(result, batch, 0)[live] = np.moveaxis(found, batch, 0)[live]
    else:
        result[...] = found
