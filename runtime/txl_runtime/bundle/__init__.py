"""A bundle on disk: its manifest and tables, reading and checking its files, its vocabulary."""

from __future__ import annotations

__all__: list[str] = []
