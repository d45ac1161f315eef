"""The measurement of any step: bundles of small modules, alone and beside their modules."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from stand_ins.small_steps import EVERY, policy, window
from txl_export import StepSpec
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent
from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays

from txl_deploy.bench import processes
from txl_deploy.bench.competitor import BundleCompetitor
from txl_deploy.bench.competitors import own_module
from txl_deploy.bench.competitors.agreement import agree, compared
from txl_deploy.bench.competitors.own_module import CompiledSteps, TorchSteps, own_competitors
from txl_deploy.bench.driving import STEADY, filling, random_inputs
from txl_deploy.bench.floor import floor_of
from txl_deploy.bench.measuring import bench
from txl_deploy.bench.overhead import overhead
from txl_deploy.bench.works import Works

pytestmark = pytest.mark.device

LENGTHS = {"policy": (4, 1), "window": (2,), "ahead": (4,), "counted": (4, 1)}


@pytest.fixture(scope="module")
def open_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """The bundle of one of `EVERY`, exported once."""
    made: dict[tuple[str, str], Path] = {}

    def load(name: str, precision: str = "fp32") -> Model:
        if (name, precision) not in made:
            path = made[name, precision] = tmp_path_factory.mktemp("own") / "own.txl"
            lengths, given = LENGTHS.get(name, ()), {"batch_size": 2, "verify": False, "precision": precision}
            txl_export.export(EVERY[name](), path, segment_length=lengths, **given)
        return txl_runtime.load(made[name, precision], threads=1)

    return load


@pytest.mark.parametrize("name", EVERY)
def test_a_module_agrees_with_its_bundle_and_is_timed(name: str, open_model: Callable[..., Model]) -> None:
    model = open_model(name)
    works, other = Works(model), TorchSteps(EVERY[name](), model)
    agreed = agree(works.ours, other, model)
    assert agreed.measure == "max_abs"
    assert max(agreed.found.values()) <= 1e-5 < agreed.limit
    assert agreed.segments > STEADY
    report = bench(works, [other], {"torch": agreed}, threads=1, seconds=0.01, rounds=1, processes=False)
    lengths = LENGTHS.get(name, (1,))
    assert [(row.segment_length, row.competitor) for row in report.rows] == [
        (length, who) for length in lengths for who in ("bundle", "torch")
    ]
    assert report.overhead is not None
    assert 0 < report.overhead.in_step < report.overhead.step
    assert (report.family, report.memory_form) == (model.manifest.family_name, None)
    assert report.conditions.state.keys() == {state.name for state in model.manifest.states}


def test_a_module_in_half_precision_is_compared_by_its_deviation(open_model: Callable[..., Model]) -> None:
    model = open_model("policy", "fp16")
    agreed = agree(BundleCompetitor("bundle", model), TorchSteps(policy(), model), model)
    assert agreed.measure == "deviation"
    assert 1e-5 < max(agreed.found.values()) <= agreed.limit < 0.1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda spec: replace(spec, outputs=["action", "worth"]), "outputs action, worth, expected action, value"),
        (lambda _: window(), r"inputs tokens \['B', 'L'\], expected obs \['B', 'L', 6\]"),
        (lambda spec: replace(spec, states=[replace(spec.states[0], shape=(3, "B", 8)), spec.states[1]]), "the states"),
    ],
)
def test_a_module_of_other_tables_is_refused(
    wrong: Callable[[StepSpec], StepSpec], said: str, open_model: Callable[..., Model]
) -> None:
    with pytest.raises(UsageError, match=said):
        TorchSteps(wrong(policy()), open_model("policy"))


def test_the_state_is_filled_as_far_as_it_grows(open_model: Callable[..., Model]) -> None:
    model = open_model("window")
    stream = model.stream()
    segments = 0
    for inputs in filling(model.manifest, stream):
        assert inputs["tokens"].shape == (2, 2)
        stream.run(inputs)
        segments += 1
    assert stream.state()["rows"].shape == (6, 2, 4)
    assert segments == 3 + STEADY, "three until there are six rows"
    assert overhead(Works(model), steps=20) is not None


def test_random_inputs_are_of_every_kind(open_model: Callable[..., Model]) -> None:
    frames = random_inputs(open_model("ahead").manifest, 4)["frames"]
    assert (frames.shape, frames.dtype) == ((2, 6, 3), np.float32)
    manifest = open_model("window").manifest
    ids = random_inputs(manifest, 2)["tokens"]
    assert ids.dtype == np.int32
    assert 0 <= ids.min() <= ids.max() < 11
    assert (ids == random_inputs(manifest, 2)["tokens"]).all()


def test_what_a_step_reads_is_its_weights_and_its_state(open_model: Callable[..., Model]) -> None:
    model = open_model("policy")
    floor = floor_of(model.bundle, 4)
    parameters = sum(tensor.numel() for tensor in policy().module.parameters())
    assert floor["state"] == 2 * 2 * 2 * 8 * 4, "states, layers, sequences, width, bytes"
    assert 2 * parameters < floor["weights"] <= 4 * parameters
    assert TorchSteps(policy(), model).step_bytes(4) == 4 * parameters + floor["state"]


def test_load_time_and_memory_of_any_step(
    open_model: Callable[..., Model], plant: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured by processes that import nothing from the folder that their user stands in."""
    shutil.copytree(open_model("window").bundle.path, tmp_path / "window.txl")
    plant(tmp_path / "window.txl")
    monkeypatch.chdir(tmp_path / "window.txl")
    path = Path()
    load = processes.measure_load(path, 1, runs=1)
    assert 0 < load.load <= load.total <= load.process
    assert processes.measure_footprint(path, 1).state == 6 * 2 * 4 * 4


