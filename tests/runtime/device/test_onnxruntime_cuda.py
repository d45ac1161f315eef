"""Backend cuda: the graphs of `build --target cuda`, run here by the CPU's provider at addresses of the host."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest
import txl_runtime
from stand_ins.engine import StandInDevice
from txl_engines.bundles import build_bundle
from txl_engines.recording import record_pass
from txl_runtime import BackendError, BundleError, load
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import choosing, onnxruntime_cuda
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.engines.files import find_engines
from txl_runtime.selftest import run_selftest

B, V = 2, 60
CPU = "CPUExecutionProvider"
both = pytest.mark.parametrize("update", ["ring", "rolled"])


@pytest.fixture(scope="module")
def built(make_bundle, tmp_path_factory):
    """A bundle with graphs for ONNX Runtime, of some update rules."""
    made: dict[tuple[str, ...], Path] = {}

    def build(*updates: str) -> Path:
        if updates not in made:
            place = tmp_path_factory.mktemp("built") / "small.txl"
            path = Path(shutil.copytree(make_bundle(batch_size=B, config={"cutoffs": (20, 40), "div_val": 2}), place))
            for update in updates:
                build_bundle(path, "cuda", update=update)
            made[updates] = path
        return made[updates]

    return build


def opened(path: Path, update: str | None = None) -> DeviceBackend:
    bundle, device = open_bundle(path), StandInDevice()
    sessions = onnxruntime_cuda.OrtSessions(onnxruntime, bundle, [CPU], "cpu")
    queue = device.queue()
    queue.push = lambda name, work, *_: work()  # its work is done at once, as ONNX Runtime waits for its own
    return onnxruntime_cuda.load_onnxruntime(sessions, bundle, device, queue, update, CPU)


def load_with(path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(choosing, "open_device", lambda *_: backend)
        return load(path, backend=backend.name)


@both
def test_onnx_runtime_streams_by_address(built, monkeypatch, update):
    path = built(update)
    backend = opened(path)
    assert "run on the CPU" not in backend.description
    assert {program.update for program in backend.programs} == {update}
    ours = load_with(path, backend, monkeypatch).stream()
    theirs = load(path, backend="cpu", update=update).stream()
    draws = np.random.default_rng(0)
    for _ in range(30):
        tokens = draws.integers(0, V, (B, int(draws.integers(2, 10))))
        np.testing.assert_allclose(ours.feed(tokens), theirs.feed(tokens), rtol=0, atol=1e-5)
        np.testing.assert_allclose(ours.score(tokens), theirs.score(tokens), rtol=0, atol=1e-5)
        drawn = [list(stream.generate(tokens, 3, temperature=0)) for stream in (ours, theirs)]
        assert np.array_equal(*drawn)


def test_graphs_that_pass_the_self_test_say_where(built, tmp_path, monkeypatch):
    path = Path(shutil.copytree(built("ring"), tmp_path / "a.txl"))
    model = load_with(path, opened(path), monkeypatch)
    run_selftest(model).require()
    assert set(record_pass(model)) == {program.name for program in model.backend.programs}
    for engine in find_engines(open_bundle(path), "cuda"):
        assert engine.sidecar.verified_on == ("graph", "self-test on a stand-in")
    assert record_pass(load(path, backend="cpu")) == ()


def test_the_rule_is_the_best_that_was_built_and_that_this_onnx_runtime_has(built, monkeypatch):
    assert opened(built("ring", "rolled")).update == "ring"
    assert opened(built("ring", "rolled"), "rolled").update == "rolled"
    assert opened(built("rolled")).update == "rolled"
    with pytest.raises(BackendError, match=r"has cuda engines of rolled memory alone.*--target cuda --update ring"):
        opened(built("rolled"), "ring")
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.2")  # the last without TensorScatter
    assert opened(built("ring", "rolled")).update == "rolled"
    with pytest.raises(BackendError, match=r"has cuda engines of ring memory alone.*--target cuda --update rolled"):
        opened(built("ring"))


def test_a_bundle_without_graphs_says_how_to_build_them(make_bundle):
    path = make_bundle(batch_size=B, config={})
    with pytest.raises(BackendError, match=r"has no cuda engines.*txl-deploy build .* --target cuda"):
        opened(path)
    with pytest.raises(BackendError, match=r"has no cuda engines.*txl-deploy build .* --target cuda"):
        onnxruntime_cuda.open_onnxruntime_cuda(open_bundle(path))
    with pytest.raises(BackendError, match=r"cannot run here: the bundle has no engines.* --target cuda"):
        load(path, backend="cuda")


def vouch(path: Path, name: str, sidecar: bool = False) -> None:
    """Have the manifest vouch for a file as it is; and the sidecar too."""
    files = [path / "engines/cuda" / name]
    if sidecar:
        facts = files[0].with_suffix(".json")
        document = msgspec.json.decode(facts.read_bytes())
        document |= {"sha256": file_sha256(files[0]), "bytes": files[0].stat().st_size}
        facts.write_bytes(msgspec.json.encode(document))
        files.append(facts)
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes())
    for file in files:
        record = {"size": file.stat().st_size, "sha256": file_sha256(file)}
        manifest["files"][file.relative_to(path).as_posix()] = record
    (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))


def test_a_graph_that_is_not_what_was_built_is_refused(built, tmp_path):
    path = Path(shutil.copytree(built("ring"), tmp_path / "a.txl"))
    graph = path / "engines/cuda/logprobs-ring-1.onnx"
    whole = graph.read_bytes()
    graph.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
    with pytest.raises(BundleError, match=r"SHA-256 is not the manifest's.*build it with `txl-deploy build` again"):
        opened(path)
    vouch(path, graph.name)
    with pytest.raises(BundleError, match=r"is not the file that its sidecar describes; txl-deploy build .* --force"):
        opened(path)
    shutil.copy(path / "engines/cuda/logprobs-ring-4.onnx", graph)
    vouch(path, graph.name, sidecar=True)
    with pytest.raises(
        BundleError,
        match=r"logprobs-ring-1: one of its inputs is tokens int32\[2, 4\], expected tokens int32\[2, 1\].*build it",
    ):
        opened(path)
    graph.write_bytes(b"\xff" * 40)
    vouch(path, graph.name, sidecar=True)
    with pytest.raises(BundleError, match=r"logprobs-ring-1: .*expected a graph ONNX Runtime can load; build it again"):
        opened(path)


def test_graphs_that_were_composed_in_another_way_are_refused(built, tmp_path):
    path = Path(shutil.copytree(built("ring"), tmp_path / "a.txl"))
    for facts in (path / "engines/cuda").glob("*.json"):
        document = msgspec.json.decode(facts.read_bytes())
        document["identity"]["version"] = "recipe 0"
        facts.write_bytes(msgspec.json.encode(document))
    with pytest.raises(
        BackendError, match=r"was composed by recipe 0, this version of txl-deploy takes recipe 2; txl-deploy build"
    ):
        opened(path)


def test_nodes_that_fall_back_are_named(built):
    bundle = open_bundle(built("rolled"))
    sessions = onnxruntime_cuda.OrtSessions(onnxruntime, bundle, [CPU], "cpu")
    engine = find_engines(bundle, "cuda")[0]
    sessions.executable(engine.program, bundle.file(engine.name).read_bytes())
    assert sessions.elsewhere(CPU) == {}
    (nodes,) = sessions.elsewhere("CUDAExecutionProvider").values()
    assert any("MatMul" in node for node in nodes)


def test_a_provider_that_does_not_start_is_no_fallback(built):
    class Started:
        def get_providers(self) -> list[str]:
            return [CPU]

    ort = SimpleNamespace(
        __version__="1",
        SessionOptions=onnxruntime.SessionOptions,
        InferenceSession=lambda *_, **__: Started(),
    )
    bundle = open_bundle(built("ring"))
    sessions = onnxruntime_cuda.OrtSessions(ort, bundle, [("CUDAExecutionProvider", {}), CPU], "cuda")
    with pytest.raises(BackendError, match="could not start CUDAExecutionProvider and took the CPU instead"):
        sessions.executable(find_engines(bundle, "cuda")[0].program, b"a graph")


def test_the_runtime_composes_nothing():
    for path in Path(txl_runtime.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"onnx", "onnx_ir", "txl_engines", "torch"}, path
