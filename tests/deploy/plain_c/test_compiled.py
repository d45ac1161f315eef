"""The generated C under compilers, sanitizers, the kernel and the clock."""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from onnx import TensorProto
from plain_c import BUNDLES, COMPILERS, build, need, run
from step_models import B, Graph, StepModel, state
from txl_runtime.bundle.tables import Input, Output

from txl_deploy.plain_c.package import package_c
from txl_deploy.plain_c.rendering import FLAGS

HERE = Path(__file__).parent
ALLOWED = {"memcpy", "memset", "memmove", "expf", "logf", "log1pf", "tanhf", "sqrtf", "erff", "fabsf", "powf"}
KINDS = {
    "policy-1": {},
    "clusters": {"batch_size": 2},
    "lookahead": {"batch_size": 2},
    "lockstep": {},
    "axes": {},
    "table": {},
}
"""Bundles of other shapes each, and how they are packaged."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts calls and refuses system calls with Linux' means")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    need("cc")
    return package_c(BUNDLES / "policy-1", tmp_path_factory.mktemp("plain") / "policy-c", name="policy")


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    need("cc")
    out = tmp_path_factory.mktemp("kinds") / "c"
    return package_c(BUNDLES / request.param, out, name="model", weights_file=True, **KINDS[request.param])


def test_nothing_is_called_but_copies_and_functions_of_mathematics(policy, tmp_path):
    """So there is nothing that could allocate, lock or ask the system; and nothing is seen but three functions."""
    need("nm")
    compiled = build(policy.folder, tmp_path / "policy.o", "-c", policy.folder / "policy.c", flags=FLAGS)
    listed = [line.split()[-2:] for line in run(Path("/usr/bin/env"), "nm", compiled).splitlines()]
    assert {name for sort, name in listed if sort == "U"} <= ALLOWED
    assert {name for sort, name in listed if sort in "TDBC"} == {"policy_init", "policy_step", "policy_reset"}


@linux
def test_steps_and_resets_allocate_nothing_lock_nothing_and_make_no_system_call(policy, tmp_path):
    library = build(policy.folder, tmp_path / "counting.so", HERE / "counting.c", flags="-shared -fPIC -ldl")
    for fault, printed in ((0, "0\n"), (1, "2000\n")):
        flags = f"{FLAGS} -fno-builtin -DFAULT={fault} -ldl"
        sources = (HERE / "real_time.c", policy.folder / "policy.c")
        program = build(policy.folder, tmp_path / f"real_time_{fault}", *sources, flags=flags)
        assert run(program, env=os.environ | {"LD_PRELOAD": str(library)}) == printed
    asks = build(policy.folder, tmp_path / "asks", *sources, flags="-DFAULT=2 -ldl")
    done = subprocess.run([asks], env=os.environ | {"LD_PRELOAD": str(library)}, capture_output=True, check=False)
    assert done.returncode == -9


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "flags",
    ["-O2 -Wall -Wextra -Werror", "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"],
    ids=["warnings", "sanitizers"],
)
def test_compilers_warn_of_nothing_sanitizers_find_nothing_and_the_replay_passes(
    kind, flags, compiler, tmp_path, request
):
    need(compiler)
    sources = (kind.folder / "test_model.c", kind.folder / "model.c")
    program = build(kind.folder, tmp_path / "replayed", *sources, compiler=compiler, flags=flags)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    assert run(program, kind.folder / "model.weights", env=environment).startswith("passed")
    own = (kind.folder / "README.md").read_text().count("whose values PyTorch computed")
    # others have none, or of segments that do not fit
    assert own == (request.node.callspec.params["kind"] == "clusters")


@pytest.mark.slow
def test_cmake_builds_a_package_and_a_program_in_cpp_that_links_two(policy, kind, tmp_path):
    need("cmake", "ctest", "c++")
    (tmp_path / "main.cpp").write_text(
        '#include "model.h"\n#include "policy.h"\n'
        "int main() { return model_step == nullptr || policy_step == nullptr; }\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.10)\nproject(both C CXX)\n"
        f"add_subdirectory({policy.folder} policy)\nadd_subdirectory({kind.folder} model)\n"
        "add_executable(both main.cpp)\ntarget_link_libraries(both policy model)\n"
    )
    for source, built in ((tmp_path, "both"), (policy.folder, "alone")):
        run(Path("/usr/bin/env"), "cmake", "-S", source, "-B", tmp_path / built)
        run(Path("/usr/bin/env"), "cmake", "--build", tmp_path / built)
    assert run(tmp_path / "both" / "both") == ""
    assert "100% tests passed" in run(Path("/usr/bin/env"), "ctest", "--test-dir", tmp_path / "alone")


@pytest.mark.slow
def test_a_million_steps_do_not_drift(policy, tmp_path):
    """Beside the runtime's own stream, over the same observations: the last steps are as near as the first ones."""
    need("cc")
    length, draws = policy.segment_length, np.random.default_rng(3)
    obs = draws.standard_normal((1_000_000 // length, length, 6), np.float32)
    obs.tofile(tmp_path / "obs")
    sources = (HERE / "many_steps.c", policy.folder / "policy.c")
    run(build(policy.folder, tmp_path / "steps", *sources, flags=FLAGS), "obs", "action")
    found = np.fromfile(tmp_path / "action", np.float32).reshape(-1, length, 3)
    assert len(found) == len(obs)
    stream = txl_runtime.load(BUNDLES / "policy-1", backend="cpu", threads=1).stream(1)
    apart = [
        np.abs(stream.run({"obs": one[None]})["action"][0] - ours).max() for one, ours in zip(obs, found, strict=True)
    ]
    tenth = len(apart) // 10
    assert max(apart[-tenth:]) <= 2 * max(apart[:tenth]) < 1e-5


@pytest.mark.slow
def test_what_is_no_number_stays_in_its_sequence_until_that_is_reset(tmp_path):
    need("cc")
    made = package_c(BUNDLES / "release-0.8", tmp_path / "memory", name="memory", batch_size=2)
    sources = (HERE / "lost_numbers.c", made.folder / "memory.c")
    printed = run(build(made.folder, tmp_path / "lost", *sources, flags=FLAGS))
    assert printed.splitlines() == ["whole whole", "whole lost", "whole lost", "whole whole"]


OPERATORS = ("Relu", "Clip", "Max", "Min", "ReduceMax", "ReduceMin", "ReduceLogSumExp")


def test_operators_hide_nothing_that_is_no_number_and_sums_of_exponentials_do_not_overflow(tmp_path):
    """The generator's own arithmetic takes the other value, and a lost sensor would look like a plain action."""
    need("cc")
    graph = Graph()
    model = StepModel(
        inputs=(Input(name="x", dtype="float32", shape=("B", 2), role="feature"),),
        outputs=tuple(Output(name=each, dtype="float32", shape=("B", 2)) for each in OPERATORS),
        states=(state("h", (B, 2), 0),),
        streams="lockstep",
    )
    one, axis = graph.constant([1], np.float32), graph.constant([1], np.int64)
    sides = [graph.constant(value, np.float32) for value in (-1, 1)]
    more = {each: [axis] for each in OPERATORS} | {"Relu": [], "Clip": sides, "Max": [one], "Min": [one]}
    for each in OPERATORS:
        found = graph.add(each, ["x", *more[each]])
        graph.add("Add", [found, graph.constant(np.zeros((B, 2)), np.float32)], each)
    graph.add("Add", ["state.h.in", "x"], "state.h.out")
    model.add("step-1", 1, graph)
    made = package_c(model.write(tmp_path / "bundle"), tmp_path / "c", name="m")
    library = build(made.folder, tmp_path / "m.so", made.folder / "m.c", flags=f"{FLAGS} -shared -fPIC")
    called, held = ctypes.CDLL(str(library)), ctypes.create_string_buffer(made.state_bytes)
    given = np.array([[np.nan, 2], [0.5, np.nan], [-2, 2]], np.float32)
    found = [np.zeros((B, 2), np.float32) for _ in OPERATORS]
    called.m_init(held)
    called.m_step(held, given.ctypes, None, *(values.ctypes for values in found))
    for name, values in zip(OPERATORS, found, strict=True):
        lost = np.isnan(given).any(axis=1, keepdims=True) if "Reduce" in name else np.isnan(given)
        np.testing.assert_array_equal(np.isnan(values), np.broadcast_to(lost, values.shape), name)
    np.testing.assert_array_equal(
        [values[2] for values in found[:-1]], [[0, 2], [-1, 1], [1, 2], [-2, 1], [2, 2], [-2, -2]]
    )
    given[:] = [[-1e4, -1e4], [200, 100], [-np.inf, -300]]
    called.m_step(held, given.ctypes, None, *(values.ctypes for values in found))
    np.testing.assert_allclose(found[-1][:, 0], [-1e4 + np.log(2), 200, -300], rtol=1e-6)


ANSWERS = """#include "m.h"
#include <stdio.h>
static m_state state;
static float x[M_X_VALUES], y[M_Y_VALUES];
int main(void)
{
    m_init(&state);
    if (fread(x, sizeof x, 1, stdin) != 1)
        return 2;
    m_step(&state, x, NULL, y);
    return fwrite(y, sizeof y, 1, stdout) != 1;
}
"""
FLOATS = (math.nan, math.inf, -math.inf, 3e9, -3e9, 1e19, 2.0**31, -(2.0**31), 2.0**63, 2.0**64, 300.7, -1.5, 40000, 7)
WHOLE = ("INT8", "UINT8", "INT16", "UINT16", "INT32", "INT64", "UINT64")
"""Not uint32: beyond its range what ONNX Runtime gives depends on where in a tensor the number stands."""


def test_floats_beyond_a_whole_numbers_type_become_what_onnx_runtime_makes_of_them(tmp_path):
    """C leaves such casts undefined, and gcc -O3 folds them away."""
    need("gcc")
    graph, n, count = Graph(), len(FLOATS), len(WHOLE) + 1
    model = StepModel(
        inputs=(Input(name="x", dtype="float32", shape=("B", n), role="feature"),),
        outputs=(Output(name="y", dtype="float32", shape=("B", count, n)),),
        states=(state("h", (B, n), 0),),
        streams="lockstep",
    )
    scale, zero = graph.constant(2, np.float32), graph.constant(5, np.int8)
    whole = [graph.add("Cast", ["x"], to=getattr(TensorProto, each)) for each in WHOLE]
    floats = [graph.add("Cast", [each], to=TensorProto.FLOAT) for each in whole]
    floats += [graph.add("DequantizeLinear", [graph.add("QuantizeLinear", ["x", scale, zero]), scale, zero])]
    axis = graph.constant([1], np.int64)
    graph.add("Concat", [graph.add("Unsqueeze", [each, axis]) for each in floats], "y", axis=1)
    graph.add("Add", ["state.h.in", "x"], "state.h.out")
    model.add("step-1", 1, graph)
    made = package_c(model.write(tmp_path / "bundle"), tmp_path / "c", name="m")
    (tmp_path / "answers.c").write_text(ANSWERS)
    given = np.tile(np.array(FLOATS, np.float32), (B, 1))
    expected = txl_runtime.load(tmp_path / "bundle", backend="cpu").stream(B).run({"x": given})["y"]
    for flags in (FLAGS, "-O1 -fsanitize=undefined,float-cast-overflow -fno-sanitize-recover=all"):
        program = build(
            *(made.folder, tmp_path / "answers", tmp_path / "answers.c", made.folder / "m.c"),
            compiler="gcc",
            flags=flags,
        )
        done = subprocess.run([program], input=given.tobytes(), capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32).reshape(expected.shape), expected)


@pytest.mark.slow
def test_the_page_of_a_package_holds_for_a_newcomer(policy, tmp_path):
    """Its commands and its program, typed from the page."""
    need("cc", "make")
    page = (policy.folder / "README.md").read_text()
    assert "\n    make test\n" in page
    assert "passed" in run(Path("/usr/bin/env"), "make", "-C", policy.folder, "test")
    (tmp_path / "main.c").write_text(re.search(r"```c\n(.*?)```", page, re.DOTALL)[1])
    program = build(
        policy.folder, tmp_path / "main", tmp_path / "main.c", policy.folder / "policy.c", flags="-Wall -Werror"
    )
    assert run(program) == ""
