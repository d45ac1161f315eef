"""The layers that a compiler made of a graph, read from the list that a builder logs and an inspector returns."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

FUSED_ATTENTION = ("_mha_v", "fmha")
"""Parts of the names of kernels that do a whole attention: scores, bias, softmax and the sum over values."""
NOT_KERNELS = frozenset({"signal", "wait", "shape_call", "noop", "constant"})
"""Kinds of layer that start no work on the device."""

_ROW = re.compile(r"^\s*Name: (?P<name>.*?), LayerType: (?P<kind>[^,\s]+)", re.MULTILINE)


@dataclass(frozen=True)
class LayerReport:
    """Counts over a program's layers, as `Sidecar` has them: kernels, each layer's name and kind, fused attention."""

    kernels: int | None
    rows: tuple[tuple[str, str], ...]
    fused: dict[str, int]

    @property
    def fused_attention(self) -> int:
        """The number of attention layers that became one kernel each."""
        return sum(self.fused.values())


def read_layers(listing: str) -> LayerReport:
    """Count the rows "Name: …, LayerType: …" of a listing at DETAILED verbosity."""
    rows = tuple((match["name"], match["kind"]) for match in _ROW.finditer(listing))
    if not rows:
        return LayerReport(None, (), {})
    fused = Counter(_family(name) for name, _ in rows if any(mark in name for mark in FUSED_ATTENTION))
    kernels = sum(kind.lower() not in NOT_KERNELS for _, kind in rows)
    return LayerReport(kernels, rows, dict(sorted(fused.items())))


def _family(name: str) -> str:
    """A kernel's name without its number in the list: "_gemm_mha_v2" of "_gemm_mha_v2_myl0_6"."""
    return re.sub(r"_myl\d+_\d+$", "", name)
