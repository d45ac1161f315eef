"""The conformance list, run through drivers: in this process, or as commands."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from txl_runtime.listener import Silent

from conformance import run as runner
from conformance.driver import Driver
from conformance.run import FOLDER, Conformance, Tally
from conformance.talking import DriverFailed

TESTS = Path(__file__).parents[1]
WRONG = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(TESTS)!r}); from stand_ins.wrong_drivers import main; main()",
)
"""The command of a driver of `stand_ins.wrong_drivers`, whose fault or manner follows."""


class Inside:
    """Python's driver without a process: what it is asked and answers goes through JSON all the same."""

    def __init__(self, *_: object) -> None:
        self._driver = Driver()

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def ask(self, request: dict[str, Any]) -> Any:
        """The reply; an error that nobody foresaw would end a process."""
        try:
            return json.loads(json.dumps(self._driver.answer(request)))
        except Exception as error:
            raise DriverFailed(f"died when asked to {request['do']}: {error!r}") from error


@contextlib.contextmanager
def inside(promise: str = "") -> Iterator[None]:
    """Drivers run in this process; where a promise is named, vectors that are not for it are left out."""
    every = runner._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Talk", Inside)
        if promise:
            patch.setattr(
                runner,
                "_read",
                lambda path, kind: [each for each in every(path, kind) if promise in getattr(each, "shows", [promise])],
            )
        yield


def run(*only: str, driver: tuple[str, ...] | None = None, silence: float = 60.0, folder: Path = FOLDER) -> list[Tally]:
    """Run the vectors of some bundles of the list, or of all."""
    return list(Conformance(folder, driver, silence, only).run(Silent()))
