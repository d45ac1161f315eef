"""The runtime in C++ on Windows: compiled by MinGW with every warning an error, and run by wine.

The engine is a stand-in that refuses every graph; the last tests take ONNX Runtime's own of `.engines/windows`, which
`make cpp-full` installs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from building import CPP, ROOT, build, done, sanitized
from cpp import test_lookup, test_words
from wine import compiled, need_wine, under_wine

from conformance.run import FOLDER
from conformance.spoiling import build as spoiled
from conformance.spoiling import index
from conformance.talking import Talk

pytestmark = [pytest.mark.slow(keep=1), pytest.mark.timeout(1200)]  # whoever comes first builds
STAND_IN = Path(__file__).parents[1] / "stand_ins" / "ort_api.c"
INCLUDED = f"-I{CPP / 'third_party'}"
ENGINE = ROOT / ".engines" / "windows" / "onnxruntime" / "capi" / "onnxruntime.dll"
TOKENS = FOLDER / "bundles" / "ring"
SYSTEMS_OWN = re.compile(r"(?<=unreadable )\(.*?\)(?=,)")
"""The system's own words in a line."""
REFUSED = "no session in a stand-in"
test_every_character_is_lowered = test_words.test_every_character_is_lowered_as_python_lowers_it
test_random_lines_have_the_same_words = test_words.test_random_lines_have_the_words_that_python_finds
test_the_same_drafts_are_found = test_lookup.test_the_same_drafts_are_found_as_in_python
test_drafts_pause_and_go_on = test_lookup.test_drafts_pause_and_go_on_as_in_python
own_engine = pytest.mark.skipif(not ENGINE.is_file(), reason="no .engines/windows here; make cpp-full installs it")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the build for Windows; its commands run programs by wine."""
    need_wine()
    options = (f"-DCMAKE_TOOLCHAIN_FILE={CPP / 'tests' / 'mingw.cmake'}", "-DTXL_OPENSSL=OFF", "-DTXL_ZLIB=OFF")
    folder = build(tmp_path_factory.getbasetemp(), "windows", options)
    for program in folder.glob("*.exe"):
        under_wine(program, folder / "wine")
    return folder


def stand_in(path: Path, version: str = "1.31.0", *options: str) -> Path:
    """Compile the stand-in of an engine for Windows."""
    path.parent.mkdir(exist_ok=True)
    return compiled(path, "-shared", f'-DVERSION="{version}"', *options, INCLUDED, STAND_IN)


def talk_of(built: Path, engine: Path | str) -> Talk:
    """Start the driver of a build with an engine."""
    return Talk(["env", f"TXL_ONNXRUNTIME={engine}", str(built / "txl-driver")], 600.0)


def said(built: Path, engine: Path | str, path: Path = TOKENS, **given: Any) -> str:
    """Load a bundle with an engine; return the line that refuses it."""
    with talk_of(built, engine) as talk:
        reply = talk.ask({"do": "load", "path": str(path), "update": None, **given})
    return str(reply["refused"])


def test_an_engine_is_opened_by_its_whole_path_and_beside_the_program(built: Path, tmp_path: Path) -> None:
    """Never out of the current folder, or by the system's search: Windows has a library of this name of its own."""
    library = stand_in(tmp_path / "Modèle 模型" / "engine.dll")
    assert REFUSED in said(built, library)
    assert REFUSED in said(built, str(library).replace("/", "\\"))
    missing = said(built, library.name)
    assert str(built / "engine.dll").replace("/", "\\") in missing
    assert "error 126 of Windows" in missing
    moved = shutil.copytree(built, tmp_path / "moved", ignore=lambda _, names: [n for n in names if "driver" not in n])
    under_wine(moved / "txl-driver.exe", built / "wine")
    shutil.copy(library, moved / "onnxruntime.dll")
    assert REFUSED in said(moved, "")
    assert REFUSED not in said(built, "")


