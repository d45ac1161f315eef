"""The runtime in C++: built with every warning an error and under the sanitizers, and held to the conformance list."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from building import CPP, ROOT, done
from txl_runtime import StreamState

from conformance.driver import packed, unpacked, unpacked_bytes
from conformance.run import FOLDER
from conformance.spoiling import allowed, build, index, outcome
from conformance.talking import Talk

pytestmark = pytest.mark.timeout(1200)  # whoever comes first builds


def test_the_versions_of_the_package_and_of_the_library_are_one() -> None:
    (package,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (library,) = re.findall(r"^project\(txl VERSION (\S+)", (CPP / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert library == package


@pytest.mark.slow
def test_it_keeps_the_conformance_list_to_the_bit(built: Path, engine: Path) -> None:
    command = [sys.executable, "conformance/run.py", "--driver", built / "txl-driver", "--json"]
    found = json.loads(done(command, cwd=ROOT))
    assert {tally["failed"] for tally in found["bundles"]} == {0}
    *vectors, bad = found["bundles"]
    assert sum(tally["passed"] for tally in vectors) >= 385
    assert [tally["name"] for tally in vectors if tally["same_bits"] is False] == []
    about_strangers = sum(case["promise"] in index()["needs"]["strangers"] for case in index()["cases"])
    assert (bad["passed"], bad["unsupported"]) == (bad["vectors"] - about_strangers, about_strangers)


@pytest.mark.slow
def test_bad_tables_weights_vectors_and_vocabularies_are_refused_though_graphs_are_not_checked(
    built: Path, engine: Path, tmp_path: Path
) -> None:
    """The list tries them with whoever keeps `strangers`, which asks more: graphs are checked, too."""
    promises = {promise for promise in index()["needs"]["strangers"] if "graphs of a closed list" not in promise}
    cases = [case for case in index()["cases"] if case["promise"] in promises]
    assert len(cases) >= 76
    with Talk([str(built / "txl-driver")], 60.0) as talk:
        for case in cases:
            found, said = outcome(talk, build(case, tmp_path / case["name"]), {"text", "selftest"})
            assert found in allowed(case["expected"]), (case["name"], found, said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy-1", "clusters"])
def test_misuse_is_refused_and_memory_is_freed_in_any_order(built: Path, engine: Path, name: str) -> None:
    folder = FOLDER / "bundles" / name
    pin = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    command = [built / "txl-misuse", folder, *sorted(path.name for path in folder.iterdir())]
    done(command, env=os.environ | {"MANIFEST_SHA256": pin})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy-16", "ring", "clusters", "lockstep"])
def test_a_prepared_step_takes_no_memory_of_its_own(built: Path, engine: Path, name: str) -> None:
    assert done([built / "txl-real-time", FOLDER / "bundles" / name]) == "0 allocations\n"


@pytest.mark.slow
def test_what_it_saved_goes_on_in_python(built: Path, engine: Path) -> None:
    path = FOLDER / "bundles" / "ring"
    stream = txl_runtime.load(path, "cpu", threads=1).stream(2)
    first, second = np.array([[[5, 3, 8, 1], [2, 7, 7, 4]], [[9, 1, 0, 6], [3, 3, 2, 8]]], np.int32)
    with Talk([str(built / "txl-driver")], 60.0) as talk:
        for request in (
            {"do": "load", "path": str(path), "update": "ring"},
            {"do": "open", "b": 2, "memory_length": None},
            {"do": "run", "inputs": {"tokens": packed(first)}, "counts": [4, 3], "commit": True},
        ):
            assert "ok" in talk.ask(request)
        saved = unpacked_bytes(talk.ask({"do": "save"})["ok"]["bytes"])
        found = talk.ask({"do": "run", "inputs": {"tokens": packed(second)}, "counts": None, "commit": True})["ok"][
            "outputs"
        ]
    stream.restore(StreamState.from_bytes(saved))
    assert stream.fill.tolist() == [4, 3]
    expected = stream.run({"tokens": second})
    assert {name: unpacked(array).tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }
