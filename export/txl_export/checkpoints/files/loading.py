"""Reads a checkpoint file into plain data. Nothing the file names is imported, nothing in it is run.

Four containers, all opened here rather than by torch.load, so that every size is checked against the file before memory
is taken for it, and no reader for a format that is refused anyway (tar) is ever reached:

    torch zip      torch ≥ 1.6: an uncompressed zip of one pickle, <name>/data.pkl, and one entry per storage
    TorchScript    the same, and code, which is never opened (`torchscript`)
    torch legacy   torch ≤ 1.5: five pickles (magic number, protocol, system, content, storage keys), then the storages
    pickle         what pickle.dump wrote; in place of each storage stands a file of torch ≤ 1.5
    safetensors    a header of JSON, then the tensors (`safetensors_file`)

`program` runs the pickles in a process of its own, `rebuilding` makes plain data and tensors of what it answers.
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

from torch import Tensor
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.containers import (
    DAMAGED,
    MAGIC_BYTES,
    SAVE_AGAIN,
    LegacyFile,
    PlainPickle,
    ZipFile,
)
from txl_export.checkpoints.files.pickle_names import STUBS, Stub, joined, shown
from txl_export.checkpoints.files.rebuilding import run
from txl_export.checkpoints.files.regular import open_regular
from txl_export.checkpoints.files.safetensors_file import is_safetensors, read_safetensors
from txl_export.checkpoints.files.torchscript import script_state
from txl_export.tensorflow import SUFFIX, converting

READ_SIZE = 1 << 20
_WITHOUT_TENSORS = ("einops.layers.torch.Rearrange", "einops.layers.torch.Reduce")
"""Layers that pickle their patterns and nothing of a module."""
WRAPPERS = ("DataParallel", "DistributedDataParallel", "BalancedDataParallel")


@dataclass(frozen=True)
class Loaded:
    """What a file holds.

    Attributes:
        container: "torch zip", "TorchScript", "torch legacy", "pickle" or "safetensors".
        content: dict, list, tuple, str, int, float, bool, bytes, None, torch.Tensor (on the CPU) and `Stub`, nothing
            else. Ordered dictionaries and counters are dicts, sets are lists, parameters are tensors, NumPy's arrays
            and OmegaConf's configs tensors and plain data. Tensors over the same elements of one storage, such as tied
            ones, are one object; anything else that is shared comes as often as it is met.
        global_names: every dotted name the file refers to, sorted.
        sha256: of the file, hexadecimal.
        notes: what was translated on the way, for people.
        classes: of a TorchScript archive, whose content is its tensors by name: the class of each part by its name.
    """

    container: str
    content: Any
    global_names: tuple[str, ...]
    sha256: str
    notes: tuple[str, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)


def load_file(path: Path, aliases: Mapping[str, str] | None = None) -> Loaded:
    """Read a file that torch.save, torch.jit.save, safetensors or pickle.dump wrote.

    Args:
        path: the file.
        aliases: names of classes in the file, and the known ones to read them as, e.g.
            {"modules.MemTransformerLM": "mem_transformer.MemTransformerLM"}.

    Raises:
        CheckpointError: there is no such file, it is something else, or damaged; an alias leads to no known class.
    """
    aliases = dict(aliases or {})
    with _reading(path) as (file, size, head):
        if wrong := sorted(shown(target) for target in aliases.values() if target not in STUBS):
            raise CheckpointError(
                f"aliases lead to {', '.join(wrong)}, expected known classes such as mem_transformer.MemTransformerLM"
            )
        if is_safetensors(head, size):
            tensors, sha256 = read_safetensors(file, size)
            return Loaded("safetensors", tensors, (), sha256)
        container = _container(path, file, size, head)
        written = run(container.program(), container.programs)
        content, classes = container.content(written, aliases), {}
        if isinstance(container, ZipFile) and container.scripted:
            content, classes = script_state(content)
            if container.constants and not content:
                raise CheckpointError(
                    f"its {container.constants} tensors are constants of its code, without names, as torch.jit.freeze "
                    "leaves them; save the module before it is frozen"
                )
        names = tuple(sorted(set(written.names)))
        notes = tuple(f"{name} read as {aliases[name]}" for name in names if name in aliases)
        return Loaded(container.name, content, names, _sha256(file), notes, classes)


def scan_globals(path: Path) -> tuple[str, ...]:
    """The dotted names that the pickles of a file refer to, sorted, up to where one is damaged.

    Raises:
        CheckpointError: the file cannot be read, or is no such file.
    """
    with _reading(path) as (file, size, head):
        if is_safetensors(head, size):
            return ()
        container = _container(path, file, size, head)
        return tuple(sorted({shown(name) for name in run(container.program(), container.programs).names}))


def _container(path: Path, file: io.BufferedReader, size: int, head: bytes) -> ZipFile | LegacyFile | PlainPickle:
    if head.startswith(b"PK\x03\x04"):
        return ZipFile(file, size)
    if MAGIC_BYTES in head[:40]:
        return LegacyFile(file, size)
    if re.match(rb"\x80[\x02-\x05]", head):
        return PlainPickle(file, size)
    raise CheckpointError(_what_else(path, head, file, size))


def module_state(module: Stub) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a whole-module pickle holds: (its state dict, its hyper-parameters).

    Names are those of model.state_dict(), without wrappers for several devices; tied tensors are one object under
    every name. Hyper-parameters are the plain attributes of the model itself: numbers, text, None, and lists of them.

    Raises:
        CheckpointError: the object is not a module.
    """
    top = _unwrapped(module)
    state: dict[str, Tensor] = {}
    _collect(top, "", state)
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    plain = {
        name: value
        for name, value in top.state.items()
        if not name.startswith("_") and name != "training" and _is_plain(value)
    }
    return state, plain