def test_an_engine_that_is_too_old_is_not_asked_for_its_functions(built: Path, tmp_path: Path) -> None:
    old = stand_in(tmp_path / "old.dll", "1.20.3", "-DBARRED")
    assert said(built, old) == "ONNX Runtime is 1.20.3, expected 1.21 or newer; install that"
    new = stand_in(tmp_path / "new.dll", "1.21.0", "-DBARRED")
    with pytest.raises(Exception, match="code 99: asked for functions"):
        said(built, new)
    (tmp_path / "none.c").write_text("int nothing;\n")
    none = compiled(tmp_path / "none.dll", "-shared", tmp_path / "none.c")
    assert "has no OrtGetApiBase, expected ONNX Runtime's library" in said(built, none)
    (tmp_path / "text.dll").write_text("no library")
    assert "error 193 of Windows" in said(built, tmp_path / "text.dll")


def test_names_are_those_of_utf_8_and_a_compiled_step_is_refused_in_a_line(built: Path, tmp_path: Path) -> None:
    library = stand_in(tmp_path / "engine.dll")
    path = Path(shutil.copytree(TOKENS, tmp_path / "Ærø 模型" / "bundle.txl"))
    assert REFUSED in said(built, library, path)
    assert said(built, library, native_library="step.so") == (
        "options.native_library is step.so, expected NULL on Windows, for which no compiled step is made; leave it out"
    )


def test_bad_bundles_are_refused_in_the_words_that_linux_has(
    built: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All whose refusal needs no session, one after the other in one process on each side."""
    linux, found = sanitized(tmp_path_factory.getbasetemp()), dict[str, tuple[str, ...]]()
    library, dll = tmp_path / "engine.so", stand_in(tmp_path / "engine.dll")
    done(["cc", "-shared", "-fPIC", '-DVERSION="1.31.0"', INCLUDED, STAND_IN, "-o", library])
    with talk_of(linux, library) as here, talk_of(built, dll) as there:
        for case in index()["cases"]:
            path = spoiled(case, tmp_path / case["name"] / "bundle")
            replies = [talk.ask({"do": "load", "path": str(path), "update": None}) for talk in (here, there)]
            lines = (str(reply.get("refused")).replace("Z:/", "/") for reply in replies)
            found[case["name"]] = tuple(SYSTEMS_OWN.sub("()", line) for line in lines)
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
    assert sum(REFUSED not in line for line, _ in found.values()) >= 76


@own_engine
@pytest.mark.slow(keep=0)
@pytest.mark.parametrize("name", ["policy-1", "clusters"])
def test_misuse_is_refused_threads_share_a_model_and_a_step_takes_no_memory_of_its_own(built: Path, name: str) -> None:
    folder = FOLDER / "bundles" / name
    pin = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    environment = os.environ | {"TXL_ONNXRUNTIME": str(ENGINE), "MANIFEST_SHA256": pin}
    done([built / "txl-misuse", folder, *sorted(path.name for path in folder.iterdir())], env=environment)
    assert done([built / "txl-real-time", folder], env=environment).strip() == "0 allocations"
    if name == "clusters":
        said = done([built / "txl-threads", folder, "10"], env=environment)
        assert said.strip() == "8 threads found what each finds alone"


@own_engine
@pytest.mark.slow(keep=0)
def test_it_keeps_the_conformance_list_with_the_engine_for_windows(built: Path) -> None:
    command = [sys.executable, "conformance/run.py", "--driver", built / "txl-driver", "--json", "--silence", "600"]
    found = json.loads(done(command, cwd=ROOT, env=os.environ | {"TXL_ONNXRUNTIME": str(ENGINE)}))
    assert {tally["failed"] for tally in found["bundles"]} == {0}
    *vectors, bad = found["bundles"]
    assert sum(tally["passed"] for tally in vectors) >= 385
    assert (bad["passed"] + bad["unsupported"], bad["died"]) == (bad["vectors"], 0)
