"""Where does a bundle first differ? Layer by layer: ONNX Runtime against the reference, an engine against ONNX Runtime.

The residual stream is looked at after every attention and every feed-forward part: `layers.00.attention`,
`layers.00.feed_forward`, … In a graph these are found by the layer norms around them, whose weights keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BackendError, BundleError, UsageError
from txl_runtime.ladder import BISECT

from txl_export.exporting import reference_for
from txl_export.families.transformer_xl.reference import Reference
from txl_export.families.transformer_xl.weights import layer_name

__all__ = [
    "Bisection",
    "Place",
    "bisect",
    "bisect_against_reference",
    "first_feeds",
    "mark",
    "marked_graph",
    "segment_of",
]

SEGMENTS = 3


@dataclass(frozen=True)
class Place:
    """A point of the residual stream: its name, the largest relative difference, and how large values are there."""

    name: str
    difference: float
    largest: float


@dataclass(frozen=True)
class Bisection:
    """All points in order, and the first that differs by more than rounding.

    Attributes:
        found, reference: what was compared with what.
        limit: of rounding.
        places: from the first layer to the last.
    """

    found: str
    reference: str
    limit: float
    places: tuple[Place, ...]

    @property
    def first(self) -> str | None:
        """The first point beyond the limit; None when all agree."""
        return next((place.name for place in self.places if not place.difference <= self.limit), None)

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"first": self.first}


def bisect(bundle: str | Path, checkpoint: str | Path | None = None, backend: str = "auto") -> Bisection:
    """Which layer of a bundle differs first.

    Args:
        bundle: its folder.
        checkpoint: what it was exported from. Without it the reference is made of the bundle's own weights, in which
            a wrong weight is as wrong.
        backend: "rtx" or "tensorrt" for the engine against ONNX Runtime; else ONNX Runtime against the reference.

    Raises:
        TxlError: the bundle, the checkpoint or the backend cannot be used.
    """
    from txl_export.verifying import _state_from, _state_of

    opened = open_bundle(bundle)
    manifest = opened.manifest
    if backend not in ("auto", "cpu", "rtx", "tensorrt"):
        raise UsageError(f"backend is {backend!r}, which cannot be taken apart; expected cpu, rtx, tensorrt or auto")
    if backend in ("rtx", "tensorrt"):
        from txl_export.parity.bisecting_engines import bisect_engine

        return bisect_engine(opened, backend)
    if checkpoint is None:
        state = _state_of(opened.file(manifest.weights), manifest)
    else:
        state = _state_from(Path(checkpoint), manifest)
    return bisect_against_reference(
        opened, reference_for(manifest.config, manifest.dialect, manifest.memory_length, state)
    )


def bisect_against_reference(bundle: Bundle, reference: Reference, seed: int = 0) -> Bisection:
    """Run some segments through a rolled or ring graph and through the reference, from empty memory on.

    Raises:
        BundleError: the graph has no layer norms where they are looked for.
    """
    program = segment_of(bundle)
    session, names = _session(bundle, program)
    length, batch = program.segment_length, bundle.manifest.batch_size
    draws = np.random.default_rng(seed)
    worst: dict[str, float] = dict.fromkeys(names, 0.0)
    largest: dict[str, float] = dict.fromkeys(names, 0.0)
    memory = reference.initial_memory(batch)
    feeds = first_feeds(bundle, program)
    for _ in range(SEGMENTS):
        tokens = draws.integers(0, bundle.manifest.config.vocab_size, (batch, length)).astype(np.int32)
        wanted = [*names.values(), *(spec.name for spec in program.outputs[1:])]
        results = dict(zip(wanted, session.run(wanted, {**feeds, "tokens": tokens}), strict=True))
        expected, memory = _traced(reference, torch.from_numpy(tokens.astype(np.int64)), memory)
        for place, name in names.items():
            ours, theirs = np.asarray(results[name], np.float64), expected[place]
            ours = ours.reshape(theirs.shape)
            scale = max(1.0, float(np.abs(theirs).max()))
            difference = float(np.nan_to_num(np.abs(ours - theirs), nan=np.inf).max()) / scale
            worst[place], largest[place] = max(worst[place], difference), max(largest[place], scale)
        if not _carry(bundle, program, feeds, results, length):
            break
    limit = BISECT[bundle.manifest.precision]
    places = tuple(Place(place, worst[place], largest[place]) for place in names)
    return Bisection(f"ONNX Runtime, {program.name}", f"the reference in {reference.dtype}", limit, places)


def marked_graph(data: bytes, layers: int, pre_norm: bool, source: str) -> tuple[bytes, dict[str, str]]:
    """A graph with the points of its residual stream as further outputs; their names by point.

    Raises:
        BundleError: a layer norm is missing.
    """
    model = onnx.load_model_from_string(data)
    norms = {_norm_name(node): node for node in model.graph.node if node.op_type == "LayerNormalization"}
    names: dict[str, str] = {}
    for i in range(layers):
        attention, after = f"{layer_name(i)}.attention", f"{layer_name(i)}.feed_forward"
        try:
            if pre_norm:
                names[attention] = str(norms[f"{after}.norm"].input[0])
                names[after] = _end_of_layer(model, names[attention], source)
            else:
                names[attention], names[after] = norms[f"{attention}.norm"].output[0], norms[f"{after}.norm"].output[0]
        except KeyError as missing:
            raise BundleError(
                f"{source}: has no layer norm of {missing}, expected one; export the model again"
            ) from None
    for name in names.values():
        model.graph.output.append(onnx.ValueInfoProto(name=name))
    return model.SerializeToString(), names


def _norm_name(node: Any) -> str:
    """`layers.00.attention.norm` of a node whose scale is …norm.weight, whatever the graph puts around the name."""
    return str(node.input[1]).replace("/", ".").removesuffix(".weight")


def _end_of_layer(model: Any, before: str, source: str) -> str:
    """Where a pre-norm layer ends: the addition to what its attention left."""
    sums = [node for node in model.graph.node if node.op_type == "Add" and before in node.input]
    if len(sums) != 1:
        raise BundleError(f"{source}: adds to {before} {len(sums)} times, expected once; export the model again")
    return str(sums[0].output[0])


def segment_of(bundle: Bundle) -> Program:
    """The program to look into: of the longest segments, rolled where there is one."""
    held = [program for program in bundle.manifest.programs if program.kind in ("logprobs", "hidden")]
    longest = max(program.segment_length for program in held)
    fitting = [program for program in held if program.segment_length == longest]
    return next((program for program in fitting if program.update == "rolled"), fitting[0])


def mark(bundle: Bundle, program: Program) -> tuple[bytes, dict[str, str]]:
    """`marked_graph` of a bundle's program."""
    config, path = bundle.manifest.config, bundle.file(program.file)
    return marked_graph(path.read_bytes(), config.n_layer, config.pre_lnorm, str(path))


