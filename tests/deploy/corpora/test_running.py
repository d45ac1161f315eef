"""`txl-deploy score` of documents, as a user types it: totals, results, what stops it, and how it goes on."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from resealing import copied, reseal
from support import Called, cli, until

from txl_deploy.corpora import sources

KILLS = int(os.environ.get("TXL_KILLS", "1"))
"""The number of times that a run is killed at a random moment; the figures are of more."""
KV = frozen("0.8/clusters")
"""A Transformer-XL of 41 tokens that reads no text."""
LETTERS = frozen("clusters")
"""One that reads bytes, without a boundary token."""
TEXTS = {"a.txt": "The memory of a segment", "b.txt": "", "c.txt": "x", "d.txt": "is the input of the next one." * 5}


Run = Callable[..., Called]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "texts" / name).write_text(text)
    return tmp_path / "texts"


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    """Documents of token ids; the third is bad."""
    draws = np.random.default_rng(0)
    rows = [{"tokens": draws.integers(41, size=length).tolist(), "id": f"d{length}"} for length in (20, 9, 5, 30, 2)]
    rows[2]["tokens"] = [99]
    (tmp_path / "ids.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return tmp_path / "ids.jsonl"


def results(path: Path) -> list[dict[str, Any]]:
    """Documents in a file of results, in the corpus's order."""
    _, *rest = map(json.loads, path.read_text().splitlines())
    return sorted(rest, key=lambda row: int(row["index"]))


def test_a_folder_scores_as_its_texts_one_by_one(run: Run, texts: Path) -> None:
    total = run("score", LETTERS, texts, "-o", "out.jsonl", "--json").document
    rows = results(Path("out.jsonl"))
    assert [row["id"] for row in rows] == sorted(TEXTS)
    nats = 0.0
    for row in rows:
        length = len(TEXTS[row["id"]])
        assert (row["tokens"], row["scored"]) == (length, max(length - 1, 0))
        if length > 1:
            alone = run("score", LETTERS, texts / row["id"], "--json").document
            assert row["nll"] == pytest.approx(alone["nll"], abs=1e-4)
            assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
            assert row["bits_per_byte"] == pytest.approx(alone["bits_per_byte"], abs=1e-4)
            nats += alone["nll"] * (length - 1)
    assert (total["documents"], total["tokens"], total["scored_tokens"]) == (4, 169, 166)
    assert total["nll"] == pytest.approx(nats / 166, abs=1e-4)
    assert total["bits_per_byte"] == pytest.approx(total["nll"] / math.log(2))
    assert "perplexity" in run("score", LETTERS, texts).stdout


def test_with_a_boundary_token_every_token_is_scored(run: Run, texts: Path, tmp_path: Path) -> None:
    """As lm-eval's rolling log-likelihood, whose first context is its prefix token."""
    bundle = reseal(copied(LETTERS, tmp_path / "letters.txl"), boundary_token=59)
    run("score", bundle, texts, "-o", "out.jsonl")
    model = txl_runtime.load(bundle, threads=1)
    for row in results(Path("out.jsonl")):
        text = TEXTS[row["id"]]
        assert row["scored"] == row["tokens"] == len(text)
        if text:
            assert model.vocabulary is not None
            ids = np.concatenate([[59], model.vocabulary.encode(text)])
            nll = model.stream(1).score(ids[None]).mean(dtype=np.float64)
            assert row["nll"] == pytest.approx(float(nll), abs=1e-4)
            assert row["bits_per_byte"] == pytest.approx(row["nll"] / math.log(2))


def test_a_bad_document_stops_with_nothing_lost(run: Run, ids: Path) -> None:
    stopped = run("score", KV, ids, "-o", "out.jsonl", "--json")
    assert stopped.code == 2
    assert f"{ids}:3: holds id 99, expected 0 … 40" in stopped.document["error"]
    assert run("score", KV, ids, "--json").document["error"].endswith("; --skip-bad leaves it out")
    assert "what was written is kept, for --resume --skip-bad" in stopped.stderr
    assert Path("out.jsonl").read_bytes() == b""
    Path("old.jsonl").write_text("results of a week")
    assert run("score", KV, ids, "-o", "old.jsonl", "--force").code == 2
    assert Path("old.jsonl").read_text() == "results of a week", "it goes with the first new result"
    done = run("score", KV, ids, "-o", "out.jsonl", "--resume", "--skip-bad", "--json")
    assert done.code == 0
    rows = results(Path("out.jsonl"))
    assert [row["id"] for row in rows] == ["d20", "d9", "d5", "d30", "d2"]
    assert "holds id 99" in rows[2]["error"]
    assert (done.document["documents"], done.document["skipped"]) == (4, 1)
    assert f"note: {ids}:3: holds id 99" in done.stderr
    before = Path("out.jsonl").read_bytes()
    anew = run("score", KV, ids, "-o", "other.jsonl", "--skip-bad", "--json").document
    assert run("score", KV, ids, "-o", "out.jsonl", "--resume", "--json").document == pytest.approx(anew)
    assert Path("out.jsonl").read_bytes() == before


