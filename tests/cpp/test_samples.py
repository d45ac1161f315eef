"""The samples in C and C++: built under the sanitizers, installed, run, and held against Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from building import CPP, ROOT, compiler, done
from txl_runtime import StreamState
from txl_runtime.types import Floats

from conformance.run import FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # whoever comes first builds
SANITIZED = "-fsanitize=address,undefined"
TINY = ROOT / "samples" / "tiny.txl"
POLICY = FOLDER / "bundles" / "policy-1"
IN_C = """
cmake_minimum_required(VERSION 3.20)
project(consumer LANGUAGES C)
set(CMAKE_C_STANDARD 11)
find_package(txl REQUIRED)
find_package(Threads REQUIRED)
add_executable(consumer {source})
target_link_libraries(consumer PRIVATE txl::txl Threads::Threads m)
"""
IN_BOTH = """
cmake_minimum_required(VERSION 3.20)
project(consumer LANGUAGES C CXX)
find_package(txl REQUIRED)
add_executable(consumer {source})
target_link_libraries(consumer PRIVATE txl::txl)
"""
INSIDE = """
cmake_minimum_required(VERSION 3.20)
project(consumer LANGUAGES C CXX)
set(TXL_TESTS OFF)
set(TXL_SAMPLES OFF)
add_subdirectory({library} txl EXCLUDE_FROM_ALL)
add_executable(consumer {source})
target_link_libraries(consumer PRIVATE txl::txl)
"""
IN_CPP = """
#include <iostream>
#include <txl.hpp>
template <typename Call>
void tried(Call call) {
    try {
        call();
    } catch (const txl::Error &error) {
        std::cout << error.code << ": " << error.what() << std::endl;
    }
}
int main(int, char **words) {
    const txl::Model model(words[1]);
    txl::Stream stream(model, 2);
    tried([&] { stream.feed({1, 2, 3}); });
    tried([&] { (void)stream.score({1, 2, 3}); });
    const auto costs = stream.score({1, 2, 3, 4});
    std::cout << costs.size() << " numbers, " << stream.fill() << " rows" << std::endl;
    const txl::Stream moved = std::move(stream);
    tried([&] { stream.feed({1, 2, 3}); });
    tried([&] { (void)stream.score({1, 2, 3}); });
}
"""
# Declarations that the fragments of code in docs/embedding.md take for granted, in their order.
GIVEN = [
    "",
    "float observation[6], action[3];",
    "txl_model *model = NULL; txl_error error = TXL_NEW(txl_error); void *inputs[1];",
    "txl_model *model = NULL; txl_error error = TXL_NEW(txl_error);",
    "const txl::Model model(words[1]); txl::Stream stream(model, 3); const void *inputs[] = {words}; "
    "std::int32_t tokens[3] = {}; std::vector<txl::Sampler> samplers;",
    "const txl::Model model(words[1]); txl::Stream stream(model); auto sampling = TXL_NEW(txl_sampling); "
    "std::vector<std::int32_t> drawn = {1};",
    "auto sampling = TXL_NEW(txl_sampling);",
    "const txl::Model model(words[1]); txl::Stream stream(model); auto sampling = TXL_NEW(txl_sampling); "
    "txl::Text said(model);",
    "const txl::Model model(words[1]); txl::Stream stream(model); const void *inputs[] = {words}; "
    "void *outputs[] = {words};",
]
HEADERS = (
    "#include <cmath>\n#include <iostream>\n#include <txl.hpp>\n",
    "#include <stdio.h>\n#include <stdlib.h>\n#include <txl.h>\n",
)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library and its headers after `cmake --install`, in a folder that the build was not made for."""
    there = tmp_path_factory.mktemp("installed")
    done(["cmake", "--install", built, "--prefix", there])
    return there


def made(source: Path, folder: Path, built: Path, installed: Path, *options: str) -> None:
    """Configure and build a project that looks for the installed library."""
    prefix = [f"-DCMAKE_PREFIX_PATH={installed}", f"-DCMAKE_C_FLAGS={SANITIZED}", f"-DCMAKE_CXX_FLAGS={SANITIZED}"]
    compilers = [f"-DCMAKE_{language}_COMPILER={compiler(built, language)}" for language in ("C", "CXX")]
    done(["cmake", "-S", source, "-B", folder, "-G", "Ninja", *prefix, *compilers, *options])
    done(["cmake", "--build", folder])


