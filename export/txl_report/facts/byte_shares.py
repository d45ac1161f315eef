"""Sum the bytes of each part of a model, from the header of the weight file alone."""

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
"""Parts of an own module that are shown by name; the smaller ones are summed."""
OTHER = "other"
TIED = "The softmax shares tables with the embedding; what is shared counts as embedding."


@dataclass(frozen=True)
class ByteShare:
    """A part of the weight file: its name, its number of tensors, and their bytes."""

    name: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class ByteShares:
    """The weight file by parts.

    Attributes:
        parts: in the order in which a model computes; for own modules the largest first.
        bytes: bytes of all tensors.
        note: a remark that the numbers need; "" for none.
    """

    parts: tuple[ByteShare, ...]
    bytes: int
    note: str = ""


ORDER = ("embedding", "layers", "positions", "softmax", "initial memory", OTHER)
"""The parts of a Transformer-XL, in the order of the page."""
POSITIONS = (".attention.position.", ".attention.distance.", ".table.")
"""Marks in the names of tensors that encode a key's position, or were computed from such ones at export."""


def read_parts(bundle: Bundle) -> ByteShares | Missing:
    """Read the parts of a bundle's weight file; a `Missing` says why its header cannot be read."""
    try:
        tensors = read_header(bundle.file(bundle.manifest.weights))
    except BundleError as error:
        return Missing(f"The weight file cannot be read: {error}.")
    return parts_of(tensors, bundle.manifest)


def parts_of(tensors: dict[str, StoredTensor], manifest: Manifest) -> ByteShares:
    """Sum tensors by the part that they belong to."""
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
    found: dict[str, ByteShare] = {}
    for name, size in named:
        before = found.get(name, ByteShare(name, 0, 0))
        found[name] = ByteShare(name, before.tensors + 1, before.bytes + size)
    return found


def _total(parts: dict[str, ByteShare]) -> int:
    return sum(part.bytes for part in parts.values())
