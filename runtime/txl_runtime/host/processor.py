"""The processor, as far as it decides what ONNX Runtime is asked for."""

from __future__ import annotations

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def sums_exactly(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor sums products of int8 in 32 bits: True with AVX512-VNNI.

    Where that is not known, as on macOS and Windows, it is False.
    """
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and "avx512_vnni" in line.split() for line in lines)
