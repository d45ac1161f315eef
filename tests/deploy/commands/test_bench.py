"""`txl-deploy bench`: what it prints, what its document holds, what it refuses. No figure is judged."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from frozen import frozen
from support import FIXTURES, call_main, cli
from txl_report.schema.measurement import BUNDLE, Measurement, decode_measurement

from txl_deploy.bench_tables import document_of, panels, verdict

pytestmark = pytest.mark.device

FAST = ("--seconds", 0.02, "--threads", 1)


@pytest.fixture(scope="module")
def bundle() -> Path:
    return frozen("ring")


@pytest.fixture(scope="module")
def document(bundle: Path) -> dict[str, Any]:
    done = cli("bench", bundle, *FAST, "--against", "torch-kv,torch", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_competitor_has_a_row_for_every_kind_of_work(document: dict[str, Any]) -> None:
    found = [(row["task"], row["segment_length"], row["competitor"]) for row in document["rows"]]
    works = (("decode", 1), ("prefill", 4), ("score", 4))
    assert found == [(*work, name) for work in works for name in (BUNDLE, "torch-kv", "torch")]


def test_rows_hold_what_is_promised(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        ms = row["ms"]
        assert 0 < ms["best"] <= ms["p50"] <= ms["p90"] <= ms["p99"]
        assert ms["calls"] >= 3 * document["conditions"]["rounds"]
        assert len(row["rounds"]) == document["conditions"]["rounds"]
        assert row["tokens_per_second"] == pytest.approx(3 * row["segment_length"] / ms["p50"] * 1e3)
        assert row["gb_per_second"] == pytest.approx(
            3 * row["bytes_per_token"] * row["segment_length"] / ms["p50"] / 1e6
        )
        assert row["of_bandwidth"] > 0
        assert row["description"]
    ours = {row["task"]: row["ms"]["p50"] for row in document["rows"] if row["competitor"] == BUNDLE}
    assert all(row["ratio"] == pytest.approx(row["ms"]["p50"] / ours[row["task"]]) for row in document["rows"])


def test_conditions_are_stated(document: dict[str, Any]) -> None:
    conditions = document["conditions"]
    assert conditions["threads"] == 1
    assert conditions["memory_rows"] == [conditions["memory_length"]] * 3 == [6] * 3, "memory is full before timing"
    assert conditions["warm_up_calls"] > 0
    assert {"python", "onnxruntime", "numpy", "torch"} <= set(document["machine"]["versions"])
    assert document["machine"]["read_gb_per_second"] > 0
    assert document["left_out"] == {}


def test_competitors_were_compared_before_they_were_timed(document: dict[str, Any]) -> None:
    assert set(document["agreement"]) == {"torch-kv", "torch"}
    for agreed in document["agreement"].values():
        assert agreed["max_abs"] <= agreed["limit"] == 1e-3
        assert agreed["measure"] == "max_abs"


def test_python_load_and_memory_are_measured(document: dict[str, Any]) -> None:
    python, load, memory = document["overhead"], document["load"], document["memory"]
    assert 0 < python["without_engine"] < math.inf
    assert 0 < python["in_step"] < python["step"]
    assert 0 < load["load"] <= load["total"] <= load["process"]
    if sys.platform == "linux":
        assert 0 < memory["before"] < memory["settled"] <= memory["peak"] <= memory["high_water"] * 1.05
        assert memory["private"] < memory["settled"]
    assert memory["state"] == 3 * 2 * 2 * 2 * 6 * 4 * 4, "sequences, layers, keys and values, heads, rows, width, bytes"


def test_the_floor_is_what_a_step_must_read(document: dict[str, Any]) -> None:
    decode, prefill = document["floor"]["decode"], document["floor"]["prefill"]
    layer = 4 * 8 * 8 + 2 * 8 * 12 + 12 + 8 + 2 * 8 + 4 * 8  # attention, feed-forward, biases u, v, norms
    assert decode["weights"] == 4 * (2 * layer + 41 * 8 + 41), "the tied embedding is the softmax's"
    assert decode["memory"] == prefill["memory"] == 3 * 2 * 2 * 6 * 8 * 4
    assert decode["positions"] == 2 * 7 * 8 * 4
    assert prefill["positions"] == 2 * 10 * 8 * 4


@pytest.mark.slow
def test_a_person_reads_tables_and_a_verdict(bundle: Path) -> None:
    done = cli("bench", bundle, *FAST, "--against", "none")
    assert done.returncode == 0, done.stderr
    for said in (
        "decode: all log-probabilities",
        "prefill:",
        "score:",
        "memory full: 6 of 6 rows",
        "load → first token",
    ):
        assert said in done.stdout
    assert done.stdout.splitlines()[-1].startswith("decode ")
    assert "time decode, L 1:" in done.stderr


def test_the_verdict_names_every_competitor(document: dict[str, Any]) -> None:
    assert document["verdict"] == verdict(msgspec.convert(document, Measurement))
    assert document["verdict"].count("× torch-kv") == 3


def test_the_picture_has_a_panel_per_kind_of_work(document: dict[str, Any]) -> None:
    found = msgspec.convert(document, Measurement)
    assert document_of(found) == msgspec.to_builtins(found) | {"verdict": document["verdict"]}
    drawn = calls_of(panels(found))
    assert drawn.count("barh") == 3
    assert drawn.count("axvline") == 1, "the floor belongs to decoding"


def calls_of(drawing: Iterable[Callable[[Any], None]]) -> list[str]:
    """Return the calls that panels make of their axes."""
    axes = MagicMock()
    for panel in drawing:
        panel(axes)
    return [name for name, _, _ in axes.method_calls]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--against", "torch,tensorflow"), "'tensorflow', expected some of torch,"),
        (("--against", "torch,torch"), "expected every name once"),
        (("--against", "none,torch"), "or none alone"),
        (("--seconds", 0), "--seconds is 0, expected 0.01"),
        (("--plot", "speed.gif"), "expected a name that ends in .png or .svg"),
        (("--plot", "nowhere/speed.png"), "expected a folder that exists"),
        (("--module", "policy.py:policy"), "--module is for a model of your own; leave it out"),
    ],
)
def test_wrong_use_is_refused_in_one_line(
    bundle: Path, options: tuple[object, ...], said: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    code, _, err = call_main(("bench", bundle, *options), monkeypatch, capfd)
    assert code == 2
    assert said in err.splitlines()[-1]


OTHERS = """

