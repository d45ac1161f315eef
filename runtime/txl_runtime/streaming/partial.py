"""Commits of a part of a segment: which parts a model allows, and the inputs that run such a part again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import few
from txl_runtime.types import Array, Ids


def refusal(manifest: Manifest, states: Sequence[StateTensor]) -> str:
    """Return why a stream cannot commit any number of a segment's positions; "" if it can.

    A caller that relies on it asks before a segment runs. In lockstep all sequences still need the same number.

    Args:
        states: those of the update rule that runs.
    """
    if any(state.update == "rolled" for state in states):
        todo = 'load with update="ring"' if "ring" in manifest.updates else "run the part alone, the bundle has no ring"
        return f"the memory is rolled, which a step moves by the whole segment, expected a ring; {todo}"
    if manifest.commits == "segment":
        return "the model has no state inside a segment, expected 0 or all that ran of each sequence; keep it whole"
    if manifest.lengths == "exact" and run_again(states):
        known = few(np.array(sorted(manifest.segment_lengths)))
        return f"the part runs again as one segment, expected 0 or one of {known} in all sequences; run parts of these"
    return ""


def run_again(states: Sequence[StateTensor]) -> bool:
    """Return whether the accepted part has to run again: a ring holds a row of each position, other states do not."""
    return any(state.slots is None for state in states)


def check_part(counts: Ids, ran: Ids, manifest: Manifest, states: Sequence[StateTensor]) -> None:
    """Check that the first `counts` of the `ran` positions can be committed, int32 [b] each.

    All that ran, or nothing of it, can be committed with every model.

    Raises:
        UsageError: a count is more than ran, or differs from others in lockstep, or the model allows no such part.
    """
    if counts.shape != ran.shape or (counts < 0).any() or (counts > ran).any():
        raise UsageError(f"{few(counts)} positions are to be committed, expected at most those that ran, {few(ran)}")
    if not counts.any() or (counts == ran).all():
        return
    said, sizes = refusal(manifest, states), {*counts.tolist()} - {0}
    if not manifest.can.run_apart and (counts != counts[0]).any():
        said = "sequences run in lockstep, expected the same number of each; take the smallest"
    elif any(state.update == "rolled" for state in states):
        pass
    elif manifest.commits == "segment":
        said = said if ((counts != 0) & (counts != ran)).any() else ""
    elif len(sizes) == 1 and sizes <= {*manifest.segment_lengths}:
        said = ""
    if said:
        raise UsageError(f"{few(counts)} positions of {few(ran)} that ran are to be committed, but {said}")


def first_positions(inputs: Mapping[str, Array], counts: Ids, manifest: Manifest) -> dict[str, Array]:
    """Return copies of a segment's inputs up to the largest count, zero beyond each count, as `Loop.run` takes them.

    Counts [2, 1] make [b, 2] of tokens [b, 4], and [b, 3, F] of features [b, 5, F] with one position of look-ahead.
    """
    found: dict[str, Array] = {}
    for entry in manifest.given:
        part = found[entry.name] = np.array(inputs[entry.name][entry.axes.window(0, int(counts.max()))])
        entry.axes.clear_uncounted(part, counts)
    return found
