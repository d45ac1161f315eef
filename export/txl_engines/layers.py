"""Reads the layers of an engine from the listing that a builder logs and an inspector returns."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

FUSED_ATTENTION = ("_mha_v", "fmha")
"""Parts of names of kernels that compute a whole attention: scores, bias, softmax and the sum of values."""
NOT_KERNELS = frozenset({"signal", "wait", "shape_call", "noop", "constant", "cjmp"})
"""Layer types that start no work on the device."""
COUNTING = frozenset({"memset", "add"})
"""Layer types that start no work if they write a single integer, e.g. a counter, which the host keeps."""
REGION = "ForeignNode["
"""Part of the name of a layer that contains several kernels; TensorRT's listing need not name these kernels."""
SIZES = {"Float": 4, "Int32": 4, "Half": 2, "BFloat16": 2, "Bool": 1, "Int8": 1, "FP8": 1, "Int64": 8}
"""Bytes per element of each type in listings."""

_ROW = re.compile(r"^\s*Name: (?P<name>.*?), LayerType: (?P<kind>[^,\s]+)(?P<rest>.*)$", re.MULTILINE)
_INPUTS = re.compile(r", Inputs: \[(.*?)\], (?:Constants|Outputs): \[")
_OUTPUTS = re.compile(r", Outputs: \[(.*?\})\]")
_TENSOR = re.compile(r"\{ Name: (.*?), Dimensions: \[([\d,]*)\](?:.*?Datatype: (\w+))?")


class Operand(NamedTuple):
    """A tensor that a kernel reads or writes."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * SIZES.get(self.dtype, 4)


@dataclass(frozen=True)
class Kernel:
    """A layer that starts work on the device, with the tensors that it reads and writes; constants are left out."""

    name: str
    kind: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    @property
    def attends(self) -> bool:
        """True if the kernel computes a whole attention."""
        return any(mark in self.name for mark in FUSED_ATTENTION)

    def reads(self, names: Collection[str]) -> frozenset[str]:
        """Return the names among `names` that the kernel reads."""
        return frozenset(tensor.name for tensor in self.inputs if tensor.name in names)

    def writes(self, names: Collection[str]) -> frozenset[str]:
        """Return the names among `names` that the kernel writes."""
        return frozenset(tensor.name for tensor in self.outputs if tensor.name in names)

    def copies(self, names: Collection[str]) -> bool:
        """Return whether the kernel only copies or reorders tensors in `names`."""
        return bool(self.inputs) and not self.attends and all(tensor.name in names for tensor in self.inputs)


@dataclass(frozen=True)
class LayerReport:
    """Counts of an engine's layers, for `Sidecar`.

    Attributes:
        kernels: number of layers that start work on the device (in a loop counted once); None if the listing is
            incomplete.
        rows: each layer's name and kind.
        fused: number of fused attentions by name of kernel.
        read_in_place: number of states that a fused attention or a product reads in place.
        copying: number of kernels that only copy states.
    """

    kernels: int | None
    rows: tuple[tuple[str, str], ...]
    fused: dict[str, int]
    read_in_place: int = 0
    copying: int = 0

    @property
    def fused_attention(self) -> int:
        """The number of attention layers that became one kernel each."""
        return sum(self.fused.values())


def read_layers(listing: str, states: Collection[str] = ()) -> LayerReport:
    """Count the rows "Name: …, LayerType: …" of a listing at DETAILED verbosity.

    `states` has the names of the inputs and outputs of memory that is updated in place.
    """
    rows = tuple((match["name"], match["kind"]) for match in _ROW.finditer(listing))
    if not rows:
        return LayerReport(None, (), {})
    fused = Counter(_family(name) for name, _ in rows if any(mark in name for mark in FUSED_ATTENTION))
    kernels = tuple(read_kernels(listing))
    direct = (kernel.reads(states) for kernel in kernels if kernel.attends or kernel.kind == "gemm")
    return LayerReport(
        kernels=None if any(REGION in name for name, _ in rows) else len(kernels),
        rows=rows,
        fused=dict(sorted(fused.items())),
        read_in_place=len(frozenset().union(*direct)),
        copying=sum(kernel.copies(states) for kernel in kernels),
    )


def read_kernels(listing: str) -> Iterator[Kernel]:
    """Yield the layers of a listing that start work on the device, in order."""
    for match in _ROW.finditer(listing):
        if match["kind"].lower() in NOT_KERNELS:
            continue
        read, written = (_operands(side.search(match["rest"])) for side in (_INPUTS, _OUTPUTS))
        if match["kind"] not in COUNTING or any(math.prod(to.shape) > 1 or "Int" not in to.dtype for to in written):
            yield Kernel(match["name"], match["kind"], read, written)


def _operands(match: re.Match[str] | None) -> tuple[Operand, ...]:
    if match is None:
        return ()
    return tuple(
        Operand(name, tuple(int(size) for size in shape.split(",") if size), dtype)
        for name, shape, dtype in _TENSOR.findall(match[1])
    )


def _family(name: str) -> str:
    """Return a kernel's name without its number in the listing: "_gemm_mha_v2" for "_gemm_mha_v2_myl0_6"."""
    return re.sub(r"_myl\d+_\d+$", "", name)
