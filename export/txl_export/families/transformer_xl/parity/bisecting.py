"""Finds the layer where a bundle's graph first differs from the reference, or an engine from the graph.

ONNX Runtime runs the graph. Polygraphy builds the engine from a graph that also returns its layers' results. This
engine is not exactly the user's: it has to keep those results, and may fuse attention differently. A wrong kernel shows
in both engines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BackendError, one_line
from txl_runtime.host.onnxruntime_cpu import WEIGHTS_FOLDER
from txl_runtime.host.placements import open_placements
from txl_runtime.installing import pip_line
from txl_runtime.ladder import BISECT
from txl_runtime.streaming.state import SequenceCounters, initial_values
from txl_runtime.types import Array

from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.points import mark, segment_of, traced

SEGMENTS = 3


@dataclass(frozen=True)
class Place:
    """The difference of two sides, e.g. engine and graph, at one point of the residual stream.

    Attributes:
        name: the point, e.g. "layers.00.attention".
        difference: the largest difference, divided by `largest`.
        largest: the larger of 1 and the reference's largest absolute value.
    """

    name: str
    difference: float
    largest: float


@dataclass(frozen=True)
class Bisection:
    """All points in order, and the first that differs by more than rounding.

    Attributes:
        found, reference: descriptions of the two sides.
        limit: the largest difference that rounding explains.
        places: the points in order, from the first layer to the last.
    """

    found: str
    reference: str
    limit: float
    places: tuple[Place, ...]

    @property
    def first(self) -> str | None:
        """The name of the first point beyond the limit; None if all points agree."""
        return next((place.name for place in self.places if not place.difference <= self.limit), None)

    def document(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON."""
        return asdict(self) | {"first": self.first}


def bisect_against_reference(bundle: Bundle, reference: PaperModel) -> Bisection:
    """Run up to 3 segments through a graph of the bundle and through the reference, from the initial memory on.

    Raises:
        BackendError: ONNX Runtime cannot run the bundle's precision.
        BundleError: the graph lacks a layer norm of the config's layers.
    """
    program, manifest = segment_of(bundle), bundle.manifest
    if manifest.precision == "bf16":
        raise BackendError(f"{bundle.path}: its precision is bf16, which ONNX Runtime cannot run here; bisect fp16")
    data, names = mark(bundle, program)
    opened = _session(bundle, data)
    draws = np.random.default_rng(0)
    memory, feeds = reference.initial_memory(manifest.batch_size), _first_feeds(bundle, program)
    places = tuple(Place(point, 0.0, 0.0) for point in names)
    for _ in range(SEGMENTS):
        tokens = draws.integers(0, manifest.config.vocab_size, program.inputs[0].fixed).astype(np.int32)
        wanted = [*names.values(), *(spec.name for spec in program.outputs[1:])]
        results = dict(zip(wanted, opened.run(wanted, {**feeds, "tokens": tokens}), strict=True))
        expected, memory = traced(reference, torch.from_numpy(tokens.astype(np.int64)), memory)
        values = {point: np.reshape(results[name], expected[point].shape) for point, name in names.items()}
        pairs = zip(places, compare(values, expected), strict=True)
        places = tuple(Place(a.name, max(a.difference, b.difference), max(a.largest, b.largest)) for a, b in pairs)
        if not _carry(bundle, program, feeds, results):
            break
    limit = BISECT[manifest.precision]
    return Bisection(f"ONNX Runtime, {program.name}", f"the reference in {reference.dtype}", limit, places)


