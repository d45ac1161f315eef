"""Writing a bundle: all of it or nothing."""

from __future__ import annotations

__all__: list[str] = []
