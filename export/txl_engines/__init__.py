"""Engines: a bundle's graphs, compiled by TensorRT or TensorRT-RTX.

    facts        what each version of the two libraries has: the one table
    bridge       the only module that touches their objects
    composing    whole programs, made of a bundle's graphs
    shapes       open sizes fixed, and what follows from them
    graphs       an ONNX file, held against its program before a library sees it
    worker       one engine, in a process of its own
    building     one graph → one engine, with progress, cancellation and errors that say what to do
    layers       what the compiler made of it: kernels, fused attention
    sidecar      what an engine is: the JSON beside it, and whether it still fits
    publishing   new files into a bundle, all or nothing
    bundles      every program of a bundle
    reading      what is there, for people

Imports numpy and msgspec; tensorrt, tensorrt_rtx and onnx where they are used. TensorRT is never needed to read what
an engine is.
"""

from __future__ import annotations

from txl_runtime.device.engines.reading import bundle_engines, describe_engine
from txl_runtime.device.engines.sidecar import Sidecar

from txl_engines.bundles import BundleBuild, EngineResult, build_bundle

__all__ = ["BundleBuild", "EngineResult", "Sidecar", "build_bundle", "bundle_engines", "describe_engine"]
