"""Runs what a user types, in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import Called, call_main


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    """A command, without the seconds that importing torch takes: `run("inspect", path).document`."""

    def call(*arguments: object) -> Called:
        monkeypatch.setenv("COLUMNS", "200")
        return call_main(arguments, monkeypatch, capfd)

    return call
