"""Engines: a bundle's programs, made into what the backends of devices load. Needs onnx, but neither PyTorch nor a GPU.

`bundles` is the whole way; docs/design.md lists every module. What an engine is, and which of them fit this machine,
says `txl_runtime.device.engines`.
"""

from __future__ import annotations

from txl_engines.bundles import BundleBuild, EngineResult, build_bundle

__all__ = ["BundleBuild", "EngineResult", "build_bundle"]
