"""`txl-deploy bench`: what it prints, what its document holds, what it refuses. No figure is judged."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support import cli

from txl_deploy.bench.measuring import BUNDLE, Report
from txl_deploy.bench_tables import panels, report_document, verdict

FAST = ("--seconds", 0.02, "--threads", 1)


@pytest.fixture(scope="module")
def bundle(make_bundle: Callable[..., Path]) -> Path:
    return make_bundle()


@pytest.fixture(scope="module")
def document(bundle: Path) -> dict[str, Any]:
    done = cli("bench", bundle, *FAST, "--against", "torch-kv,onnx-hidden", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_competitor_has_a_row_for_every_kind_of_work(document: dict[str, Any]) -> None:
    found = [(row["task"], row["segment_length"], row["competitor"]) for row in document["rows"]]
    works = (("decode", 1), ("prefill", 4), ("score", 4))
    assert found == [(*work, name) for work in works for name in (BUNDLE, "torch-kv", "onnx-hidden")]


def test_rows_hold_what_is_promised(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        ms = row["ms"]
        assert 0 < ms["best"] <= ms["p50"] <= ms["p90"] <= ms["p99"]
        assert ms["calls"] >= 3 * document["conditions"]["rounds"]
        assert len(row["rounds"]) == document["conditions"]["rounds"]
        assert row["tokens_per_second"] == pytest.approx(row["segment_length"] / ms["p50"] * 1e3)
        assert row["gb_per_second"] == pytest.approx(row["bytes_per_token"] * row["segment_length"] / ms["p50"] / 1e6)
        assert row["of_bandwidth"] > 0
        assert row["description"]
    ours = {row["task"]: row["ms"]["p50"] for row in document["rows"] if row["competitor"] == BUNDLE}
    assert all(row["ratio"] == pytest.approx(row["ms"]["p50"] / ours[row["task"]]) for row in document["rows"])


def test_conditions_are_stated(document: dict[str, Any]) -> None:
    conditions = document["conditions"]
    assert conditions["threads"] == 1
    assert conditions["memory_rows"] == [conditions["memory_length"]] == [7], "memory is full before timing"
    assert conditions["warm_up_calls"] > 0
    assert {"python", "onnxruntime", "numpy", "torch"} <= set(document["machine"]["versions"])
    assert document["machine"]["read_gb_per_second"] > 0
    assert document["left_out"] == {}


def test_competitors_were_compared_before_they_were_timed(document: dict[str, Any]) -> None:
    assert set(document["agreement"]) == {"torch-kv", "onnx-hidden"}
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
    assert memory["state"] == 2 * 2 * 2 * 7 * 8 * 4, "layers, keys and values, heads, rows, width of a head, bytes"


def test_the_floor_is_what_a_step_must_read(document: dict[str, Any]) -> None:
    decode, prefill = document["floor"]["decode"], document["floor"]["prefill"]
    layer = 4 * 16 * 16 + 2 * 16 * 32 + 32 + 16 + 2 * 16 + 4 * 16  # attention, feed-forward, biases u, v, norms
    assert decode["weights"] == 4 * (2 * layer + 60 * 16 + 60), "the tied embedding is the softmax's"
    assert decode["memory"] == prefill["memory"] == 2 * 2 * 7 * 16 * 4
    assert decode["positions"] == 2 * 8 * 16 * 4
    assert prefill["positions"] == 2 * 11 * 16 * 4


def test_a_person_reads_tables_and_a_verdict(bundle: Path) -> None:
    done = cli("bench", bundle, *FAST, "--against", "none")
    assert done.returncode == 0, done.stderr
    for said in (
        "decode: all log-probabilities",
        "prefill:",
        "score:",
        "memory full: 7 of 7 rows",
        "load → first token",
    ):
        assert said in done.stdout
    assert done.stdout.splitlines()[-1].startswith("decode ")
    assert "time decode, L 1:" in done.stderr


def test_the_verdict_names_every_competitor(document: dict[str, Any]) -> None:
    assert document["verdict"] == verdict(msgspec.convert(document, Report))
    assert document["verdict"].count("× torch-kv") == 3


def test_the_picture_has_a_panel_per_kind_of_work(document: dict[str, Any]) -> None:
    drawn: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *given, **_: drawn.append(f"{name} {given[:1]}")

    names = ("barh", "text", "axvline", "legend", "set_title", "set_xlabel", "set_xlim")
    axes = SimpleNamespace(**{name: note(name) for name in names})
    report = msgspec.convert(document, Report)
    assert msgspec.to_builtins(report) == {
        key: value for key, value in report_document(report).items() if key != "verdict"
    }
    for panel in panels(report):
        panel(axes)
    assert sum(line.startswith("barh") for line in drawn) == 3
    assert sum(line.startswith("axvline") for line in drawn) == 1, "the floor belongs to decoding"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--against", "torch,tensorflow"), "'tensorflow', expected some of torch,"),
        (("--against", "torch,torch"), "expected every name once"),
        (("--against", "none,torch"), "or none alone"),
        (("--seconds", 0), "--seconds is 0, expected 0.01"),
        (("--threads", 0), "threads is 0, expected"),
        (("--plot", "speed.gif"), "expected a name that ends in .png or .svg"),
        (("--plot", "nowhere/speed.png"), "expected a folder that exists"),
    ],
)
def test_wrong_use_is_refused_in_one_line(bundle: Path, options: tuple[object, ...], said: str) -> None:
    done = cli("bench", bundle, *options)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_competitor_that_cannot_run_is_left_out_with_its_reason(make_bundle: Callable[..., Path]) -> None:
    hidden = make_bundle(memory="hidden")
    alone = cli("bench", hidden, *FAST, "--against", "onnx-hidden")
    assert alone.returncode == 2
    assert "the bundle keeps hidden memory itself" in alone.stderr
    beside = cli("bench", hidden, *FAST, "--against", "onnx-hidden,torch-kv", "--json")
    assert beside.returncode == 0, beside.stderr
    assert json.loads(beside.stdout)["left_out"] == {"onnx-hidden": "the bundle keeps hidden memory itself"}
    assert "note: onnx-hidden is left out" in beside.stderr
