"""Implicit state, simulated on ONNX Runtime: a loop that feeds states back as the server does, beside a stream."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import step_models
import txl_runtime
from step_models import counting, growing, recurrent
from support import call_main
from txl_engines.implicit import implicit_step
from txl_runtime.bundle.reading import open_bundle

from txl_deploy.triton.implicit import onnx_config, package_onnx

KINDS = {"TYPE_FP32": np.float32, "TYPE_INT32": np.int32, "TYPE_BOOL": np.bool_}


def initial(folder, entry):
    """A state at the start of a sequence, as the configuration tells the server."""
    (state,) = entry["initial_state"]
    if state.get("zero_data"):
        return np.zeros(state["dims"], KINDS[state["data_type"]])
    data = (folder / "initial_state" / state["data_file"]).read_bytes()
    return np.frombuffer(data, KINDS[state["data_type"]]).reshape(state["dims"])


def test_states_go_on_and_start_from_files(tmp_path, monkeypatch):
    """The server knows the configuration and the files, and nothing else."""
    monkeypatch.setattr(step_models, "B", 1)
    bundle = recurrent().write(tmp_path / "a.txl")
    package_onnx(bundle, tmp_path / "models", length=4)
    folder, config = tmp_path / "models" / "a", onnx_config(implicit_step(open_bundle(bundle), 4), 16, 60.0)
    onnx.checker.check_model(str(folder / "1" / "model.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    assert sorted(path.name for path in (folder / "initial_state").iterdir()) == ["state.count.in", "state.h.in"]
    assert "**Not run on that backend**" in (tmp_path / "models" / "README.md").read_text()
    stream, draws, kept = txl_runtime.load(bundle, backend="cpu").stream(), np.random.default_rng(0), {}
    table, names = config["sequence_batching"]["state"], [entry["name"] for entry in config["output"]]
    for step in range(12):
        inputs = {"obs": draws.normal(size=(1, 4, 5)).astype(np.float32), "starts": draws.random(1) < 0.2}
        for entry in config["input"]:
            array = inputs[entry["name"]]
            assert (array.dtype, list(array.shape)) == (KINDS[entry["data_type"]], entry["dims"])
        if step in (0, 7):
            stream.reset()
            kept = {entry["input_name"]: initial(folder, entry) for entry in table}
        found = session.run([*names, *(entry["output_name"] for entry in table)], inputs | kept)
        for entry, array in zip(table, found[len(names) :], strict=True):
            assert (array.dtype, list(array.shape)) == (KINDS[entry["data_type"]], entry["dims"])
            kept[entry["input_name"]] = array
        for name, expected in stream.run(inputs).items():
            assert np.abs(found[names.index(name)].astype(np.float64) - expected).max() < 1e-5, name


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
