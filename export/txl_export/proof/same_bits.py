"""Compares pairs of runs of the bundle that must give equal bits, without a reference.

A sequence's results may not depend on its neighbours, whether they run, are idle or hold only NaN, as long as a segment
computes the same number of sequences. A stream repeats its results after `restore`, and after calls with commit=False.
The stored graphs must give the results of the faster form that the loop runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.host.backend import HostBackend
from txl_runtime.model import Model
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.streaming.state import RowState
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Array, Ids

from txl_export.proof.bits import FORMS, IDLE, INDEPENDENT, REPEATED, RESTORED, Bits, named, rows_of
from txl_export.proof.input_source import POISON, InputSource, poisoned

SEGMENTS, FEW = 6, 2
"""Numbers of segments per run: 6, or 2 if sequences are independent by construction, so that only the bundle can be
wrong."""

Call = tuple[dict[str, Array], Ids]
"""The inputs of one segment, and counts [B] of the valid positions of each sequence."""


def compare_bits(model: Model, samples: Mapping[str, Any] | None, bits: Bits, folder: Path, few: bool) -> None:
    """Run all pairs that the bundle allows; count differing values. With `few`, run `FEW` segments, one sequence."""
    draws, manifest, segments = np.random.default_rng(7), model.manifest, FEW if few else SEGMENTS
    source = InputSource(manifest, samples, draws, few=few)
    calls = []
    for number in range(2 * segments):
        length = model.segment_lengths[0 if number % 3 else -1]
        calls.append((source.take(model.batch_size, length), np.full(model.batch_size, length, np.int32)))
    _repeated(model, calls[: segments // 2], bits)
    _restored(model, calls[:segments], calls[segments:], bits, folder)
    if manifest.can.run_apart and model.batch_size > 1:
        some = {0, model.batch_size // 2, model.batch_size - 1}
        for row in sorted(some) if not few else [model.batch_size - 1]:
            _among_neighbours(model, row, calls[:segments], bits)


def compare_forms(model: Model, samples: Mapping[str, Any] | None, bits: Bits) -> Callable[[], None]:
    """Run segments with idle sequences; return a function that compares their results with those of the stored graphs.

    Call the function after the model is deleted: the function loads a second model, and both would hold the weights.
    """
    backend, manifest, draws = model.backend, model.manifest, np.random.default_rng(11)
    if not isinstance(backend, HostBackend) or not any(map(backend.engine.kept, backend.programs)):
        return lambda: None
    source, calls = InputSource(manifest, samples, draws, few=True), list[Call]()
    for number in range(SEGMENTS):
        length = model.segment_lengths[number % len(model.segment_lengths)]
        live = (draws.random(model.batch_size) < 0.5) | (np.arange(model.batch_size) == number % model.batch_size)
        calls.append((source.take(model.batch_size, length), np.where(live, length, 0).astype(np.int32)))
    expected = list(_with_one_zero(_run(model.stream(), calls)))
    plain = partial(Model, model.bundle, "cpu", model._threads, model.update, forms="plain")
    return lambda: _compare_runs(FORMS, expected, _with_one_zero(_run(plain().stream(), calls)), bits)


def _with_one_zero(results: Iterable[dict[str, Array]]) -> Iterator[dict[str, Array]]:
    """Yield results with 0.0 for -0.0, because ONNX Runtime's Where returns -0.0 where a fast form returns 0.0."""
    for one in results:
        yield {name: array + 0 if array.dtype.kind == "f" else array for name, array in one.items()}


def _repeated(model: Model, calls: Sequence[Call], bits: Bits) -> None:
    """Compare the results of calls with commit=False, and of a call with commit=True, on the same segments."""
    stream = model.stream()
    for inputs, counts in calls:
        one = stream.run(inputs, lengths=counts, commit=False)
        for commit in (False, True):
            bits.compare(REPEATED, one, stream.run(inputs, lengths=counts, commit=commit))


def _restored(model: Model, before: Sequence[Call], after: Sequence[Call], bits: Bits, folder: Path) -> None:
    """Compare runs from a snapshot: in the same stream, sequence by sequence in a new stream, and through a file.

    Each copy of the state is deleted after use, because a memory may be several times as large as the model.
    """
    stream = model.stream()
    for inputs, counts in before:
        stream.run(inputs, lengths=counts)
    snapshot, path = stream.snapshot(), folder / "restored.safetensors"
    first = list(_run(stream, after))
    stream.restore(snapshot)
    _compare_runs(RESTORED, first, _run(stream, after), bits)
    if model.manifest.can.run_apart or model.batch_size == 1:
        stream.restore(snapshot)
        other = model.stream()
        for row in range(model.batch_size):
            other.put(row, stream.take(row))
        _compare_runs(RESTORED, first, _run(other, after), bits)
    snapshot.save(path)
    del snapshot
    stream.restore(StreamState.load(path))
    _compare_runs(RESTORED, first, _run(stream, after), bits)


def _among_neighbours(model: Model, row: int, calls: Sequence[Call], bits: Bits) -> None:
    """Compare one sequence's results while other sequences run, are idle, or have NaN in inputs and state.

    Graphs with an open B compute sequences only up to the last one that runs, and an engine may round differently for a
    different number of sequences. So only runs with the same number of sequences are compared.
    """
    manifest, numbers, together = model.manifest, np.arange(model.batch_size), list(_run(model.stream(), calls))
    some = any(program.open_batch for program in manifest.programs)
    first, alone = (numbers <= row) | (not some), numbers == row
    among = together if first.all() else list(_run(model.stream(), _running(calls, first)))
    tries = [(IDLE, alone, among), (INDEPENDENT, first, among)]
    if not first.all():
        tries += [(IDLE, alone | (numbers == numbers[-1]), together), (INDEPENDENT, numbers >= 0, together)]
    for tried, running, expected in tries:
        stream = model.stream()
        for other in np.flatnonzero(~alone) if tried == INDEPENDENT else ():
            stream.put(int(other), poisoned_state(stream.take(int(other)), manifest))
        for (inputs, counts), results in zip(_running(calls, running), expected, strict=True):
            arrays = poisoned(manifest, inputs, np.where(alone, counts, 0).astype(np.int32))
            values = named(stream.run(arrays, lengths=counts), stream.state())
            wanted = rows_of(manifest, results, [row])
            bits.compare(tried, wanted, rows_of(manifest, values, [row]))


def _running(calls: Sequence[Call], running: NDArray[np.bool_]) -> list[Call]:
    """Return the calls with count 0 for sequences that are False in `running` [B]."""
    return [(inputs, np.where(running, counts, 0).astype(np.int32)) for inputs, counts in calls]


def poisoned_state(state: RowState, manifest: Manifest) -> RowState:
    """Return one sequence's state with a full memory, and NaN in all floats."""
    rows = {one.name: (manifest.memory_length, *one.row_shape) for one in manifest.states if one.counted}
    floats = {
        name: np.full(rows.get(name, part.shape), POISON, part.dtype)
        for name, part in state.tensors.items()
        if part.dtype.kind == "f"
    }
    return replace(state, fill=manifest.memory_length, tensors={**state.tensors, **floats})


def _run(stream: Stream, calls: Sequence[Call]) -> Iterator[dict[str, Array]]:
    """Yield outputs and states after each segment, one segment at a time, because vocabularies make outputs large."""
    for inputs, counts in calls:
        yield named(stream.run(inputs, lengths=counts), stream.state())


def _compare_runs(tried: str, first: Iterable[Any], second: Iterable[Any], bits: Bits) -> None:
    for one, other in zip(first, second, strict=True):
        bits.compare(tried, one, other)
