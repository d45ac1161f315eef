"""The choice of the sessions that get rows, and of the sessions that one round serves together."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.sessions.jobs import Job, Session
from txl_runtime.streaming.inputs import segment_size

SLICE = 64
"""Number of rounds that a session is served before a waiting session may take its row in the middle of a request. The
reader of its answer then has to wait, so most answers should fit into one slice.
"""
SHORT_SLICE = 16
"""Number of rounds before a waiting session may take the row between two requests. Moving two states costs the time of
several rounds.
"""
LATELY = 16
"""Number of rounds after which a session that was served is no longer expected to run again soon."""

LONG = 1024
"""Maximum number of positions in a round of long segments while other sessions decode, because the other sessions have
to wait for the round.
"""


class Cuts:
    """The rule that cuts a request into segments, the same rule as in `Stream.feed`, whatever other sessions do."""

    def __init__(self, manifest: Manifest) -> None:
        self._lengths, self._ragged = manifest.segment_lengths, manifest.can.run_ragged
        self.shortest = self._lengths[-1]

    def size(self, left: int) -> int:
        """Return the number of positions of the next segment, if `left` positions are left."""
        return segment_size(left, self._lengths, self._ragged) or self.shortest

    def length(self, size: int) -> int:
        """Return the segment length of the program that runs `size` positions."""
        return next(length for length in reversed(self._lengths) if length >= size)


class Turns:
    """The choice of the sessions that the next round serves.

    A round runs one program: sessions whose next segments have the same length L are served together, so that a
    session's results do not depend on the other sessions. Every second round runs the shortest segments, so that long
    prompts never keep other sessions from decoding. Otherwise the session that was served least recently comes first.

    If the loop computes only the rows that run (`leading`), a long segment takes longer with every session in it, and
    decoding sessions wait for it. So only max(1, LONG // L) long prompts are served together while other sessions
    decode. These prompts are served until they are read or their slices are over.

    Args:
        alone: whether each session needs a segment of its own, because an input or output is shared by all sequences.
        leading: whether the loop computes only the rows up to the last row that runs.
    """

    def __init__(self, cuts: Cuts, alone: bool, leading: bool) -> None:
        self._cuts, self._alone, self._leading, self._short = cuts, alone, leading, False

    def together(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs to serve now, all of one program.

        Args:
            jobs: the first job of each session on a row, in the order in which the sessions came; may be empty.
        """
        if not jobs:
            return []
        groups: dict[tuple[int, bool, bool, int], list[Job]] = {}
        for job in jobs:
            arrays = job.work.arrays is not None
            length = self._cuts.length(self._cuts.size(job.positions_left))
            apart = id(job) if arrays and self._alone else 0
            groups.setdefault((length, arrays, job.work.last, apart), []).append(job)
        short = {key for key in groups if key[0] == self._cuts.shortest}
        turn = short if short and (not self._short or len(short) == len(groups)) else groups.keys() - short
        self._short = turn is short
        key = min(turn, key=lambda key: min(job.session.served for job in groups[key]))
        if self._leading and short and not self._short:
            return sorted(groups[key], key=lambda job: job.session.turns // SLICE)[: max(1, LONG // key[0])]
        return groups[key]


def in_order(waiting: Iterable[Session], newcomer: bool) -> list[Session]:
    """Return the waiting sessions in order: new and begun requests alternate, in each kind the longest wait first.

    So a new request does not wait for all begun requests, and many new requests do not keep begun requests waiting.
    """
    sides: tuple[list[Session], list[Session]] = ([], [])
    for session in sorted(waiting, key=lambda session: session.served):
        sides[(session.jobs[0].at == 0) != newcomer].append(session)
    return [session for pair in itertools.zip_longest(*sides) for session in pair if session is not None]


def closing_up(owners: Sequence[Session | None], runnable: Collection[Session]) -> list[tuple[Session, int]]:
    """Return moves (session, row) after which all runnable sessions are on the first rows.

    If graphs leave the batch size open, a segment computes the rows up to the last row that runs: with sessions on rows
    0 and 3, moving the second session to row 1 saves computing two rows.
    """
    count = sum(owner in runnable for owner in owners if owner is not None)
    behind = [owner for owner in owners[count:] if owner is not None and owner in runnable]
    rows = [row for row, owner in enumerate(owners[:count]) if owner not in runnable]
    return list(zip(reversed(behind), rows, strict=True))


def leaver(owners: Sequence[Session | None], runnable: Collection[Session]) -> int | None:
    """Return the row to give to a waiting session; None if the session has to go on waiting.

    The lowest free row is taken first; then the row of an idle session, the session that was served least recently;
    then the row of a session whose slice is over.
    """
    for row, owner in enumerate(owners):
        if owner is None:
            return row
    known = [owner for owner in owners if owner is not None]
    idle = [owner for owner in known if owner not in runnable]
    served = idle or [owner for owner in known if owner.turns >= (SLICE if owner.jobs[0].at else SHORT_SLICE)]
    oldest = min(served, key=lambda owner: owner.served, default=None)
    return None if oldest is None else oldest.row