def _session(bundle: Bundle, program: Program) -> tuple[Any, dict[str, str]]:
    import onnxruntime

    if bundle.manifest.precision == "bf16":
        raise BackendError(f"{bundle.path}: its precision is bf16, which ONNX Runtime cannot run here; bisect fp16")
    data, names = mark(bundle, program)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]), names


def first_feeds(bundle: Bundle, program: Program) -> dict[str, NDArray[Any]]:
    """What goes in before anything was seen: memory as it starts, and all rows counting."""
    from txl_runtime.model import Model

    batch, manifest = bundle.manifest.batch_size, bundle.manifest
    model = Model(bundle, "cpu", 1, program.update)
    memory, _ = model.stream()._memory.bound()
    fresh = manifest.memory_length if manifest.dialect.memory_start == "zeros" else 0
    counts = {"valid": program.segment_length, "fill": fresh, "head": 0}
    names = {spec.name for spec in program.inputs}
    feeds: dict[str, NDArray[Any]] = {name: np.array(array) for name, array in memory.items() if name in names}
    return feeds | {name: np.full(batch, value, np.int32) for name, value in counts.items() if name in names}


def _carry(
    bundle: Bundle, program: Program, feeds: dict[str, NDArray[Any]], results: Mapping[str, Any], length: int
) -> bool:
    """Memory and counts of the next segment; whether there can be one: a ring ends before rows would spill."""
    states = bundle.manifest.states_of(program.update)
    for state in states:
        feeds[state.input] = results[state.output]
    feeds["fill"] = np.minimum(feeds["fill"] + length, bundle.manifest.memory_length).astype(np.int32)
    if program.update != "ring":
        return True
    feeds["head"] = (feeds["head"] + length).astype(np.int32)
    return bool(states[0].slots is not None and int(feeds["head"][0]) + length <= states[0].slots)


def _traced(
    reference: Reference, tokens: torch.Tensor, memory: Sequence[torch.Tensor]
) -> tuple[dict[str, NDArray[np.float64]], list[torch.Tensor]]:
    """One segment of the reference; the residual stream after each part of each layer, and the memory after it."""
    seen: dict[str, NDArray[np.float64]] = {}
    traced = _Traced(reference, seen)
    _, after = traced(tokens, memory)
    return seen, after


class _Traced(Reference):
    """The reference, which notes what its layers leave."""

    def __init__(self, reference: Reference, seen: dict[str, NDArray[np.float64]]) -> None:
        self.__dict__.update(reference.__dict__)
        self._seen = seen

    def _layer(self, i: int, hidden: torch.Tensor, remembered: torch.Tensor) -> torch.Tensor:
        result = super()._layer(i, hidden, remembered)
        self._seen[f"{layer_name(i)}.feed_forward"] = result.double().numpy()
        return result

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        result = super()._norm(name, x)
        layer, _, part = name.removesuffix(".norm").rpartition(".")
        if self.config.pre_lnorm and part == "feed_forward":
            self._seen[f"{layer}.attention"] = x.double().numpy()
        elif not self.config.pre_lnorm and part == "attention":
            self._seen[f"{layer}.attention"] = result.double().numpy()
        return result
