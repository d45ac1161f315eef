"""`txl-deploy inspect BUNDLE --check`: every program that a stream runs, tried in a bounded process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import onnx
import pytest
import step_models
from frozen import frozen
from hostile_graphs import insert, node
from resealing import reseal
from txl_runtime.host import backend

from txl_deploy import trying


@pytest.fixture
def ending(tmp_path: Path) -> Path:
    """A bundle whose steps of one position ask for 2^40 bytes."""
    path = step_models.counting().write(tmp_path / "ending.txl")
    model = onnx.load(path / "step-1.onnx")
    insert(model, node("ConstantOfShape", "s", "big"), node("ReduceSum", "big", "sum"), s=[2**38])
    (path / "step-1.onnx").write_bytes(model.SerializeToString())
    return reseal(path)


def test_each_program_is_tried_for_b_sequences_and_for_one(run):
    done = run("inspect", frozen("ring"), "--check", "--json")
    assert done.code == 0
    tried = {(row["program"], row["update"]): row for row in done.document["tried"]}
    programs = {program["name"] for program in done.document["manifest"]["programs"]}
    assert {name for name, _ in tried} == programs | {"(opening)"}
    assert {update for _, update in tried} == {"ring", "rolled"}
    assert tried["hidden-ring-4", "ring"]["combinations"] == 2
    assert all(tried["(opening)", update]["seconds"] > 0.01 for update in ("ring", "rolled"))
    assert all(2**20 < row["memory"] < 2**30 for row in tried.values()), "on Linux"
    for stage in ("to open the graphs of ring", "ring with B 3", "ring with B 1", "rolled with B 3"):
        assert f"try {stage}: " in done.stderr


@pytest.mark.parametrize("name", ["ring", "growing"])
def test_nothing_of_the_bundle_runs_in_the_commands_own_process(run, monkeypatch, name):
    """A state that a step has made could end it: no trial shows that."""

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the bundle is opened here")

    monkeypatch.setattr(backend, "OnnxRuntimeCpu", opened)
    assert run("inspect", frozen(name), "--check", "--json").code == 0


@pytest.mark.parametrize(
    ("name", "sizes"), [("growing", {"step-4": 4}), ("stages", {f"step-4.{n}": 1 for n in range(4)})]
)
def test_states_grow_until_no_sizes_are_new(run, name, sizes):
    document = run("inspect", frozen(name), "--check", "--json").document
    tried = {row["program"]: row["combinations"] for row in document["tried"]}
    assert tried == sizes | {"(opening)": 1}


def test_a_program_that_no_stream_came_to_is_listed(run, monkeypatch):
    monkeypatch.setattr(trying, "_run", lambda *_: None)
    document = run("inspect", frozen("policy-16"), "--check", "--json").document
    tried = {row["program"]: row["combinations"] for row in document["tried"]}
    assert tried == {"(opening)": 1, "step-4": 0, "step-1": 0}


def test_log_probabilities_of_no_tokens_are_tried(run, tmp_path):
    model = step_models.recurrent()
    model.outputs = (msgspec.structs.replace(model.outputs[0], role="logprobs"), *model.outputs[1:])
    document = run("inspect", model.write(tmp_path / "a.txl"), "--check", "--json").document
    assert [row["combinations"] for row in document["tried"]] == [1, 1, 1]


def test_the_table_stands_below_what_the_bundle_says(run):
    shown = run("inspect", frozen("policy-16"), "--check").stdout
    lines = [line.split()[:3] for line in shown.splitlines() if "replace" in line]
    assert lines[-3:] == [["(opening)", "replace", "1"], ["step-4", "replace", "2"], ["step-1", "replace", "2"]]
    assert "tried" not in run("inspect", frozen("policy-16")).stdout


def test_a_trial_that_ends_is_one_line_and_exit_code_2(run, ending):
    done = run("inspect", ending, "--check")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"error: {ending}: in a trial, program step-1 ")
    done = run("inspect", ending, "--check", "--json")
    assert done.code == 2
    assert done.document.keys() == {"error", "exit_code"}


def test_bounds_are_given_with_the_check(run, ending):
    done = run("inspect", ending, "--check", "--memory", "1000", "--processor-seconds", "7")
    assert done.code == 2
    assert "expected at most 1000 bytes, 7 s of processor time, 300 s" in done.stderr
    done = run("inspect", ending, "--memory", "1000")
    assert (done.code, done.stdout) == (2, "")
    assert "--memory and --processor-seconds are given without --check" in done.stderr
    done = run("inspect", ending, "--check", "--memory", "0")
    assert (done.code, done.stdout) == (2, "")
    assert "bounds: memory is 0, expected a whole number above 0" in done.stderr


def test_what_is_no_bundle_is_not_checked(run, tmp_path):
    (tmp_path / "model.pt").write_bytes(b"nothing")
    done = run("inspect", tmp_path / "model.pt", "--check")
    assert (done.code, done.stdout) == (2, "")
    assert "is no bundle, --check is for bundles; leave it out" in done.stderr
