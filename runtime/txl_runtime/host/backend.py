"""The backend "cpu": the programs of one update rule of a bundle, opened with ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.host.engine import Engine
from txl_runtime.host.loop import HostLoop
from txl_runtime.host.onnxruntime_cpu import OnnxRuntimeCpu
from txl_runtime.host.placements import HostPlacement, Ring
from txl_runtime.streaming.loop import Backend, Loop
from txl_runtime.streaming.state import Initial
from txl_runtime.update_rules import usable_updates

if TYPE_CHECKING:
    from txl_runtime.sandbox.process import Bounds


@dataclass
class HostBackend(Backend):
    """The backend "cpu"; see `streaming.loop.Backend`.

    Attributes:
        engine: the engine that has opened the programs; a benchmark may replace it.
        programs: the segment programs.
        ring: the placement class for ring states.
        reached, precision: see `streaming.loop.Backend`.
    """

    engine: Engine
    update: str
    programs: tuple[Program, ...]
    description: str
    name: str = "cpu"
    ring: type[HostPlacement] = Ring
    reached: tuple[float, float] | None = None
    precision: str | None = None

    def open_loop(self, manifest: Manifest, initial: Initial) -> Loop:
        return HostLoop(manifest, self.engine, self.update, self.programs, initial, self.ring)

    def release_pages(self) -> None:
        self.engine.release_pages()


def open_host(
    bundle: Bundle,
    update: str | None,
    threads: int | None,
    lean: bool,
    forms: str,
    trial: bool | Bounds = False,
) -> HostBackend:
    """Open a bundle on the CPU.

    Args:
        update: the update rule; None for the fastest rule that the installed ONNX Runtime supports.
        threads, lean, forms, trial: see `txl_runtime.load`.

    Raises:
        BackendError: the engine is not installed, or cannot run the bundle.
        BundleError: a graph differs from the manifest, or a trial failed.
    """
    rule = update or usable_updates(bundle.manifest.updates)[0]
    segments = tuple(program for program in bundle.manifest.programs if program.update == rule)
    softmax = tuple(program for program in bundle.manifest.programs if not program.segment_length)
    used = (*segments, *(softmax if segments[0].kind == "hidden" else ()))
    engine: Engine
    if trial is False:
        engine = OnnxRuntimeCpu(bundle, used, threads, lean, forms)
    else:
        from txl_runtime.host.trial import TrialEngine

        opener = partial(OnnxRuntimeCpu, bundle, threads=threads, lean=lean, forms=forms)
        engine = TrialEngine(bundle, used, lean, forms, trial, opener)
    return HostBackend(engine, rule, segments, engine.description)
