"""`txl-deploy datastore build`, as a user types it: its rows, how it goes on, and what score, generate and serve do."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from support import until

from txl_deploy.retrieval import Mixture, building, folder, searching, store
from txl_deploy.retrieval.building import build

KILLS = int(os.environ.get("TXL_KILLS", "1"))
"""The number of times that a build is killed at a random moment; the figures are of more."""
LETTERS = frozen("clusters")
"""A Transformer-XL that reads bytes."""
TEXTS = {"a.txt": "The memory of a segment. " * 9, "b.txt": "x", "c.txt": "is the input of the next one. " * 40}


@pytest.fixture(scope="module")
def model() -> txl_runtime.Model:
    return txl_runtime.load(LETTERS, "cpu", threads=1)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "texts" / name).write_text(text)
    return tmp_path / "texts"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits after few positions."""
    monkeypatch.setattr(building, "COMMIT_ROWS", 100)
    monkeypatch.setattr(building, "SEGMENTS_PER_CALL", 8)


def files(place: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in place.iterdir()}


def reached(process: subprocess.Popen[bytes], file: Path, size: int) -> bool:
    """Return True once a process has ended, or a file has this size."""
    return process.poll() is not None or (file.exists() and file.stat().st_size >= size)


def no_entropies() -> Any:
    raise AssertionError("one W needs no entropies")


def opened(model: Any, place: Path, weight: float = 0.5) -> store.Store:
    found = store.open_store(model, Mixture(place, 4, 1.0, weight))
    assert found is not None
    return found


# --- rows ---------------------------------------------------------------------------------------------------------


def test_rows_are_features_and_the_tokens_after_them(model, texts, tmp_path):
    result = build(model, [texts], tmp_path / "store")
    assert result == {
        "rows": 224 + 1199,
        "added": 224 + 1199,
        "texts": 2,
        "already_there": 0,
        "width": 8,
        "feature": "softmax",
        "search": "exact",
        "bytes": result["bytes"],
    }
    header = folder.read_header(tmp_path / "store", model.manifest.model_id)
    features, tokens = folder.mapped(tmp_path / "store", header)
    first = np.frombuffer(TEXTS["a.txt"].encode(), np.uint8).astype(np.int32)
    np.testing.assert_array_equal(tokens[:224], first[1:])
    np.testing.assert_array_equal(features[:224], model.stream(1).features(first[None, :-1])[0].astype(np.float16))
    parts = folder.read_parts(tmp_path / "store", header)
    assert [(part.name, part.first, part.rows) for part in parts] == [("a.txt", 0, 224), ("c.txt", 224, 1199)]


def test_a_bundle_with_features_has_a_store_of_them_and_searches_either(run, make_bundle, tmp_path):
    """The rows are what enters the last feed-forward layer, which a bundle without it cannot search."""
    sizes = {"segment_length": [8, 1], "memory_length": 6, "verify": False}
    plain, more = make_bundle(**sizes), make_bundle(**sizes, features=True)
    ids, stores = np.random.default_rng(0).integers(60, size=300).astype(np.int32), (tmp_path / "a", tmp_path / "b")
    np.save(tmp_path / "ids.npy", ids)
    models = [txl_runtime.load(bundle, "cpu", threads=1) for bundle in (plain, more)]
    kinds = [build(each, [tmp_path / "ids.npy"], place)["feature"] for each, place in zip(models, stores, strict=True)]
    assert kinds == ["softmax", "feed-forward"]
    rows = models[1].stream(1).features(ids[None, :-1])[0].astype(np.float16)
    for place, columns in zip(stores, (slice(0, 16), slice(16, 32)), strict=True):
        header = folder.read_header(place, models[1].manifest.model_id)
        np.testing.assert_array_equal(folder.mapped(place, header)[0], rows[:, columns])
    other, scores = np.random.default_rng(1).integers(60, size=(1, 90)), list[np.ndarray]()
    for bundle, place in ((models[0], stores[0]), (models[1], stores[0]), (models[1], stores[1])):
        scores.append(bundle.stream(1).score(other, datastore=opened(bundle, place)))
    np.testing.assert_array_equal(scores[0], scores[1])
    assert not np.array_equal(scores[1], scores[2])
    for arguments in (
        ("score", plain, tmp_path / "ids.npy", "--datastore", stores[1]),
        ("datastore", "build", plain, tmp_path / "ids.npy", "-o", stores[1], "--append"),
    ):
        assert "programs do not return, expected one of `export --features`" in run(*arguments).error


