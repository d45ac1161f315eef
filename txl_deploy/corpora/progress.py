"""How far long work is and how long it will take: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.progress import TextColumn
from txl_report.numbers import prefixed

from txl_deploy.console import Bar, cut, elapsed, plain, stderr

FIRST_SECONDS, MOST_SECONDS = 10.0, 60.0
"""Between lines where there is no terminal: at first, and at most."""
EARLY = 2.0
"""Seconds before which nothing is said of the rest."""


class Advance:
    """Shows the share of work that is done, and the time that the rest takes at this run's own speed.

    Args:
        title: what is done.
        total: how much there is, in any unit; 0 where that is not known.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = plain(title), total
        self._before = self._done = self._documents = self._tokens = 0
        self._began = self._told = time.monotonic()
        self._pause = FIRST_SECONDS
        share = TextColumn("{task.percentage:>3.0f}%", markup=False)
        self._bar = Bar(share, elapsed(), cut("{task.fields[said]}", 30), beside=52)
        self._task = self._bar.add_task(self._title, total=total or None, said="")

    def __enter__(self) -> Advance:
        self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bar.stop()
        if self._bar.disable and kind is None:
            seconds = time.monotonic() - self._began
            stderr.print(f"{self._title}: {self._said()}, {seconds:.1f} s", soft_wrap=True)

    def advance(self, work: int, documents: int, tokens: int) -> None:
        """So much is done in addition."""
        self._done, self._documents = self._done + work, self._documents + documents
        self._tokens += tokens
        rest = self.rest()
        said = self._said() + ("" if rest is None else f", {lasting(rest)} left")
        if not self._bar.disable:
            self._bar.update(self._task, completed=self._done, said=said)
        elif time.monotonic() - self._told >= self._pause:
            share = f"{self._done / self._total:.0%}, " if self._total else ""
            stderr.print(f"{self._title}: {share}{said}", soft_wrap=True)
            self._told, self._pause = time.monotonic(), min(2 * self._pause, MOST_SECONDS)

    def skip(self, work: int) -> None:
        """So much was done by an earlier run: it is done, and says nothing of the speed."""
        self._before, self._done = self._before + work, self._done + work

    def rest(self) -> float | None:
        """Seconds that are left at the mean speed of this run; None while that is not known."""
        seconds, done = time.monotonic() - self._began, self._done - self._before
        if not self._total or seconds < EARLY or done <= 0:
            return None
        return seconds * max(self._total - self._done, 0) / done

    def _said(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-3)
        counted = f"{self._documents} documents, " if self._documents else ""
        return f"{counted}{prefixed(round(self._tokens / seconds), 'tokens/s')}"


def lasting(seconds: float) -> str:
    """A duration as people say it: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