@pytest.mark.parametrize("changed", ["vocabulary", "weights"])
def test_a_bundle_of_the_same_model_with_something_else_in_it_is_not_gone_on_with(
    run: Run, tmp_path: Path, texts: Path, changed: str
) -> None:
    """The vocabulary is no part of the model, nor is which weights stay whole beside int8."""
    bundle = copied(frozen("ring"), tmp_path / "ring.txl")
    before = run("score", bundle, texts, "-o", "out.jsonl", "--json").document
    lines = Path("out.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:-1]))
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    file = bundle / manifest[changed]
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"a","b"', b'"b","a"') if changed == "vocabulary" else data[:-1] + b"\0")
    reseal(bundle)
    refused = run("score", bundle, texts, "-o", "out.jsonl", "--resume")
    assert refused.code == 2
    held = manifest["files"][file.name]["sha256"]
    assert f"out.jsonl: holds results of another run, {changed} is {held}" in refused.stderr
    assert Path("out.jsonl").read_bytes() == b"".join(lines[:-1])
    file.write_bytes(data)
    reseal(bundle)
    assert run("score", bundle, texts, "-o", "out.jsonl", "--resume", "--json").document == before


def test_a_file_that_breaks_off_ends_the_run_and_no_document_is_lost_or_doubled(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or a network folder that fails once."""
    (tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        lines = [f'{{"tokens": [1, 2, 3], "id": "{name}{number}"}}\n' for number in range(3)]
        (tmp_path / "corpus" / f"{name}.jsonl").write_text("".join(lines))
    real = sources._document

    def failing(decoder: Any, line: bytes, named: str | None, at: Any) -> Any:
        if b'"a1"' in line:
            raise OSError(5, "Input/output error")
        return real(decoder, line, named, at)

    arguments = ("score", KV, "corpus", "-o", "out.jsonl", "--skip-bad", "--json")
    with monkeypatch.context() as patched:
        patched.setattr(sources, "_document", failing)
        stopped = run(*arguments)
    assert stopped.code == 2
    assert (
        "a.jsonl: breaks off after 1 documents (Input/output error), expected to be read to its end" in stopped.stderr
    )
    assert run(*arguments, "--resume").document["skipped"] == 0
    rows = results(Path("out.jsonl"))
    assert [(row["index"], row["id"]) for row in rows] == list(enumerate(["a0", "a1", "a2", "b0", "b1", "b2"]))


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes only there")
def test_names_that_are_no_utf8_are_escaped_in_results(run: Run, tmp_path: Path) -> None:
    """Names of documents and of the bundle."""
    bundle, corpus = tmp_path / os.fsdecode(b"kv\xe9.txl"), tmp_path / "corpus"
    shutil.copytree(KV, bundle)
    corpus.mkdir()
    np.save(corpus / os.fsdecode(b"a\xe9.npy"), np.arange(9))
    (corpus / os.fsdecode(b"b\xe9.jsonl")).write_text('{"x": 1}\n{"tokens": [1, 2, 3]}')
    done = run("score", bundle, corpus, "-o", "out.jsonl", "--skip-bad", "--json")
    assert done.code == 0, done.stderr
    rows = results(Path("out.jsonl"))
    assert [row["id"] for row in rows] == ["a\\xe9.npy", "b\\xe9.jsonl:1", "b\\xe9.jsonl:2"]
    assert f"{corpus}/b\\xe9.jsonl:1: has fields ['x']" in rows[1]["error"]
    assert [row["scored"] for row in rows] == [8, 0, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ids.npy", "-o", "out.jsonl"), "-o is for documents"),
        (("ids.npy", "--resume"), "--resume is for documents"),
        (("ids.npy", "--skip-bad"), "--skip-bad is for documents"),
        (("ids.npy", "--field", "text"), "--field is for documents"),
        (("ids.npy", "--jobs", 2), "--jobs is for documents"),
        (("ids.jsonl", "--jobs", 0), "Invalid value for '--jobs'"),
        (("ids.jsonl", "--resume"), "--resume and --force are for a file of results, expected -o OUT"),
        (("ids.jsonl", "-o", "out.jsonl", "--resume", "--force"), "expected one of them"),
        (("ids.jsonl", "-o", "ids.jsonl", "--force"), "ids.jsonl: lies in"),
        ((".", "-o", "out.jsonl"), "out.jsonl: lies in ."),
        (("ids.jsonl", "-o", KV / "out.jsonl"), "expected a place beside it"),
        (("ids.jsonl", "--field", "body"), "has fields ['tokens', 'id'], expected 'body'"),
        (("ids.jsonl", "-o", "out.jsonl", "--field", "\udcff"), "expected the name of a field"),
        (("nothing.jsonl",), "nothing.jsonl: no such file"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, tuple) else None,
)
def test_what_does_not_go_together_is_refused(run: Run, ids: Path, arguments: tuple[object, ...], said: str) -> None:
    np.save("ids.npy", np.arange(40))
    before = {path: path.read_bytes() for path in ids.parent.iterdir()}
    result = run("score", KV, *arguments)
    assert result.code == 2
    assert said in result.stderr
    assert {path: path.read_bytes() for path in ids.parent.iterdir()} == before


def test_folders_that_are_not_looked_into_are_mentioned(run: Run, texts: Path) -> None:
    (texts / "deeper").mkdir()
    (texts / "deeper" / "e.txt").write_text("deep")
    result = run("score", LETTERS, texts, "--json")
    assert (result.document["documents"], "1 folders in" in result.stderr) == (4, True)
    assert run("score", LETTERS, texts, "--json", "--recursive").document["documents"] == 5


@pytest.mark.parametrize("bad", [(), ("--skip-bad",)])
def test_threads_score_a_corpus_as_one_does(run: Run, ids: Path, bad: tuple[str, ...]) -> None:
    alone, beside = (run("score", KV, ids, *bad, "--jobs", jobs, "--json") for jobs in (1, 2))
    assert beside.code == alone.code
    assert beside.document == pytest.approx(alone.document, abs=1e-5)


def many(path: Path, count: int, most: int) -> Path:
    draws = random.Random(0)
    with path.open("wb") as stream:
        for index in range(count):
            tokens = [draws.randrange(41) for _ in range(draws.randrange(most))]
            stream.write(msgspec.json.encode({"tokens": tokens, "id": f"d{index}"}) + b"\n")
    return path


def has_written(process: subprocess.Popen[str], out: Path, least: int) -> bool:
    """Return whether a run has written `least` bytes, or has ended."""
    return process.poll() is not None or (out.exists() and out.stat().st_size >= least)


def started(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "txl_deploy", "score", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
def test_a_run_that_is_killed_goes_on_with_every_document_once(tmp_path: Path) -> None:
    corpus, out, draws = many(tmp_path / "many.jsonl", 400, 400), tmp_path / "out.jsonl", random.Random(KILLS)
    arguments = (KV, corpus, "-o", out, "--resume", "--jobs", 2)
    for _ in range(KILLS):
        more = max(out.stat().st_size if out.exists() else 0, 500)
        process = started(*arguments, cwd=tmp_path)
        until(partial(has_written, process, out, more + 1))
        time.sleep(draws.random() * 0.05)
        process.kill()
        process.communicate()
    done = cli("score", *arguments, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["id"] for row in results(out)] == [f"d{index}" for index in range(400)]
    assert json.loads(done.stdout)["documents"] == 400


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_ends_cleanly_and_keeps_what_is_done(tmp_path: Path, jobs: int) -> None:
    corpus, out = many(tmp_path / "many.jsonl", 2000, 2000), tmp_path / "out.jsonl"
    process = started(KV, corpus, "-o", out, "--jobs", jobs, cwd=tmp_path)
    until(partial(has_written, process, out, 1000))
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in said
    assert 1 <= len(results(out)) < 2000
