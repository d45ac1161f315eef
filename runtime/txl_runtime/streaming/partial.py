"""Rules for committing only the first positions of a segment, and the inputs with which such a part runs again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import few
from txl_runtime.types import Array, Ids


class Parts:
    """The rules for committing only the first positions of a segment, by the model's kinds of state.

    Args:
        states: the state tensors of the update rule that runs.

    Attributes:
        again: whether a part has to run again. A ring needs no second run, because it holds one row for each position.
        refusal: the reason why some numbers of positions cannot be committed; "" if every number can. In lockstep the
            number still has to be the same for all sequences.
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
        """Check that, in each sequence, the first `counts[i]` of the `ran[i]` positions can be committed.

        Every model can commit all positions that ran, or none of them.

        Raises:
            UsageError: a count is larger than the positions that ran, counts differ in lockstep, or `refusal` applies.
        """
        pairs, message = list(zip(counts, ran, strict=False)), ""
        if len(counts) != len(ran) or not all(0 <= count <= most for count, most in pairs):
            message = "there are no more, expected at most those that ran; give other numbers"
        elif counts == ran or not any(counts):
            return
        elif not self._manifest.can.run_apart and min(counts) < max(counts):
            message = "sequences run in lockstep, expected the same number of each; take the smallest"
        elif self.refusal:
            whole, sizes = all(count in (0, most) for count, most in pairs), {*counts} - {0}
            one = len(sizes) == 1 and sizes <= {*self._manifest.segment_lengths}
            fits = whole if self._manifest.commits == "segment" else one
            message = "" if fits and not self._rolled else self.refusal
        if message:
            held, wanted = few(np.array(ran)), few(np.array(counts))
            raise UsageError(f"{wanted} positions of {held} that ran are to be committed, but {message}")

    def inputs(self, inputs: Mapping[str, Array], counts: Ids) -> dict[str, Array]:
        """Return copies of a segment's inputs up to the largest count, zero beyond each count, for `Loop.run`.

        With counts [2, 1], tokens [2, 4] become [2, 2], and features [2, 5, F] with one position of look-ahead become
        [2, 3, F].
        """
        arrays: dict[str, Array] = {}
        for entry in self._manifest.given:
            part = arrays[entry.name] = np.array(inputs[entry.name][entry.axes.window(0, int(counts.max()))])
            entry.axes.clear_uncounted(part, counts)
        return arrays
