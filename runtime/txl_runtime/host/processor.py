"""The features of the processor that decide how sums are computed and which instructions are used."""

from __future__ import annotations

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""Linux's description of the processors."""


@functools.cache
def processor_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return Linux's names of the processor's features, e.g. avx2; an empty set if they are unknown, as on macOS."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split())


def sums_exactly(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor sums products of int8 in 32 bits: True with AVX512-VNNI.

    If this is unknown, as on macOS and Windows, return False.
    """
    return "avx512_vnni" in processor_flags(cpuinfo)
