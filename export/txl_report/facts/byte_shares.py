"""Sum the bytes of each part of a model, by reading only the header of the weight file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.weight_header import StoredTensor, read_header
from txl_runtime.errors import BundleError

from txl_report.facts.plain import Missing
from txl_report.schema.reading import short

NAMED = 12
"""Number of parts of an own module that are shown by name; the smaller parts are summed."""
OTHER = "other"
"""Name of the part for tensors that belong to no known part."""
TIED = "The softmax shares tables with the embedding; what is shared counts as embedding."
"""Note for a model whose softmax and embedding share tables."""


@dataclass(frozen=True)
class ByteShare:
    """A part of the weight file: its name, its number of tensors, and their size in bytes."""

    name: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class ByteShares:
    """The parts of a weight file, with their sizes.

    Attributes:
        parts: the parts in the order in which a model computes; for own modules the largest first.
        bytes: size of all tensors in bytes.
        note: a remark on the numbers; "" if they need none.
    """

    parts: tuple[ByteShare, ...]
    bytes: int
    note: str = ""


ORDER = ("embedding", "layers", "positions", "softmax", "initial memory", OTHER)
"""The parts of a Transformer-XL, in the order in which the page shows them."""
POSITIONS = (".attention.position.", ".attention.distance.", ".table.")
"""Marks in the names of tensors that encode a key's position, or that the export computed from such tensors."""


def read_parts(bundle: Bundle) -> ByteShares | Missing:
    """Read the parts of a bundle's weight file; return a `Missing` with the reason if its header cannot be read."""
    try:
        tensors = read_header(bundle.file(bundle.manifest.weights))
    except BundleError as error:
        return Missing(f"The weight file cannot be read: {error}.")
    return parts_of(tensors, bundle.manifest)


def parts_of(tensors: dict[str, StoredTensor], manifest: Manifest) -> ByteShares:
    """Sum the tensors' bytes by the part of the model to which they belong."""
    whole = manifest.family_name == "transformer_xl"
    named = ((_part(name) if whole else _module(name), tensor.length) for name, tensor in tensors.items())
    parts = _sums(named)
    if whole:
        tables = [sum(name.startswith(f"{part}.tables.") for name in tensors) for part in ("embedding", "softmax")]
        note = "" if tables[1] >= tables[0] else TIED
        return ByteShares(tuple(parts[name] for name in ORDER if name in parts), _total(parts), note)
    largest = sorted(parts.values(), key=lambda part: (-part.bytes, part.name))
    shown, rest = largest[:NAMED], largest[NAMED:]
    if rest:
        shown.append(
            ByteShare(f"{len(rest)} more", sum(part.tensors for part in rest), sum(part.bytes for part in rest))
        )
    return ByteShares(tuple(shown), _total(parts))


def _part(name: str) -> str:
    if name.startswith("initial."):
        return "initial memory"
    if any(part in name for part in POSITIONS) or name.endswith(".positions"):
        return "positions"
    if name.startswith("final_norm."):
        return "layers"
    for part in ("embedding", "layers", "softmax"):
        if name.startswith(f"{part}."):
            return part
    return OTHER


def _module(name: str) -> str:
    """Return the first part of a tensor's path in the user's module, e.g. "encoder" for "encoder.0.weight"."""
    return "initial state" if name.startswith("initial.") else short(name.partition(".")[0], 80)


def _sums(named: Iterable[tuple[str, int]]) -> dict[str, ByteShare]:
    sums: dict[str, ByteShare] = {}
    for name, size in named:
        before = sums.get(name, ByteShare(name, 0, 0))
        sums[name] = ByteShare(name, before.tensors + 1, before.bytes + size)
    return sums


def _total(parts: dict[str, ByteShare]) -> int:
    return sum(part.bytes for part in parts.values())