def other():
    torch.manual_seed(1)
    return StepSpec(Policy(), [InputSpec("obs", ("B", "L", 6))], [StateSpec("h", (1, "B", 8))], ["action", "value"])


def broken():
    raise RuntimeError("no weights today")


def speaking():
    print("the user's own words")
    return policy()
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy's file and its bundle."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "policy.py").write_text((FIXTURES / "release_0_8" / "own.py").read_text() + OTHERS)
    (folder / "policy.txl").symlink_to(frozen("policy-16"))
    return folder


@pytest.mark.slow
def test_a_model_of_one_s_own_is_measured_beside_its_module(own: Path) -> None:
    module = ("--module", own / "policy.py:speaking", "--against", "torch,torch-compile")
    done = cli("bench", own / "policy.txl", *FAST, *module, "--json", env=os.environ | {"CXX": "no-such-compiler"})
    assert done.returncode == 0, done.stderr
    assert "note: torch-compile is left out: torch.compile needs a C++ compiler" in done.stderr
    assert "the user's own words" in done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {
        *("model_id", "family", "precision", "memory_form", "machine", "conditions", "rows", "floor", "agreement"),
        *("left_out", "overhead", "load", "memory", "device_floors", "verdict"),
    }
    assert (document["family"], document["memory_form"]) == ("own_module", None)
    assert list(document["left_out"]) == ["torch-compile"]
    assert [(row["task"], row["segment_length"], row["competitor"]) for row in document["rows"]] == [
        *(("step", 4, BUNDLE), ("step", 4, "torch"), ("step", 1, BUNDLE), ("step", 1, "torch"))
    ]
    for row in document["rows"]:
        ms = row["ms"]
        assert 0 < ms["p50"] <= ms["p90"] <= ms["p99"]
        assert row["positions_per_second"] == pytest.approx(16 * row["segment_length"] / ms["p50"] * 1e3)
        assert row["gb_per_second"] == pytest.approx(row["bytes_per_step"] / ms["p50"] / 1e6)
        assert row["of_bandwidth"] > 0
    assert document["rows"][0]["bytes_per_step"] == sum(document["floor"]["step"].values())
    assert document["agreement"]["torch"]["found"]["action"] <= document["agreement"]["torch"]["limit"] == 1e-3
    assert document["conditions"]["state"] == {"h": [1, 16, 8]}
    assert 0 < document["load"]["total"] <= document["load"]["process"]
    assert document["memory"]["state"] == 16 * 8 * 4
    assert document["device_floors"] == [], "it ran on the CPU"
    assert document["verdict"].startswith("L 4 ")
    assert document["verdict"].count("× torch") == 2


def test_a_person_reads_of_a_bundle_alone(own: Path) -> None:
    done = cli("bench", own / "policy.txl", *FAST)
    assert done.returncode == 0, done.stderr
    for said in ("steps: all outputs of segments of 1", "state full: h 1 × 16 × 8", "positions/s", "first result"):
        assert said in done.stdout
    assert done.stdout.splitlines()[-1].startswith("L 4 ")


def test_the_picture_of_steps_has_a_floor_in_every_panel() -> None:
    measured = decode_measurement((FIXTURES / "release_0_8" / "policy-16.bench.json").read_bytes())
    found = panels(msgspec.structs.replace(measured, floor={"step": {"weights": 4, "state": 4}}))
    assert (len(found), calls_of(found).count("axvline")) == (2, 2)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--against", "torch"), 2, "give --module FILE.py:FUNCTION and --weights, or --against none"),
        (("--weights", "policy.pt"), 2, "--weights is given without --module"),
        (("--module", "policy.py:policy", "--against", "torch-kv"), 2, "'torch-kv', expected some of torch, torch-"),
        (("--module", "policy.py:nothing"), 2, "policy.py has no nothing; its functions are "),
        (("--module", "policy.py:broken"), 2, "RuntimeError: no weights today"),
        (("--module", "policy.py:other", "--against", "torch"), 1, "differs from the bundle's by max_abs"),
    ],
)
def test_wrong_use_of_one_s_own_module_is_refused_in_one_line(
    own: Path, options: tuple[object, ...], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(own)
    found, out, err = call_main(("bench", "policy.txl", "--threads", 1, *options), monkeypatch, capfd)
    assert (found, out) == (code, "")
    assert said in err.splitlines()[-1]