def submodule(module: Stub, name: str) -> Stub | None:
    """A part of a module by its dotted name, e.g. "layers.0.pos_ff", without wrappers; None if there is none.

    "" is the module itself.

    Raises:
        CheckpointError: the object, or one on the way, is not a module.
    """
    found = _unwrapped(module)
    for part in name.split(".") if name else ():
        child = _parts(found, "_modules").get(part)
        if not isinstance(child, Stub):
            return None
        found = _unwrapped(child)
    return found


def _collect(module: Stub, prefix: str, state: dict[str, Tensor]) -> None:
    """Add a module's tensors and those of its parts, by their names; a part is met as often as it is shared."""
    listed = module.state.get("_non_persistent_buffers_set")
    transient = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
    buffers, parameters, modules = (_parts(module, kind) for kind in ("_buffers", "_parameters", "_modules"))
    buffers = {name: buffer for name, buffer in buffers.items() if name not in transient}
    for name, tensor in (parameters | buffers).items():
        if isinstance(tensor, Tensor):
            state[joined(prefix, name)] = tensor
        elif tensor is not None:
            raise CheckpointError(f"{shown(joined(prefix, name))} is not a tensor; {SAVE_AGAIN}")
    for name, child in modules.items():
        if isinstance(child, Stub):
            if child.class_name not in _WITHOUT_TENSORS:
                _collect(_unwrapped(child), joined(prefix, name), state)
        elif child is not None:
            raise CheckpointError(f"{shown(joined(prefix, name))} is not a module; {SAVE_AGAIN}")


def _unwrapped(module: Stub) -> Stub:
    while module.class_name.rpartition(".")[2] in WRAPPERS:
        inner = _parts(module, "_modules").get("module")
        if not isinstance(inner, Stub):
            raise CheckpointError(f"a {shown(module.class_name)} holds no module; {SAVE_AGAIN}")
        module = inner
    return module


def _parts(module: Stub, kind: str) -> dict[str, Any]:
    parts = module.state.get(kind)
    if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts):
        raise CheckpointError(
            f"{shown(module.class_name)} has no {kind}, expected a module as torch.save(model) writes it; {SAVE_AGAIN}"
        )
    return parts


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


@contextmanager
def _reading(path: Path) -> Iterator[tuple[io.BufferedReader, int, bytes]]:
    """The file, open, its size and how it begins; what goes wrong inside becomes one line that names it."""
    try:
        if path.is_dir():
            raise CheckpointError(
                "this is a folder, expected a checkpoint file; a Hugging Face folder needs its config.json"
            )
        if not path.exists():
            raise CheckpointError("no such file; check the path")
        with open_regular(path) as (file, size):
            yield file, size, file.read(min(size, READ_SIZE))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file") from None
    except MemoryError:
        raise CheckpointError(f"{path}: needs more memory than there is; load it on a larger machine") from None


def _sha256(file: io.BufferedReader) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(READ_SIZE):
        digest.update(block)
    return digest.hexdigest()


def _what_else(path: Path, head: bytes, file: io.BufferedReader, size: int) -> str:
    """What a file is that is no checkpoint known here, and what to do about it."""
    if not head:
        return "the file is empty; copy it again"
    file.seek(max(0, size - 8))
    tail = file.read(8)
    if SUFFIX.search(path.name) or tail == b"\x57\xfb\x80\x8b\x24\x75\x47\xdb":
        return converting(path)
    if head[257:262] == b"ustar":
        return f"this is a tar archive; if torch < 0.4 wrote it, load it there and {SAVE_AGAIN}; otherwise unpack it"
    if head.startswith(b"\x89HDF"):
        return "this is an HDF5 file (Keras?), expected PyTorch; convert it first"
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd")):
        return "this file is compressed; unpack it first"
    if head.startswith(b"PK"):
        return f"this is the beginning of a zip archive, or an empty one; the file is {DAMAGED}"
    if head.startswith(b"\x08") and (path.suffix == ".onnx" or b"onnx" in head[:4096].lower()):
        return "this is an ONNX file, expected the checkpoint it was made from"
    if path.suffix == ".safetensors":
        return f"not a valid safetensors file; the file is {DAMAGED}"
    if head.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer, not the file itself; fetch it with git lfs pull"
    if _looks_like_text(head[:4096]):
        return f"looks like text ({shown(head[:40].decode(errors='replace'))}), expected a checkpoint; check the path"
    return f"begins with {head[:8].hex(' ')}, expected a file by torch.save or safetensors; check the path"


def _looks_like_text(head: bytes) -> bool:
    try:
        text = head[:-4].decode() if len(head) > 8 else head.decode()
    except UnicodeDecodeError as error:
        text = head[: error.start].decode() if error.start > len(head) - 8 else "\0"
    return all(character.isprintable() or character.isspace() for character in text)
