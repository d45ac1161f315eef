"""`build --target cuda`: composed graphs for ONNX Runtime, written into the bundle without a GPU or PyTorch."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from frozen import frozen
from resealing import contents
from support import cli
from txl_engines import composing
from txl_engines.building import ComposedEngines
from txl_engines.bundles import build_bundle, default_kinds
from txl_engines.composing import compose, whole_programs
from txl_engines.publishing import LOCK
from txl_report.numbers import prefixed
from txl_runtime import load
from txl_runtime.bundle.engines.files import bundle_engines
from txl_runtime.bundle.engines.sidecar import read_sidecar
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.streaming.programs import KINDS, Programs
from verified_steps import Heard


@pytest.mark.parametrize("update", [None, "rolled"])
def test_every_whole_program_is_written_and_listed(bundle: Path, update: str | None):
    before = contents(bundle)
    made = build_bundle(bundle, "cuda", update=update)
    opened = open_bundle(bundle)
    programs = whole_programs(opened.manifest, update or "ring")
    assert (made.target, made.update) == ("cuda", update or "ring")
    assert [engine.program for engine in made.engines] == [program.name for program in programs]
    for engine, program in zip(made.engines, programs, strict=True):
        assert engine.file == f"engines/cuda/{program.name}.onnx"
        path = bundle / engine.file
        assert path.read_bytes() == compose(opened, program), "what was composed when it was loaded"
        assert path.stat().st_size < (bundle / "weights.safetensors").stat().st_size
        weights = onnx.load(path, load_external_data=False).graph.initializer
        outside = {entry.value for tensor in weights for entry in tensor.external_data if entry.key == "location"}
        assert outside == {"weights.safetensors"}, "weights stay in the bundle's one file"
        sidecar = engine.sidecar
        assert read_sidecar(path.with_suffix(".json")) == sidecar
        assert sidecar.identity.onnx == sidecar.sha256 == opened.manifest.files[engine.file].sha256
        assert (sidecar.identity.flavour, sidecar.identity.platform, sidecar.identity.device) == (
            "onnxruntime",
            "any",
            None,
        )
        assert sidecar.attention_layers == 2
        assert sidecar.in_place == (4 if update is None else 0)
        opened.check(engine.file)
    after = contents(bundle)
    assert {name for name in after if not name.startswith("engines/")} == set(before)
    assert {name for name in before if after[name] != before[name]} == {"manifest.json"}
    assert dict(bundle_engines(opened)) == {engine.file: engine.sidecar for engine in made.engines}
    assert load(bundle, backend="cpu").stream().step([[1]]).shape[2] > 1


def test_it_is_reused_until_something_changed_and_forced_ones_are_the_same(bundle: Path, monkeypatch):
    first = build_bundle(bundle, "cuda")
    forced = build_bundle(bundle, "cuda", force=True)
    assert not any(engine.reused for engine in forced.engines)
    assert [engine.sidecar.sha256 for engine in forced.engines] == [engine.sidecar.sha256 for engine in first.engines]
    before = contents(bundle)
    monkeypatch.setattr(ComposedEngines, "make", None)  # nothing is made any more
    again = build_bundle(bundle, "cuda")
    assert all(engine.reused for engine in again.engines)
    assert contents(bundle) == before
    assert LOCK not in before
    monkeypatch.undo()

    path = bundle / first.engines[0].file.replace(".onnx", ".json")
    document = json.loads(path.read_text())
    document["identity"] |= {"version": "recipe 0", "onnx": "0" * 64}
    path.write_text(json.dumps(document))
    heard = Heard()
    again = build_bundle(bundle, "cuda", listener=heard)
    name = first.engines[0].file
    assert heard.warnings == [
        f"{name} was composed by recipe 0, this version of txl-deploy takes recipe 2; built again",
        f"{name} was built from another graph file; built again",
    ]
    assert [engine.reused for engine in again.engines] == [False, True, True, True]
    assert {file: digest for file, digest in contents(bundle).items() if file.endswith(".onnx")} == {
        file: digest for file, digest in before.items() if file.endswith(".onnx")
    }


def test_both_targets_of_a_bundle_stand_side_by_side(bundle: Path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    build_bundle(bundle, "rtx")
    build_bundle(bundle, "cuda", update="ring")
    build_bundle(bundle, "cuda", update="rolled")
    names = [name for name, _ in bundle_engines(open_bundle(bundle))]
    assert len(names) == 12
    assert sum(name.startswith("engines/cuda/") for name in names) == 8


def test_kinds_of_programs_can_be_left_out(bundle: Path):
    """Each engine of TensorRT holds the weights, so a small device is better off with those that it needs."""
    made = build_bundle(bundle, "cuda", kinds=("logprobs", "score"))
    assert [engine.sidecar.identity.kind for engine in made.engines] == ["logprobs", "logprobs", "score"]
    programs = [engine.sidecar.identity.as_program() for engine in made.engines]
    found = Programs(open_bundle(bundle).manifest, programs, "cuda")
    wanted = {want: found.find(want, 4, ()).kind for want in KINDS}
    assert wanted == {"rows": "logprobs", "last": "logprobs", "next": "logprobs", "nll": "score"}
    whole = build_bundle(bundle, "cuda")
    assert [engine.reused for engine in whole.engines].count(True) == 3, "the others can be added later"
    heard = Heard()
    build_bundle(bundle, "cuda", kinds=("logprobs",), listener=heard)
    assert [message.split(" ", 1)[1] for message in heard.warnings] == [
        "is not among the programs of this build; removed (--programs all builds all)"
    ] * 2
    kinds = [sidecar.identity.kind for _, sidecar in bundle_engines(open_bundle(bundle))]
    assert kinds == ["logprobs", "logprobs"]
    assert len(list((bundle / "engines" / "cuda").iterdir())) == 4
    assert build_bundle(bundle, "cuda", update="rolled").engines
    assert len(bundle_engines(open_bundle(bundle))) > 2, "engines of the other rule stay"


def test_engines_that_this_version_has_no_program_for_go(bundle: Path, monkeypatch):
    """Nobody would build them again: the bundle would be refused for them after every change of the library."""
    with monkeypatch.context() as patch:
        patch.setattr(composing, "SHORT_ROW", 1)
        build_bundle(bundle, "cuda")
    kinds = {sidecar.identity.kind for _, sidecar in bundle_engines(open_bundle(bundle))}
    assert kinds == {"logprobs", "next", "score"}
    build_bundle(bundle, "cuda")
    kinds = {sidecar.identity.kind for _, sidecar in bundle_engines(open_bundle(bundle))}
    assert kinds == {"logprobs", "last", "score"}


def test_kinds_of_programs_are_checked(bundle: Path):
    with pytest.raises(UsageError, match="--programs holds rows, the bundle has logprobs, last, score; name some"):
        build_bundle(bundle, "cuda", kinds=("rows",))
    with pytest.raises(UsageError, match="--programs is score, expected logprobs among them"):
        build_bundle(bundle, "cuda", kinds=("score",))
    refused = cli("build", bundle, "--target", "cuda", "--programs", "last, score")
    assert (refused.returncode, "add logprobs" in refused.stderr) == (2, True), refused.stderr


def test_what_spares_rows_alone_is_left_out_where_rows_are_short():
    manifest = open_bundle(frozen("ring")).manifest
    assert default_kinds(manifest) == ("logprobs",)
    for size, kind, wanted in ((1024, "hidden", ("logprobs",)), (1025, "hidden", None), (60, "step", None)):
        like: Any = SimpleNamespace(vocab_size=size, programs=(SimpleNamespace(kind=kind),))
        assert default_kinds(like) == wanted


def test_gpus_cannot_be_asked_for(bundle: Path):
    with pytest.raises(
        UsageError, match=r"--sm is 86, 120, but the graphs of --target cuda are for every GPU .* leave"
    ):
        build_bundle(bundle, "cuda", gpus=(86, 120))


def test_a_lock_of_a_killed_build_holds_nobody_back(bundle: Path):
    (bundle / LOCK).touch()
    (bundle / ".building-left").mkdir()
    build_bundle(bundle, "cuda")
    assert not [path for path in bundle.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_a_bundle_that_cannot_be_written_to_is_named(bundle: Path, monkeypatch):
    from filelock import FileLock

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(FileLock, "acquire", denied)
    with pytest.raises(UsageError, match="Permission denied; expected a bundle that can be written to"):
        build_bundle(bundle, "cuda")
    monkeypatch.setattr(FileLock, "acquire", refused)
    with pytest.raises(UsageError, match="Read-only file system; expected a bundle that can be written to"):
        build_bundle(bundle, "cuda")
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(BackendError, match="filelock is not installed, expected it to write into a bundle"):
        build_bundle(bundle, "cuda")


def test_it_needs_no_torch_and_no_onnx_runtime(bundle: Path):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['onnxruntime'] = None\n"
        "from txl_engines.bundles import build_bundle\n"
        f"print(len(build_bundle({str(bundle)!r}, 'cuda').engines))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


@pytest.mark.device
def test_the_command(bundle: Path):
    done = cli("build", bundle, "--target", "cuda", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["target"], document["library"], document["update"]) == ("cuda", "onnxruntime (recipe 2)", "ring")
    assert [entry["program"] for entry in document["programs"]] == ["logprobs-ring-4", "logprobs-ring-1"]
    graphs = [onnx.load(bundle / entry["file"], load_external_data=False).graph for entry in document["programs"]]
    places = [entry for graph in graphs for tensor in graph.initializer for entry in tensor.external_data]
    weights = sum(int(entry.value) for entry in places if entry.key == "length")
    assert (document["weight_bytes"], document["shared_weight_bytes"]) == (weights, 0)
    assert weights > 1.5 * (bundle / "weights.safetensors").stat().st_size
    for entry in document["programs"]:
        assert {"program", "file", "bytes", "seconds", "kernels", "attention_layers", "fused_attention"} <= set(entry)
        assert entry["bytes"] == (bundle / entry["file"]).stat().st_size
        assert (entry["kernels"], entry["reused"], entry["verified_on"]) == (None, False, ["graph"])
    assert "writing logprobs-ring-4 for ONNX Runtime" in done.stderr
    again = cli("build", bundle, "--target", "cuda")
    assert again.returncode == 0, again.stderr
    assert "was there" in again.stdout
    assert "not yet run on a GPU" in again.stdout
    held = f"weights on the device: {prefixed(weights)} in 2 engines, each of which holds its own"
    assert held in again.stdout
    spared = "not built: last, score, which only spare the fetching of short rows; --programs all builds them"
    assert spared in again.stdout
    looked = json.loads(cli("inspect", bundle / document["programs"][0]["file"], "--json").stdout)
    assert (looked["kind"], looked["flavour"], looked["program"]) == ("engine", "onnxruntime", "logprobs-ring-4")
    shown = cli("inspect", bundle / document["programs"][0]["file"])
    assert shown.returncode == 0, shown.stderr
    assert "any GPU" in shown.stdout
    own = sum(
        int(entry.value) for tensor in graphs[0].initializer for entry in tensor.external_data if entry.key == "length"
    )
    assert f"{prefixed(own)} held by the engine" in shown.stdout
    assert "by nobody" in shown.stdout
    listed = json.loads(cli("inspect", bundle, "--json").stdout)
    assert [engine["file"] for engine in listed["engines"]] == sorted(entry["file"] for entry in document["programs"])
    assert listed["broken_engines"] == []
    assert f"onnxruntime, ring: {held}" in cli("inspect", bundle).stdout
    everything = cli("build", bundle, "--target", "cuda", "--programs", "all")
    assert "in 4 engines, each of which holds its own" in everything.stdout
    assert "not built" not in everything.stdout
    fewer = cli("build", bundle, "--target", "cuda")
    assert fewer.stderr.count("removed (--programs all builds all)") == 2, fewer.stderr
    shared = cli("build", bundle, "--target", "cuda", "--weights", "once")
    assert (shared.returncode, shared.stdout) == (2, "")
    assert "--weights is once, but engines of ring memory by onnxruntime (recipe 2) hold their own" in shared.stderr
    wrong = cli("build", bundle, "--target", "cuda", "--sm", "86")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "leave --sm out" in wrong.stderr