def test_texts_are_added_once(model, texts, tmp_path):
    place, more = tmp_path / "store", tmp_path / "more.jsonl"
    more.write_text(json.dumps({"text": TEXTS["a.txt"]}) + "\n" + json.dumps({"tokens": [5, 6, 7]}) + "\n")
    build(model, [texts], place)
    before = files(place)
    result = build(model, [texts, more], place, append=True)
    assert (result["added"], result["texts"], result["already_there"]) == (2, 3, 2)
    after = files(place)
    assert after["features.f16"].startswith(before["features.f16"])
    assert folder.mapped(place, folder.read_header(place, model.manifest.model_id))[1][-2:].tolist() == [6, 7]
    assert build(model, [texts, more], place, append=True)["added"] == 0
    assert files(place) == after


# --- what ends a build ----------------------------------------------------------------------------------------------


def test_a_build_that_was_ended_goes_on_with_the_same_bytes(model, texts, tmp_path, small, monkeypatch):
    """Twenty times, at any of the moments at which it writes."""
    build(model, [texts], tmp_path / "whole")
    expected, draws = files(tmp_path / "whole"), random.Random(0)
    for number in range(20):
        place, ended = tmp_path / f"{number}", 0
        while True:
            left = draws.randrange(1, 60)

            def ending(real: Any) -> Any:
                def call(*arguments: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if not left:
                        raise KeyboardInterrupt
                    return real(*arguments)

                return call

            with monkeypatch.context() as patched:
                for name in ("write_header", "write_named", "file_hash"):
                    patched.setattr(building, name, ending(getattr(building, name)))
                patched.setattr(building.os, "fsync", ending(os.fsync))
                try:
                    build(model, [texts], place)
                    break
                except KeyboardInterrupt:
                    ended += 1
                    with pytest.raises(txl_runtime.UsageError, match=r"its build was ended after|expected a datastore"):
                        opened(model, place)
        assert files(place) == expected, (number, ended)


def test_a_build_that_is_killed_goes_on_with_the_same_bytes(texts, tmp_path):
    """A process, at random moments; TXL_KILLS says how often."""
    (texts / "d.txt").write_text("".join(random.Random(1).choices("abcdefgh \n", k=40_000)))
    command = [
        sys.executable,
        "-m",
        "txl_deploy",
        "datastore",
        "build",
        str(LETTERS),
        str(texts),
        "--threads",
        "1",
        "-o",
    ]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    expected, draws = files(tmp_path / "whole"), random.Random(0)
    for number in range(KILLS):
        place = tmp_path / f"{number}"
        process = subprocess.Popen([*command, str(place)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until(partial(reached, process, place / "features.f16", draws.randrange(0, 900_000)))
        process.send_signal(signal.SIGKILL)
        process.wait()
        again = subprocess.run([*command, str(place)], capture_output=True, text=True)
        assert again.returncode == 0 or "is there already" in again.stderr
        assert files(place) == expected


def test_rows_of_a_text_that_is_not_given_again_are_dropped(model, texts, tmp_path, small, monkeypatch):
    place = tmp_path / "store"
    with monkeypatch.context() as patched:
        patched.setattr(building.Writer, "end", lambda self, name, sha256: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(model, [texts / "c.txt"], place)
    assert folder.read_header(place, model.manifest.model_id).begun is not None
    build(model, [texts / "a.txt"], place)
    build(model, [texts / "a.txt"], tmp_path / "alone")
    assert files(place) == files(tmp_path / "alone")


def room(monkeypatch: Any, free: int) -> None:
    monkeypatch.setattr(building.shutil, "disk_usage", lambda place: type("", (), {"free": free})())


def test_a_build_needs_room_for_what_is_not_there_yet(model, texts, tmp_path, small, monkeypatch):
    build(model, [texts / "c.txt"], tmp_path / "whole")
    place = tmp_path / "store"
    with monkeypatch.context() as patched:
        patched.setattr(building.Writer, "end", lambda self, name, sha256: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(model, [texts / "c.txt"], place)
    there = folder.read_header(place, model.manifest.model_id).rows
    assert 0 < there < 1199
    needed = (1199 - there) * 20
    room(monkeypatch, needed - 1)
    with pytest.raises(txl_runtime.UsageError, match="has room for"):
        build(model, [texts / "c.txt"], place)
    room(monkeypatch, needed)
    monkeypatch.setattr(building, "EXACT_ROWS", 1199)
    monkeypatch.setattr(searching, "EXACT_ROWS", 1199)
    monkeypatch.setattr("txl_deploy.extras.find_spec", lambda name: None)  # faiss is needed beyond 1199 rows
    assert build(model, [texts / "c.txt"], place)["rows"] == 1199
    assert files(place) == files(tmp_path / "whole")


def test_a_full_disk_is_one_line_and_the_build_goes_on(run, model, texts, tmp_path, small, monkeypatch):
    build(model, [texts], tmp_path / "whole")
    place, left = tmp_path / "store", 20

    def full(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(building.os, "fsync", full)
        called = run("datastore", "build", LETTERS, texts, "-o", place)
        assert re.search("disk is full; make room|No space left on device\\), expected room", called.error)
    run("datastore", "build", LETTERS, texts, "-o", place, "--threads", 1)
    assert files(place) == files(tmp_path / "whole")


def test_a_build_that_is_interrupted_says_what_is_kept(run, texts, tmp_path, small, monkeypatch):
    def interrupted(self: Any, name: str, sha256: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(building.Writer, "end", interrupted)
        called = run("datastore", "build", LETTERS, texts / "c.txt", "-o", tmp_path / "store")
    assert called.code == 130
    kept = folder.read_header(tmp_path / "store", txl_runtime.load(LETTERS, "cpu").manifest.model_id).rows
    assert kept >= 100
    assert f"keeps {kept:,} positions; the same command goes on behind them" in " ".join(called.stderr.split())


def test_two_builds_of_one_store_are_refused(model, texts, tmp_path):
    with building.Writer(tmp_path / "store", model.manifest.model_id, 8) as writer:
        writer.find(False)
        writer.begin()
        with pytest.raises(txl_runtime.UsageError, match="another build writes to it, expected one at a time"):
            build(model, [texts], tmp_path / "store")


def test_two_builds_that_begin_a_store_are_refused(model, texts, tmp_path):
    with building.Writer(tmp_path / "store", model.manifest.model_id, 8) as writer:
        writer.find(False)
        build(model, [texts], tmp_path / "store")
        before = files(tmp_path / "store")
        with pytest.raises(txl_runtime.UsageError, match="another build wrote to it, expected one at a time"):
            writer.begin()
    assert files(tmp_path / "store") == before


def test_a_store_is_locked_before_it_is_read(model, texts, tmp_path, monkeypatch):
    """A build that reads the header waits for no other: what the other adds is not lost."""
    place, real = tmp_path / "store", building.read_header
    build(model, [texts / "a.txt"], place)

    def slow(*arguments: Any) -> Any:
        monkeypatch.setattr(building, "read_header", real)
        found = real(*arguments)
        with pytest.raises(txl_runtime.UsageError, match="another build writes to it"):
            build(model, [texts / "c.txt"], place, append=True)
        return found

    monkeypatch.setattr(building, "read_header", slow)
    assert build(model, [texts / "c.txt"], place, append=True)["texts"] == 2


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="the system opens links alone")
@pytest.mark.parametrize("name", building.COLUMNS)
def test_no_file_is_written_through_a_link(model, texts, tmp_path, name):
    place, victim = tmp_path / "store", tmp_path / "victim"
    for fresh in (True, False):
        if not fresh:
            build(model, [texts / "a.txt"], place)
            (place / name).rename(victim)
        else:
            place.mkdir()
            victim.touch()
        (place / name).symlink_to(victim)
        before = victim.read_bytes()
        with pytest.raises(txl_runtime.UsageError, match=f"{name}: .*, expected a file to write to"):
            build(model, [texts], place, append=True)
        assert victim.read_bytes() == before
        (place / name).unlink()
        victim.unlink()


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_no_store_can_be_made_of_is_refused(run, model, texts, tmp_path, monkeypatch):
    place = tmp_path / "store"
    build(model, [texts], place)
    for arguments, expected in (
        ((texts, "-o", place), "is there already; --append adds to it, or give a different -o"),
        ((texts, "-o", texts), f"lies in {texts}, expected a place beside it"),
        ((texts, "-o", tmp_path), "expected a place beside it|expected an empty folder"),
        ((texts / "b.txt", "-o", tmp_path / "other"), "the texts hold no two tokens, expected at least one position"),
        ((texts, "-o", tmp_path / "none" / "store"), "No such file or directory, expected a place for a datastore"),
        ((tmp_path / "none", "-o", tmp_path / "other"), "no such file, expected documents"),
    ):
        assert re.search(expected, run("datastore", "build", LETTERS, *arguments).error)
    room(monkeypatch, 10)
    assert (
        "has room for 10 bytes, expected 28.5 kB"
        in run("datastore", "build", LETTERS, texts, "-o", tmp_path / "full").error
    )
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "full").exists()


def test_a_model_without_features_has_no_store(run, texts, tmp_path):
    called = run("datastore", "build", frozen("hidden"), texts, "-o", tmp_path / "store")
    assert "this model's programs return log-probabilities alone" in called.error


@pytest.mark.parametrize("name", ["features.f16", "tokens.i32", "parts.jsonl", "datastore.json"])
def test_a_damaged_store_is_named(run, model, texts, tmp_path, name):
    place = tmp_path / "store"
    build(model, [texts], place)
    data = (place / name).read_bytes()
    for damaged in (data[:-9], b"\x07" + data[1:], None):
        (place / name).unlink()
        if damaged is not None:
            (place / name).write_bytes(damaged)
        assert name in run("score", LETTERS, texts, "--datastore", place).error


def test_a_forged_header_is_named(model, texts, tmp_path):
    place = tmp_path / "store"
    build(model, [texts / "c.txt"], place)
    header = folder.read_header(place, model.manifest.model_id)
    empty = dict.fromkeys(header.files, folder.Held(0, hashlib.sha256(b"").hexdigest()))
    (place / "parts.jsonl").write_bytes(b"")
    textless = {**header.files, "parts.jsonl": empty["parts.jsonl"]}
    for forged, expected in (
        ({"clustered": 5}, "for clusters of 5 rows"),
        ({"files": textless}, r"its texts have 0 rows, and the store \d+"),
        ({"rows": 0, "files": empty}, "no row"),
    ):
        folder.write_header(place, msgspec.structs.replace(header, **forged))
        with pytest.raises(txl_runtime.UsageError, match=expected):
            opened(model, place)


def test_a_token_out_of_range_is_named(model, texts, tmp_path):
    place = tmp_path / "store"
    build(model, [texts / "c.txt"], place)
    header, data = folder.read_header(place, model.manifest.model_id), np.fromfile(place / "tokens.i32", "<i4")
    data[3] = -1
    data.tofile(place / "tokens.i32")
    files = {**header.files, "tokens.i32": folder.Held(data.nbytes, hashlib.sha256(data.tobytes()).hexdigest())}
    folder.write_header(place, msgspec.structs.replace(header, files=files))
    with pytest.raises(txl_runtime.UsageError, match=r"tokens -1 … \d+, expected 8 and 0 … 255"):
        opened(model, place)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_store_that_was_sealed_with_a_number_that_is_none_is_named(run, model, texts, tmp_path, value):
    place = tmp_path / "store"
    build(model, [texts / "c.txt"], place)
    header, data = folder.read_header(place, model.manifest.model_id), np.fromfile(place / "features.f16", "<f2")
    data[8 * 700 + 3] = value
    data.tofile(place / "features.f16")
    sealed = folder.Held(data.nbytes, hashlib.sha256(data.tobytes()).hexdigest())
    folder.write_header(place, msgspec.structs.replace(header, files={**header.files, "features.f16": sealed}))
    called = run("score", LETTERS, texts / "a.txt", "--datastore", place)
    assert f"{place}: row 700 holds NaN or infinity, expected numbers; build a new one" in called.error


def test_a_temperature_near_zero_leaves_the_nearest(model, texts, tmp_path):
    build(model, [texts / "c.txt"], tmp_path / "store")
    found = store.open_store(model, Mixture(tmp_path / "store", 300, 1e-320, 0.5))
    assert found is not None
    with np.errstate(over="raise"):
        shares = found.shares(np.ones((2, 8), np.float32), no_entropies)[1]
    np.testing.assert_allclose(shares.sum(axis=1), 0.5)


@pytest.mark.parametrize("verb", ["score", "generate", "serve"])
def test_numbers_without_a_store_are_refused(run, texts, verb):
    more = {"score": (texts / "a.txt",), "generate": ("--prompt", "x"), "serve": ("--port", 0)}[verb]
    assert "are for --datastore; give one" in run(verb, LETTERS, *more, "--knn", 3).error


def test_features_of_a_different_width_are_refused(model, texts, tmp_path):
    build(model, [texts], tmp_path / "store")
    with pytest.raises(txl_runtime.UsageError, match="features have 16 numbers, expected 8; use the store's model"):
        opened(model, tmp_path / "store").shares(np.zeros((1, 16), np.float32), no_entropies)


def test_a_store_of_a_different_model_is_named(run, model, texts, tmp_path):
    build(model, [texts], tmp_path / "store")
    called = run("generate", frozen("ring"), "--prompt-tokens", "1,2", "--datastore", tmp_path / "store")
    assert f"is of model {model.manifest.model_id[:12]}, expected the bundle's" in called.error


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("--knn", 0, "1 … 1024"), ("--knn-temperature", 0, "a number above 0"), ("--knn-weight", 1, "less than 1")],
)
def test_numbers_out_of_range_are_refused(run, model, texts, tmp_path, option, value, expected):
    build(model, [texts], tmp_path / "store")
    arguments = ("--prompt", "x", "--datastore", tmp_path / "store", option, value)
    assert re.search(f"{option} is {value}.*, expected .*{expected}", run("generate", LETTERS, *arguments).error)


# --- score, generate, serve -----------------------------------------------------------------------------------------


def test_a_text_is_scored_without_its_own_rows(run, model, texts, tmp_path):
    place = tmp_path / "store"
    build(model, [texts], place)
    build(model, [texts / "c.txt"], tmp_path / "other")
    options = ("--knn", 4, "--knn-temperature", 1, "--knn-weight", 0.5, "--json")
    called = run("score", LETTERS, texts / "a.txt", "--datastore", place, *options)
    assert "the store has read this text; its 224 rows are hidden" in called.stderr
    found = called.document
    other = run("score", LETTERS, texts / "a.txt", "--datastore", tmp_path / "other", *options).document
    assert found["nll"] == pytest.approx(other["nll"], abs=1e-9)
    ids = np.frombuffer(TEXTS["a.txt"].encode(), np.uint8).astype(np.int32)
    own = model.stream(1).score(ids[None], datastore=opened(model, place)).mean()
    assert own < found["nll"] - 0.3, "its own rows would tell what comes next"
    called = run("score", LETTERS, texts, "--datastore", place, *options, "-o", tmp_path / "out.jsonl")
    assert "the store has read 2 of these documents; each is scored without its own rows" in called.stderr
    documents = called.document
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["nll"] for line in lines[1:] if line["id"] == "a.txt"] == [pytest.approx(found["nll"], abs=1e-6)]
    assert documents["documents"] == 3
    changed = (*options[:5], 0.25, "--json", "-o", tmp_path / "out.jsonl", "--resume")
    assert "results of another run, datastore is" in run("score", LETTERS, texts, "--datastore", place, *changed).stderr
    without = run("score", LETTERS, texts, "-o", tmp_path / "out.jsonl", "--resume").error
    assert "results of another run, datastore is" in without


def test_a_weight_of_zero_is_no_store(run, model, texts, tmp_path):
    place = tmp_path / "store"
    build(model, [texts], place)
    assert store.open_store(model, Mixture(place, 4, 1.0, 0.0)) is None
    for verb, arguments in (
        ("score", (texts / "a.txt",)),
        ("generate", ("--prompt", "The m", "--seed", 1, "--max-new-tokens", 40)),
    ):
        plain, zero = (
            {**run(verb, LETTERS, *arguments, *more, "--json").document, "seconds": 0}
            for more in ((), ("--datastore", place, "--knn-weight", 0))
        )
        assert plain == zero


def test_a_store_changes_what_is_generated(run, model, texts, tmp_path):
    build(model, [texts / "c.txt"], tmp_path / "store")
    arguments = ("--prompt", "is the input of", "--temperature", 0, "--max-new-tokens", 20, "--json")
    options = ("--datastore", tmp_path / "store", "--knn-weight", 0.99, "--knn-temperature", 0.01)
    assert set(run("generate", LETTERS, *arguments, *options).document["text"]) <= set(TEXTS["c.txt"])
    assert not set(run("generate", LETTERS, *arguments).document["text"]) <= set(TEXTS["c.txt"])


@pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss is not installed: pip install -e '.[knn]'")
def test_a_large_store_is_searched_in_clusters(model, texts, tmp_path, monkeypatch):
    for module in (building, searching):
        monkeypatch.setattr(module, "EXACT_ROWS", 1000)
    place = tmp_path / "store"
    assert build(model, [texts / "c.txt"], place)["search"] == "clusters"
    header = folder.read_header(place, model.manifest.model_id)
    assert header.clustered == 1199
    ids = np.frombuffer(TEXTS["c.txt"].encode(), np.uint8).astype(np.int32)
    assert model.stream(1).score(ids[None], datastore=opened(model, place, 0.9)).mean() < 0.2
    build(model, [texts], place, append=True)
    assert folder.read_header(place, model.manifest.model_id).clustered == 1199
    store_of_both = opened(model, place, 0.9)
    own = np.frombuffer(TEXTS["a.txt"].encode(), np.uint8).astype(np.int32)
    assert model.stream(1).score(own[None], datastore=store_of_both).mean() < 0.5
