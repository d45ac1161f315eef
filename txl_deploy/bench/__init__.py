"""Measuring a bundle: torch-free, so that it can be done on the device.

`report.bench` is the whole measurement; `timing` takes turns, `floor` says what a step must read and how fast the
machine reads, `bundles` has the bundle as a competitor and the cost of Python, `processes` load time and memory.
"""

from __future__ import annotations

__all__: list[str] = []
