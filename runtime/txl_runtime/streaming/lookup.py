"""Drafts of next tokens, looked up in the sequence's own earlier tokens, and the segment that tries a draft.

Text often repeats itself: "for i in range(" is probably followed by the same tokens as the last time. The draft d1 … d4
runs behind the latest token t as one segment [t, d1, d2, d3, d4], which is not committed to the state yet. A token is
then drawn at each position, as if it were a step. While the drawn token equals the draft's, drawing goes on at the next
position. The first different token ends the draft, and only the positions before it are committed. So this gives the
same tokens as plain decoding; logits may differ by rounding, because a segment multiplies matrices of other shapes.

A draft costs more time than a step. `Pace` compares the time of drafts with the time of the steps that they saved, and
pauses drafts that lose time. (Prompt lookup decoding: Saxena 2023; checking drafts in one pass: Leviathan et al. 2023,
arXiv 2211.17192.)
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import few, is_whole, shown
from txl_runtime.streaming.loop import Loop, Result
from txl_runtime.streaming.outputs import SegmentResult, StreamSoftmax, WholeSoftmax
from txl_runtime.streaming.partial import Parts
from txl_runtime.types import Floats, Ids

MOST_DRAFT = 4
"""Maximum number of tokens of a draft. A segment of 5 tokens reads each weight once, as a step of one token does, so it
takes little more time where reading weights is the bottleneck.
"""
SHORT = 8
"""Longest segment length of a program that drafts run in: in a longer program, computing the padding costs more than
drafts save.
"""
MATCH = 3
"""Number of latest tokens that are looked up. In replays, looking up 6 or 4 tokens first gained the same within 4 %."""
KEPT = 2**16
"""Number of latest tokens that are kept when older tokens are dropped, which happens at twice that number. A token
takes about 150 bytes.
"""
SHARE = 0.01
"""Largest share of the total time that drafts may lose."""
FIRST, WARM, MEAN_OF = 2, 6, 32
"""Numbers of runs. The first 2 are not timed, because engines prepare in them. Drafts begin after 6 steps; until then
the usual time is the shortest time, later a running mean over 32 runs. A run counts as at most twice the usual time,
because a process may have to wait for a processor.
"""


def longest_draft(lookup: int, manifest: Manifest, parts: Parts) -> int:
    """Return the maximum number of tokens of a draft: 4 if `lookup` is 4 and a program holds 5 tokens; 0 if `lookup` is
    0.

    Raises:
        UsageError: `lookup` is not 0 … 4, a segment does not equal single steps, or a part of a segment cannot be
            committed.
    """
    if not is_whole(lookup) or not 0 <= lookup <= MOST_DRAFT:
        raise UsageError(f"lookup is {shown(lookup)}, expected a whole number of 0 … {MOST_DRAFT}; 0 is off")
    if not lookup:
        return 0
    stepwise, draft = manifest.stepwise or 0, 0
    while draft < min(lookup, stepwise - 1) and _holds(draft + 2, manifest):
        draft += 1
    # if lengths are exact, `_holds` has already checked which parts can be committed
    refusal = parts.refusal if manifest.can.run_ragged else ""
    if draft and not refusal:
        return draft
    if not stepwise:
        again = "export the model again, with --lookup if it has that"
        refusal = f"the bundle does not say that a segment is as many steps; {again}"
    elif stepwise < 2:
        refusal = "a position of a segment sees more than that of a step; export with --lookup if the model has that"
    elif not refusal:
        todo = "--segment-length 5 besides" if manifest.can.run_ragged else "segments of exactly 1, 2, 3, 4 and 5"
        refusal = f"segments are of {few(np.array(sorted(manifest.segment_lengths)))} positions; export with {todo}"
    raise UsageError(f"lookup is {lookup}, expected 0, because {refusal}")


def _holds(size: int, manifest: Manifest) -> bool:
    """Return whether a program runs segments of `size` positions well: of this length, or of at most 8, padded."""
    known = manifest.segment_lengths
    if manifest.can.run_ragged:
        return min((length for length in known if length >= size), default=SHORT + 1) <= SHORT
    return size in known


class Repeats:
    """The tokens of one sequence, with an index of where each run of `MATCH` tokens stood last.

    Args:
        tokens: the sequence's first tokens.
        kept: number of latest tokens that are kept when older tokens are dropped; None for `KEPT`.
    """

    def __init__(self, tokens: Sequence[int], kept: int | None = None) -> None:
        self._read, self._kept = list[int](), kept or KEPT
        self._latest: tuple[int, ...] = ()
        self._after: dict[tuple[int, ...], int] = {}  # maps `MATCH` tokens to the index of the token after them
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens [n]; if there are then more than twice `kept`, drop all but the latest `kept`."""
        if len(self._read) + len(tokens) > 2 * self._kept:
            self._read, tokens = [], [*self._read, *tokens][-self._kept :]
            self._after, self._latest = {}, ()
        for token in tokens:
            self._after[self._latest] = len(self._read)
            self._latest = (*self._latest[1 - MATCH :], token)
            self._read.append(token)

    def find(self, most: int) -> list[int]:
        """Return the `most` tokens that followed the latest 3 tokens at their previous place; [] if these 3 are new.

        For [7, 8, 9, 7, 7, 8, 9] and 4 this is [7, 7, 8, 9]. For [7, 7, 7, 7] it is [7, 7, 7, 7]: where the tokens end,
        the part since the previous place is repeated.
        """
        read = self._read
        at = self._after.get(self._latest, 0)
        return [read[at + i % (len(read) - at)] for i in range(most)] if at else []


