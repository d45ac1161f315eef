"""Run checks one after the other, and report them on the terminal, in a file of JSON lines, and on a page.

A result is on the disk before the next check starts, so that it survives any end of the process.
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
"""The states of a check. `ENDED` says that a limit, the budget or Ctrl-C ended the check, so its result is unknown."""


@dataclass
class Found:
    """One check and its result.

    Attributes:
        name: the check's name.
        state: `OK`, `FAILED`, `ENDED` or `NOT_RUN`.
        seconds: the duration of the check.
        figures: the measurements by name.
        reason: the reason why the check failed, ended or was not run; "" for `OK`.
    """

    name: str
    state: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def without_cuda(torch: Any) -> str:
    """Return the reason why PyTorch sees no GPU, as one line."""
    return "PyTorch sees no GPU" if torch.version.cuda else "PyTorch was built without CUDA"


def said_of(found: Found) -> str:
    """Return one line about a check, e.g. "ok      open: is RTX 3060"."""
    text = figures_of(found)
    return f"{found.state:7} {found.name}{': ' if text else ''}{text}"


def figures_of(found: Found) -> str:
    """Return a check's reason, if it has one, else its figures as text: "worst 2e-05, steps 300"."""
    return found.reason or ", ".join(f"{name} {_short(value)}" for name, value in found.figures.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def writing(program: str) -> Iterator[None]:
    """Run a block that writes a program's files; after an error of the disk, end with one line and status 2."""
    try:
        yield
    except OSError as error:
        place = error.filename or "its results"
        text = f"{program}: cannot write {place}: {error.strerror}, expected --out FOLDER that can be written"
        print(text, file=sys.stderr)
        raise SystemExit(2) from None


class Journal:
    """The results of a program's checks so far.

    Args:
        name: the name of the program and of its files.
        folder: the folder of NAME.jsonl and NAME.md; None to write no files.
    """

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name, self.found = name, list[Found]()
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.jsonl").write_text("")

    def run(self, name: str, check: Callable[[], Mapping[str, Any] | None]) -> Found:
        """Run a check and note its result: `OK` with the figures that it returns, or `FAILED` with its error.

        Raises:
            KeyboardInterrupt: somebody stops the program; the check is noted as `ENDED`, with the interrupt's text.
        """
        started = time.perf_counter()
        try:
            results = Found(name, OK, figures=dict(check() or {}))
        except KeyboardInterrupt as stop:
            self.add(Found(name, ENDED, time.perf_counter() - started, reason=str(stop) or "interrupted"))
            raise
        except Exception as error:  # a failing check must not prevent the checks after it
            results = Found(name, FAILED, reason=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        results.seconds = time.perf_counter() - started
        return self.add(results)

    def skip(self, name: str, reason: str) -> Found:
        """Note a check as not run, with the reason."""
        return self.add(Found(name, NOT_RUN, reason=reason))

    def add(self, found: Found) -> Found:
        """Print a check's result on the terminal, and write it to the disk."""
        self.found.append(found)
        print(said_of(found), flush=True)
        if self._folder is not None:
            with (self._folder / f"{self.name}.jsonl").open("a") as file:
                file.write(json.dumps(asdict(found), default=str) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return found

    def finish(self) -> int:
        """Write the page with all results; return 1 if a check failed, else 0."""
        if self._folder is not None:
            (self._folder / f"{self.name}.md").write_text(self.page())
        return int(any(step.state == FAILED for step in self.found))

    def page(self) -> str:
        """Return a page in markdown with a table of all checks."""
        counts = ", ".join(
            f"{sum(step.state == state for step in self.found)} {state}" for state in (OK, FAILED, ENDED, NOT_RUN)
        )
        lines = [
            f"# {self.name}: {counts}",
            "",
            "| check | | seconds | figures, or why not |",
            "| --- | --- | --- | --- |",
        ]
        for step in self.found:
            text = figures_of(step).replace("|", "/")
            lines.append(f"| {step.name} | {step.state} | {step.seconds:.1f} | {text} |")
        return "\n".join(lines) + "\n"


def read_found(file: Path) -> list[Found]:
    """Read the results of a journal's file; [] without a file. Reading ends at a line that was cut off."""
    results = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            results.append(Found(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return results
