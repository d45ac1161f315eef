"""`build --target native`: compile, verify, place; and one line where that is impossible."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from frozen import frozen
from native_steps import best, compiled
from support import call_main
from txl_engines import native
from txl_engines.native import build_native, compile_step, find_compiler, find_cross_compiler
from txl_runtime import load
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.errors import BackendError, CheckError, UsageError
from txl_runtime.native import opening
from txl_runtime.native.library import Shape
from txl_runtime.native.opening import SIDECAR, STEP, kept_step, platform_name
from txl_runtime.selftest import run_selftest


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of a kept bundle; what is compiled is the library that all tests share."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = compiled(best())
    monkeypatch.setattr(native, "compile_step", lambda command, path, *_: shutil.copy(library, path))

    def copy(name):
        return shutil.copytree(frozen(name), tmp_path / f"{name}.txl")

    return copy


@pytest.mark.parametrize(
    ("name", "cache"), [("ring", "fp32"), ("int8", "fp32"), ("int8", "fp16"), ("clusters", "fp16")]
)
def test_a_built_step_is_listed_verified_and_runs(copied, name, cache):
    bundle = copied(name)
    made = build_native(bundle, cache)
    assert made.sidecar.compared["logprobs"] < (1e-5 if cache == "fp32" else 0.1)
    model = load(bundle, "native", threads=1)
    assert f"keys and values in {cache}" in model.backend.description
    assert run_selftest(model).passed
    assert kept_step(file_sha256(bundle / SIDECAR)).read_bytes() == (bundle / STEP).read_bytes()


@pytest.mark.parametrize(("name", "cache"), [("ring", "fp32"), ("clusters", "int8"), ("int8", "int8")])
def test_a_step_of_lower_precision_says_so_and_is_judged_by_it(copied, name, cache):
    bundle = copied(name)
    made = build_native(bundle, cache, bf16=name != "int8")
    assert made.sidecar.precision == ("int8" if name == "int8" else "bf16")
    assert 1e-8 < made.sidecar.compared["kl"] < 1e-4
    model = load(bundle, "native", threads=1)
    assert f"weights in {made.sidecar.precision}, keys and values in {cache}" in model.backend.description
    assert (model.backend.precision or model.manifest.precision) == ("int8" if cache == "int8" else "bf16")
    assert run_selftest(model).passed


def test_only_an_fp32_bundle_is_rounded_to_bf16(copied, monkeypatch, capfd):
    said = call_main(["build", copied("int8"), "--target", "native", "--precision", "bf16"], monkeypatch, capfd)
    assert said.code == 2
    assert "its precision is int8, expected fp32 for --precision bf16" in said.stderr


def test_a_step_that_takes_short_segments_for_long_ones_is_not_placed(make_bundle, tmp_path, monkeypatch):
    """With `export --lookup` up to 5 tokens give what single steps give; once the memory is full that differs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = make_bundle({"memory_length": 6}, segment_length=(64, 1), lookup=True, verify=False)
    bundle, library = shutil.copytree(made, tmp_path / "b.txl"), compiled(best())
    monkeypatch.setattr(native, "compile_step", lambda command, path, *_: shutil.copy(library, path))
    assert build_native(bundle).sidecar.compared["logprobs"] < 1e-5
    whole = Shape.__init__
    monkeypatch.setattr(Shape, "__init__", lambda self, **given: whole(self, **given | {"single_steps": 0}))
    with pytest.raises(CheckError, match="differs from ONNX Runtime"):
        build_native(bundle)


def test_a_compiler_that_is_no_command_is_named(monkeypatch):
    monkeypatch.setenv("CC", '"gcc')
    with pytest.raises(BackendError, match=r"CC is '\"gcc' \(No closing quotation\), expected a command"):
        find_compiler()


