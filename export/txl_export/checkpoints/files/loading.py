"""Reads checkpoint files as plain data; imports nothing that a file names and runs nothing in it.

`program` runs pickles in a separate process, `rebuilding` makes plain data and tensors from the result. torch.load is
not used: it neither compares sizes with the file's nor refuses other formats. Five formats are read:

    torch zip      torch ≥ 1.6: an uncompressed zip of one pickle, <name>/data.pkl, and one entry per storage
    TorchScript    a torch zip that also holds code, which is never opened
    torch legacy   torch ≤ 1.5: five pickles (magic number, protocol, system, content, storage keys), then the storages
    pickle         by pickle.dump; a torch legacy file inside the pickle holds each storage
    safetensors    a header of JSON, then the tensors (`safetensors_file`)
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.containers import DAMAGED, MAGIC_BYTES, SAVE_AGAIN, LegacyFile, PlainPickle, ZipFile
from txl_export.checkpoints.files.pickle_names import known, shown
from txl_export.checkpoints.files.rebuilding import Builder, ProgramAnswer, run
from txl_export.checkpoints.files.safetensors_file import is_safetensors, read_safetensors
from txl_export.regular import open_regular
from txl_export.tensorflow import SUFFIX, converting

READ_SIZE = 1 << 20
_OTHERS = {
    rb"(?s).{257}ustar": f"a tar archive; if torch < 0.4 wrote it, load it there and {SAVE_AGAIN}; otherwise unpack it",
    rb"\x89HDF": "an HDF5 file (Keras?), expected PyTorch; convert it first",
    rb"\x1f\x8b|BZh|\xfd7zXZ|\(\xb5/\xfd": "a compressed file; unpack it first",
    rb"PK": f"the beginning of a zip archive, or an empty one; the file is {DAMAGED}",
    rb"(?is)\x08.{,4200}onnx": "an ONNX file, expected the checkpoint it was made from",
    rb"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch it with git lfs pull",
}
"""Patterns of the first bytes of files that are no checkpoints, each with a phrase that names the file's kind and what
to do."""


@dataclass(frozen=True)
class Loaded:
    """The content of a file, with the record of reading it.

    Attributes:
        container: "torch zip", "TorchScript", "torch legacy", "pickle" or "safetensors".
        content: dict, list, tuple, str, int, float, bool, bytes, None, torch.Tensor (on the CPU) and `Stub`. Ordered
            dictionaries and counters are dicts, sets are lists, parameters and NumPy's arrays tensors. Tensors over the
            same elements of one storage, such as tied tensors, are one object; any other shared object is copied.
        global_names: every dotted name the file refers to, sorted.
        sha256: the hash of the file, hexadecimal.
        notes: the names that aliases translated, for the user.
        constants: the number of nameless tensors in a TorchScript archive, besides its module's tensors.
        classes: the class of each part of a TorchScript archive by the part's name; `modules.unscripted` fills it.
    """

    container: str
    content: Any
    global_names: tuple[str, ...]
    sha256: str
    notes: tuple[str, ...] = ()
    constants: int = 0
    classes: Mapping[str, str] = field(default_factory=dict)


def load_file(path: Path, aliases: Mapping[str, str] | None = None) -> Loaded:
    """Read a file that torch.save, torch.jit.save, safetensors or pickle.dump wrote.

    `aliases` maps names of classes in the file to known names, e.g. {"modules.MemTransformerLM":
    "mem_transformer.MemTransformerLM"}.

    Raises:
        CheckpointError: the file is missing, damaged or no checkpoint, or an alias leads to an unknown class.
    """
    aliases = aliases or {}
    with _reading(path) as (file, size, head):
        if wrong := ", ".join(sorted(shown(target) for target in aliases.values() if not known(target))):
            raise CheckpointError(f"aliases lead to {wrong}, expected known ones like mem_transformer.MemTransformerLM")
        if is_safetensors(head, size):
            return Loaded("safetensors", read_safetensors(file, size), (), _sha256(file))
        container, written = _run(path, file, size, head)
        if written.error:
            raise CheckpointError(written.error)
        builder = Builder(
            written.blob, container.elements, aliases, container.nested if container.name == "pickle" else None
        )
        content, names = container.content(written, builder), tuple(sorted(set(written.names)))
        notes = tuple(f"{name} read as {aliases[name]}" for name in names if name in aliases)
        return Loaded(container.name, content, names, _sha256(file), notes, container.constants)


def scan_globals(path: Path) -> tuple[str, ...]:
    """Return the dotted names that a file's pickles refer to, sorted; of a damaged file, the names before the damage.

    Raises:
        CheckpointError: the file cannot be read, or is no checkpoint.
    """
    with _reading(path) as (file, size, head):
        names = [] if is_safetensors(head, size) else _run(path, file, size, head)[1].names
        return tuple(sorted({shown(name) for name in names}))


def _run(path: Path, file: io.BufferedReader, size: int, head: bytes) -> tuple[PlainPickle, ProgramAnswer]:
    """Recognise the container by the first bytes; return the container and the content of its pickles."""
    kind: type[PlainPickle]
    if head.startswith(b"PK\x03\x04"):
        kind = ZipFile
    elif MAGIC_BYTES in head[:40]:
        kind = LegacyFile
    elif re.match(rb"\x80[\x02-\x05]", head):
        kind = PlainPickle
    else:
        raise CheckpointError(_what_else(path, head, file, size))
    container = kind(file, size)
    return container, run(container.program(), container.programs)


@contextmanager
def _reading(path: Path) -> Iterator[tuple[io.BufferedReader, int, bytes]]:
    """Open a file; yield the file, its size and its first bytes; errors of the caller's block get the path in front."""
    try:
        if path.is_dir():
            raise CheckpointError("this is a folder, expected a checkpoint file; Hugging Face's needs its config.json")
        if not path.exists():
            raise CheckpointError("no such file; check the path")
        with open_regular(path) as (file, size):
            yield file, size, file.read(min(size, READ_SIZE))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file") from None
    except RecursionError:
        raise CheckpointError(f"{path}: its content is nested too deeply; {SAVE_AGAIN}") from None
    except MemoryError:
        raise CheckpointError(f"{path}: needs more memory than there is; load it on a larger machine") from None


def _sha256(file: io.BufferedReader) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(READ_SIZE):
        digest.update(block)
    return digest.hexdigest()


def _what_else(path: Path, head: bytes, file: io.BufferedReader, size: int) -> str:
    """Return a phrase that says which kind of file this is, and what to do, for a file that is no known checkpoint."""
    if not head:
        return "the file is empty; copy it again"
    file.seek(max(0, size - 8))
    if SUFFIX.search(path.name) or file.read(8) == b"\x57\xfb\x80\x8b\x24\x75\x47\xdb":
        return converting(path)
    for beginning, what in _OTHERS.items():
        if re.match(beginning, head[:4096] + path.suffix.encode("utf-8", "replace")):
            return f"this is {what}"
    if path.suffix == ".safetensors":
        return f"not a valid safetensors file; the file is {DAMAGED}"
    text = head[:40].decode(errors="ignore")
    plain = all(character.isprintable() or character.isspace() for character in text)
    # the first 40 bytes may end inside a character, of up to 4 bytes
    if plain and len(text.encode()) > len(head[:40]) - 4:
        return f"looks like text ({shown(text)}), expected a checkpoint; check the path"
    return f"begins with {head[:8].hex(' ')}, expected a file by torch.save or safetensors; check the path"
