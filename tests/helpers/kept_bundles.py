"""Bundles that tests export, kept between runs: `.bundles/1f0c…/` has those of one state of what they are made from.

A changed file of `MADE_FROM`, a different Python or a different version of an installed package gives a different name:
no bundle is taken that an export would write otherwise today.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import txl_export
import txl_runtime
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
MOST, DAY = 3, 24 * 3600
"""Folders that stay however old they are, the last used ones; others go a day after a run took them."""


def place(base: Path, root: Path = ROOT) -> Path:
    """The folder below `base` for bundles of today's sources; where none can be written, one of this run alone."""
    for package in (txl_export, txl_runtime):  # a second checkout's environment would export by that one's code
        file = Path(str(package.__file__)).resolve()
        assert file.is_relative_to(ROOT.resolve()), f"{file} is not of the checkout {ROOT}"
    name = state_of(root)
    found = base if base.name == name else base / name  # a run within a run is told the whole name
    try:
        found.mkdir(parents=True, exist_ok=True)
        found.touch()
    except OSError:
        return Path(tempfile.mkdtemp()) / found.name
    with suppress(OSError):  # a second run may sweep too
        used = sorted(((path.stat().st_mtime, path) for path in found.parent.iterdir() if path.is_dir()), reverse=True)
        for last, old in used[MOST:]:
            if time.time() - last > DAY:
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

    Args:
        shared: a folder of `place`, or one that this run alone uses.
        own: a folder of this process, for bundles whose options have no lasting name.
        state: the name that the sources gave to `shared`; sources that changed since make no bundle for it.
    """

    def __init__(self, shared: Path, own: Path, state: Callable[[], str] | None = None) -> None:
        self.shared, self.own, self.state = shared, own, state
        self.made: dict[str, Path] = {}
        self.began = time.time()

    def make(
        self, config: dict[str, Any] | None = None, seed: int = 0, vocabulary: bool = False, **options: Any
    ) -> Path:
        """The folder of a bundle, which no test may change."""
        key = repr((sorted((config or {}).items()), seed, vocabulary, sorted(options.items())))
        if key not in self.made:
            own, shared = (place / hashlib.sha256(key.encode()).hexdigest()[:16] for place in (self.own, self.shared))
            # An address names something in one process alone, and an array is written with dots.
            place = shared if plain([config, options]) else own
            for folder in (own, place):
                folder.mkdir(parents=True, exist_ok=True)
            self.made[key] = self._once(
                place / "small.txl",
                own / "new" / "small.txl",
                lambda path: export(path, small_config(**(config or {})), seed, vocabulary, options),
            )
        return self.made[key]

    def _once(self, path: Path, new: Path, write: Callable[[Path], None]) -> Path:
        """A bundle that is there as it was exported, or one that `write` exports now."""
        told = path.with_suffix(".sha256")
        with FileLock(path.with_suffix(".lock")):
            if whole(path):
                return path
            if told.exists():
                told.rename(path.with_suffix(".changed")).touch()
            for folder in (path, new.parent):
                shutil.rmtree(folder, ignore_errors=True)
            new.parent.mkdir()
            write(new)
            if self.state is not None and self.state() != self.shared.name:
                new.with_suffix(".sha256").write_text(digest(new))
                return new
            shutil.move(new, path)
            told.write_text(digest(path))
            return path

    def changed(self) -> list[Path]:
        """Bundles that are not as they were exported, or were not when a process of this run looked."""
        return [path for path in self.made.values() if not whole(path) or changed_since(path, self.began)]


def plain(value: Any) -> bool:
    """True for numbers, texts and None, alone or in lists, tuples and dicts: `repr` gives them lasting names."""
    if isinstance(value, dict):
        return all(map(plain, value.values()))
    return all(map(plain, value)) if isinstance(value, list | tuple) else value is None or type(value) in PLAIN


PLAIN = (bool, int, float, str)


def whole(path: Path) -> bool:
    """True for a bundle whose files are those that were exported."""
    told = path.with_suffix(".sha256")
    return told.is_file() and told.read_text() == digest(path)


def changed_since(path: Path, began: float) -> bool:
    """True where a process found a bundle changed and made it anew."""
    note = path.with_suffix(".changed")
    return note.exists() and note.stat().st_mtime >= began


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
