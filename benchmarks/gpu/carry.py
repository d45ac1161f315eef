"""Carry packages in pieces to a machine without a network: cut them here, and join them there, with only Python.

    python carry.py split WHEEL_OR_FOLDER … --out PIECES [--mib 36] [--only-sm 90]
    python carry.py join PIECES --site SITE

`split` makes one archive and cuts it into PIECES/000, 001 … of --mib MiB each; the last piece may be smaller.
PIECES/index.json has the SHA-256 of each piece. Carry all pieces and the index into one folder, in as many turns as you
like. `join` checks every piece, then writes the files to SITE, and unpacks the wheels there. With --only-sm, `split`
overwrites the machine code for GPUs of different compute capabilities with zeros, and compresses the archive:
onnxruntime-gpu then takes two pieces instead of seven. The headers of the code stay, by which CUDA finds the code for
its GPU. No GPU has tried such libraries yet.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import struct
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

INDEX, FORMAT = "index.json", "txl-deploy.pieces.1"
MIB = 2**20
LEADS_OUT = re.compile(r"(^|/)\.\.(/|$)|^/|[\\:\0]|^$")
"""Matches file names that would leave the folder into which an archive is unpacked, on any system."""
MODULES = re.compile(r"^[^/]+\.data/(?:purelib|platlib)/")
"""Matches the folders of a wheel's `.data` that hold modules; scripts and headers in `.data` are not needed."""


FATBIN, IMAGE = struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
"""Two headers in a library. The header of a set of images: magic number, version, the header's size, the images' size.
The header of one image: kind, version, the header's size, the content's size, compute capability."""
MAGIC, HEADER = 0xBA55ED50, 16


class CarryError(Exception):
    """Pieces cannot be made or joined; the message is one line that says what was found, expected, and can be done."""


def without_others(library: bytes, sm: int) -> bytes:
    """Return a library's bytes with zeros in place of all images for other GPUs; nothing changes its place.

    A set of images without one for this GPU stays as it is. `sm` is the compute capability times 10, e.g. 90.
    """
    result, magic, at = bytearray(library), struct.pack("<I", MAGIC), 0
    while (at := library.find(magic, at)) >= 0:
        _, version, header, size = FATBIN.unpack_from(library.ljust(at + HEADER), at)
        end, place, images = at + HEADER + size, at + HEADER, list[tuple[int, int, int]]()
        at += len(magic)
        if (version, header) != (1, HEADER) or end > len(library):
            continue
        while place + IMAGE.size <= end:
            _, _, own, content, capability = IMAGE.unpack_from(library, place)
            images.append((capability, place + own, content))
            place += own + content
        if sm in {capability for capability, _, _ in images}:
            for capability, start, content in images:
                if capability != sm:
                    result[start : start + content] = bytes(content)
    return bytes(result)


def split(sources: Sequence[Path], folder: Path, most: int, sm: int | None = None) -> int:
    """Cut files, and all files of folders, into pieces of at most `most` MiB in `folder`; return the number of pieces.

    With `sm`, wheels are unpacked, `without_others` changes their libraries, and the archive is compressed.

    Raises:
        CarryError: two files have one name, a file is a link to a folder, or `folder` is not empty.
    """
    named: dict[str, Path] = {}
    for source in sources:
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            name = file.relative_to(source if source.is_dir() else source.parent).as_posix()
            if file.is_symlink() and file.is_dir():
                raise CarryError(f"{file} is a link to a folder, expected files; copy the folder there")
            if named.setdefault(name, file) is not file:
                raise CarryError(f"{name} is there twice, expected one of each name; split them apart")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CarryError(f"{folder} is not empty, expected a new folder; name another with --out")
    pieces: dict[str, str] = {}
    with tempfile.TemporaryFile(dir=folder) as whole:
        with tarfile.open(fileobj=whole, mode="w" if sm is None else "w:xz", dereference=True) as archive:
            for name, file in named.items():
                if sm is not None and file.suffix == ".whl":
                    for part, content in _members(file):
                        data = content.read()
                        data = without_others(data, sm) if ".so" in part else data
                        member = tarfile.TarInfo(part)
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
                elif not file.is_dir() and "__pycache__" not in file.parts:
                    archive.add(file, name)
        whole.seek(0)
        while data := whole.read(most * MIB):
            name = f"{len(pieces):03}"
            (folder / name).write_bytes(data)
            pieces[name] = hashlib.sha256(data).hexdigest()
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, "pieces": pieces}, indent=1) + "\n")
    return len(pieces)


