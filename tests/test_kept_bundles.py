"""Bundles that are kept between runs: none is taken that today's sources would not write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kept_bundles
import numpy as np
import pytest
from kept_bundles import MADE_FROM, PACKAGES, ROOT, Maker, state_of

EXPORTS = """
import sys
from pathlib import Path
read = set()
sys.addaudithook(lambda event, given: read.add(given[0]) if event == "open" and isinstance(given[0], str) else None)
from kept_bundles import Maker
maker = Maker(Path(sys.argv[1]), Path(sys.argv[1]))
maker.make(config={"cutoffs": (20, 40), "div_val": 2})
maker.make(config={"vocab_size": 256}, vocabulary=True, precision="int8")
print(*read, sep="\\n")
"""
"""Tells the files that the export of two bundles opened, modules among them."""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A checkout with one file in each place, and one that no bundle is made from."""
    for part in (*MADE_FROM, PACKAGES, "tests/deploy"):
        (tmp_path / part / "inner").mkdir(parents=True)
        (tmp_path / part / "inner" / "a.py").write_text("x = 1")
    return tmp_path


def test_a_file_that_bundles_are_made_from_changes_their_folder(sources: Path) -> None:
    seen = {state_of(sources, ["numpy 2"]), state_of(sources, ["numpy 3"])}
    for part in (*MADE_FROM, PACKAGES):
        (sources / part / "inner" / "a.py").write_text("x = 2")
        seen.add(state_of(sources, ["numpy 2"]))
        (sources / part / "inner" / "a.py").rename(sources / part / "inner" / "b.py")
        seen.add(state_of(sources, ["numpy 2"]))
    assert len(seen) == 2 + 2 * len((*MADE_FROM, PACKAGES))
    before = state_of(sources)
    (sources / "tests" / "deploy" / "inner" / "a.py").write_text("x = 2")
    (sources / "export" / "__pycache__").mkdir()
    (sources / "export" / "__pycache__" / "a.pyc").touch()
    assert state_of(sources) == before


@pytest.mark.slow
def test_an_export_reads_nothing_else(tmp_path: Path) -> None:
    """So the folder's name covers each file that a kept bundle was made from."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path / "compiled"), "PYTHONPATH": "tests/helpers"}
    done = subprocess.run(
        [sys.executable, "-c", EXPORTS, tmp_path / "made"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = {Path(name).resolve() for name in done.stdout.splitlines()}
    own = {path for path in read if path.is_relative_to(ROOT) and not path.is_relative_to(sys.prefix)}
    assert ROOT / "export" / "txl_export" / "exporting.py" in own
    made_from = [ROOT / part for part in MADE_FROM]
    assert [path for path in own if path.is_file() and not any(map(path.is_relative_to, made_from))] == []


def test_a_bundle_that_a_test_changed_is_named_and_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports: list[Path] = []

    def export(path: Path, *_: object) -> None:
        path.mkdir()
        (path / "manifest.json").write_text("{}")
        exports.append(path)

    monkeypatch.setattr(kept_bundles, "export", export)
    maker = Maker(tmp_path / "kept", tmp_path / "own")
    number = exports.__len__
    path = maker.make(batch_size=3)
    assert maker.make(batch_size=3) == path
    assert Maker(tmp_path / "kept", tmp_path / "own").make(batch_size=3) == path
    assert (number(), maker.changed()) == (1, [])
    (path / "more.json").write_text("{}")
    assert maker.changed() == [path]
    assert Maker(tmp_path / "kept", tmp_path / "own").make(batch_size=3) == path
    assert (number(), [*path.iterdir()]) == (2, [path / "manifest.json"])
    assert maker.changed() == [path], "although a second process made it anew"
    for odd in (object(), np.zeros(5000)):  # what they are called may be called something else in the next process
        assert maker.make(listener=odd).is_relative_to(tmp_path / "own")
