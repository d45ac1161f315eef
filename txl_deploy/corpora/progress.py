"""How far long work is and how long it will take: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rich.progress import TextColumn
from txl_report.numbers import counted, prefixed, whole

from txl_deploy.console import Bar, cut, elapsed, plain, stderr
from txl_deploy.corpora.documents import Unit

FIRST_SECONDS, MOST_SECONDS = 10.0, 60.0
"""Between lines where there is no terminal: at first, and at most."""
EARLY = 2.0
"""Seconds before which nothing is said of the rest."""
RECENT = 30.0
"""Seconds whose speed tells how long the rest takes: short documents, which come last, are slower by the byte."""


class Advance:
    """Shows the share of work that is done, and the time that the rest takes at this run's own speed.

    Args:
        title: what is done.
        total: how much there is, in any unit; 0 where that is not known.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = plain(title), total
        self._before = self._done = self._documents = self._earlier = self._tokens = 0
        self._begun: dict[int, tuple[float, float]] = {}
        self._began = self._told = time.monotonic()
        self._recent = deque([(self._began, 0.0)])
        self._pause = FIRST_SECONDS
        share = TextColumn("{task.percentage:>3.0f}%", markup=False)
        self._bar = Bar(share, elapsed(), cut("{task.fields[said]}", 28), beside=52)
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
        self._show()

    def partly(self, batch: Sequence[Unit], share: float) -> None:
        """This share of a batch that is being scored is done; 0 once it is finished, and counted by `advance`."""
        if share:
            done = sum(unit.weight for unit in batch), sum(unit.scored for unit in batch)
            self._begun[batch[0].index] = share * done[0], share * done[1]
            self._show()
        else:
            self._begun.pop(batch[0].index, None)

    def skip(self, work: int) -> None:
        """A document that an earlier run has scored: it is done, and says nothing of the speed."""
        self._before, self._done, self._earlier = self._before + work, self._done + work, self._earlier + 1

    def rest(self) -> float | None:
        """Seconds that are left at this run's own speed of late; None while that is not known."""
        now, work = time.monotonic(), self.work()
        if now - self._recent[-1][0] >= 1:
            self._recent.append((now, work - self._before))
        while len(self._recent) > 2 and self._recent[1][0] <= now - RECENT:
            self._recent.popleft()
        began, before = self._recent[0]
        done = work - self._before - before
        if not self._total or now - self._began < EARLY or done <= 0:
            return None
        return (now - began) * max(self._total - work, 0) / done

    def work(self) -> float:
        """What is done, with what is done of batches that are not finished."""
        return self._done + sum(work for work, _ in self._begun.values())

    def _show(self) -> None:
        rest, work = self.rest(), self.work()
        left = "" if rest is None else f"{lasting(rest)} left"
        if not self._bar.disable:
            self._bar.update(self._task, completed=work, said=f"{left}, {self._said()}" if left else self._said())
        elif time.monotonic() - self._told >= self._pause:
            share = f"{work / self._total:.0%}, " if self._total else ""
            stderr.print(f"{self._title}: {share}{self._said()}{left and f', {left}'}", soft_wrap=True)
            self._told, self._pause = time.monotonic(), min(2 * self._pause, MOST_SECONDS)

    def _said(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-3)
        tokens = self._tokens + sum(tokens for _, tokens in self._begun.values())
        documents = self._documents + self._earlier
        said = f"{counted(documents, 'document')}, " if documents else ""
        earlier = f"{whole(self._earlier)} of them earlier, " if self._earlier else ""
        return f"{said}{earlier}{prefixed(round(tokens / seconds), 'tokens/s')}"


def lasting(seconds: float) -> str:
    """A duration as people say it: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