def join(folder: Path, site: Path) -> int:
    """Check all pieces of a folder, then unpack them into `site`; return the number of files in the archive.

    Raises:
        CarryError: the index or a piece is missing or wrong, or a file's name leads out of `site`.
    """
    try:
        facts = json.loads((folder / INDEX).read_text())
        if facts["format"] != FORMAT:
            raise ValueError(facts["format"])
        pieces = {_below(name): str(sha256) for name, sha256 in facts["pieces"].items()}
    except FileNotFoundError:
        raise CarryError(f"{folder} has no {INDEX}, expected what `split` wrote; carry it here, too") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CarryError(f"{folder / INDEX} is no index of pieces; carry it here once more") from None
    if missing := [name for name in pieces if not (folder / name).is_file()]:
        raise CarryError(f"{folder} lacks {', '.join(missing)}, expected {len(pieces)} pieces; carry them here too")
    with tempfile.TemporaryFile(dir=folder) as whole:
        for name, sha256 in pieces.items():
            data = (folder / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != sha256:
                raise CarryError(f"{folder / name} has another SHA-256 than when it was cut; carry it here once more")
            whole.write(data)
        whole.seek(0)
        with tarfile.open(fileobj=whole) as archive:
            members = archive.getmembers()
            for member in members:
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    raise CarryError(f"{member.name} is no plain file, expected what `split` writes; use other pieces")
                _put(content, site / _below(member.name))
    for wheel in (site / member.name for member in members if member.name.endswith(".whl")):
        for name, content in _members(wheel):
            _put(content, site / name)
        wheel.unlink()
    return len(members)


def _members(wheel: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of each file of a wheel that belongs into a folder of packages."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = MODULES.sub("", _below(member.filename))
            if not member.is_dir() and not name.split("/")[0].endswith(".data"):
                with archive.open(member) as content:
                    yield _below(name), content


def _put(content: IO[bytes], to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("wb") as file:
        shutil.copyfileobj(content, file, MIB)


def _below(name: str) -> str:
    if LEADS_OUT.search(name):
        raise CarryError(f"{name!r} leads out of the folder, expected a file below it; do not use these pieces")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, and split or join; return 2 after an error, else 0."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    verbs = options.add_subparsers(dest="verb", required=True)
    cut, joined = verbs.add_parser("split", help="cut files"), verbs.add_parser("join", help="put them together")
    cut.add_argument("sources", type=Path, nargs="+", help="wheels, and folders of packages")
    cut.add_argument("--out", type=Path, required=True, metavar="PIECES", help="a new folder")
    cut.add_argument(
        "--mib", type=int, choices=range(1, 1025), metavar="1…1024", default=36, help="of a piece (default 36)"
    )
    cut.add_argument("--only-sm", type=int, metavar="SM", help="leave out machine code for GPUs of others, such as 90")
    joined.add_argument("pieces", type=Path, help="the folder with all of them")
    joined.add_argument("--site", type=Path, required=True, help="where the packages go")
    given = options.parse_args(arguments)
    try:
        if given.verb == "split":
            print(f"{split(given.sources, given.out, given.mib, given.only_sm)} pieces and {INDEX} in {given.out}")
        else:
            print(f"{join(given.pieces, given.site)} files, their wheels unpacked, in {given.site}")
    except (CarryError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        print(f"carry: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
