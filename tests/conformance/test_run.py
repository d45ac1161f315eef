"""The conformance list: Python keeps it, faults are caught by vectors that are for them, drivers may be odd."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conforming import WRONG, inside, run
from stand_ins.wrong_drivers import FAULTS, HASHES, faulty
from support import FIXTURES
from txl_runtime.errors import UsageError

from conformance.driver import PROMISES
from conformance.run import BAD, FOLDER, OWN, main

BUNDLES = json.loads((FOLDER / "index.json").read_text())["bundles"]
MEANT = {
    "lockstep": "lockstep",
    "initial": "zeros",
    "lookahead": "lookahead",
    "grows": "stages",
    "open": "policy-16",
    "clusters": "clusters",
    "text": "clusters",
    "refusals": "policy-1",
    "greedy takes the last that ties": "table",
    "seeds are cut to 32 bits": "table",
    "seeds are cut to 64 bits": "table",
    "seeds are cut to 128 bits": "table",
    "lines end at other signs": "table",
    "temperatures have a floor": "table",
    "temperatures are float32": "table",
    "top_p is forgotten beside a small top_k": "table",
    "a reset of none is one of all": "hidden",
    "selftest": "untrue",
    HASHES: BAD,
}
"""A bundle whose vectors are for a fault or a promise; of any other it is the one called ring."""


FAST = ("ring", "zeros", "policy-16", "lookahead", "stages", "lockstep")
"""The bundles that differ most from each other; together they show every kind of step."""


def kept(*names: str) -> None:
    """Raise AssertionError unless Python keeps what these bundles' vectors show."""
    with inside():
        found = run(*names)
    assert [failure for tally in found for failure in tally.failures] == []
    assert all(tally.passed == tally.vectors > 0 and not tally.unsupported for tally in found)


def test_python_keeps_a_part_of_the_list() -> None:
    kept(*FAST)


@pytest.mark.slow(keep=len(BUNDLES))
@pytest.mark.parametrize("name", [name for name in BUNDLES if name not in FAST])
def test_python_keeps_the_rest_of_the_list(name: str) -> None:
    kept(name)


def test_python_keeps_it_through_the_protocol() -> None:
    (found,) = run("policy-16", driver=OWN)
    assert (found.failed, found.unsupported, found.same_bits) == (0, 0, True)
    assert found.passed == found.vectors
    assert found.largest is not None


@pytest.mark.slow(keep=1)
def test_python_refuses_the_bad_bundles_through_the_protocol() -> None:
    (found,) = run(BAD)
    assert (found.failures, found.died, found.opened, found.unsupported) == ([], 0, 0, 0)
    assert found.passed == found.vectors > 200


@pytest.mark.parametrize("fault", [name for name, (_, promise) in FAULTS.items() if promise != HASHES])
def test_a_fault_is_caught_by_vectors_that_are_for_it(fault: str) -> None:
    promise = FAULTS[fault][1]
    with inside(promise), faulty(fault):
        (found,) = run(MEANT.get(fault, MEANT.get(promise, "ring")))
    assert found.failures, f"{found.passed} vectors that show {promise} passed"
    assert found.failures[0].found.startswith("step "), "what differs is named"


def test_files_whose_hashes_nobody_checks_are_found_out(tmp_path: Path) -> None:
    with inside(), faulty("hashes are not checked"):
        (found,) = run(BAD, folder=some_bad(tmp_path, "altered-step-weights.safetensors", "missing-step-step-1.onnx"))
    assert [(failure.vector, failure.shows) for failure in found.failures] == [
        ("altered-step-weights.safetensors", [HASHES])
    ]
    assert (found.passed, found.opened, found.refused) == (1, 1, 1)


def some_bad(folder: Path, *names: str) -> Path:
    """A list with these bad bundles alone."""
    shutil.copytree(FOLDER / BAD, folder / BAD)
    (folder / "bundles").mkdir()
    document = json.loads((FOLDER / BAD / "index.json").read_text())
    document["cases"] = [case for case in document["cases"] if case["name"] in names]
    (folder / BAD / "index.json").write_text(json.dumps(document))
    (folder / "index.json").write_text(json.dumps({"format": "txl-deploy.conformance", "version": 1, "bundles": []}))
    return folder


# --- drivers that do not keep to the protocol -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manner", "told"),
    [
        ("dies", "died when asked to open, code 7: out of luck"),
        ("aborts", "died when asked to open, SIGABRT"),
        ("out of order", "answered open with the id 1, expected"),
    ],
)
def test_what_breaks_the_protocol_is_told(manner: str, told: str) -> None:
    (found,) = run("lockstep", driver=(*WRONG, manner))
    assert (found.passed, found.failed, found.same_bits) == (2, found.vectors - 2, False)
    assert told in found.failures[0].found
    assert "was not run" in found.failures[1].found


def test_what_is_not_supported_is_counted_apart() -> None:
    declined, lacked = (run("lockstep", driver=(*WRONG, manner))[0] for manner in ("declines", "lacks"))
    assert (declined.passed, declined.failed, declined.unsupported) == (declined.vectors - 1, 0, 1)
    assert lacked.failed == 0
    assert lacked.unsupported == lacked.vectors - lacked.passed > lacked.passed > 0


