"""A program whose state a server keeps: every state is an input and an output, and the graph counts its memory rows.

A server with implicit state feeds a sequence's returned states to its next request, and initial values to its first.
So nothing of a step may be left to whoever calls it: where the runtime counts memory rows, the graph returns

    new_fill = min(fill + valid, M)

and where a model takes whole segments alone, the number of positions that count is a constant. There is one sequence,
so that no row can be idle. Memory is rolled: a ring would have to be read before it is written in place.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.open_batch import smaller
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import DType, Input, Program, StateTensor, TensorSpec
from txl_runtime.errors import UsageError
from txl_runtime.streaming.state import initial_values

from txl_engines.checking import check_graph, decode_graph
from txl_engines.composing import compose, whole_programs
from txl_engines.weaving import Weaver

RETURNED = "new_{}"
"""What the graph calls a counter that it returns."""


@dataclass(frozen=True)
class KeptState:
    """A tensor that the server keeps.

    Attributes:
        input, output: its names in the graph.
        dtype, shape: of all of it.
        initial: the bytes that a sequence starts with, in row-major order; None for zeros.
    """

    input: str
    output: str
    dtype: DType
    shape: tuple[int, ...]
    initial: bytes | None


@dataclass(frozen=True)
class ImplicitStep:
    """A step whose state a server keeps.

    Attributes:
        program: inputs and outputs of the graph, states among them.
        data: the graph as an ONNX file's bytes; its weights lie in the bundle's weight file.
        states: what the server keeps.
    """

    program: Program
    data: bytes
    states: tuple[KeptState, ...]


def implicit_step(bundle: Bundle, length: int | None = None) -> ImplicitStep:
    """The step of a bundle whose state a server can keep.

    Args:
        bundle: of one sequence, or with programs that leave B open.
        length: L of the segments; the longest without it.

    Raises:
        UsageError: the bundle's steps cannot be run so, or it has none of this length.
        BundleError: a graph of the bundle is not what the manifest says.
        BackendError: onnx is not installed.
    """
    update = whole_update(bundle.manifest)
    manifest = _of_one(bundle.manifest, update)
    bundle = dataclasses.replace(bundle, manifest=manifest)
    source = whole_source(manifest, update, length)
    path = bundle.file(source.file)
    model = decode_graph(compose(bundle, source), path)
    check_graph(model, path, source)
    counters = [entry for entry in manifest.inputs if entry.role in manifest.counters]
    weaver = Weaver(model, path, {spec.name for spec in source.outputs})
    program = _counted(manifest, source, counters, weaver)
    states = [_counter(entry, manifest) for entry in counters]
    initial = initial_values(bundle)
    states += [_kept(state, initial[state.name]) for state in manifest.states_of(update)]
    return ImplicitStep(program, weaver.finish(program), tuple(states))


def whole_update(manifest: Manifest) -> str:
    """The update rule whose programs return whole states.

    Raises:
        UsageError: there is none, or a state changes its size.
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


def _of_one(manifest: Manifest, update: str) -> Manifest:
    """The manifest as it would be of one sequence.

    Raises:
        UsageError: there are several, and a program that does not leave their number open.
    """
    if manifest.batch_size == 1:
        return manifest
    programs = [program for program in manifest.programs if program.update == update]
    if not all(program.open_batch for program in programs):
        raise UsageError(
            f"the bundle has B {manifest.batch_size}, expected 1, because the server keeps the state of each sequence "
            "apart; export it with --batch-size 1"
        )
    return smaller(manifest, 1)


def whole_source(manifest: Manifest, update: str, length: int | None) -> Program:
    """The program that returns all results of all positions; the longest one without a length.

    Raises:
        UsageError: there is none of this length.
    """
    lengths = manifest.segment_lengths
    if length is not None and length not in lengths:
        raise UsageError(f"the segment length is {length}, this bundle has {', '.join(map(str, lengths))}; choose one")
    return next(
        program
        for program in whole_programs(manifest, update)
        if program.kind in ("step", "logprobs") and program.segment_length == (length or lengths[0])
    )


def _counted(manifest: Manifest, source: Program, counters: list[Input], weaver: Weaver) -> Program:
    """Add what the graph has to count; the program it then is."""
    inputs, outputs = source.inputs, list(source.outputs)
    valid = next((entry.name for entry in manifest.inputs if entry.role == "valid"), "")
    for entry in counters:
        name, most = RETURNED.format(entry.name), manifest.counters[entry.role].most
        weaver.add("Min", weaver.add("Add", entry.name, valid), weaver.int32(most), out=name)
        outputs.append(TensorSpec(name=name, dtype="int32", shape=(1,)))
    if valid and not manifest.can.run_ragged:
        weaver.fix(valid, np.array([source.segment_length], np.int32))
        inputs = tuple(spec for spec in inputs if spec.name != valid)
    return msgspec.structs.replace(source, inputs=inputs, outputs=tuple(outputs))


def _counter(entry: Input, manifest: Manifest) -> KeptState:
    start = np.array([manifest.counters[entry.role].start], np.int32)
    return KeptState(entry.name, RETURNED.format(entry.name), "int32", (1,), _bytes(start, "int32"))


def _kept(state: StateTensor, initial: NDArray[Any]) -> KeptState:
    whole = whole_start(state, initial)
    return KeptState(state.input, state.output, state.dtype, state.shape, _bytes(whole, state.dtype))


def whole_start(state: StateTensor, initial: NDArray[Any]) -> NDArray[Any]:
    """A state's initial value, as `initial_values` has it, in the whole tensor's shape."""
    if initial.ndim and state.update == "rolled":  # of one row
        initial = initial.reshape(state.axes.sizes(1, 1))
    elif initial.ndim:  # of one sequence, of which leading axes may be left out
        sizes = [1] * (len(state.sequence_shape) - initial.ndim) + list(initial.shape)
        initial = state.axes.joined([initial.reshape(sizes)])
    return np.broadcast_to(initial, state.shape)


def _bytes(array: NDArray[Any], dtype: DType) -> bytes | None:
    """An array in another type as the server reads it from a file; None of zeros."""
    if not array.any():
        return None
    if dtype != "bfloat16":
        return np.ascontiguousarray(array.astype(np.dtype(dtype))).tobytes()
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, of two the even one
    return rounded.astype(np.uint16).tobytes()
