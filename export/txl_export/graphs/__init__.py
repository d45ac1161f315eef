"""ONNX files, whatever the model: tracing, weights by offset, quantised products, emulated bf16."""

from __future__ import annotations

__all__: list[str] = []
