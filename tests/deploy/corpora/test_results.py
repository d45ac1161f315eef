"""The file of results: whole lines, from which a run goes on whatever ended it, and nobody else's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from txl_runtime.errors import UsageError

from txl_deploy import terminal
from txl_deploy.corpora.results import Results
from txl_deploy.corpora.totals import Scores, Totals, measures

HEADER = {
    "model_id": "ab" * 32,
    "precision": "fp32",
    "segment_length": 4,
    "corpus": "cd" * 32,
    "boundary_token": None,
    "field": None,
    "weights": "12" * 32,
    "vocabulary": "34" * 32,
    "format": "txl-deploy.scores/1",
}


def scores(index: int) -> Scores:
    return Scores(
        index=index, id=f"d{index}", tokens=index + 1, scored=index, nll=0.5 if index else None, scored_bytes=index
    )


def written(path: Path, count: int = 4) -> bytes:
    with Results(path, HEADER) as results:
        for index in range(count):
            results.add([scores(index)])
    return path.read_bytes()


def test_every_line_is_one_document(tmp_path: Path) -> None:
    first, *rest = written(tmp_path / "out.jsonl").splitlines()
    assert json.loads(first) == HEADER
    assert [msgspec.json.decode(line, type=Scores) for line in rest] == [scores(index) for index in range(4)]


def test_a_file_torn_at_any_byte_goes_on_with_every_document_once(tmp_path: Path) -> None:
    whole, path = written(tmp_path / "whole.jsonl", 2), tmp_path / "torn.jsonl"
    begins = [0, *(place + 1 for place in range(len(whole)) if whole[place : place + 1] == b"\n")]
    for torn in range(len(whole) + 1):
        path.write_bytes(whole[:torn])
        with Results(path, HEADER, resume=True) as results:
            there = sum(begin <= torn for begin in begins) - 2  # without the header and the end of all
            assert len(results.finished) == max(there, 0)
            for index in range(2):
                if index not in results.finished:
                    results.add([scores(index)])
        assert path.read_bytes() == whole, f"torn at {torn}"


@pytest.mark.parametrize(
    ("name", "value"), [("vocabulary", None), *((name, "another") for name in HEADER if name != "format")]
)
def test_results_of_another_run_are_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    before = written(tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match=f"out.jsonl: holds results of another run, {name} is .*, expected {value}"):
        Results(tmp_path / "out.jsonl", HEADER | {name: value}, resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_file_of_an_older_version_goes_on_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal.Messages, "stream", sys.stderr)
    first, *rest = written(tmp_path / "out.jsonl").splitlines(keepends=True)
    older = {name: value for name, value in json.loads(first).items() if name not in ("weights", "vocabulary")}
    before = msgspec.json.encode(older) + b"\n" + b"".join(rest)
    (tmp_path / "out.jsonl").write_bytes(before)
    with Results(tmp_path / "out.jsonl", HEADER, resume=True) as results:
        assert len(results.finished) == 4
    assert (tmp_path / "out.jsonl").read_bytes() == before
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "out.jsonl: was begun by version 0.8.0, so nothing tells whether weights and vocabulary are still the" in said
    )
    with pytest.raises(UsageError, match=r"corpus is cdcd.*, expected efef"):
        Results(tmp_path / "out.jsonl", HEADER | {"corpus": "ef" * 32}, resume=True)


@pytest.mark.parametrize("content", [b"my thesis", b'{"format": "other"}\n'], ids=lambda content: str(content[:20]))
def test_a_file_that_holds_no_results_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "thesis").write_bytes(content)
    with pytest.raises(UsageError, match="holds no results of `txl-deploy score`"):
        Results(tmp_path / "thesis", HEADER, resume=True)
    assert (tmp_path / "thesis").read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"nonsense",
        b'{"index": -1, "id": "a"}',
        b'{"index": 9, "id": "a", "scored": -1}',
        b'{"index": 9, "id": "a", "nll": 1e309}',
        b'{"index": 2, "id": "d2"}',
    ],
)
def test_a_damaged_line_is_named_and_the_file_kept(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "out.jsonl"
    before = written(path) + line + b"\n"
    path.write_bytes(before)
    with pytest.raises(UsageError, match=r"out\.jsonl:6: "):
        Results(path, HEADER, resume=True)
    assert path.read_bytes() == before


def test_a_file_is_replaced_when_that_is_asked_for_and_else_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    before = written(path)
    with pytest.raises(UsageError, match="is there already, expected a new file; --resume goes on, --force"):
        Results(path, HEADER)
    assert path.read_bytes() == before
    with Results(path, HEADER, force=True) as results:
        assert len(results.finished) == 0
        results.add([scores(2)])
        assert path.read_bytes().splitlines()[1:] == [before.splitlines()[3]]


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    with (
        Results(tmp_path / "out.jsonl", HEADER),
        pytest.raises(UsageError, match=r"out\.jsonl: another run writes to it"),
    ):
        Results(tmp_path / "out.jsonl", HEADER, resume=True)


@pytest.mark.parametrize("place", ["/dev/null", ".", "missing/out.jsonl", "a\0b"])
def test_a_place_that_takes_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    for options in ({}, {"resume": True}, {"force": True}):
        with pytest.raises(UsageError, match="expected a"):
            Results(Path(place), HEADER, **options)


def test_totals_are_means_over_tokens() -> None:
    totals = Totals()
    parts = [(3, 4.5), (10, 12.0), (0, 0.0)]
    for index, (scored, total) in enumerate(parts):
        found = measures(total, scored, scored)
        totals.add(Scores(index=index, id="", tokens=scored + 1, scored=scored, nll=found["nll"], scored_bytes=scored))
    totals.add(Scores(index=3, id="", error="broken"))
    document = totals.document()
    assert document["nll"] == pytest.approx(16.5 / 13)
    assert document["perplexity"] == pytest.approx(np.exp(16.5 / 13))
    assert document["bits_per_byte"] == document["bits_per_token"] == pytest.approx(16.5 / 13 / np.log(2))
    assert (document["tokens"], document["scored_tokens"], document["documents"], document["skipped"]) == (16, 13, 3, 1)


@pytest.mark.parametrize("more", [{"scored_bytes": None}, {"scored_bytes": 5, "unknown_words": 1}])
def test_there_is_nothing_to_say_of_bytes_that_the_ids_do_not_hold(more: dict[str, int | None]) -> None:
    totals = Totals()
    totals.add(Scores(index=0, id="", tokens=6, scored=5, nll=1.0, scored_bytes=5))
    totals.add(Scores(index=1, id="", tokens=6, scored=5, nll=1.0, **more))  # type: ignore[arg-type]
    assert totals.document()["bits_per_byte"] is None
    assert Totals().document()["nll"] is None
