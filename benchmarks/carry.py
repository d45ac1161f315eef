"""Carry packages to a machine without a network in pieces: cut here, joined there. Needs nothing but Python.

    python carry.py split WHEEL_OR_FOLDER … --out PIECES [--mib 60]
    python carry.py join PIECES --site SITE

`split` makes one archive and cuts it: PIECES/000, 001 … are as large as was asked for, the last one smaller, and
PIECES/index.json has the SHA-256 of each. Carry them in as many turns as it takes, the index with any of them, into one
folder. `join` checks every piece first, then puts the files into SITE; wheels are unpacked there.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMAT, VERSION, INDEX = "txl-deploy.pieces", 1, "index.json"
MIB = 2**20
LEADS_OUT = re.compile(r"(^|/)\.\.(/|$)|^/|[\\:\0]|^$")
"""Names of files that are not below the folder they are put into, on any system."""
MODULES = re.compile(r"^[^/]+\.data/(?:purelib|platlib)/")
"""Where a wheel may have its modules; the rest of that folder are scripts and headers, which nobody imports."""


class CarryError(Exception):
    """What was found, what was expected, and what to do."""


class _Cut(io.RawIOBase):
    """Takes an archive, and writes it into pieces."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self.pieces: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        rest = bytes(data)
        while rest:
            if not self.pieces or self.pieces[-1]["size"] == self._most:
                self.pieces.append({"name": f"{len(self.pieces):03}", "size": 0})
                self._digest = hashlib.sha256()
            last = self.pieces[-1]
            part, rest = rest[: self._most - last["size"]], rest[self._most - last["size"] :]
            with (self._folder / last["name"]).open("ab") as file:
                file.write(part)
            self._digest.update(part)
            last |= {"size": last["size"] + len(part), "sha256": self._digest.hexdigest()}
        return len(data)


class _Joined(io.RawIOBase):
    """Gives an archive, read from its pieces."""

    def __init__(self, pieces: Sequence[Path]) -> None:
        self._left, self._at = list(pieces), 0

    def read(self, size: int = -1) -> bytes:
        while self._left:
            with self._left[0].open("rb") as file:
                file.seek(self._at)
                data = file.read(size)
            self._at += len(data)
            if data:
                return data
            self._left.pop(0)
            self._at = 0
        return b""


def split(sources: Sequence[Path], folder: Path, most: int) -> int:
    """Cut files, and those of folders, into pieces of at most so many bytes; the number of pieces.

    Raises:
        CarryError: a file has the name of another, or there is something in the folder already.
    """
    named: dict[str, Path] = {}
    for source in sources:
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            name = file.relative_to(source if source.is_dir() else source.parent).as_posix()
            if file.is_dir() or "__pycache__" in file.parts:
                continue
            if name in named:
                raise CarryError(f"{name} is there twice, expected one of each name; split them apart")
            named[name] = file
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CarryError(f"{folder} is not empty, expected a new folder; name another with --out")
    cut = _Cut(folder, most)
    with tarfile.open(fileobj=cut, mode="w|", bufsize=MIB, dereference=True) as archive:
        for name, file in named.items():
            archive.add(file, name)
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, "version": VERSION, "pieces": cut.pieces}, indent=1))
    return len(cut.pieces)


def join(folder: Path, site: Path) -> int:
    """Put what was split into `site`, once all of it is there; the number of files.

    Raises:
        CarryError: a piece is missing or another one, or a file's name leads out of `site`.
    """
    pieces = _checked(folder)
    names = []
    with tarfile.open(fileobj=_Joined(pieces), mode="r|", bufsize=MIB) as archive:
        for member in archive:
            to, content = site / _below(member.name), archive.extractfile(member)
            if content is None:
                raise CarryError(f"{member.name} is no plain file, expected what `split` writes; use other pieces")
            _put(content, to)
            names.append(member.name)
    for name in names:
        if name.endswith(".whl"):
            _unpack(site / name, site)
            (site / name).unlink()
    return len(names)


def _checked(folder: Path) -> list[Path]:
    """The pieces in their order, each as it was cut."""
    index = folder / INDEX
    try:
        told = json.loads(index.read_text())
        if (told["format"], told["version"]) != (FORMAT, VERSION):
            raise ValueError(told["format"])
        expected = [(folder / _below(item["name"]), item["sha256"]) for item in told["pieces"]]
    except FileNotFoundError:
        raise CarryError(f"{index} is missing, expected what `split` wrote; carry it here with the pieces") from None
    except (ValueError, KeyError, TypeError):
        raise CarryError(f"{index} is no index of version {VERSION}; carry it here once more") from None
    if missing := [path.name for path, _ in expected if not path.is_file()]:
        raise CarryError(
            f"{folder} lacks {', '.join(missing)}, expected {len(expected)} pieces; carry them here as well"
        )
    for path, sha256 in expected:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(MIB):
                digest.update(data)
        if digest.hexdigest() != sha256:
            raise CarryError(f"{path} has another SHA-256 than when it was cut; carry it here once more")
    return [path for path, _ in expected]


def _unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = MODULES.sub("", _below(member.filename))
            if not member.is_dir() and ".data/" not in name:
                with archive.open(member) as content:
                    _put(content, site / _below(name))


def _put(content: Any, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("wb") as file:
        shutil.copyfileobj(content, file, MIB)


def _below(name: str) -> str:
    if LEADS_OUT.search(name):
        raise CarryError(f"{name!r} leads out of the folder, expected a file below it; do not use these pieces")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Split or join; 2 where that cannot be done."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    verbs = options.add_subparsers(dest="verb", required=True)
    cut, joined = (
        verbs.add_parser("split", help="cut files into pieces"),
        verbs.add_parser("join", help="put them back"),
    )
    cut.add_argument("sources", type=Path, nargs="+", help="wheels, and folders of packages")
    cut.add_argument("--out", type=Path, required=True, metavar="PIECES", help="a new folder")
    cut.add_argument("--mib", type=int, default=60, help="of the largest piece (default 60)")
    joined.add_argument("pieces", type=Path, help="the folder with all of them")
    joined.add_argument("--site", type=Path, required=True, help="where the packages go")
    given = options.parse_args(arguments)
    try:
        if given.verb == "split":
            count = split(given.sources, given.out, max(given.mib, 1) * MIB)
            print(f"{count} pieces and {INDEX} in {given.out}")
        else:
            count = join(given.pieces, given.site)
            print(f"{count} files, their wheels unpacked, in {given.site}")
    except (CarryError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        print(f"carry: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
