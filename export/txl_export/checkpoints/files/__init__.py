"""Files that PyTorch and its relatives write, read without executing anything in them."""

from __future__ import annotations

__all__: list[str] = []
