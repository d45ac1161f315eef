"""The promise to whoever upgrades: what release 0.8.0 wrote is read, gives what it gave, and is gone on with."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import txl_export
import txl_runtime
from report_pages import Page
from support import FIXTURES, call_main
from txl_export.families.registry import facts_of_bundle
from txl_report import write_report
from txl_report.facts.gathering import gather
from txl_report.facts.plain import Missing
from txl_runtime.bundle.engines.sidecar import COMPOSED, differences
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.engines.fitting import checked_engines
from txl_runtime.sessions import Outputs, Request, Sampling, Sessions, Token
from versions.exercise import ROUNDING, exercise

FROZEN = FIXTURES / "release_0_8"
NAMES = sorted(path.parent.name for path in FROZEN.glob("*/manifest.json"))
WRITTEN = "6dd067331ba7d9923e2e4f640876b0cf7b3b8bc384bb79f86a662e4c0f3ffb3a"
"""The hash of all files that the release wrote: they are never written again."""


def test_the_files_are_those_that_the_release_wrote():
    found, size = hashlib.sha256(), 0
    for path in sorted(FROZEN.rglob("*"), key=lambda path: path.relative_to(FROZEN).as_posix()):
        if path.is_file() and path.name != "README.md" and "__pycache__" not in path.parts:
            data = path.read_bytes()
            assert not any(place in data for place in (b"/tmp/", b"/home/", b"/root/", b"/Users/")), path
            found.update(f"{path.relative_to(FROZEN).as_posix()} {hashlib.sha256(data).hexdigest()}\n".encode())
            size += len(data)
    assert size <= 3_000_000
    assert found.hexdigest() == WRITTEN


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_gives_what_it_gave_and_a_snapshot_goes_on(name: str):
    recorded = dict(np.load(FROZEN / f"{name}.npz"))
    rules = sorted(path.name.split(".")[1] for path in FROZEN.glob(f"{name}.*.state"))
    assert sorted(exercise(FROZEN / name, recorded)) == [f"{name} {rule}" for rule in rules]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_can_be_made_of_a_bundle_and_of_what_was_measured(name: str, tmp_path: Path):
    measured = {"bench": FROZEN / f"{name}.bench.json", "verify": FROZEN / f"{name}.verify.json"}
    there = {option: path for option, path in measured.items() if path.exists()}
    facts = gather(open_bundle(FROZEN / name), **there)
    assert not isinstance(facts.exported, Missing), "its report.json was read"
    assert isinstance(facts.repeated, Missing) == ("verify" not in there)
    assert isinstance(facts.speed, Missing) == ("bench" not in there)
    write_report(FROZEN / name, tmp_path / "page.html", describe=facts_of_bundle, **there)
    Page((tmp_path / "page.html").read_text())


@pytest.mark.parametrize("checkpoint", [None, "tokens.pt"])
def test_a_transformer_xl_verifies_by_its_own_weights_and_by_its_checkpoint(checkpoint: str | None):
    given = None if checkpoint is None else FROZEN / checkpoint
    assert txl_export.verify(FROZEN / "tokens", checkpoint=given, segments=20, threads=1).passed


def test_what_an_adapter_exported_verifies_by_its_checkpoint():
    given = {"config": FROZEN / "policy.json", "weights": FROZEN / "policy.pt"}
    assert txl_export.verify(FROZEN / "adapted", adapter="recurrent-policy", **given, segments=20, threads=1).passed


@pytest.mark.parametrize(("name", "module"), [("policy-16", "policy"), ("growing", "growing")])
def test_a_model_of_ones_own_verifies_by_its_module_as_it_was_written(name: str, module: str):
    assert txl_export.verify(FROZEN / name, module=f"{FROZEN / 'own.py'}:{module}", segments=20, threads=1).passed


@pytest.mark.parametrize("name", ["policy-1", "policy-16"])
def test_a_model_of_ones_own_that_is_exported_now_is_the_same_model_and_goes_on_from_its_snapshot(name, tmp_path):
    """Since 0.9 its graphs leave B open, which is no other function."""
    recorded, size = dict(np.load(FROZEN / f"{name}.npz")), int(name.partition("-")[2])
    source, out = f"{FROZEN / 'own.py'}:policy", tmp_path / name
    exported = txl_export.export(source, out, batch_size=size, segment_length=(4, 1), verify=False)
    assert [program.open_batch for program in exported.manifest.programs] == [size > 1] * 2
    assert exported.manifest.model_id == open_bundle(FROZEN / name).manifest.model_id
    shutil.copyfile(FROZEN / f"{name}.replace.state", tmp_path / f"{name}.replace.state")
    assert exercise(out, recorded) == [f"{name} replace"]


def test_graphs_that_a_build_wrote_for_a_gpu_are_taken():
    programs = {engine.program.name for engine in checked_engines(open_bundle(FROZEN / "tokens"), "cuda", COMPOSED)}
    assert programs == {"last-ring-4", "logprobs-ring-1", "logprobs-ring-4", "score-ring-4"}


def test_an_engine_is_taken_whose_gpu_the_release_knew_by_name_alone():
    """It did not write the number of multiprocessors, so an engine of another Orin cannot be told from this one's."""
    engine = checked_engines(open_bundle(FROZEN / "tokens"), "cuda", COMPOSED)[0]
    written = msgspec.structs.replace(engine.sidecar.identity, device="Orin, SM 87")
    for here in ("Orin, SM 87, 16 multiprocessors", "Orin, SM 87, 8 multiprocessors"):
        assert differences(written, msgspec.structs.replace(written, device=here)) == []
    assert differences(written, msgspec.structs.replace(written, device="Thor, SM 110, 20 multiprocessors"))