def test_a_step_that_computes_something_else_is_not_placed(copied, monkeypatch):
    bundle, whole = copied("ring"), native.open_step
    before = sorted(path.relative_to(bundle) for path in bundle.rglob("*"))

    def wrong(*arguments, **more):
        opened = whole(*arguments, **more)
        run = opened.engine.bind

        def bind(program, inputs, outputs):
            call = run(program, inputs, outputs)
            if program.kind != "hidden":
                return call

            def called():
                call()
                next(iter(outputs.values()))[...] += np.float32(1e-2)

            return called

        opened.engine.bind = bind
        return opened

    monkeypatch.setattr(native, "open_step", wrong)
    with pytest.raises(CheckError, match=r"differs from ONNX Runtime \(.*it was not placed"):
        build_native(bundle)
    assert sorted(path.relative_to(bundle) for path in bundle.rglob("*")) == before


def test_without_a_compiler_there_is_one_line(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    with pytest.raises(
        BackendError, match=r"^no C compiler was found, expected cc, gcc, clang or \$CC; install one.*ziglang$"
    ):
        find_compiler()
    monkeypatch.setattr(native, "find_spec", lambda name: object())
    assert find_compiler()[1:] == ("-m", "ziglang", "cc")
    monkeypatch.setenv("CC", "ccache gcc")
    assert find_compiler() == ("ccache", "gcc")
    monkeypatch.setenv("CC", "./cc -O2")
    assert find_compiler() == (str(Path("cc").absolute()), "-O2")


def test_a_compiler_that_fails_says_why(tmp_path):
    compiled(best())  # skips where there is no compiler
    with pytest.raises(BackendError, match=r"failed .*nonsense.*expected GCC 11"):
        compile_step(find_compiler(), tmp_path / "step.so", "plain", ("-fnonsense",))
    with pytest.raises(BackendError, match="no-such-compiler: No such file"):
        compile_step(("no-such-compiler",), tmp_path / "step.so", "plain")


@pytest.mark.parametrize(("name", "said"), [("hidden", "not a ring"), ("half", "precision is fp16")])
def test_a_bundle_that_it_cannot_run_is_refused_before_compiling(name, said):
    with pytest.raises(UsageError, match=said):
        build_native(frozen(name))


def test_the_command_prints_what_was_built(copied, monkeypatch, capfd):
    bundle = copied("ring")
    said = call_main(["build", bundle, "--target", "native"], monkeypatch, capfd)
    assert "checked: 32 segments beside ONNX Runtime" in said.stdout
    said = call_main(["build", bundle, "--target", "native", "--cache", "fp16", "--json"], monkeypatch, capfd)
    assert json.loads(said.stdout)["cache"] == "fp16"


def test_inspect_says_what_the_step_is_and_who_takes_it(copied, monkeypatch, capfd):
    def look():
        document = json.loads(call_main(["inspect", bundle, "--json"], monkeypatch, capfd).stdout)
        shown = call_main(["inspect", bundle], monkeypatch, capfd)
        assert shown.code == 0
        return document, " ".join(shown.stdout.split())

    bundle = copied("ring")
    document, shown = look()
    assert document["native"] is None
    assert "compiled step" not in shown
    made = build_native(bundle, "fp16").sidecar
    document, shown = look()
    step = document["native"]
    assert (step["file"], step["cache"], step["bytes"]) == (STEP, "fp16", made.bytes)
    assert (step["instructions"], step["platform"], step["compiler"]) == (best(), made.platform, made.compiler)
    assert (step["compared"], tuple(step["reached"])) == (made.compared, made.reached)
    assert (step["not_here"], step["not_auto"], document["backends"]["native"]) == ("", "", "")
    assert "yes, and backend auto takes it" in shown
    assert f"{made.platform} with {best()}" in shown
    kept_step(file_sha256(bundle / SIDECAR)).unlink()
    document, shown = look()
    assert document["native"]["not_here"] == ""
    assert "did not compile here" in document["native"]["not_auto"]
    assert "yes, where backend native is named; not by auto" in shown
    monkeypatch.setattr(opening, "platform_name", lambda: "Linux-aarch64")
    document, shown = look()
    assert "this is Linux-aarch64" in document["backends"]["native"]
    assert "runs here no: " in shown
    (bundle / STEP).write_bytes(b"x" * made.bytes)
    document, shown = look()
    assert document["native"] is None
    assert STEP in document["broken_engines"][0]
    assert STEP in shown


def test_a_step_for_another_platform_says_that_only_its_sources_were_verified(copied, monkeypatch, capfd):
    """It is no step of this user's machine: "auto" goes on without it, and who names it is told the platform."""
    bundle = copied("ring")
    monkeypatch.setattr(native, "find_cross_compiler", lambda platform: ("cc", platform))
    monkeypatch.setattr(native, "_version", lambda command: " ".join(command))
    said = call_main(["build", bundle, "--target", "native", "--platform", "linux-aarch64"], monkeypatch, capfd)
    assert "not verified on its platform" in said.stdout, said.stderr
    facts = json.loads((bundle / SIDECAR).read_text())
    assert (facts["platform"], facts["instructions"]) == ("Linux-aarch64", "neon")
    assert (facts["compiler"], facts["verified_on"]) == ("cc linux-aarch64", f"{platform_name()} ({best()})")
    assert not kept_step(file_sha256(bundle / SIDECAR)).exists()
    assert load(bundle).backend.name == "cpu"
    with pytest.raises(BackendError, match="was compiled for Linux-aarch64 with neon, this is Linux-x86_64; build"):
        load(bundle, "native")


def test_this_platform_by_its_name_is_built_as_without_it(copied):
    assert build_native(copied("ring"), platform=platform_name().lower()).sidecar.verified_on == ""


def test_a_compiler_of_another_platform_is_ziglangs_or_named(monkeypatch):
    monkeypatch.setattr(native, "find_spec", lambda name: object())
    assert find_cross_compiler("linux-aarch64")[-2:] == ("-target", "aarch64-linux-gnu.2.28")
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert find_cross_compiler("linux-aarch64") == ("/usr/bin/aarch64-linux-gnu-gcc",)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(BackendError, match=r"^no C compiler for linux-aarch64 .*aarch64-linux-gnu-gcc or: pip"):
        find_cross_compiler("linux-aarch64")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("native", "--sm", "89"), "--sm is for engines of GPUs"),
        (("rtx", "--cache", "fp16"), "--cache is for --target native"),
        (("cuda", "--precision", "bf16"), "--precision bf16 is for --target native"),
        (("cuda", "--platform", "linux-aarch64"), "--platform is for --target native"),
    ],
)
def test_options_of_the_other_targets_are_refused(options, said, monkeypatch, capfd):
    called = call_main(["build", frozen("ring"), "--target", *options], monkeypatch, capfd)
    assert called.code == 2
    assert said in called.stderr