def _session(bundle: Bundle, graph: bytes) -> Any:
    """Open a graph that reads the bundle's weights in ONNX Runtime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.path))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def bisect_engine(bundle: Bundle, target: str) -> Bisection:
    """Build an engine, run it and ONNX Runtime on the same segment, and compare their results.

    Raises:
        BackendError: Polygraphy or the library is not installed, or the engine cannot be built or run.
    """
    module = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}[target]
    for name, extra in (("polygraphy", "debug"), (module, target)):
        if find_spec(name) is None:
            raise BackendError(f"{name} is not installed, verify --bisect needs it; {pip_line(extra)}")
    if target == "rtx":
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"  # Polygraphy reads this on import
    program = segment_of(bundle)
    data, names = mark(bundle, program)
    draws = np.random.default_rng(0)
    shape = program.inputs[0].fixed
    tokens = draws.integers(0, bundle.manifest.config.vocab_size, shape).astype(np.int32)
    feeds = {**_first_feeds(bundle, program), "tokens": tokens}
    try:
        theirs, ours = _run_both(bundle, data, feeds, target)
    except Exception as error:  # Polygraphy raises its own class, TensorRT has no class of errors
        raise BackendError(
            f"{program.name}: Polygraphy with {module} failed: {one_line(error)}; see docs/engines.md"
        ) from None
    places = compare(*({point: side[name] for point, name in names.items()} for side in (ours, theirs)))
    return Bisection(f"{module}, {program.name}", "ONNX Runtime on the CPU", BISECT[bundle.manifest.precision], places)


def compare(found: Mapping[str, Any], expected: Mapping[str, Any]) -> tuple[Place, ...]:
    """Return the difference of two sides at every point, in the order of `found`."""
    places = []
    for point, array in found.items():
        ours, theirs = np.asarray(array, np.float64), np.asarray(expected[point], np.float64)
        scale = max(1.0, float(np.abs(theirs).max()))
        difference = float(np.nan_to_num(np.abs(ours - theirs), nan=np.inf).max()) / scale
        places.append(Place(point, difference, scale))
    return tuple(places)


def _first_feeds(bundle: Bundle, program: Program) -> dict[str, Array]:
    """Return a program's inputs for new streams, except tokens: initial memory, and `valid` = L."""
    manifest, every = bundle.manifest, np.arange(bundle.manifest.batch_size)
    states = manifest.states_of(program.update)
    counters = SequenceCounters(manifest, states)
    counters.clear(every)
    valid = np.full(len(every), program.segment_length, np.int32)
    feeds = {"valid": valid, "fill": counters.fill, "head": counters.head}
    for placement in open_placements(states, initial_values(bundle), counters):
        placement.clear(every)
        feeds |= placement.bound(program, counters.side)[0]
    return {spec.name: feeds[spec.name] for spec in program.inputs if spec.name in feeds}


def _carry(bundle: Bundle, program: Program, feeds: dict[str, Array], results: Mapping[str, Any]) -> bool:
    """Update memory and counts in `feeds` after a segment.

    Returns:
        False if the next segment's rows would not fit into the ring.
    """
    states, length = bundle.manifest.states_of(program.update), program.segment_length
    for state in states:
        feeds[state.input] = results[state.output]
    feeds["fill"] = np.minimum(feeds["fill"] + length, bundle.manifest.memory_length).astype(np.int32)
    if program.update != "ring":
        return True
    feeds["head"] = (feeds["head"] + length).astype(np.int32)
    return bool(states[0].slots is not None and int(feeds["head"][0]) + length <= states[0].slots)


def _run_both(
    bundle: Bundle, data: bytes, feeds: dict[str, Array], target: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return every output of the marked graph twice: as ONNX Runtime computes it, and as the engine computes it.

    The graph lies in a temporary folder, next to a link to the bundle's weights.
    """
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.backend.trt import CreateConfig, EngineFromNetwork, NetworkFromOnnxPath, TrtRunner

    with tempfile.TemporaryDirectory(prefix="txl-bisect-") as folder:
        path = Path(folder) / "marked.onnx"
        path.write_bytes(data)
        (Path(folder) / bundle.manifest.weights).symlink_to(bundle.file(bundle.manifest.weights).resolve())
        network = NetworkFromOnnxPath(str(path), strongly_typed=True)
        config: Any = CreateConfig(tf32=False)
        if target == "rtx":
            from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

            config = CreateConfigRTX()
        results = []
        session = SessionFromOnnx(str(path), providers=["CPUExecutionProvider"])
        for runner in (OnnxrtRunner(session), TrtRunner(EngineFromNetwork(network, config))):
            with runner:
                outputs = runner.infer(feed_dict=feeds)
                results.append({name: np.array(array) for name, array in outputs.items()})
    return results[0], results[1]
