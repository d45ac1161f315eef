"""Is a bundle the same function as PyTorch's? Chains of segments, comparing, judging, bisecting."""

from __future__ import annotations

__all__: list[str] = []