def test_conversations_go_on_word_by_word(tmp_path: Path):
    told = json.loads((FROZEN / "tokens.sessions.json").read_text())
    folder = Path(shutil.copytree(FROZEN / "tokens.sessions", tmp_path / "sessions"))
    with Sessions(txl_runtime.load(FROZEN / "tokens", "cpu", threads=1)) as sessions:
        assert sessions.restore(folder) == {}
        assert sessions.names() == list(told)
        for name, expected in told.items():
            info = sessions.info(name)
            assert (info.seen, info.pending) == (expected["seen"], expected["pending"])
            sampling = Sampling(expected["temperature"], seed=expected["seed"])
            ticket = sessions.submit(Request([1, 2, 3], 12, sampling), name)
            while sessions.round():
                pass
            assert [event.id for event in ticket.events() if isinstance(event, Token)] == expected["drawn"]
        assert sessions.save(folder) == len(told)


def test_sessions_of_a_policy_go_on(tmp_path: Path):
    told = dict(np.load(FROZEN / "policy-16.sessions.npz"))
    folder = Path(shutil.copytree(FROZEN / "policy-16.sessions", tmp_path / "sessions"))
    with Sessions(txl_runtime.load(FROZEN / "policy-16", "cpu", threads=1)) as sessions:
        assert sessions.restore(folder) == {}
        assert len(sessions.names()) == 3
        for name in sessions.names():
            ticket = sessions.submit(Request(inputs={"obs": told[f"{name}/obs"]}), name)
            while sessions.round():
                pass
            given = [event.arrays["action"] for event in ticket.events() if isinstance(event, Outputs)]
            assert np.allclose(np.concatenate(given, 1), told[f"{name}/action"], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("begun", ["scores.begun.jsonl", "scores.jsonl"])
def test_results_of_a_corpus_go_on_to_the_same_total(begun, tmp_path, monkeypatch, capfd):
    """The one was killed while it wrote a line."""
    out = Path(shutil.copyfile(FROZEN / begun, tmp_path / "out.jsonl"))
    before = out.read_bytes()
    asked = ("score", FROZEN / "tokens", FROZEN / "corpus.jsonl", "-o", out, "--resume", "--threads", 1, "--json")
    code, said, errors = call_main(asked, monkeypatch, capfd)
    assert code == 0, errors
    found, expected = json.loads(said), json.loads((FROZEN / "scores.json").read_text())
    assert found.keys() >= expected.keys()
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=0, rel=1e-6)
    whole = before[: before.rfind(b"\n") + 1]
    assert out.read_bytes().startswith(whole)
    assert (len(out.read_bytes()) > len(before)) == ("begun" in begun)
    made, wanted = _by_document(out), _by_document(FROZEN / "scores.jsonl")
    assert made.keys() == wanted.keys() == set(range(found["documents"]))
    for index, row in wanted.items():
        nll = row.pop("nll"), row.pop("perplexity"), row.pop("bits_per_byte")
        again = made[index]
        assert {name: again[name] for name in row} == row
        assert (again["nll"], again["perplexity"], again["bits_per_byte"]) == pytest.approx(nll, abs=0, rel=1e-6)


def _by_document(results: Path) -> dict[int, dict[str, Any]]:
    rows = map(json.loads, results.read_text().splitlines()[1:])
    return {row["index"]: row for row in rows}
