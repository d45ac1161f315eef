"""What makes the engines of each target: one of TensorRT's libraries, or, for ONNX Runtime, the composing alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.tables import Program
from txl_runtime.device.engines.library import load_library
from txl_runtime.device.engines.sidecar import ANYWHERE, COMPOSED, FLAVOURS, TARGETS, Target
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener

from txl_engines.building import CompiledEngines
from txl_engines.checking import Graph, read_graph
from txl_engines.publishing import write_file
from txl_engines.worker import Outcome

NEWEST_OPSET = 24
"""Of the graphs that export writes. Which of them ONNX Runtime knows depends on its version where the bundle runs."""


class Maker(Protocol):
    """Makes the engines of one target.

    Attributes:
        target: the backend that will load them.
        title: what makes them, for people.
        version, gpus, device, platform: the fields of an engine's `Identity`.
        ring: whether its engines can update a ring of memory in place.
    """

    target: Target
    title: str
    version: str
    gpus: tuple[int, ...]
    device: str | None
    platform: str
    ring: bool

    def read(self, data: bytes, program: Program, folder: Path, hashes: Mapping[str, str] | None = None) -> Graph:
        """Check a composed graph, and change in it what the target needs.

        Args:
            data: the graph's bytes.
            program: what the graph is.
            folder: where its external weights lie.
            hashes: SHA-256 of weight files, as far as they are known already.

        Raises:
            BundleError: the graph is not what its program says.
            BackendError: the target cannot take it.
        """
        ...

    def make(self, graph: Graph, program: Program, out: Path, listener: Listener) -> Outcome:
        """Make the engine of a graph.

        Args:
            graph: from `read`.
            program: what the graph is.
            out: the file to write. It is not there when this fails.
            listener: hears of progress and warnings.

        Raises:
            BundleError, BackendError: it cannot be made; the message says why and what to do.
            KeyboardInterrupt: somebody asked to stop.
        """
        ...


def open_maker(target: str, precision: str, gpus: Sequence[int]) -> Maker:
    """What makes the engines of a target.

    Args:
        target: one of `TARGETS`.
        precision: of the bundle.
        gpus: compute capabilities that were asked for.

    Raises:
        UsageError: there is no such target, or it cannot build for these GPUs.
        BackendError: the library is not installed, or is too old.
    """
    if target == "cuda":
        return ComposedEngines(gpus)
    if target == "rtx" or target == "tensorrt":
        return CompiledEngines(load_library(target), precision, gpus)
    raise UsageError(f"--target is {target!r}, expected {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")


class ComposedEngines:
    """Writes composed graphs as they are: ONNX Runtime opens them without a build of its own. See `Maker`."""

    target: Target = "cuda"
    version, platform = COMPOSED, ANYWHERE
    device: str | None = None
    gpus: tuple[int, ...] = ()
    title = f"{FLAVOURS['cuda']} ({COMPOSED})"
    ring = True

    def __init__(self, gpus: Sequence[int] = ()) -> None:
        if gpus:
            raise UsageError(
                f"--sm is {', '.join(map(str, gpus))}, but the graphs of --target cuda are for every GPU that ONNX "
                "Runtime runs on; leave --sm out"
            )

    def read(self, data: bytes, program: Program, folder: Path, hashes: Mapping[str, str] | None = None) -> Graph:
        """See `Maker`."""
        return read_graph(data, program, folder, NEWEST_OPSET, hashes)

    def make(self, graph: Graph, program: Program, out: Path, listener: Listener) -> Outcome:
        """See `Maker`."""
        listener.stage(f"writing {program.name} for ONNX Runtime")
        started = time.monotonic()
        write_file(out, graph.data)
        return Outcome(
            sha256=file_sha256(out),
            bytes=len(graph.data),
            seconds=round(time.monotonic() - started, 3),
            in_place=graph.scatters,
            verified=("graph",),
        )
