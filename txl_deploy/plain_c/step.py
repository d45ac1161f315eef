"""Choose the step that becomes C: one program of a bundle with every size fixed, and the states that it updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from txl_engines.composing import compose, whole_programs
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.open_batch import smaller
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Input, Output, Program, StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.streaming.state import initial_values
from txl_runtime.types import Array


@dataclass(frozen=True)
class PlainStep:
    """A step of fixed sizes.

    Attributes:
        manifest: the bundle's manifest, with the B of the step.
        program: inputs and outputs of the graph, states among them.
        graph: the bytes of an ONNX file, whose weights lie in the bundle's weight file.
        states: the states that go from step to step, as whole tensors; memory is rolled.
        starts: initial value of each state for one sequence, by name; None for zeros.
        shorter: steps of smaller L, the longest first, which run what is left of a block; they have the same states.
    """

    manifest: Manifest
    program: Program
    graph: bytes
    states: tuple[StateTensor, ...]
    starts: dict[str, Array | None]
    shorter: tuple[PlainStep, ...] = ()

    @property
    def takes_less(self) -> bool:
        """Return True if a call may run fewer positions than L."""
        return bool(self.shorter) or self.manifest.can.run_ragged


def plain_step(bundle: Bundle, lengths: Sequence[int], batch_size: int | None) -> PlainStep:
    """Return the step of a bundle with L and B fixed.

    Args:
        lengths: L, or several lengths, into which blocks of any size are cut; () for the bundle's longest.
        batch_size: B, needed if the bundle leaves it open.

    Raises:
        UsageError: the bundle has no such step, or plain C does not support it.
        BundleError: a graph of the bundle does not match the manifest.
    """
    update = whole_update(bundle.manifest)
    manifest = _of_batch(bundle.manifest, update, batch_size)
    longest, *rest = sorted(set(lengths), reverse=True) or manifest.segment_lengths[:1]
    source = _source(manifest, update, longest)
    for spec in (*source.inputs, *source.outputs):
        if spec.dtype in ("float16", "bfloat16"):
            raise UsageError(f"{spec.name} is {spec.dtype}, which C99 has no type for; export the model in fp32")
    states, initial = manifest.states_of(update), initial_values(bundle)
    starts: dict[str, Array | None] = {}
    for state in states:
        start = np.ascontiguousarray(state.axes.one(_whole_start(state, initial[state.name]), 0), np.dtype(state.dtype))
        starts[state.name] = start if start.any() else None
    graph = compose(dataclasses.replace(bundle, manifest=manifest), source)
    step = PlainStep(manifest, source, graph, states, starts)
    if not rest:
        return step
    _check_cutting(step, [source.segment_length, *rest])
    return dataclasses.replace(step, shorter=tuple(plain_step(bundle, [one], batch_size) for one in rest))


def _check_cutting(step: PlainStep, lengths: Sequence[int]) -> None:
    """Refuse several lengths if 1 is not among them, or if a block's positions do not follow each other in an array."""
    manifest = step.manifest
    option = f"--segment-length is {', '.join(map(str, lengths))}"
    if lengths[-1] != 1:
        raise UsageError(
            f"{option}, expected 1 among them, into which any rest can be cut; give --segment-length 1 too"
        )
    if manifest.batch_size != 1 or manifest.can.run_ragged or manifest.counters:
        raise UsageError(
            f"{option}: several lengths are for one sequence of a model with exact lengths; give --batch-size 1, or "
            "one --segment-length"
        )
    entries: list[Input | Output] = [*manifest.given, *manifest.outputs]
    for entry in entries:
        before = entry.shape[: entry.axes.positions[0]] if entry.axes.positions else [0]
        ahead, ids = entry.axes.ahead, isinstance(entry, Input) and entry.vocab
        if any(size not in ("B", 1) for size in before) or ahead or ids or len(entry.axes.positions) > 1:
            raise UsageError(
                f"{option}: {entry.name} is {list(entry.shape)}, expected features whose first axes are B and L, "
                "without look-ahead; give one --segment-length"
            )


def whole_update(manifest: Manifest) -> str:
    """Return the update rule whose programs return whole states.

    Raises:
        UsageError: no update rule has such programs, or a state changes its size.
    """
    rules = [rule for rule in ("rolled", "replace") if rule in manifest.updates]
    if not rules:
        raise UsageError(
            f"the bundle has programs for {', '.join(manifest.updates)} memory, expected rolled ones; export it again"
        )
    for state in manifest.states_of(rules[0]):
        if state.rows is not None or state.absent:
            raise UsageError(
                f"state {state.name} grows, expected states of fixed sizes, which a package can keep; count rows in a "
                "state instead (docs/own-models-reference.md)"
            )
    return rules[0]


def _source(manifest: Manifest, update: str, length: int) -> Program:
    """Return the program of this update rule and length that returns all results of all positions."""
    lengths = manifest.segment_lengths
    if length not in lengths:
        raise UsageError(f"the segment length is {length}, this bundle has {', '.join(map(str, lengths))}; choose one")
    return next(
        program
        for program in whole_programs(manifest, update)
        if program.kind in ("step", "logprobs") and program.segment_length == length
    )


def _whole_start(state: StateTensor, initial: Array) -> Array:
    """Broadcast a state's initial value, as `initial_values` returns it, to the whole tensor's shape."""
    if initial.ndim and state.update == "rolled":  # `initial` is one memory row
        initial = initial.reshape(state.axes.sizes(1, 1))
    elif initial.ndim:  # `initial` is one sequence's state, and may lack leading axes
        sizes = [1] * (len(state.sequence_shape) - initial.ndim) + list(initial.shape)
        initial = state.axes.joined([initial.reshape(sizes)])
    return np.broadcast_to(initial, state.shape)


def _of_batch(manifest: Manifest, update: str, batch_size: int | None) -> Manifest:
    """Return the manifest for `batch_size` sequences; None keeps the bundle's B, if the bundle has only one."""
    is_open = all(program.open_batch for program in manifest.programs if program.update == update)
    most = manifest.batch_size
    if is_open and batch_size is None:
        raise UsageError(f"the bundle leaves B open up to {most}, expected one B for C; give --batch-size")
    if batch_size is None or batch_size == most:
        return manifest
    if not is_open:
        raise UsageError(f"--batch-size is {batch_size}, this bundle's programs have B {most} alone; leave it out")
    if not 1 <= batch_size <= most:
        raise UsageError(f"--batch-size is {batch_size}, expected 1 … {most}, which the bundle was exported for")
    return smaller(manifest, batch_size)
