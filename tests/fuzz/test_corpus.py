"""Every input that is kept, and some changes of them: no failure of any target comes back."""

from __future__ import annotations

import importlib
import random
import signal

import pytest

from fuzz.guard import Guard
from fuzz.mutations import changed
from fuzz.run import CORPUS
from fuzz.targets import TARGETS

CHANGES = 60
"""Changed inputs that are tried beside the kept ones, the same ones in every run."""


@pytest.fixture
def guard():
    """A guard around a target; what it does to signals is undone."""
    before = signal.getsignal(signal.SIGPROF)
    yield lambda name: Guard(importlib.import_module(f"fuzz.targets.{name}").one_input)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_and_changes_of_them(name, guard):
    run, target = guard(name), importlib.import_module(f"fuzz.targets.{name}")
    kept = [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]
    assert kept
    corpus, draws = [*target.seeds(), *kept], random.Random(0)
    for data in corpus:
        run(data)
    for _ in range(CHANGES):
        run(changed(draws, corpus, 1 << 12))
    assert run.failures == {}
    assert run.refused < run.cases, "nothing is ever accepted"


def test_the_corpus_is_small():
    sizes = [file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()]
    assert sum(sizes) <= 2 << 20
    assert max(sizes) <= 1 << 16


def test_every_kind_of_failure_is_told(guard, tmp_path, monkeypatch):
    """The guard lets documented errors through, and keeps the input of everything else."""
    from txl_runtime.errors import BundleError

    from fuzz import guard as module

    def one_input(data: bytes) -> None:
        match data:
            case b"refused":
                raise BundleError("small.txl: is damaged, expected a bundle; export the model again")
            case b"error":
                raise KeyError("name")
            case b"slow":
                while True:
                    pass
            case b"large":
                b"x" * (module.GROWTH + (8 << 20))
            case b"memory":
                raise BundleError("needs more memory than there is")

    guard("vocabulary")  # restores the signal afterwards
    run = Guard(one_input, tmp_path)
    assert run(b"") is None
    assert run(b"refused") is None
    for data in (b"error", b"large", b"memory"):
        assert run(data) is not None, data
    monkeypatch.setattr(module, "SECONDS", 0.1)
    assert run(b"slow") is not None
    assert run.cases == 6
    assert sorted(file.read_bytes() for file in tmp_path.iterdir()) == [b"error", b"large", b"memory", b"slow"]


def test_without_atheris_a_target_runs_on_changes_of_its_corpus(tmp_path):
    import json

    from fuzz.run import _process

    options = ["--seconds", "0.5", "--crashes", str(tmp_path / "crashes"), "--plain"]
    died, found = _process(
        ["vocabulary", str(tmp_path / "new"), str(CORPUS / "vocabulary"), *options], tmp_path / "log", 1
    )
    assert died == []
    assert found["failures"] == []
    assert found["cases"] > 10
    assert json.loads((tmp_path / "figures.json").read_text("utf-8"))["cases"] == found["cases"]
