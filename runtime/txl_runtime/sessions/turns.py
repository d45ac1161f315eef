"""Whose turn it is: which sessions come to rows, and which of those on rows are served together."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.sessions.jobs import Job, Session
from txl_runtime.streaming.inputs import segment_size

SLICE = 64
"""Rounds that serve a session before its row is given, in the middle of a request, to one that waits. Whoever reads an
answer would wait as well, so most answers should fit into one slice."""
SHORT_SLICE = 16
"""The same between two requests. Moving two states costs as much as some rounds."""
LATELY = 16
"""Rounds within which a session that was served is likely to come again."""

LONG = 1024
"""Positions that are fed together in a round of long segments, where others wait to decode."""


class Cuts:
    """How a request is cut into segments, by itself: as `Stream.feed` cuts it, whatever the neighbours do."""

    def __init__(self, manifest: Manifest) -> None:
        self._lengths, self._ragged = manifest.segment_lengths, manifest.can.run_ragged
        self.shortest = self._lengths[-1]

    def size(self, left: int) -> int:
        """Positions of the next segment, of so many that are left."""
        return segment_size(left, self._lengths, self._ragged) or self.shortest

    def length(self, size: int) -> int:
        """The segment length of the program that runs so many positions."""
        return next(length for length in reversed(self._lengths) if length >= size)


class Turns:
    """Who is served next.

    A round runs one program: sessions with as much to feed are served together, so that what a session is given does
    not depend on its neighbours. Every other round is of the shortest segments, so that long prompts never keep others
    from decoding. Beside that the session that was served least recently comes first.

    Where sequences that do not run are not computed, a long segment takes longer with every session in it, and those
    who decode wait for it. So only some sessions with long prompts are served together while others decode. They stay
    the same ones until their prompts are read or their slices are over.

    Args:
        alone: whether each session needs a segment of its own, because the model reads something that all share.
        leading: whether sequences behind the last one that runs are not computed.
    """

    def __init__(self, cuts: Cuts, alone: bool, leading: bool) -> None:
        self._cuts, self._alone, self._leading, self._short = cuts, alone, leading, False

    def together(self, jobs: Sequence[Job]) -> list[Job]:
        """Which of the jobs on rows are served now: those of one program.

        Args:
            jobs: in the order in which their sessions came; where there are none, none are served.
        """
        if not jobs:
            return []
        groups: dict[tuple[int, bool, bool, int], list[Job]] = {}
        for job in jobs:
            arrays = job.work.arrays is not None
            length = self._cuts.length(self._cuts.size(job.left))
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
    """Sessions that wait for rows: newcomers and those that have had turns come by turns, the longest wait first.

    So a newcomer does not stand behind all who were there before, and no number of newcomers keeps others waiting.
    """
    sides: tuple[list[Session], list[Session]] = ([], [])
    for session in sorted(waiting, key=lambda session: session.served):
        sides[(session.jobs[0].at == 0) != newcomer].append(session)
    return [session for pair in itertools.zip_longest(*sides) for session in pair if session is not None]


def closing_up(owners: Sequence[Session | None], runnable: Collection[Session]) -> list[tuple[Session, int]]:
    """Sessions that have something to do and stand behind rows that have not, and the rows that they should come to.

    Where graphs leave the batch open, a segment computes the rows up to the last one that runs.
    """
    count = sum(owner in runnable for owner in owners if owner is not None)
    behind = [owner for owner in owners[count:] if owner is not None and owner in runnable]
    rows = [row for row, owner in enumerate(owners[:count]) if owner not in runnable]
    return list(zip(reversed(behind), rows, strict=True))


def leaver(owners: Sequence[Session | None], runnable: Collection[Session]) -> int | None:
    """The row to give to a session that waits; None if it has to wait on.

    A free row, the lowest; else that of a session that has nothing to do, the one served least recently; else of one
    that has had its slice.
    """
    for row, owner in enumerate(owners):
        if owner is None:
            return row
    known = [owner for owner in owners if owner is not None]
    idle = [owner for owner in known if owner not in runnable]
    served = idle or [owner for owner in known if owner.turns >= (SLICE if owner.jobs[0].at else SHORT_SLICE)]
    found = min(served, key=lambda owner: owner.served, default=None)
    return None if found is None else found.row
