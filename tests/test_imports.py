"""The runtime needs numpy, msgspec, safetensors and its engine; nothing else is ever imported."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import txl_export
import txl_runtime

# What the runtime may load, beside the standard library. typing_extensions is msgspec's, where it is installed;
# flatbuffers, packaging and google (protobuf) are ONNX Runtime's declared needs.
RUNTIME = {"txl_runtime", "numpy", "msgspec", "typing_extensions"}
ENGINE = {"onnxruntime", "flatbuffers", "packaging", "google"}
ALLOWED = RUNTIME | ENGINE | {"safetensors"}

EVERYTHING = """
import numpy as np
import txl_runtime
from txl_runtime.selftest import run_selftest

model = txl_runtime.load(bundle)
stream = model.stream()
assert model.vocabulary is not None
text = np.tile(model.vocabulary.encode(b"nothing but numpy"), (stream.batch_size, 1))
first = stream.feed(text)
stream.score(text)
stream.snapshot().save(place)
tokens = list(stream.generate(text, 5, seed=1))
stream.restore(txl_runtime.StreamState.load(place))
assert all((a == b).all() for a, b in zip(tokens, stream.generate(text, 5, seed=1), strict=True))
stream.select([0])
stream.reset()
model.bundle.report()
run_selftest(model).require()
try:
    txl_runtime.load(place)
except txl_runtime.TxlError:
    pass
"""


def loaded_by(code: str, **names: str) -> set[str]:
    """Top-level names of the modules that some code loads in a process of its own, the standard library's aside."""
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    program = f"import sys\nbefore = set(sys.modules)\n{given}{code}\nimport json\n"
    program += "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = set(json.loads(done.stdout)) - set(sys.stdlib_module_names)
    return {name for name in found if not name.startswith(("_cython_", "cython_runtime"))}  # NumPy's, without a file


def test_importing_the_runtime_loads_no_engine_and_nothing_that_is_not_its_own():
    loaded = loaded_by("import txl_runtime")
    assert loaded >= {"txl_runtime", "numpy", "msgspec"}
    assert loaded <= RUNTIME


def test_a_whole_stream_loads_nothing_but_the_runtime_and_its_engine(make_bundle, tmp_path):
    bundle = make_bundle(config={"vocab_size": 256}, vocabulary=True)
    loaded = loaded_by(EVERYTHING, bundle=str(bundle), place=str(tmp_path / "a.state"))
    assert loaded >= {"txl_runtime", "numpy", "msgspec", "onnxruntime", "safetensors"}
    assert loaded <= ALLOWED
    assert not loaded & {"torch", "onnx", "onnxscript", "onnx_ir", "typer", "rich", "txl_export", "txl_deploy"}


def test_every_module_of_the_runtime_can_be_imported_alone_without_an_engine():
    folder = Path(txl_runtime.__file__).parent
    paths = [path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py")]
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    assert "txl_runtime.host.onnxruntime_cpu" in names
    assert loaded_by("".join(f"import {name}\n" for name in names)) <= RUNTIME


def test_the_engine_is_missed_by_name(make_bundle):
    code = """
import txl_runtime
sys.modules["onnxruntime"] = None
try:
    txl_runtime.load(bundle)
except txl_runtime.BackendError as error:
    assert "onnxruntime is not installed" in str(error) and "pip install 'txl-deploy[cpu]'" in str(error), error
else:
    raise AssertionError("loaded without an engine")
del sys.modules["onnxruntime"]
"""
    assert "onnxruntime" not in loaded_by(code, bundle=str(make_bundle(batch_size=3, config={})))


@pytest.mark.parametrize("package", [txl_runtime, txl_export], ids=lambda package: package.__name__)
def test_what_is_public_is_what_is_listed(package):
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert package.__all__ == sorted(package.__all__, key=lambda name: (not name[0].isupper(), name))
    assert set(package.__all__) == public


def test_the_documented_interface_is_there():
    assert {"load", "Model", "Stream", "StreamState", "TxlError", "UsageError", "BundleError"} <= set(
        txl_runtime.__all__
    )
    assert {"export", "verify"} <= set(txl_export.__all__)
    attributes = {
        txl_runtime.Model: "manifest vocab_size memory_length batch_size segment_lengths stream",
        txl_runtime.Stream: "step feed score generate memory fill reset select snapshot restore batch_size",
        txl_runtime.StreamState: "save load model_id fill memory batch_size",
    }
    for kind, names in attributes.items():
        assert set(names.split()) <= {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
    parameters = inspect.signature(txl_runtime.load).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "path": inspect.Parameter.empty,
        "backend": "auto",
        "threads": None,
        "verify_files": True,
        "update": None,
        "lean": False,
    }


def test_a_model_says_what_it_is(make_bundle):
    model = txl_runtime.load(make_bundle(batch_size=3, config={}))
    assert (model.vocab_size, model.memory_length, model.batch_size) == (60, 7, 3)
    assert model.segment_lengths == (4, 1), "largest first"
    assert model.vocabulary is None
    assert model.manifest.model_id == txl_runtime.load(make_bundle(batch_size=3, config={})).manifest.model_id
    assert np.asarray(model.stream().fill).tolist() == [0, 0, 0]


def test_each_module_lists_what_it_defines():
    folder = Path(txl_runtime.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        assert all(hasattr(module, listed) for listed in module.__all__), name
