"""Packages on the disk: what is in them, that they load alone, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from step_models import counting
from support import call_main

from txl_deploy.packages import model_name
from txl_deploy.triton.inside import model as inside
from txl_deploy.triton.repository import package_python

ALONE = """
import json, sys, types
sys.path = [place for place in sys.path if not place.startswith({root!r}) or "site-packages" in place]
sys.path[:0] = [{stand_ins!r}]
import numpy as np
from stand_ins import triton_server
sys.modules["triton_python_backend_utils"] = triton_server
import importlib.util
spec = importlib.util.spec_from_file_location("model", {model!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
served = module.TritonPythonModel()
parameters = {{"serves": "stepping", "backend": "cpu", "threads": "1", "sequences": "4"}}
told = {{"parameters": {{name: {{"string_value": value}} for name, value in parameters.items()}}}}
served.initialize({{"model_config": json.dumps(told)}})
request = triton_server.Request(1, {{"tokens": np.array([[1, 2]], np.int32)}}, ("last",), start=True)
(answer,) = served.execute([request])
assert np.isfinite(answer.arrays["last"]).all()
served.finalize()
import txl_deploy, txl_runtime
print(txl_runtime.__file__, txl_deploy.__file__)
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return counting().write(tmp_path_factory.mktemp("bundle") / "my model.txl")


def test_a_package_holds_all_that_its_model_needs(bundle, tmp_path):
    """In a process that finds this project nowhere else."""
    made = package_python(bundle, tmp_path / "models")
    version = made.folder / "my-model" / "1"
    code = ALONE.format(
        root=str(Path(__file__).parents[3]), stand_ins=str(Path(__file__).parents[2]), model=str(version / "model.py")
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    places, loaded = done.stdout.splitlines()[-2:]
    assert all(Path(place).is_relative_to(version / "packages") for place in places.split())
    assert not {"onnx", "torch", "typer", "filelock"} & set(loaded.split())
    shared = [(made.folder / name / "1" / "bundle" / "weights.safetensors").stat().st_ino for name in made.models]
    assert len(shared) == 2
    assert shared[0] == shared[1]


def test_the_command_says_what_it_wrote_and_a_probe_lies_beside(bundle, tmp_path, monkeypatch, capfd):
    out = tmp_path / "models"
    code, said, _ = call_main(["package", bundle, "--target", "triton", "-o", out, "--json"], monkeypatch, capfd)
    assert code == 0
    assert json.loads(said)["models"][0] == "my-model"
    assert json.loads((out / "txl-package.json").read_text())["target"] == "triton"
    probe = json.loads((out / "my-model" / "probe.json").read_text())
    assert probe["parameters"] == {"sequence_id": 2**32 - 1, "sequence_start": True, "sequence_end": True}
    assert probe["inputs"] == [{"name": "tokens", "datatype": "INT32", "shape": [1, 1], "data": [0]}]
    assert f"models/{model_name(bundle)}/infer -d @{model_name(bundle)}/probe.json" in (out / "README.md").read_text()


def test_what_stands_there_is_replaced_only_with_force_and_only_if_it_is_a_package(
    bundle, tmp_path, monkeypatch, capfd
):
    out = tmp_path / "models"
    command = ["package", bundle, "--target", "triton", "-o", out]
    assert call_main(command, monkeypatch, capfd)[0] == 0
    (out / "mark").touch()
    code, _, said = call_main(command, monkeypatch, capfd)
    assert (code, "exists already" in said) == (2, True)
    assert call_main([*command, "--force"], monkeypatch, capfd)[0] == 0
    assert not (out / "mark").exists()
    (out / "txl-package.json").unlink()
    code, _, said = call_main([*command, "--force"], monkeypatch, capfd)
    assert code == 2
    assert "replaces only packages" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]


def test_a_place_inside_the_bundle_is_refused(tmp_path, monkeypatch, capfd):
    bundle = counting().write(tmp_path / "own.txl")
    before = sorted(bundle.rglob("*"))
    command = ["package", bundle, "--target", "triton", "-o", bundle / "models"]
    code, _, said = call_main(command, monkeypatch, capfd)
    assert (code, "expected a place beside it" in said) == (2, True)
    assert sorted(bundle.rglob("*")) == before


def test_a_bundle_that_was_altered_leaves_nothing(bundle, tmp_path, monkeypatch, capfd):
    broken = counting().write(tmp_path / "broken.txl")
    weights = broken / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    code, _, said = call_main(["package", broken, "--target", "triton", "-o", tmp_path / "models"], monkeypatch, capfd)
    assert code == 2
    assert "SHA-256" in said
    assert [path.name for path in tmp_path.iterdir()] == ["broken.txl"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--sequences=0", "--sequences is 0"),
        ("--idle-seconds=nan", "--idle-seconds is nan"),
        ("--segment-length=4", "--segment-length is for --target c"),
    ],
)
def test_numbers_out_of_range_are_refused(bundle, tmp_path, monkeypatch, capfd, option, said):
    command = ["package", bundle, "--target", "triton", "-o", tmp_path / "models", option]
    code, _, error = call_main(command, monkeypatch, capfd)
    assert (code, said in error) == (2, True)


def test_what_a_server_s_python_lacks_is_said_in_a_line(monkeypatch):
    monkeypatch.setattr(inside, "find_spec", lambda name: None if name in ("onnxruntime", "msgspec") else object())
    assert inside.missing("cpu").startswith("msgspec, onnxruntime not found by Python 3.")
    assert inside.missing("tensorrt").startswith("msgspec not found by Python 3.")
    monkeypatch.setattr(sys, "version_info", (3, 8))
    assert "expected 3.10 or newer" in inside.missing("cpu")


def test_a_server_that_misreads_arrays_is_refused():
    from stand_ins import triton_server

    class Swapped(triton_server.Tensor):
        @staticmethod
        def from_dlpack(name, array):
            return triton_server.Tensor(name, array * 0 + 97)

    assert inside.misread(triton_server) == ""
    broken = type("server", (), {"Tensor": Swapped})
    assert "[97, 98, 99, 100, 101] became [97, 97, 97, 97, 97]" in inside.misread(broken)