def test_who_opens_trusted_bundles_alone_is_not_held_to_what_is_said_of_strangers(tmp_path: Path) -> None:
    folder = some_bad(tmp_path, "graph-loop", "cut-manifest", "missing-step-step-1.onnx")
    (found,) = run(BAD, folder=folder, driver=(*WRONG, "lacks"))
    assert (found.passed, found.refused, found.unsupported, found.failed) == (2, 2, 1, 0)
    (found,) = run(BAD, folder=folder)
    assert (found.passed, found.refused) == (3, 3)


def test_a_driver_that_rounds_otherwise_passes_and_is_not_the_same() -> None:
    (found,) = run("lockstep", driver=(*WRONG, "rounds"))
    assert (found.failed, found.same_bits) == (0, False)
    assert found.largest is not None
    assert 0 < found.largest < 1e-5


def test_a_wrong_driver_fails_through_the_protocol() -> None:
    (found,) = run("lockstep", driver=(*WRONG, "nothing runs behind b"))
    assert {"lockstep"} <= set(found.failures[0].shows)
    assert found.same_bits is False
    assert re.match(r"step 2, run: outputs.y differs by 0\.\d+, limit 0.0001", found.failures[0].found)


# --- the folder -----------------------------------------------------------------------------------------------------


def test_every_promise_is_shown_by_some_vector_and_told_on_the_page() -> None:
    shown = {
        promise
        for name in BUNDLES
        for line in (FOLDER / "vectors" / f"{name}.jsonl").read_text().splitlines()
        for promise in json.loads(line)["shows"]
    }
    assert shown == set(PROMISES) - {"strangers"}
    page = (FOLDER / "README.md").read_text().partition("## What is promised")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(PROMISES)
    assert {promise for _, promise in FAULTS.values()} >= set(PROMISES) - {"int8", "half", "old", "axes", "strangers"}


def test_the_folder_is_small_and_its_copies_of_frozen_bundles_are_whole() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 6_000_000
    copies = {"bundles/growing": "release_0_8/growing", "bundles/release-0.8": "release_0_8/clusters"}
    for copy, frozen in copies.items():
        names = {path.relative_to(FIXTURES / frozen) for path in (FIXTURES / frozen).rglob("*") if path.is_file()}
        assert names == {path.relative_to(FOLDER / copy) for path in (FOLDER / copy).rglob("*") if path.is_file()}
        assert all(filecmp.cmp(FIXTURES / frozen / name, FOLDER / copy / name, shallow=False) for name in names), copy


def test_a_driver_that_says_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"said nothing for 0\.2 s when asked to hello"):
        run("ring", driver=(sys.executable, "-c", "import time; time.sleep(1000)"), silence=0.2)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"id": 1, "ok": {"name": "x"}}', "the driver's hello: .*version"),
        ('{"id": 1, "refused": "no", "kind": "usage"}', "the driver's hello: Expected `object`"),
        ("hello", "the driver answered hello with 'hello', expected a reply in JSON"),
    ],
)
def test_a_driver_that_does_not_say_who_it_is_is_refused(said: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        run("ring", driver=(sys.executable, "-c", f"input(); print({said!r})"))


# --- the command ----------------------------------------------------------------------------------------------------


def test_what_passes_is_one_row_for_each_bundle(capfd: pytest.CaptureFixture[str]) -> None:
    with inside():
        assert main(["--only", "lockstep", "--only", "policy-1"]) == 0
    said = capfd.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.split()}
    count = str(len((FOLDER / "vectors" / "policy-1.jsonl").read_text().splitlines()))
    assert rows["policy-1"][:5] == [count, count, "0", "0", "0"]
    assert rows["lockstep"][5] == "0.0001"
    assert rows["verdict"] == ["passed"]
    assert "ONNX Runtime" in said


def test_what_fails_is_named_at_most_a_screen_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    with inside(), faulty("reset forgets the first state"):
        assert main(["--only", "zeros", "--json"]) == 1
    (tally,) = json.loads(capfd.readouterr().out)["bundles"]
    first = tally["failures"][0]
    assert first["shows"] == ["reset", "initial"]
    assert re.match(r"step 5, state: states\.\S+ differs by 0\.\d+, limit 0\.0001", first["found"])
    with inside(), faulty("idle sequences advance"):
        assert main(["--only", "ring", "--only", "zeros"]) == 1
    said = capfd.readouterr().out
    assert len(said.splitlines()) < 60
    assert re.search(r"and \d+ more; --json has all", said)
    assert "FAILED" in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "rings"], "--only is 'rings', expected one of ring, .*; did you mean 'ring'"),
        (["--driver", ""], "--driver is empty, expected a command"),
        (["--driver", "'"], '--driver is "\'": No closing quotation'),
        (["--driver", "/nowhere/driver"], "--driver /nowhere/driver: No such file"),
        (["--silence", "0"], "--silence is 0, expected seconds"),
        (["--folder", "empty"], r"index.json: No such file .* --folder"),
        (["--folder", "foreign"], r"a list of another 1, expected txl-deploy\.conformance 1"),
        (["--folder", "torn", "--only", "ring"], r"ring.jsonl: line 1: .*`shows`"),
    ],
)
def test_wrong_use_is_told(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, index in (
        ("foreign", '{"format": "another", "version": 1, "bundles": []}'),
        ("torn", (FOLDER / "index.json").read_text()),
    ):
        (tmp_path / name / "vectors").mkdir(parents=True)
        (tmp_path / name / "index.json").write_text(index)
        (tmp_path / name / "vectors" / "ring.jsonl").write_text("{}\n")
    assert main(arguments) == 2
    assert re.search(told, capfd.readouterr().err)