def flags(installed: Path) -> list[str]:
    """Return the compiler's flags of pkg-config."""
    (folder,) = installed.rglob("pkgconfig")
    about = ["pkg-config", "--cflags", "--libs", "txl"]
    return done(about, env={**os.environ, "PKG_CONFIG_PATH": str(folder)}).split()


def refused(*command: Path | str) -> str:
    """The one line with which a program ends in 2."""
    found = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, check=False)
    (line,) = found.stderr.splitlines()
    assert (found.returncode, found.stdout) == (2, "")
    return line


def actions(observations: Floats, begins: set[int]) -> Floats:
    """Return the policy's actions [n, 3] for observations [n, 6]; it is reset before those in `begins`."""
    model, found = txl_runtime.load(POLICY, "cpu", threads=1), []
    stream, name = model.stream(1), model.manifest.inputs[0].name
    for n, seen in enumerate(observations):
        if n in begins:
            stream.reset()
        found.append(next(iter(stream.run({name: seen[None, None]}).values()))[0, 0])
    return np.stack(found)


def test_an_application_finds_what_was_installed(built: Path, installed: Path, engine: Path, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(IN_BOTH.format(source=CPP / "samples" / "generate.cpp"))
    made(tmp_path, tmp_path / "build", built, installed)
    assert done([tmp_path / "build" / "consumer", FOLDER / "bundles" / "clusters", "abc", "5", tmp_path / "memory"])
    assert StreamState.load(tmp_path / "memory").fill.tolist() == [6]


def test_a_project_in_c_alone_links_what_was_installed(
    built: Path, installed: Path, engine: Path, tmp_path: Path
) -> None:
    (tmp_path / "CMakeLists.txt").write_text(IN_C.format(source=CPP / "samples" / "control.c"))
    made(tmp_path, tmp_path / "build", built, installed)
    assert done([tmp_path / "build" / "consumer", POLICY, "1"]).startswith("1 steps, 1 resets")


def test_pkg_config_says_all_that_a_compiler_of_c_needs_wherever_it_was_installed(
    built: Path, installed: Path, engine: Path, tmp_path: Path
) -> None:
    program = tmp_path / "control"
    control = CPP / "samples" / "control.c"
    done([compiler(built, "C"), SANITIZED, control, "-o", program, *flags(installed), "-lm", "-pthread"])
    assert done([program, POLICY, "1"]).startswith("1 steps, 1 resets")


def test_tokens_that_are_not_as_many_for_each_sequence_and_streams_that_were_moved_away_are_refused(
    built: Path, installed: Path, engine: Path, tmp_path: Path
) -> None:
    (tmp_path / "main.cpp").write_text(IN_CPP)
    program, source = tmp_path / "main", tmp_path / "main.cpp"
    done([compiler(built, "CXX"), "-std=c++17", SANITIZED, source, "-o", program, *flags(installed)])
    assert done([tmp_path / "main", FOLDER / "bundles" / "ring"]).splitlines() == [
        "3: 3 token ids were given, expected as many for each of 2 sequences; give [b, T]",
        "3: 3 token ids were given, expected as many for each of 2 sequences; give [b, T]",
        "2 numbers, 1 rows",
        "3: the stream is NULL, expected one; give it",
        "3: the stream is NULL, expected one; give it",
    ]


def test_the_code_on_the_page_of_embedding_compiles(built: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "embedding.md").read_text()
    section = page[page.index("## C++\n") : page.index("### Build it\n")]
    blocks = re.findall(r"^( *)```text\n(.*?)^\1```$", section, re.MULTILINE | re.DOTALL)
    for n, (given, (_, block)) in enumerate(zip(GIVEN, blocks, strict=True)):
        in_c = "&error" in block
        source = tmp_path / f"{n}.{'c' if in_c else 'cpp'}"
        lines = [line for line in block.splitlines() if not line.lstrip().startswith("#include")]
        body = "\n".join([given, *lines])
        source.write_text(f"{HEADERS[in_c]}int main(int count, char **words) {{\n{body}\nreturn count && !words;\n}}\n")
        command = [compiler(built, "C" if in_c else "CXX"), "-std=c99" if in_c else "-std=c++17", "-Werror"]
        done([*command, "-fsyntax-only", f"-I{CPP / 'include'}", source])


def test_a_project_may_build_the_library_as_a_part_of_itself(built: Path, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(INSIDE.format(library=CPP, source=CPP / "samples" / "generate.cpp"))
    done(["cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja"])
    targets = done(["ninja", "-C", tmp_path / "build", "-t", "targets", "all"])
    assert "consumer: " in targets
    assert "txl-driver" not in targets
    assert "txl-score" not in targets


@pytest.mark.parametrize("text", ["def main(", "é"])
def test_generate_writes_and_remembers_what_python_does(built: Path, engine: Path, tmp_path: Path, text: str) -> None:
    stream, drawing = txl_runtime.load(TINY, "cpu").stream(1), {"temperature": 0.7, "top_p": 0.95, "seed": 1}
    for _ in range(2):  # the second one goes on from the first one's memory
        said = subprocess.run(
            [built / "txl-generate", TINY, text, "40", tmp_path / "memory"],
            capture_output=True,
            check=True,
            timeout=600,
        )
        drawn = [int(token) for (token,) in stream.generate(text, 40, feed_last=True, **drawing)]
        assert said.stdout == bytes(drawn).decode(errors="replace").encode()


def test_generate_writes_the_same_with_drafts(
    built: Path, engine: Path, tmp_path: Path, make_bundle: Callable[..., Path]
) -> None:
    bundle = make_bundle(lookup=True, vocabulary=True, config={"vocab_size": 256}, segment_length=(5, 1))
    said = [
        done([built / "txl-generate", bundle, "abababab", "120", tmp_path / most, "--lookup", most], errors="replace")
        for most in "04"
    ]
    assert said[0] == said[1] != ""
    one, other = (StreamState.load(tmp_path / most) for most in "04")
    assert one.fill.tolist() == other.fill.tolist()
    for name, rows in one.memory.items():
        np.testing.assert_allclose(rows, other.memory[name], rtol=0, atol=2e-5)
    assert "lookup is 4, expected 0, because" in refused(built / "txl-generate", TINY, "a", "9", "--lookup", "4")


@pytest.mark.parametrize("length", [2, 129, 130, 4000])
def test_score_says_what_the_command_says(built: Path, engine: Path, tmp_path: Path, length: int) -> None:
    text = tmp_path / "text"
    text.write_bytes((ROOT / "runtime" / "txl_runtime" / "model.py").read_bytes()[:length])
    said = dict(line.split() for line in done([built / "txl-score", TINY, text]).splitlines())
    expected = json.loads(done([sys.executable, "-m", "txl_deploy", "score", TINY, text, "--threads", "1", "--json"]))
    assert expected.pop("unknown_words") == 0
    assert expected.pop("scored_tokens") == max(expected["tokens"] - 1, 0)
    assert float(said.pop("nats_per_byte")) == pytest.approx(expected["bits_per_byte"] * np.log(2), rel=1e-6)
    assert {name: float(value) for name, value in said.items()} == pytest.approx(expected, rel=1e-6)


def test_score_refuses_what_it_cannot_score(built: Path, engine: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("a")
    assert "holds 1 tokens, expected at least 2" in refused(built / "txl-score", TINY, tmp_path / "short")
    assert "missing: cannot be read" in refused(built / "txl-score", TINY, tmp_path / "missing")
    assert "no vocabulary" in refused(built / "txl-score", POLICY, tmp_path / "short")


@pytest.mark.skipif(sys.platform == "darwin", reason="the libraries have other names there")
def test_where_no_engine_opens_the_message_says_each_name_of_this_system_and_no_other(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).write_text("no library\n" * 100)
    monkeypatch.delenv("TXL_ONNXRUNTIME", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    said = refused(built / "txl-score", TINY, tmp_path / "text")
    assert said.count("libonnxruntime.so: ") == said.count("libonnxruntime.so.1: ") == 1
    assert "dylib" not in said


@pytest.mark.skipif(sys.platform == "darwin", reason="its loader says it by itself")
def test_an_engine_for_another_processor_is_not_called_missing_alone(
    built: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = bytearray(engine.read_bytes()[:4096])
    other[18] ^= 1  # the processor in the header of an ELF file
    (tmp_path / "other.so").write_bytes(other)
    monkeypatch.setenv("TXL_ONNXRUNTIME", str(tmp_path / "other.so"))
    assert "it may be for another processor" in refused(built / "txl-score", TINY, tmp_path / "text")
    monkeypatch.setenv("TXL_ONNXRUNTIME", str(tmp_path / "nowhere.so"))
    assert "processor" not in refused(built / "txl-score", TINY, tmp_path / "text")


@pytest.mark.parametrize(("name", "rows"), [("tiny", 1), ("ring", 3), ("hidden", 2), ("int8", 2)])
def test_users_who_share_rows_are_told_what_each_is_told_alone(built: Path, engine: Path, name: str, rows: int) -> None:
    first, second = done(
        [built / "txl-sessions", TINY if name == "tiny" else FOLDER / "bundles" / name, "7", "6"]
    ).splitlines()
    found = re.fullmatch(r"7 users on (\d+) rows: (\d+) rounds, (\d+) moves", first)
    assert found is not None
    assert int(found[1]) == rows
    assert int(found[3]) >= 7
    found = re.fullmatch(r"7 of 7 users were told the same alone, log-probabilities (\S+) apart", second)
    assert found is not None
    assert float(found[1]) <= 1e-6


def test_sessions_refuses_a_model_whose_sequences_run_in_lockstep(built: Path, engine: Path) -> None:
    said = refused(built / "txl-sessions", FOLDER / "bundles" / "lockstep")
    assert said.endswith("expected a model of text whose sequences can be idle and moved alone")


def test_the_control_loop_runs_every_observation_and_reset_in_their_order(built: Path, engine: Path) -> None:
    said = done([built / "txl-control", POLICY, "20", "8"])
    assert said.startswith("20 steps, 3 resets, 0 observations and 0 actions lost\n")
    found = re.fullmatch(
        r"a step took \S+ us on average, \S+ us at most\n"
        r"(\d+) periods began \S+ us late on average, \S+ us at most; (\d+) of them ended too late\n"
        r"20 actions, the last one (\S+) (\S+) (\S+)\n",
        said.partition("\n")[2],
    )
    assert found is not None
    assert int(found[2]) <= int(found[1])
    waves = np.sin(0.05 * np.arange(20)[:, None] + np.arange(6)).astype(np.float32)
    last = [float(number) for number in found.groups()[2:]]
    assert last == pytest.approx(actions(waves, {0, 8, 16})[-1], abs=1e-6)
    assert last != pytest.approx(actions(waves, {0, 8})[-1], abs=1e-3)


def test_the_control_loop_is_for_few_numbers(built: Path, engine: Path) -> None:
    assert "take another bundle" in refused(built / "txl-control", FOLDER / "bundles" / "ring", "1")


def test_the_node_for_ros_2_acts_on_the_newest_observation(
    built: Path, installed: Path, engine: Path, tmp_path: Path
) -> None:
    stand_in = ROOT / "tests" / "stand_ins" / "ros2"
    names = [f"-D{name}_DIR={stand_in}" for name in ("ament_cmake", "rclcpp", "std_msgs", "std_srvs")]
    made(CPP / "samples" / "ros2", tmp_path, built, installed, *names)
    waves = np.sin(np.arange(12).reshape(2, 6)).astype(np.float32)
    first, second = ("observation " + " ".join(str(number) for number in wave) for wave in waves)
    lines = ["tick", first, second, "tick", "tick", "observation 1", "tick", "reset", "tick", first, "tick", "tick"]
    said = done(
        [tmp_path / "policy_node", "--ros-args", "-p", f"bundle:={POLICY}", "-p", "rate:=100"],
        input="\n".join(lines) + "\n",
    ).splitlines()
    assert [line for line in said if not line.startswith("action")] == [
        "every 0.01 s",
        "1 numbers, expected 6",
        "reset 1",
    ]
    found = np.array([line.split()[1:] for line in said if line.startswith("action")], np.float32)
    assert np.abs(found - actions(waves[[1, 1, 0, 0]], {0, 2})).max() <= 1e-6
