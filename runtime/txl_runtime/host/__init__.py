"""The loop on the CPU, by ONNX Runtime."""

from __future__ import annotations

__all__: list[str] = []
