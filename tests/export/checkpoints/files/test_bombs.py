"""Containers and texts that ask for much: each is read, or refused, within its share of memory and processor time."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pickle_programs import (
    ENTRIES,
    PROGRAM,
    described,
    legacy_bytes,
    program,
    safetensors_bytes,
    storage,
    tensor,
    zip_bytes,
)
from txl_export.checkpoints.files.loading import load_file

MEMORY, CONSTANT = 32, 32 << 20
"""An eighth of what SECURITY promises for each byte, and half of its constant: nothing here needs more."""
SECONDS, PER_MEGABYTE = 2.0, 2.0
MANY = int(os.environ.get("TXL_BOMB_SIZE", "20000"))
"""Entries, tensors or lines of each file: 20,000 in every sweep, 200,000 and a million by hand."""
DIRECTORY = struct.Struct("<4s4B4HL2L5H2L")
END = struct.Struct("<4s4H2LH")


class _Pipe(io.BytesIO):
    """A stream that can only be written to: zipfile then puts sizes and checksums behind each entry."""

    def seekable(self) -> bool:
        return False

    def seek(self, *where: int) -> int:
        raise OSError

    def tell(self) -> int:
        raise OSError


def behind() -> bytes:
    file = _Pipe()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in ENTRIES:
            archive.writestr(name, data)
    return file.getvalue()


def zip64(length: int | None = None, offset: int | None = None) -> bytes:
    """Sizes and places in 64 bits, in both headers of each entry; those of the storage are lies where given."""
    body, directory = b"", b""
    for name, data in ENTRIES:
        raw, size = data.encode() if isinstance(data, str) else data, len(data)
        lies = name == "a/data/0"
        here = offset if lies and offset is not None else len(body)
        large = length if lies and length is not None else size
        crc = zipfile.crc32(raw)
        extra = struct.pack("<HHQQQ", 1, 24, large, large, here)
        most = 0xFFFFFFFF
        body += struct.pack("<4s5H3L2H", b"PK\x03\x04", 45, 0, 0, 0, 0, crc, most, most, len(name), 20)
        body += name.encode() + struct.pack("<HHQQ", 1, 16, size, size) + raw
        directory += DIRECTORY.pack(
            b"PK\x01\x02", 45, 3, 45, 0, 0, 0, 0, 0, crc, most, most, len(name), len(extra), 0, 0, 0, 0, most
        )
        directory += name.encode() + extra
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 3, 3, len(directory), len(body))
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(body) + len(directory), 1)
    return body + directory + record + locator + END.pack(b"PK\x05\x06", 0, 0, 3, 3, most, most, 0)


def directory_bomb(name: Callable[[int], str]) -> bytes:
    """Many entries in the directory, and one place they all name."""
    body = zip_bytes([("a/data.pkl", PROGRAM)])
    body = body[: body.index(b"PK\x01\x02")]
    crc, size = zipfile.crc32(PROGRAM), len(PROGRAM)
    entries = b"".join(
        DIRECTORY.pack(b"PK\x01\x02", 20, 3, 20, 0, 0, 0, 0, 0, crc, size, size, len(text), 0, 0, 0, 0, 0, 0) + text
        for text in (name(i).encode() for i in range(MANY))
    )
    return body + entries + END.pack(b"PK\x05\x06", 0, 0, MANY & 0xFFFF, MANY & 0xFFFF, len(entries), len(body), 0)


def entries(name: Callable[[int], str]) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that stand there twice
        return zip_bytes([*ENTRIES, *((name(i), b"") for i in range(MANY))])


def tensors(header: Callable[[int], object]) -> bytes:
    return safetensors_bytes({f"{i}": header(i) for i in range(MANY)}, b"")


def text_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def compressed(method: int, megabytes: int) -> bytes:
    """Zeros in a thousandth of their size, or less."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=9) as archive:
        archive.writestr("a/data.pkl", PROGRAM)
        with archive.open("a/data/0", "w", force_zip64=True) as entry:
            for _ in range(megabytes):
                entry.write(bytes(1 << 20))
    return file.getvalue()


HEADER = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
LONG = 500 * MANY
READ = "read"

