"""A runner of segments that must be finite: NaN or infinity in an input, output or state raises an error."""

from __future__ import annotations

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import BackendError, TxlError, UsageError
from txl_runtime.streaming.loop import Loop
from txl_runtime.types import Array, Arrays, Ids


def run_finite(loop: Loop, manifest: Manifest, inputs: Arrays, counts: Ids, commit: bool) -> dict[str, Array]:
    """Run a segment and return its outputs, e.g. [b, T, F]; raise an error if any value is NaN or infinite.

    After an error the state is unchanged; see `Stream.run`. For example, {"logprobs": [2, 5, 256]}.
    """
    for entry in manifest.inputs:
        if entry.name in inputs:
            _refuse(UsageError, f"input {entry.name}", inputs[entry.name], entry.axes.batch, counts)
    try:
        outputs = loop.run(inputs, counts, "rows", commit=False).outputs()
        for output in manifest.outputs:
            _refuse(BackendError, f"output {output.name}", outputs[output.name], output.axes.batch, counts)
        for state, array in loop.written():
            finite = np.where(np.isinf(array), 0, array)  # a state may start as infinity, e.g. a running maximum
            _refuse(BackendError, f"state {state.name}", finite, state.batch_axis, counts)
    except BaseException:
        loop.commit(np.zeros_like(counts))  # a later `Stream.commit` must keep nothing of this segment
        raise
    if commit:
        loop.commit()
    return outputs


def _refuse(kind: type[TxlError], what: str, array: Array, batch: int | None, counts: Ids) -> None:
    """Raise an error of class `kind` for the first value that is not finite, ignoring idle sequences."""
    for place in np.argwhere(~np.isfinite(array)).tolist():
        row = None if batch is None else place[batch]
        if row is None or (row < len(counts) and counts[row]):
            whose = "" if row is None else f" of sequence {row}"
            raise kind(
                f"{what}{whose} holds {array[tuple(place)]} at {place}, expected a finite number; the segment did not "
                "happen: give other inputs, or reset the sequence"
            )