class Pace:
    """A timer of steps and drafts, which pauses drafts while they lose time.

    The loss is the time of drafts minus the time of the steps that they saved, and never falls below 0. A draft is
    allowed while the loss is at most `SHARE` of the total time. So drafts that lose wait until more steps have run.

    Args:
        clock: a function that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._since, self._part = clock, 0.0, 0.0
        self._spent = self._loss = 0.0
        # two lists with an entry for steps and one for drafts: number of runs, and usual time in seconds
        self._counts, self._usual = [0, 0], [math.inf, math.inf]
        self._follows = False  # True if the latest run was a draft

    def allows(self) -> bool:
        """Return whether a draft may be made now."""
        return self._counts[0] > WARM and self._loss <= SHARE * self._spent

    def start(self) -> None:
        """Start the clock; the time that a caller spends between two tokens is not measured."""
        self._since = self._clock()

    def stop(self) -> None:
        """Add the time since `start` to the running step or draft."""
        now = self._clock()
        self._part, self._since = self._part + now - self._since, now

    def count(self, draft: bool = False, steps: float = 1) -> None:
        """Finish the measurement of a step, or of a draft that saved `steps` steps; the clock goes on for
        the next run.
        """
        self.stop()
        took, self._part = self._part, 0.0
        judged, self._follows = draft or self._follows, draft
        self._counts[draft] += 1
        if self._counts[draft] <= FIRST:
            return
        usual = self._usual[draft]
        if self._counts[draft] <= WARM:
            usual = min(usual, took)
        took = min(took, 2 * usual)  # without the limit, one wait for a processor would count as 100 steps
        self._spent += took
        if judged:  # a step after a draft counts as well: it reads weights that the draft pushed out of the caches
            self._loss = max(0.0, self._loss + took - steps * self._usual[False])
        if draft or not judged:
            self._usual[draft] = usual + (took - usual) / MEAN_OF


class Positions(StreamSoftmax):
    """An uncommitted segment [b, T], at whose positions tokens are drawn one after the other.

    This object is also the softmax for these draws, because the head was computed for all positions at once.

    Args:
        output: the softmax.
        result: the segment's result.
        ran: int32 [b], number of positions that ran.

    Attributes:
        at: index of the position of the next draw.
        counts: int32 [b], number of positions to commit; at least 1 for each sequence that runs.
        lost: True if the engine failed, or was interrupted, while it committed these positions.
    """

    def __init__(self, output: StreamSoftmax, result: Result, ran: Ids) -> None:
        self.name, self.clusters, self._output = output.name, output.clusters, output
        # copy the rows, because a caller's `adjust` may run a part again, which overwrites the program's outputs
        self._rows = result.rows().copy()
        self.at, self.counts, self.lost = 0, np.minimum(ran, 1), False
        self._heads = self._rows
        if isinstance(output, WholeSoftmax):
            return
        b, length, width = self._rows.shape
        live = np.flatnonzero(np.arange(length) < ran[:, None])
        # pad to a multiple of b, because an engine is bound to few numbers of rows
        filled = np.resize(live, -(-live.size // b) * b)
        head = output.head(self._rows.reshape(b * length, width)[filled])
        heads = np.zeros((b * length, head.shape[1]), np.float32)
        heads[live] = head[: live.size]
        self._heads = heads.reshape(b, length, -1)

    def step(self, sequences: NDArray[np.bool_]) -> None:
        """Go on to the next position, and count it among the positions to commit, for sequences in this mask, bool [b].

        For example, [True, False] counts one more position for sequence 0.
        """
        self.at, self.counts = self.at + 1, self.counts + sequences

    def keep(self, loop: Loop) -> None:
        """Commit the counted positions to the state; raise the errors of `Loop.commit`."""
        self.lost = True
        loop.commit(self.counts)
        self.lost = False

    def result(self) -> Result:
        """Return the result at the position of the next draw."""
        return SegmentResult(self._rows[:, self.at : self.at + 1], self.counts, 1, None, self)

    def logprobs(self, features: Floats, out: Floats) -> None:
        self._output.logprobs(features, out)

    def head(self, features: Floats) -> Floats:
        """Return the head's values at the position of the next draw, to which the features belong.

        For example, features [2, 64] give [2, 256].
        """
        return self._heads[:, self.at]

    def tail(self, features: Floats, cluster: int) -> Floats:
        return self._output.tail(features, cluster)

    def nll(self, features: Floats, targets: Ids) -> Floats:
        return self._output.nll(features, targets)


class Draft(Positions):
    """An uncommitted segment [b, T] of each sequence's latest token and draft. All sequences' drafts end together.

    Args:
        output, result: see `Positions`.
        ids: int32 [b, T], the latest token and the draft of each sequence.
        fed: bool [b], the sequences that run.
    """

    def __init__(self, output: StreamSoftmax, result: Result, ids: Ids, fed: NDArray[np.bool_]) -> None:
        super().__init__(output, result, fed.astype(np.int32) * ids.shape[1])
        self._ids = ids
        self._fed = fed.copy()  # a copy, because the caller clears the entry of a sequence that stops

    def follows(self, tokens: Ids, fed: NDArray[np.bool_]) -> bool:
        """Go on to the next position if the draft predicted these tokens [b] there; return whether it did.

        For example, it predicted [17, 4], and [17, 4] were drawn.
        """
        goes_on = self.at + 1 < self._ids.shape[1] and np.array_equal(fed, self._fed)
        if goes_on and np.array_equal(self._ids[fed, self.at + 1], tokens[fed]):
            self.step(fed)
            return True
        return False


class Lookup:
    """The drafts of one generation of b sequences, all equally long.

    Args:
        most: maximum number of tokens of a draft.
        prompts: the tokens of each sequence so far.

    Attributes:
        pace: the times of this generation.
    """

    def __init__(self, most: int, prompts: Sequence[Sequence[int]], pace: Pace) -> None:
        self._most, self.pace = most, pace
        self._read = [Repeats(prompt, KEPT // len(prompts)) for prompt in prompts]
        self._kept = 0  # number of positions of the latest draft that were right; 0 after a step
        # a weak reference, so that a suspended generator does not keep a closed engine alive
        self._draft: weakref.ref[Draft] | None = None

    def add(self, tokens: Ids) -> None:
        """Add one drawn token of each sequence, int32 [b]. For example, [17, 4] for two sequences."""
        for repeats, token in zip(self._read, tokens.tolist(), strict=True):
            repeats.add((token,))

    def find(self, fed: NDArray[np.bool_], most: int) -> Ids | None:
        """Return drafts of equal length, int32 [b, k] with k at most `most`; None if a sequence in `fed` has no draft.

        This call also ends the time measurement of the previous step or draft. For example, [[5, 9, 2], [7, 1, 1]] for
        two sequences.
        """
        accepted, self._kept = self._kept, 0
        self.pace.count(accepted > 0, accepted or 1)
        most = min(most, self._most)
        if most < 1 or not self.pace.allows():
            return None
        drafts = list[list[int]]()
        for repeats, runs in zip(self._read, fed.tolist(), strict=True):
            drafts.append(repeats.find(most) if runs else [0] * most)
            if not drafts[-1]:
                return None
        return np.array(drafts, np.int32)

    def begin(self, output: StreamSoftmax, result: Result, ids: Ids, fed: NDArray[np.bool_]) -> Draft:
        """Return the `Draft` of a segment that has run; the arguments are the arguments of `Draft`.

        For example, ids [[17, 5, 9, 2]] hold the token to feed, 17, and its draft of 3 tokens.
        """
        draft = Draft(output, result, ids, fed)
        self._draft, self._kept = weakref.ref(draft), 1
        return draft

    def follows(self, opened: Positions | None, tokens: Ids, fed: NDArray[np.bool_]) -> bool:
        """Go on in `opened` if it is this generation's draft and predicted these tokens [b]; return whether it did.

        For example, the draft [[5, 9, 2]] predicted [5].
        """
        draft = None if self._draft is None else self._draft()
        if draft is None or draft is not opened or not draft.follows(tokens, fed):
            return False
        self._kept += 1
        return True
