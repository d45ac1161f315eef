"""Engines of TensorRT and TensorRT-RTX as they are loaded: facts, sidecars, reading and running."""

from __future__ import annotations

__all__: list[str] = []
