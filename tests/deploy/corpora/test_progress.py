"""What is said of the rest: from this run's own speed, and not before there is one."""

from __future__ import annotations

import sys

import pytest

from txl_deploy import terminal
from txl_deploy.corpora import progress
from txl_deploy.corpora.documents import Unit
from txl_deploy.corpora.progress import Advance, lasting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_rest_is_told_from_this_runs_own_speed(clock: list[float]) -> None:
    shown = Advance("score", 1000)
    shown.skip(600)
    assert shown.rest() is None
    clock[0] += 1
    shown.advance(10, 1, 100)
    assert shown.rest() is None, "a second says nothing yet"
    clock[0] += 9
    shown.advance(90, 9, 900)
    assert shown.rest() == pytest.approx(30), "100 in 10 seconds, 300 are left"
    clock[0] += 30
    shown.advance(400, 1, 1)
    assert shown.rest() == 0


def test_lines_come_less_and_less_often_where_there_is_no_terminal(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal.Messages, "stream", sys.stderr)
    with Advance("score corpus", 1000) as shown:
        for _ in range(200):
            clock[0] += 1
            shown.advance(1, 1, 50)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "score corpus: 1%, 10 documents, 50 tokens/s, 16 min left"
    assert 4 <= len(lines) <= 7
    assert lines[-1] == "score corpus: 200 documents, 50 tokens/s, 200.0 s"


@pytest.mark.parametrize(
    ("seconds", "said"), [(3, "3 s"), (89.4, "89 s"), (600, "10 min"), (3600 * 3 + 300, "3 h 05 min")]
)
def test_durations_are_said_as_people_do(seconds: float, said: str) -> None:
    assert lasting(seconds) == said


def unit(index: int, weight: int, tokens: int) -> Unit:
    return Unit(index, "", "", weight, bytes(4 * tokens), tokens)


def test_what_is_done_of_a_long_document_counts_before_it_is_finished(clock: list[float]) -> None:
    shown, batch = Advance("score", 1000), [unit(0, 300, 301), unit(1, 100, 101)]
    clock[0] += 10
    shown.partly(batch, 0.25)
    assert shown.rest() == pytest.approx(90), "100 of 1000 in 10 seconds"
    shown.partly(batch, 0.5)
    assert shown.rest() == pytest.approx(40)
    shown.partly(batch, 0)
    shown.advance(400, 2, 400)
    assert shown.rest() == pytest.approx(15), "and once it is, it counts once"


def test_the_rest_follows_the_speed_of_late(clock: list[float]) -> None:
    shown = Advance("score", 1000)
    for _ in range(10):
        clock[0] += 1
        shown.advance(50, 1, 50)
    for _ in range(100):
        clock[0] += 1
        shown.advance(1, 1, 1)
    assert shown.rest() == pytest.approx(400), "1 a second, not the mean of 600 in 110 seconds"


def test_documents_of_an_earlier_run_are_counted_and_named(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal.Messages, "stream", sys.stderr)
    with Advance("score corpus", 2000) as shown:
        for _ in range(144):
            shown.skip(1)
        clock[0] += 8
        shown.advance(1856, 1856, 4000)
    said = capsys.readouterr().err
    assert said == "score corpus: 2,000 documents, 144 of them earlier, 500 tokens/s, 8.0 s\n"
