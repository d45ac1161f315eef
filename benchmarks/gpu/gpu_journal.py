"""Checks one after the other, each told at once: on the terminal, as a line of JSON in a file, on a page at the end.

What has been found is on the disk before the next check starts, whatever ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "ENDED",
    "FAILED",
    "NOT_RUN",
    "OK",
    "Found",
    "Journal",
    "figures_of",
    "read_found",
    "said_of",
    "without_cuda",
    "writing",
]

OK, FAILED, ENDED, NOT_RUN = "ok", "FAILED", "ended", "not run"
"""`ENDED` is what a limit, the budget or somebody's Ctrl-C ended: nothing is known of it."""


@dataclass
class Found:
    """One check.

    Attributes:
        name: what was checked.
        state: `OK`, `FAILED`, `ENDED` or `NOT_RUN`.
        seconds: how long it took.
        figures: what was measured.
        reason: why it failed or was not run.
    """

    name: str
    state: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def without_cuda(torch: Any) -> str:
    """Return why this PyTorch sees no GPU."""
    return "PyTorch sees no GPU" if torch.version.cuda else "PyTorch was built without CUDA"


def said_of(found: Found) -> str:
    """A check in one line."""
    said = figures_of(found)
    return f"{found.state:7} {found.name}{': ' if said else ''}{said}"


def figures_of(found: Found) -> str:
    """Return the figures of a step as text, or the reason why there are none."""
    return found.reason or ", ".join(f"{name} {_short(value)}" for name, value in found.figures.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def writing(program: str) -> Iterator[None]:
    """Begin a program's files: where they cannot be written, it ends with one line and status 2."""
    try:
        yield
    except OSError as error:
        place = error.filename or "its results"
        said = f"{program}: cannot write {place}: {error.strerror}, expected --out FOLDER that can be written"
        print(said, file=sys.stderr)
        raise SystemExit(2) from None


class Journal:
    """The steps that a program of checks has done so far.

    Args:
        name: of the program and of its files.
        folder: where NAME.jsonl and NAME.md go; None for nowhere.
    """

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name, self.found = name, list[Found]()
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.jsonl").write_text("")

    def run(self, name: str, check: Callable[[], Mapping[str, Any] | None]) -> Found:
        """Run a check, which returns figures and raises where it fails; whatever it raises, the next one can run.

        Raises:
            KeyboardInterrupt: somebody stops the program. The check is noted as ended, with what the interrupt says.
        """
        started = time.perf_counter()
        try:
            found = Found(name, OK, figures=dict(check() or {}))
        except KeyboardInterrupt as stop:
            self.add(Found(name, ENDED, time.perf_counter() - started, reason=str(stop) or "interrupted"))
            raise
        except Exception as error:  # one that cannot run must not keep the others from it
            found = Found(name, FAILED, reason=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        found.seconds = time.perf_counter() - started
        return self.add(found)

    def skip(self, name: str, reason: str) -> Found:
        """Note a check that is not run."""
        return self.add(Found(name, NOT_RUN, reason=reason))

    def add(self, found: Found) -> Found:
        """Note a check: on the terminal, and on the disk."""
        self.found.append(found)
        print(said_of(found), flush=True)
        if self._folder is not None:
            with (self._folder / f"{self.name}.jsonl").open("a") as file:
                file.write(json.dumps(asdict(found), default=str) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return found

    def finish(self) -> int:
        """Write the page; 1 where a check failed, else 0."""
        if self._folder is not None:
            (self._folder / f"{self.name}.md").write_text(self.page())
        return int(any(found.state == FAILED for found in self.found))

    def page(self) -> str:
        """All checks as a table."""
        counts = ", ".join(
            f"{sum(found.state == state for found in self.found)} {state}" for state in (OK, FAILED, ENDED, NOT_RUN)
        )
        lines = [
            f"# {self.name}: {counts}",
            "",
            "| check | | seconds | figures, or why not |",
            "| --- | --- | --- | --- |",
        ]
        for found in self.found:
            said = figures_of(found).replace("|", "/")
            lines.append(f"| {found.name} | {found.state} | {found.seconds:.1f} | {said} |")
        return "\n".join(lines) + "\n"


def read_found(file: Path) -> list[Found]:
    """Read the steps of a journal on the disk; a last line that was cut off is left out."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(Found(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return found
