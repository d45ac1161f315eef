"""Bundles that tests export, kept between runs: `.bundles/1f0c…/` has those of one state of what they are made from.

A changed file of `MADE_FROM`, a different Python or a different version of an installed package gives a different name:
no bundle is taken that an export would write otherwise today. Tests of the export itself keep theirs for one run.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import txl_export
from filelock import FileLock
from support import random_state, save_checkpoint, small_config

ROOT = Path(__file__).parents[2]
MADE_FROM = (
    "export",
    "runtime/txl_runtime",
    "tests/helpers",
    "tests/stand_ins",
    "tests/own_modules",
    "tests/fixtures",
    "samples",
)
PACKAGES = ".packages"
MOST = 3
"""Folders that stay: those that a run took last."""


def place(root: Path = ROOT) -> Path:
    """The folder for bundles of today's sources; folders that three others were used after go."""
    found = root / ".bundles" / state_of(root)
    found.mkdir(parents=True, exist_ok=True)
    found.touch()
    for old in sorted(found.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)[MOST:]:
        shutil.rmtree(old, ignore_errors=True)
    return found


def state_of(root: Path, installed: Iterable[str] | None = None) -> str:
    """A name for what bundles are made from: files by their bytes, packages of .packages by size and time of change."""
    versions = (f"{each.metadata['Name']} {each.version}" for each in distributions())
    told = hashlib.sha256("\n".join([sys.version, *sorted(versions if installed is None else installed)]).encode())
    for part in MADE_FROM:
        for path in files(root / part):
            told.update(f"\n{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    for path in files(root / PACKAGES):
        told.update(f"\n{path.relative_to(root)} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return told.hexdigest()[:16]


def files(folder: Path) -> Iterator[Path]:
    """The files below a folder in a fixed order, without what Python compiles and leaves there."""
    yield from sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


class Maker:
    """Exports small random models, each once: a folder `shared` may hold them from processes before.

    `make(config={"n_layer": 3}, batch_size=3)`: `config` changes fields of the model's config; `vocabulary` goes
    through a checkpoint file with a byte vocabulary (256 ids); everything else goes to `txl_export.export`.
    """

    def __init__(self, shared: Path, own: Path) -> None:
        self.shared, self.own = shared, own
        self.made: dict[str, Path] = {}

    def make(
        self, config: dict[str, Any] | None = None, seed: int = 0, vocabulary: bool = False, **options: Any
    ) -> Path:
        """The folder of a bundle, which no test may change."""
        key = repr((sorted((config or {}).items()), seed, vocabulary, sorted(options.items())))
        if key not in self.made:
            shared = self.own if " at 0x" in key else self.shared  # an address means something in one process alone
            path = shared / hashlib.sha256(key.encode()).hexdigest()[:16] / "small.txl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self.made[key] = once(path, lambda: export(path, small_config(**(config or {})), seed, vocabulary, options))
        return self.made[key]

    def changed(self) -> list[Path]:
        """Bundles that are not as they were exported."""
        return [path for path in self.made.values() if not whole(path)]


def once(path: Path, make: Callable[[], None]) -> Path:
    """A bundle that `make` writes, unless it is there as it was written."""
    with FileLock(path.with_suffix(".lock")):
        if not whole(path):
            shutil.rmtree(path, ignore_errors=True)
            make()
            path.with_suffix(".sha256").write_text(digest(path))
    return path


def whole(path: Path) -> bool:
    """True for a bundle whose files are those that were exported."""
    told = path.with_suffix(".sha256")
    return told.is_file() and told.read_text() == digest(path)


def digest(folder: Path) -> str:
    """A hash of a folder's files and their names."""
    told = hashlib.sha256()
    for path in files(folder):
        told.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return told.hexdigest()


def export(path: Path, values: dict[str, Any], seed: int, vocabulary: bool, options: dict[str, Any]) -> None:
    """Export a random model with segments of 4 and 1, or others that are given."""
    options = {"segment_length": (4, 1)} | options
    if vocabulary:
        file = save_checkpoint(path.with_suffix(".pt"), values, vocabulary={"kind": "bytes"})
        txl_export.export(file, path, **options)
    else:
        txl_export.export(random_state(values, seed), path, config=values, **options)
