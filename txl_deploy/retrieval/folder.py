"""Read, write and check the files in the folder of a datastore.

Features and tokens are plain arrays, row after row, which are memory-mapped; `parts.jsonl` has a line for each text.
The header says how many bytes of each file count: during a build a file may have more bytes, and never fewer.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from txl_runtime.bundle.writing import write_named
from txl_runtime.errors import UsageError, brief, one_line
from txl_runtime.files import open_plain
from txl_runtime.types import Ids

HEADER, FEATURES, TOKENS, PARTS, INDEX = "datastore.json", "features.f16", "tokens.i32", "parts.jsonl", "index.faiss"
AGAIN = "build a new one"
BLOCK = 1 << 15
"""Number of rows that are read at a time."""
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Sha = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Halves = NDArray[np.float16]
Feature = Literal["softmax", "feed-forward"]


class Part(Struct, frozen=True, kw_only=True):
    """A line of `parts.jsonl`, which says where the rows of a text are.

    Attributes:
        name: the text's name.
        sha256: SHA-256 of the text's token ids, as `hash_of` computes it.
        first, rows: index of the text's first row, and number of its rows.
    """

    name: str
    sha256: Sha
    first: Count
    rows: Count


class Held(Struct, frozen=True):
    """A file: the number of its bytes that count, and their SHA-256, or None until the store is complete."""

    bytes: Count
    sha256: Sha | None = None


class Begun(Struct, frozen=True, kw_only=True):
    """A text of which only the first rows are stored: its hash, its first row, and the file with the model's state."""

    sha256: Sha
    first: Count
    state: Annotated[str, Meta(pattern=r"^state-[0-9]+\.safetensors$")]


class Header(Struct, frozen=True, kw_only=True):
    """The content of `datastore.json`.

    Attributes:
        model_id: the id of the model that computed the features.
        width: F, number of values of a feature.
        feature: the kind of feature: the input of the softmax, or of the last feed-forward layer.
        rows: number of rows, one for each position.
        files: every file by its name.
        complete: True if the build has ended; if False, the same command continues the build.
        begun: the text of which only the first rows are stored; None if there is none.
        clustered: number of rows from which the clusters of the index were computed; 0 if there is no index.
    """

    format: Literal["txl-deploy.datastore/1"] = "txl-deploy.datastore/1"
    model_id: str
    width: Annotated[int, Meta(ge=1, lt=2**20)]
    feature: Feature = "softmax"
    rows: Count = 0
    files: dict[str, Held]
    complete: bool = False
    begun: Begun | None = None
    clustered: Count = 0


def hash_of(ids: Ids) -> str:
    """Return the SHA-256 of token ids, as little-endian int32, which identifies a text, e.g. "9f2c…" of 64 digits."""
    return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()


def read_header(folder: Path, model_id: str) -> Header:
    """Read a datastore's header.

    Raises:
        UsageError: there is no header, or it is damaged or of a different model.
    """
    place = folder / HEADER
    try:
        with open_plain(place) as (file, _):
            header = msgspec.json.decode(file.read(1 << 16), type=Header)
        rows, files = header.rows, header.files
        sizes = {FEATURES: rows * header.width * 2, TOKENS: rows * 4}
        if set(files) - {INDEX} != {*sizes, PARTS}:
            raise ValueError(f"it lists {', '.join(files)}")
        if any(files[name].bytes != size for name, size in sizes.items()):
            raise ValueError(f"the sizes are not those of {rows} rows")
        if header.complete and (not rows or any(held.sha256 is None for held in files.values())):
            raise ValueError("it has no row, or a file has no hash")
        if (INDEX in files) != bool(header.clustered):
            raise ValueError(f"it lists {', '.join(files)} for clusters of {header.clustered} rows")
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror or error}, expected a datastore; build one there first") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: {brief(one_line(error))}, expected a datastore's header; {AGAIN}") from None
    if header.model_id != model_id:
        raise UsageError(
            f"{folder}: is of model {header.model_id[:12]}, expected the bundle's, {model_id[:12]}; build one with it"
        )
    return header


def write_header(folder: Path, header: Header) -> None:
    """Write the header; readers see either the old header or the new one.

    Raises:
        TxlError: the disk is full, or the folder cannot be written.
    """
    write_named(folder / HEADER, msgspec.json.format(msgspec.json.encode(header)))


def file_hash(place: Path, size: int) -> str:
    """Return the SHA-256 of the first `size` bytes of a file.

    Raises:
        UsageError: the file is missing, or has fewer bytes.
    """
    digest, left = hashlib.sha256(), size
    try:
        with open_plain(place) as (file, _):
            while left and (piece := file.read(min(left, 1 << 22))):
                digest.update(piece)
                left -= len(piece)
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror or error}, expected a file of the datastore; {AGAIN}") from None
    if left:
        raise UsageError(f"{place}: has {size - left} bytes, expected {size}; {AGAIN}")
    return digest.hexdigest()


def check_files(folder: Path, header: Header) -> None:
    """Check the hashes of all files.

    Raises:
        UsageError: the store is not complete, or a file is missing, shorter or altered.
    """
    if not header.complete:
        raise UsageError(
            f"{folder}: its build was ended after {header.rows:,} positions, expected a whole one; build it again with "
            "the same command, or wait where a build still runs"
        )
    for name, held in header.files.items():
        if (digest := file_hash(folder / name, held.bytes)) != held.sha256:
            raise UsageError(f"{folder / name}: its hash is {digest[:12]}, expected {str(held.sha256)[:12]}; {AGAIN}")


def read_parts(folder: Path, header: Header) -> list[Part]:
    """Read `parts.jsonl`, whose lines are in the order of the texts' rows.

    Raises:
        UsageError: a line is damaged, its rows do not follow the rows of the line before it, or rows of a complete
            store belong to no text.
    """
    place, parts, end = folder / PARTS, list[Part](), 0
    try:
        with open_plain(place) as (file, _):
            for line in file.read(header.files[PARTS].bytes).splitlines():
                part = msgspec.json.decode(line, type=Part)
                if part.first != end or (end := end + part.rows) > header.rows:
                    raise ValueError(f"{brief(part.name)} begins at row {part.first}")
                parts.append(part)
        if header.complete and end != header.rows:
            raise ValueError(f"its texts have {end} rows, and the store {header.rows}")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{place}: {brief(one_line(error))}, expected a line for each text; {AGAIN}") from None
    return parts


def mapped(folder: Path, header: Header) -> tuple[Halves, Ids]:
    """Return the features, float16 [rows, F], and the tokens, int32 [rows], from the mapped files.

    For example, [100000, 512] and [100000].
    """
    shape = header.rows, header.width
    features: Halves = np.memmap(folder / FEATURES, "<f2", "r", shape=shape)
    tokens: Ids = np.memmap(folder / TOKENS, "<i4", "r", shape=shape[:1])
    return features, tokens


def first_unusable(features: Halves) -> int | None:
    """Return the first row of float16 [rows, F] that holds NaN or infinity; None if no row does."""
    for first in range(0, len(features), BLOCK):
        some = np.isfinite(features[first : first + BLOCK]).all(axis=1)
        if not some.all():
            return first + int(some.argmin())
    return None