def test_a_compiler_that_fails_leaves_its_competitor_out(
    open_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such operator")

    (tmp_path / "mine.py").write_text("from stand_ins.small_steps import policy as build\n")
    model = open_model("policy")
    monkeypatch.setattr(torch, "compile", lambda step, **_: fails)
    works, given = Works(model), (f"{tmp_path}/mine.py:build", None, model, 1, Silent())
    makers, left_out = own_competitors(("torch", "torch-compile"), *given)
    others, agreement, failed = compared(works, makers, Silent())
    assert [other.name for other in others] == list(agreement) == ["torch"]
    assert left_out == {}
    assert failed == {"torch-compile": "it fails on this module: RuntimeError: no such operator"}
    monkeypatch.setattr(own_module, "no_compiler", lambda: "there is no compiler")
    assert own_competitors(("torch-compile",), *given) == ({}, {"torch-compile": "there is no compiler"})


def test_what_is_compiled_is_the_step_of_a_full_state(
    open_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def compiled(step: Callable[..., object], **_: object) -> Callable[..., object]:
        def run(inputs: object, states: dict[str, torch.Tensor], valid: object) -> object:
            rows.append(states["rows"].shape[0])
            return step(inputs, states, valid)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    model = open_model("window")
    agreed = agree(BundleCompetitor("bundle", model), CompiledSteps(window(), model), model)
    assert set(rows) == {6}
    assert len(rows) > agreed.segments / 2


def test_after_a_comparison_that_failed_the_bundle_s_state_is_full(open_model: Callable[..., Model]) -> None:
    class Fails(TorchSteps):
        def run(self, inputs: Arrays) -> Mapping[str, Array]:
            raise RuntimeError("at the first segment")

    model = open_model("window")
    works = Works(model)
    assert compared(works, {"torch-compile": lambda: Fails(window(), model)}, Silent())[0] == []
    assert works.ours.stream.state()["rows"].shape == (6, 2, 4)


@pytest.mark.slow(keep=1)
@pytest.mark.filterwarnings("ignore")  # the compiler's own deprecations
@pytest.mark.parametrize("name", ["policy", "window", "cell"])
def test_the_compiled_module_is_the_bundle_s(name: str, open_model: Callable[..., Model]) -> None:
    model = open_model(name)
    agreed = agree(BundleCompetitor("bundle", model), CompiledSteps(EVERY[name](), model), model)
    assert max(agreed.found.values()) <= 1e-4
