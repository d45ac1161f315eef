"""Compiles a bundle's programs into the engines that device backends load. Needs onnx, but neither PyTorch nor a GPU.

`bundles` builds all engines of a bundle; docs/design.md lists every module. `txl_runtime.bundle.engines` defines an
engine, and `txl_runtime.device.engines` decides which engines fit this machine.
"""

from __future__ import annotations

from txl_engines.bundles import BundleBuild, EngineResult, build_bundle

__all__ = ["BundleBuild", "EngineResult", "build_bundle"]