# file's name → (its bytes, "read" or a part of what the refusal says)
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "zip64.pt": (zip64, READ),
    "zip64-length.pt": (lambda: zip64(1 << 62), "overlap, or have one name"),
    "zip64-offset.pt": (lambda: zip64(None, 1 << 63), "cannot be read"),
    "descriptors.pt": (behind, READ),
    "deflated.pt": (lambda: compressed(zipfile.ZIP_DEFLATED, MANY // 20), "compressed or encrypted"),
    "entries.pt": (lambda: entries("a/data/x{}".format), READ),
    "entries-of-one-name.pt": (lambda: entries(lambda i: "a/data/x"), "have one name"),
    "pickles.pt": (lambda: entries("{}/data.pkl".format), "data.pkl, expected one"),
    "directory.pt": (lambda: directory_bomb("{}".format), "overlap, or have one name|cannot be read"),
    "directory-of-one-name.pt": (
        lambda: directory_bomb(lambda i: "a/data.pkl"),
        "overlap, or have one name|cannot be read",
    ),
    "comment.pt": (
        lambda: zip_bytes(ENTRIES)[:-2] + b"\xff\xff" + b"PK\x05\x06" * 16384,
        "damaged",
    ),
    "storages.pt": (
        lambda: zip_bytes(
            [
                ("a/data.pkl", program([tensor(storage(4, f"{i}")) for i in range(MANY // 10)])),
                *((f"a/data/{i}", bytes(16)) for i in range(MANY // 10)),
            ]
        ),
        READ,
    ),
    "legacy.pt": (
        lambda: legacy_bytes(
            body=[tensor(storage(4, f"{i}")) for i in range(MANY // 10)],
            keys=tuple(f"{i}" for i in range(MANY // 10)),
            count=4,
        ),
        READ,
    ),
    "spaces.safetensors": (lambda: text_header(b"{" + b" " * LONG + b"}"), READ),
    "nested.safetensors": (lambda: text_header(b'{"a":' + b"[" * LONG), "not a valid safetensors"),
    "metadata.safetensors": (lambda: text_header(b'{"__metadata__":{"a":"' + b"x" * LONG + b'"}}'), READ),
    "digits.safetensors": (
        lambda: text_header(b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"9" * LONG + b"]}}"),
        "not a valid safetensors",
    ),
    "axes.safetensors": (
        lambda: text_header(
            b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b",".join([b"0"] * (LONG // 2)) + b"]}}"
        ),
        "not a valid safetensors",
    ),
    "tensors.safetensors": (lambda: tensors(lambda i: described(shape=(0,), last=0)), READ),
    "tensors-of-one-place.safetensors": (
        lambda: safetensors_bytes({f"{i}": described() for i in range(MANY)}),
        "1 is F32 .4. at 0 … 16, expected it at 16",
    ),
    "tensors-of-one-name.safetensors": (
        lambda: text_header(b"{" + b",".join([(HEADER % 0).encode()] * MANY) + b"}"),
        READ,
    ),
    "long-names.safetensors": (
        lambda: safetensors_bytes({f"{i}" * 2000: described("Q9") for i in range(MANY // 40)}),
        "not a valid safetensors",
    ),
    "deep.json": (lambda: b'{"a":' + b"[" * LONG, "expected one JSON object"),
    "long.json": (lambda: json.dumps({f"k{i}": i for i in range(MANY)}).encode(), READ),
    "digits.json": (lambda: b'{"n_layer": ' + b"9" * LONG + b"}", "expected one JSON object"),
    "escapes.json": (lambda: b'{"a": "' + b"\\u00e9" * (LONG // 6) + b'"}', READ),
    "words.txt": (lambda: b"".join(b"w%d 3\n" % i for i in range(MANY)), READ),
    "lines.txt": (lambda: b"\n" * LONG, "no list of symbols"),
    "marks.txt": (lambda: b"<unk>\n<eos>\n<S>\n" * MANY, READ),
    "latin.txt": (lambda: b"x" * LONG + b"\xe9", "expected one symbol per line"),
}

CHILD = """
import resource, sys, time
from pathlib import Path
import torch
from txl_export.checkpoints import read_config
from txl_export.checkpoints.files.loading import load_file
from txl_export.checkpoints.vocabularies import read_vocabulary_file
from txl_runtime.errors import TxlError
torch.zeros(1)
memory, constant = map(int, sys.argv[1:3])
for name in sys.argv[3:]:
    path = Path(name)
    read = {".json": read_config, ".txt": read_vocabulary_file}.get(path.suffix, load_file)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + memory * path.stat().st_size + constant, resource.RLIM_INFINITY))
    start, said = time.process_time(), "read"
    try:
        found = read(path)
    except TxlError as error:
        said = str(error)
        assert said.isprintable() and len(said) < 3000, said[:3000]
    except MemoryError:
        said = "out of memory"
    found = None
    spent = time.process_time() - start
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(path.name, f"{spent:.3f}", said, sep="\\t", flush=True)
"""


@pytest.mark.parametrize("build", [zip64, behind])
def test_archives_of_other_writers_are_read(tmp_path, build):
    path = tmp_path / "model.pt"
    path.write_bytes(build())
    assert torch.equal(load_file(path).content, torch.zeros(4))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to know how much memory a process has")
def test_no_file_takes_more_memory_or_time_than_its_share(tmp_path):
    """One process reads them all, each with no more memory than it had and the file's share."""
    for name, (build, _) in FILES.items():
        (tmp_path / name).write_bytes(build())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(MEMORY), str(CONSTANT), *(str(tmp_path / name) for name in FILES)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = [row.split("\t") for row in done.stdout.splitlines()]
    assert [row[0] for row in found] == list(FILES)
    for name, seconds, said in found:
        match = FILES[name][1]
        assert said == READ if match == READ else re.search(match, said), (name, said)
        assert float(seconds) < SECONDS + PER_MEGABYTE * (tmp_path / name).stat().st_size / 1e6, (name, seconds)
