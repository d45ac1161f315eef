"""The loop on a GPU: memory, queue and recorded work of a device, and the engines that run there."""

from __future__ import annotations

__all__: list[str] = []
