"""Commits of a part of a segment: which parts a model allows, and the inputs that run such a part again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import few
from txl_runtime.types import Array, Ids


class Parts:
    """The parts of a segment that a model allows to commit.

    Args:
        states: those of the update rule that runs.

    Attributes:
        again: whether a part has to run again: a ring holds a row of each position, other states do not.
        refusal: the reason why not every number of positions can be committed, for callers that rely on it; "" if every
            number can. In lockstep it still has to be the same for all sequences.
    """

    def __init__(self, manifest: Manifest, states: Sequence[StateTensor]) -> None:
        self.again, self._manifest = any(state.slots is None for state in states), manifest
        self._rolled, self.refusal = any(state.update == "rolled" for state in states), ""
        if self._rolled:
            has = "ring" in manifest.updates
            todo = 'load with update="ring"' if has else "run the part alone, the bundle has no ring"
            self.refusal = f"the memory is rolled, which a step moves by the whole segment, expected a ring; {todo}"
        elif manifest.commits == "segment":
            self.refusal = "the model has no state inside a segment, expected 0 or all that ran of each; keep it whole"
        elif manifest.lengths == "exact" and self.again:
            known = few(np.array(sorted(manifest.segment_lengths)))
            self.refusal = f"it runs again as one segment, expected 0 or one of {known} in all sequences; keep so many"

    def check(self, counts: Sequence[int], ran: Sequence[int]) -> None:
        """Check that the first `counts` of the `ran` positions can be committed, b numbers each.

        All that ran, or nothing of it, can be committed with every model.

        Raises:
            UsageError: a count is more than ran, or differs from others in lockstep, or the model allows no such part.
        """
        pairs, said = list(zip(counts, ran, strict=False)), ""
        if len(counts) != len(ran) or not all(0 <= count <= most for count, most in pairs):
            said = "there are no more, expected at most those that ran; give other numbers"
        elif counts == ran or not any(counts):
            return
        elif not self._manifest.can.run_apart and min(counts) < max(counts):
            said = "sequences run in lockstep, expected the same number of each; take the smallest"
        elif self.refusal:
            whole, sizes = all(count in (0, most) for count, most in pairs), {*counts} - {0}
            one = len(sizes) == 1 and sizes <= {*self._manifest.segment_lengths}
            fits = whole if self._manifest.commits == "segment" else one
            said = "" if fits and not self._rolled else self.refusal
        if said:
            held, wanted = few(np.array(ran)), few(np.array(counts))
            raise UsageError(f"{wanted} positions of {held} that ran are to be committed, but {said}")

    def inputs(self, inputs: Mapping[str, Array], counts: Ids) -> dict[str, Array]:
        """Return copies of a segment's inputs up to the largest count, zero beyond each count, for `Loop.run`.

        Counts [2, 1] make [b, 2] of tokens [b, 4], and [b, 3, F] of features [b, 5, F] with one position of look-ahead.
        """
        found: dict[str, Array] = {}
        for entry in self._manifest.given:
            part = found[entry.name] = np.array(inputs[entry.name][entry.axes.window(0, int(counts.max()))])
            entry.axes.clear_uncounted(part, counts)
        return found
