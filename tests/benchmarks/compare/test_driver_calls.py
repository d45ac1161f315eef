"""The proof that two checkouts call CUDA's driver alike: it is the same in every run, and it sees what is not alike."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import driver_calls
import pytest
from txl_runtime.device.cuda import Queue

pytestmark = pytest.mark.device

CASES = [("together", "replace"), ("counting", "replace")]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def expected(bundles) -> driver_calls.Record:
    gc.freeze()  # each way ends with a collection, which other tests' objects would make long
    return driver_calls.record(bundles, CASES)


def compared(bundles: Path, expected: driver_calls.Record, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    found = driver_calls.record(bundles, CASES)
    capsys.readouterr()
    return driver_calls.compare(expected, found), capsys.readouterr().out


def test_the_same_code_makes_the_same_calls(bundles, expected, capsys):
    status, said = compared(bundles, expected, capsys)
    assert status == 0, said
    operations = sum(map(len, expected.values()))
    assert said.endswith("; 0 operations differ\n")
    for case, found in expected.items():
        assert found[-1] == ("what a GPU would do wrong", [])
        assert "the end, before everything was done" not in dict(found)
        raised = [title for title, lines in found for line in lines if line.startswith("raises")]
        assert bool(raised) == case.endswith("failures"), (case, raised)
    assert int(said.split()[0]) == operations > 700


def swapped(work: Callable[..., None]) -> Callable[..., None]:
    """Every second copy comes before the one that was asked for first."""
    waiting: list[tuple[Any, ...]] = []

    def copy(*given: Any) -> None:
        if not waiting:
            waiting.append(given)
            return
        work(*given)
        work(*waiting.pop())

    return copy


FAULTS: dict[str, Callable[[Callable[..., None]], Callable[..., None]]] = {
    "two copies change places": swapped,
    "a copy is made twice": lambda work: lambda *given: (work(*given), work(*given))[0],
    "a copy goes one value further": lambda work: lambda queue, to, *more: work(queue, to + 4, *more),
    "a copy takes a byte less": lambda work: (
        lambda queue, to, source, width, *more: work(queue, to, source, width - 1, *more)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(bundles, expected, fault, capsys, monkeypatch):
    monkeypatch.setattr(Queue, "copy", FAULTS[fault](Queue.copy))
    status, said = compared(bundles, expected, capsys)
    assert status == 1
    assert "+cuMemcpy" in said
