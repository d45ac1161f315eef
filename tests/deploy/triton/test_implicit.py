"""Implicit state, simulated on ONNX Runtime: a loop that feeds states back as the server does, beside streams."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import step_models
import txl_runtime
from step_models import counting, growing, recurrent
from support import call_main
from txl_engines.implicit import implicit_step
from txl_runtime.bundle.reading import open_bundle

from txl_deploy.triton.implicit import onnx_config, package_onnx

KINDS = {"TYPE_FP32": np.float32, "TYPE_INT32": np.int32, "TYPE_BOOL": np.bool_}


class Simulated:
    """One model of a package, run as the server runs it: it knows the configuration and the files, and nothing else."""

    def __init__(self, folder, config):
        assert config["platform"] == "onnxruntime_onnx"
        self.folder, self.config = folder, config
        onnx.checker.check_model(str(folder / "1" / "model.onnx"), full_check=True)
        self.session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
        self.table = config["sequence_batching"].get("state", [])
        self.kept = {}

    def infer(self, name, inputs, start=False):
        if start:
            self.kept[name] = {state["input_name"]: self.initial(*state["initial_state"]) for state in self.table}
        for entry in self.config["input"]:
            assert inputs[entry["name"]].dtype == KINDS[entry["data_type"]]
            assert list(inputs[entry["name"]].shape) == entry["dims"]
        outputs = [entry["name"] for entry in self.config["output"]]
        returned = [state["output_name"] for state in self.table]
        found = self.session.run([*outputs, *returned], inputs | self.kept[name])
        for state, array in zip(self.table, found[len(outputs) :], strict=True):
            assert (array.dtype, list(array.shape)) == (KINDS[state["data_type"]], state["dims"])
            self.kept[name][state["input_name"]] = array
        return dict(zip(outputs, found, strict=False))

    def initial(self, state):
        if state.get("zero_data"):
            return np.zeros(state["dims"], KINDS[state["data_type"]])
        data = (self.folder / "initial_state" / state["data_file"]).read_bytes()
        return np.frombuffer(data, KINDS[state["data_type"]]).reshape(state["dims"])


def packaged(bundle, out, length=None):
    package_onnx(bundle, out, length=length)
    step = implicit_step(open_bundle(bundle), length)
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return Simulated(folder, onnx_config(step, 16, 60.0))


@pytest.fixture
def alone(monkeypatch):
    """The small models with one sequence."""
    monkeypatch.setattr(step_models, "B", 1)


def test_states_that_are_replaced_start_from_files(alone, tmp_path):
    bundle = recurrent().write(tmp_path / "a.txl")
    served, stream = packaged(bundle, tmp_path / "models", 4), txl_runtime.load(bundle, backend="cpu").stream()
    draws, columns = np.random.default_rng(0), 4
    assert [entry["name"] for entry in served.config["input"]] == ["obs", "starts"]
    assert sorted(path.name for path in (served.folder / "initial_state").iterdir()) == [
        "state.count.in",
        "state.h.in",
    ]
    for step in range(12):
        inputs = {"obs": draws.normal(size=(1, columns, 5)).astype(np.float32), "starts": draws.random(1) < 0.2}
        if step in (0, 7):
            stream.reset()
        found, expected = served.infer(1, inputs, step in (0, 7)), stream.run(inputs)
        for name, array in expected.items():
            assert np.abs(found[name].astype(np.float64) - array).max() < 1e-5, name


def test_what_no_server_can_keep_is_refused(tmp_path, monkeypatch, capfd):
    several = recurrent().write(tmp_path / "several.txl")
    monkeypatch.setattr(step_models, "B", 1)
    grows, plain = growing().write(tmp_path / "grows.txl"), counting().write(tmp_path / "plain.txl")
    for bundle, options, said in (
        (several, [], "has B 3, expected 1"),
        (grows, [], "state rows grows"),
        (plain, ["--segment-length", "3"], "the segment length is 3, this bundle has 4, 1"),
    ):
        command = ["package", bundle, "--target", "triton-onnx", "-o", tmp_path / "models", *options]
        code, _, error = call_main(command, monkeypatch, capfd)
        assert (code, said in error) == (2, True), error
        assert not (tmp_path / "models").exists()


def test_the_page_says_that_it_was_not_run_there(alone, tmp_path, monkeypatch, capfd):
    bundle = counting().write(tmp_path / "plain.txl")
    command = ["package", bundle, "--target", "triton-onnx", "-o", tmp_path / "models", "--json"]
    code, said, _ = call_main(command, monkeypatch, capfd)
    assert (code, json.loads(said)["target"]) == (0, "triton-onnx")
    assert "**Not run on that backend**" in (tmp_path / "models" / "README.md").read_text()
