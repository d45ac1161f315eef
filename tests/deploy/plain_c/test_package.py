"""Packages in plain C: what is in them, what their own test says, and what is refused with nothing left behind."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from plain_c import BUNDLES, build, need, run
from resealing import reseal
from safetensors.numpy import save_file
from step_models import B, Graph, StepModel, state
from support import call_main
from txl_runtime.bundle.tables import Input, Output
from txl_runtime.errors import BackendError, BundleError, CheckError, UsageError

from txl_deploy.plain_c import compiling, generating, package
from txl_deploy.plain_c.package import package_c


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    need("cc", "make")
    out = tmp_path_factory.mktemp("plain") / "policy-c"
    return package_c(BUNDLES / "policy-1", out, name="policy")


def test_a_policy_becomes_files_whose_own_test_passes(policy, tmp_path):
    assert {path.name for path in policy.folder.iterdir()} == {
        *("policy.h", "policy.c", "test_policy.c", "Makefile", "CMakeLists.txt", "README.md", "txl-package.json")
    }
    told = json.loads((policy.folder / "txl-package.json").read_text())
    assert (told["target"], told["models"]) == ("c", ["policy"])
    sources = (policy.folder / f"{name}.c" for name in ("test_policy", "policy"))
    assert run(build(policy.folder, tmp_path / "replayed", *sources)).startswith("passed: 24 steps")


def test_a_package_tells_its_sizes_and_what_proves_it(policy):
    header, page = ((policy.folder / name).read_text() for name in ("policy.h", "README.md"))
    numbers = {name: int(value) for name, value in re.findall(r"#define POLICY_(\w+) (\d+)", header)}
    assert numbers["VERIFIED"] == numbers["BATCH_SIZE"] == 1
    assert (numbers["SEGMENT_LENGTH"], numbers["OBS_VALUES"], numbers["ACTION_VALUES"]) == (4, 24, 12)
    assert (numbers["STACK_BYTES"], numbers["CODE_BYTES"]) == (policy.stack_bytes, policy.code_bytes)
    assert 0 < policy.stack_bytes < 64_000
    assert 0 < policy.code_bytes < 64_000
    assert policy.state_bytes == 2 * 8 * 4 + 4
    assert numbers["MULTIPLY_ADDS"] == policy.multiply_adds == 4 * (6 * 24 + 8 * 24 + 8 * 3 + 8)
    assert policy.verified in header
    assert policy.verified in page
    assert "112 chained segments" in policy.verified


def test_a_test_of_a_package_fails_where_the_model_is_another(policy, tmp_path):
    """One weight is another: the replay says where, and its exit code is 1."""
    source = (policy.folder / "policy.c").read_text()
    weight = re.search(r"static const float weight_0\[\d+\] = {\n([^,]*)", source)
    (tmp_path / "policy.c").write_text(source[: weight.start(1)] + "3.0f" + source[weight.end(1) :])
    program = build(policy.folder, tmp_path / "replayed", policy.folder / "test_policy.c", tmp_path / "policy.c")
    with pytest.raises(AssertionError, match=r"^1: FAILED.*\n(?s:.*)expected"):
        run(program)


def test_without_a_compiler_a_package_is_refused_or_says_that_nobody_verified_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    words = ["package", BUNDLES / "policy-1", "--target", "c", "-o", tmp_path / "out", "--name", "policy"]
    code, _, said = call_main(words, monkeypatch, capfd)
    assert code == 2
    assert "found no compiler of C (no-such-compiler)" in said
    assert "--unverified" in said
    assert not list(tmp_path.iterdir())
    code, said, _ = call_main([*words, "--unverified", "--weights-file"], monkeypatch, capfd)
    assert code == 0
    assert "NOT VERIFIED" in said
    header, page = ((tmp_path / "out" / name).read_text() for name in ("policy.h", "README.md"))
    assert "NOT VERIFIED" in header
    assert "#define POLICY_VERIFIED 0" in header
    assert "STACK_BYTES" not in header
    assert "**Not verified.**" in page
    assert "not measured" in page


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("policy-16", {}, "leaves B open up to 16, expected one B for C; give --batch-size"),
        ("policy-16", {"batch_size": 17}, "--batch-size is 17, expected 1 … 16"),
        ("lockstep", {"batch_size": 1}, "programs have B 3 alone"),
        ("policy-1", {"lengths": (3,)}, "the segment length is 3, this bundle has 4, 1"),
        ("growing", {}, "state memory grows, expected states of fixed sizes"),
        ("half", {"batch_size": 1}, "is float16, which C99 has no type for"),
        ("policy-1", {"name": "double"}, "--name is 'double', expected a name that C and C++ leave free"),
        ("policy-1", {"max_bytes": 50}, "--max-bytes allows 50; package a smaller model"),
        ("nothing", {}, "nothing"),
    ],
)
def test_what_cannot_be_packaged_is_refused_in_one_line_and_leaves_nothing(tmp_path, monkeypatch, name, options, said):
    monkeypatch.setattr(package, "find_compiler", lambda: ["cc"])
    with pytest.raises((UsageError, BundleError)) as refused:
        package_c(BUNDLES / name, tmp_path / "out", **options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_what_states_start_as_is_told_and_counts_among_the_bytes(tmp_path):
    made = package_c(BUNDLES / "axes", tmp_path / "out", name="model", unverified=True)
    source, page = ((made.folder / name).read_text() for name in ("model.c", "README.md"))
    assert made.start_bytes == 4 * sum(map(int, re.findall(r"^static const \w+ start_\w+\[(\d+)\]", source, re.M))) > 0
    assert f"| what states start as, read only | {made.start_bytes} |" in page
    with pytest.raises(UsageError, match=f"start {made.start_bytes} B"):
        package_c(BUNDLES / "axes", tmp_path / "none", max_bytes=made.weight_bytes + made.state_bytes, unverified=True)


def test_what_the_generator_cannot_write_is_refused_with_its_reason(tmp_path, monkeypatch):
    def broken(model):
        model.graph.node[0].op_type = "Bernoulli2"

    monkeypatch.setattr(generating, "_prepare", broken)
    monkeypatch.setattr(package, "find_compiler", lambda: ["cc"])
    with pytest.raises(BackendError, match=r"cannot be written as C: emx-onnx-cgen says .*Bernoulli2"):
        package_c(BUNDLES / "policy-1", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"unverified": True}], ids=["verified", "unverified"])
def test_a_constant_index_out_of_range_is_refused(tmp_path, monkeypatch, options):
    """Such a step fails in ONNX Runtime; its C would read 400 KB behind the state."""
    graph = Graph()
    model = StepModel(
        inputs=(Input(name="x", dtype="float32", shape=("B", 4), role="feature"),),
        outputs=(Output(name="y", dtype="float32", shape=("B", 2)),),
        states=(state("s", (B, 4), 0),),
        streams="lockstep",
    )
    graph.add("Gather", ["state.s.in", graph.constant([-4, 100000], np.int64)], "y", axis=1)
    graph.add("Add", ["state.s.in", "x"], "state.s.out")
    model.add("step-1", 1, graph)
    bundle = model.write(tmp_path / "bundle")
    stored = {"length": np.ones(1, np.int32), "counts": np.ones((1, B), np.int32), "reset": np.zeros((1, B), np.bool_)}
    stored |= {"input/x": np.zeros((1, B, 4), np.float32), "output/y": np.zeros((1, B, 2), np.float32)}
    stored |= {"place/y": np.arange(2), "state/s": np.zeros((B, 4), np.float32), "state_place/s": np.arange(4)}
    save_file(stored | {"state_shape/s": np.array([4])}, bundle / "selftest.safetensors")
    reseal(bundle, selftest="selftest.safetensors")
    monkeypatch.setattr(package, "find_compiler", lambda: ["cc"])
    with pytest.raises(BackendError, match="Gather has the constant index 100000, expected -4 … 3"):
        package_c(bundle, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


FAULTS = {
    "a state that stays": ("state->side = next;", ""),
    "idle outputs that are not cleared": ("memset(action, 0, 12 * sizeof *action);", ""),
    "a reset that forgets": ("if (which && !which[row])", "if (which)"),
    "a start that is not written": ("memset(place, 0, bytes);", "(void)bytes;"),
    "a step that ends the process": ("running[row] = count;", "running[row] = 8 / (count - 4);"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_the_bundle_is_refused(tmp_path, monkeypatch, fault):
    need("cc")
    (right, wrong), real = FAULTS[fault], package.render

    def render(template, context):
        text = real(template, context)
        assert template != "source.c" or right in text
        return text.replace(right, wrong) if template == "source.c" else text

    monkeypatch.setattr(package, "render", render)
    with pytest.raises(CheckError, match=r"is not the model|ended with"):
        package_c(BUNDLES / "policy-1", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ends", [0.0, 1.0], ids=["zero clears", "one clears"])
def test_a_state_that_a_flag_clears_is_carried_over_steps_before_it_is_judged(tmp_path, monkeypatch, ends):
    """Random numbers as the flag would clear the state in every step, and hide a wrong weight."""
    need("cc")
    graph = Graph()
    model = StepModel(
        inputs=(
            Input(name="x", dtype="float32", shape=("B", 4), role="feature"),
            Input(name="flag", dtype="float32", shape=("B", 1), role="feature"),
        ),
        outputs=(Output(name="y", dtype="float32", shape=("B", 4)),),
        states=(state("s", (B, 4), 0),),
        streams="lockstep",
    )
    keeps = ["flag"] if ends == 0 else [graph.add("Sub", [graph.constant(1.0, np.float32), "flag"], "rest")]
    graph.add("Equal", [*keeps, graph.constant(1.0, np.float32)], "kept")
    graph.add("Where", ["kept", "state.s.in", graph.constant(0.0, np.float32)], "carried")
    graph.add("Mul", ["carried", graph.constant(0.4375, np.float32)], "smaller")
    graph.add("Add", ["smaller", "x"], "sum")
    graph.add("Identity", ["sum"], "y")
    graph.add("Identity", ["sum"], "state.s.out")
    model.add("step-1", 1, graph)
    bundle, real = model.write(tmp_path / "bundle"), package.render
    monkeypatch.setattr(
        package, "render", lambda name, context: real(name, context).replace("0x1.c00000p-2f", "0x1.200000p-1f")
    )
    with pytest.raises(CheckError, match="is not the model"):
        package_c(bundle, tmp_path / "wrong")


def test_a_flag_that_all_sequences_share_is_tried_at_0_and_1(tmp_path):
    """A bool without axes: a draw of it is an array that can be written to."""
    need("cc")
    graph = Graph()
    model = StepModel(
        inputs=(
            Input(name="x", dtype="float32", shape=("B", 4), role="feature"),
            Input(name="flag", dtype="bool", shape=(), role="feature"),
        ),
        outputs=(Output(name="y", dtype="float32", shape=("B", 4)),),
        states=(state("s", (B, 4), 0),),
        streams="lockstep",
    )
    graph.add("Where", ["flag", "state.s.in", graph.constant(0.0, np.float32)], "carried")
    graph.add("Add", ["carried", "x"], "sum")
    graph.add("Identity", ["sum"], "y")
    graph.add("Identity", ["sum"], "state.s.out")
    model.add("step-1", 1, graph)
    assert package_c(model.write(tmp_path / "bundle"), tmp_path / "out")


@pytest.mark.slow
def test_a_quantised_model_whose_scales_are_misread_is_refused(tmp_path, monkeypatch):
    """The generator takes scales on one axis for those of other blocks: nats away, and nothing in the text shows it."""
    need("cc")
    tiny = BUNDLES.parents[1] / "samples" / "tiny.txl"
    monkeypatch.setattr(package, "packed_step", lambda *given: None)
    assert package_c(tiny, tmp_path / "right", lengths=(1,)).verified
    monkeypatch.setattr(generating, "_prepare", lambda model: None)
    with pytest.raises(CheckError, match="the C of this model is not the model: KL mean of one chain"):
        package_c(tiny, tmp_path / "wrong", lengths=(1,))
    assert [path.name for path in tmp_path.iterdir()] == ["right"]


def test_what_a_compiler_refuses_is_said_in_one_line(tmp_path):
    need("cc")
    (tmp_path / "model.c").write_text("#error no such machine\n")
    with pytest.raises(BackendError, match=r"cc does not compile .*model.c:1:2: error: #error no such machine"):
        compiling.compile_replay(["cc"], tmp_path, "model", tmp_path / "replay.c")
    with pytest.raises(BackendError, match="cannot be started"):
        compiling.compile_replay([str(tmp_path)], tmp_path, "model", tmp_path / "replay.c")


def test_a_compiler_may_be_named_by_a_path_from_here_and_a_command_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cc").symlink_to("/bin/sh")
    monkeypatch.setenv("CC", "./cc -O2 '-DNAME=a b'")
    assert compiling.find_compiler() == [str(tmp_path / "cc"), "-O2", "-DNAME=a b"]
    monkeypatch.setenv("CC", "cc '-O2")
    with pytest.raises(BackendError, match=r"CC is \"cc '-O2\", expected a command of a shell: No closing quotation"):
        compiling.find_compiler()
