"""Keep sessions over a restart: restore sessions at the start, save them periodically and at the end, and log this."""

from __future__ import annotations

import asyncio
import time

from txl_runtime.errors import TxlError, UsageError, one_line
from txl_runtime.sessions import AsyncSessions, Busy, Sessions
from txl_runtime.sessions.asynchronous import save_beside
from txl_runtime.sessions.checkpoint import Checkpoint

from txl_deploy.serve.logs import Log
from txl_deploy.serve.playground.tabs import of_tab
from txl_deploy.serve.settings import ServerSettings

TOLD = 10
"""Maximum number of lost sessions that are named in the log at the start."""


class Keeping:
    """The checkpoint of one server, with counts of successes and failures.

    Args:
        checkpoint: the checkpoint in which sessions are kept; None if sessions end with the server.

    Attributes:
        restored, lost: number of sessions restored at the start, and number whose saved files could not be used.
        written, failed: number of checkpoints written, and number that could not be written.
    """

    def __init__(self, log: Log, checkpoint: Checkpoint | None = None) -> None:
        self._log, self._checkpoint = log, checkpoint
        self.restored = self.lost = self.written = self.failed = 0
        self._last, self._failing = time.monotonic(), False

    @property
    def age(self) -> float | None:
        """Return the seconds since the last checkpoint, or since the start; None without a checkpoint folder."""
        return None if self._checkpoint is None else time.monotonic() - self._last

    @property
    def standing(self) -> str:
        """Return the text about sessions in the ready line, so that a user notices a forgotten checkpoint folder."""
        if self._checkpoint is None:
            return "sessions end with the server; "
        lost = f", {self.lost} {'is' if self.lost == 1 else 'are'} lost" if self.lost else ""
        return f"{_sessions(self.restored)} came back{lost}; "

    def restore(self, sessions: Sessions) -> None:
        """Restore the sessions of the last checkpoint, and log the sessions whose files cannot be used.

        Raises:
            TxlError: the checkpoint cannot be read, or does not fit the bundle or the limits.
        """
        if self._checkpoint is None:
            return
        try:
            lost = list(self._checkpoint.restore(sessions).values())
        except Busy:  # the error's own message is for a client, who cannot raise a limit
            raise UsageError(
                f"{self._checkpoint.folder}: {_sessions(len(self._checkpoint.names))} are kept here, expected at most "
                f"the {len(sessions.names())} that there is room for; raise --max-sessions or --session-bytes"
            ) from None
        for error in lost[:TOLD]:
            self._log.say("session_lost", f"note: {error}", problem=str(error))
        if len(lost) > TOLD:
            self._log.say("sessions_lost", f"note: {len(lost)} sessions are lost in all", sessions=len(lost))
        for name in filter(of_tab, sessions.names()):  # the playground's pages of these sessions are closed
            sessions.close(name)
        self.restored, self.lost, self._last = len(sessions.names()), len(lost), time.monotonic()

    async def go_on(self, settings: ServerSettings, front: AsyncSessions) -> None:
        """Periodically end idle sessions and save all other sessions, until this task is cancelled."""
        look = min(settings.idle_seconds / 4, settings.checkpoint_every, 10.0)
        tried = time.monotonic()
        while True:
            await asyncio.sleep(look)
            try:
                await front.call(lambda sessions: sessions.expire())
                if self._checkpoint is not None and time.monotonic() - tried >= settings.checkpoint_every:
                    tried = time.monotonic()
                    self._made(await save_beside(front, self._checkpoint), self._checkpoint, tried)
            except TxlError as error:  # e.g. a full disk: the last checkpoint stays, and the next may succeed
                self.failed, self._failing = self.failed + 1, True
                self._log.say("checkpoint_failed", f"note: no checkpoint: {error}", problem=str(error))
            except Exception as error:  # a defect must not prevent later checkpoints
                message = f"{type(error).__name__}: {one_line(error)}"
                self._log.say(
                    "upkeep_failed", f"error: upkeep of the sessions: {message}; report it, please", problem=message
                )

    async def end(self, sessions: Sessions) -> None:
        """Save all sessions for the last time.

        Raises:
            TxlError: the sessions cannot be written; the last checkpoint is kept.
        """
        if self._checkpoint is not None:
            began = time.monotonic()
            try:
                self._made(await asyncio.to_thread(self._checkpoint.save, sessions), self._checkpoint, began, last=True)
            except TxlError as error:
                raise TxlError(f"{error}; sessions come back as they were {self.age:.0f} s ago") from None

    def _made(self, changed: int, checkpoint: Checkpoint, began: float, last: bool = False) -> None:
        """Log a checkpoint.

        JSON logs have every checkpoint. Lines for people have only the last checkpoint, and the first checkpoint that
        succeeds after a failure: a line every minute would hide other events.
        """
        held = len(checkpoint.names)
        facts = {"sessions": changed, "held": held, "seconds": round(time.monotonic() - began, 3)}
        if last or self._failing:
            line = f"checkpoint: {_sessions(held)}, {changed} of them written anew"
            self._log.say("checkpoint", line, **facts)
        else:
            self._log.detail("checkpoint", **facts)
        self.written, self._failing, self._last = self.written + 1, False, began


def _sessions(count: int) -> str:
    return f"{count} {'session' if count == 1 else 'sessions'}"
