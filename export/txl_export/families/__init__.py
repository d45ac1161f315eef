"""Model families whose numerics are this project's own, a folder each."""

from __future__ import annotations

__all__: list[str] = []