@pytest.mark.parametrize(("cache", "bf16"), [("fp32", False), ("fp16", False), ("int8", False), ("fp16", True)])
def test_a_built_step_passes_every_gate_beside_pytorch(copied, cache, bf16, monkeypatch, capfd):
    """Chains of segments, drift, and bits: idle rows, independence, snapshots. The lowest precision is what judges."""
    bundle = copied("ring")
    build_native(bundle, cache, bf16=bf16)
    said = call_main(["verify", bundle, "--backend", "native"], monkeypatch, capfd)
    assert said.code == 0, said.stdout + said.stderr
    assert ("log-probs max abs" in said.stdout) == (cache == "fp32" and not bf16), said.stdout
    lowest = "bf16" if bf16 else cache
    assert f"{lowest} on native" in said.stdout or f"{lowest} on a step in C" in said.stdout, said.stdout


def test_a_compiler_that_writes_nothing_and_a_cache_folder_that_cannot_be_are_one_line(copied, monkeypatch, tmp_path):
    with pytest.raises(BackendError, match=r"^true failed \(nothing\), expected GCC"):
        compile_step(("true",), tmp_path / "step.so", "plain")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BackendError, match=r"file/txl-deploy/native: Not a directory, .* set XDG_CACHE_HOME"):
        build_native(copied("ring"))
