"""Engines: a bundle's programs, made into what the backends of devices load. Needs onnx, but neither PyTorch nor a GPU.

    bundles      every program of a bundle, for one target: reused, or made and listed
    targets      what makes the engines of each target
    composing    whole programs, composed of a bundle's graphs
    shapes       fixing the sizes that a graph leaves open
    checking     a graph, held against its program before a library sees it
    adapting     the changes to a graph that TensorRT's parsers need
    building     TensorRT's engines: a build process of its own, progress, and errors that say what to do
    worker       that process
    compiler     the part of TensorRT's libraries that builds
    layers       the layers that the compiler made of a graph: kernels, fused attention
    messages     the libraries' complaints, in words that tell a user what to do
    publishing   new files put into a bundle, all of them or none
    recording    notes of passed self-tests in the engines' sidecars

What an engine is, and which of them fit this machine, says `txl_runtime.device.engines`.
"""

from __future__ import annotations

from txl_engines.bundles import BundleBuild, EngineResult, build_bundle

__all__ = ["BundleBuild", "EngineResult", "build_bundle"]
