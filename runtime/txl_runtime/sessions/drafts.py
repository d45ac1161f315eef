"""Drafts of sessions' next tokens: this module chooses the sessions that try a draft in a round, and measures whether
drafts save time.
"""

from __future__ import annotations

from collections.abc import Sequence

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.sessions.jobs import Job, Part, Session
from txl_runtime.streaming.lookup import Pace, Repeats

KEPT = 2**12
"""Number of a session's latest tokens that are kept when older tokens are dropped: about 1 MB."""
MOST = 2
"""Number of sessions per row whose tokens are kept, namely the sessions that were served last. So a chat can find text
of its earlier turns.
"""


class Drafts:
    """The tokens of the sessions whose requests look up drafts, and a timer of rounds with and without drafts.

    A session's tokens outlive its requests, and are kept when it loses its row. The tokens are dropped after other
    sessions were served; later drafts of the session are then found only in tokens that are fed from then on.

    Args:
        rows: number of the stream's sequences.

    Attributes:
        pace: the timer of rounds in which every session draws a token and at least one looks up drafts.
    """

    def __init__(self, manifest: Manifest, rows: int) -> None:
        self._ragged, self._most, self.pace = manifest.can.run_ragged, MOST * rows, Pace()
        self._read: dict[Session, Repeats] = {}  # sessions in the order of service, the last served at the end
        self._drafted: bool | None = None  # True if this round has drafts; None if its time is not counted

    def find(self, parts: Sequence[Part]) -> bool:
        """Begin a round: set the draft of each part that has a draft, and return True if any part has one."""
        looking, self._drafted = [part for part in parts if part.job.work.draft], None
        for part in looking:
            self._of(part.job.session).add(part.job.ids(part.size).tolist())
        if not looking or not all(part.size == 1 and part.job.draws_after(1) for part in parts):
            return False
        self.pace.start()
        self._drafted = False
        if self.pace.allows() and looking == list(parts) and (self._ragged or len(parts) == 1):
            drafts = [self._draft(part.job) for part in parts]
            self._drafted = all(drafts)  # a session without a draft would wait for a longer round
            for part, draft in zip(parts, drafts if self._drafted else (), strict=False):
                part.draft = draft
        return self._drafted

    def end(self, parts: Sequence[Part]) -> None:
        """End a round, and record the tokens that were fed after each session's first position."""
        for part in parts:
            if part.draft:
                self._of(part.job.session).add(part.draft[: part.fed - 1])
        if self._drafted is not None:
            self.pace.count(self._drafted, min(part.fed for part in parts))

    def _draft(self, job: Job) -> list[int]:
        # if all tokens of a draft are right, one more token is drawn after it
        most = min(job.work.draft, job.work.max_new_tokens - job.drawn - 1)
        return self._read[job.session].find(most) if most > 0 else []

    def _of(self, session: Session) -> Repeats:
        repeats = self._read.pop(session) if session in self._read else Repeats((), KEPT)
        self._read[session] = repeats
        if len(self._read) > self._most:
            del self._read[next(iter(self._read))]
        return repeats
