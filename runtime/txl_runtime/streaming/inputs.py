"""Checks of named inputs against the bundle's input table, and of operations that need a model of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from txl_runtime.bundle.abilities import ORDERS
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Input
from txl_runtime.errors import UsageError, todo_about
from txl_runtime.streaming.checks import (
    as_array,
    check_columns,
    check_flag,
    check_ids,
    check_lengths,
    cut_at,
    ids_fit,
    is_whole,
    shown,
)
from txl_runtime.streaming.finite import run_finite
from txl_runtime.streaming.loop import Loop
from txl_runtime.types import Array, Arrays, Ids

KINDS = {"float32": "fiu", "float16": "fiu", "int32": "iu", "bool": "b"}
"""NumPy kinds (`dtype.kind`) that an input of each declared type accepts; any type that is not listed accepts "f"."""


def refusal(manifest: Manifest, what: str) -> str:
    """Return the reason why a model does not support `what`, a stream method that takes token ids; "" if it does."""
    tokens, logprobs = manifest.tokens, manifest.logprobs
    instead = "use run({...}) or feed({...}) with arrays by name"
    if tokens is None:
        read = ", ".join(f"{entry.name} ({entry.role})" for entry in manifest.given) or "nothing"
        return f"{what} takes token ids alone, but this model reads {read}; {instead}"
    if logprobs is None:
        outputs = ", ".join(f"{output.name} ({output.role})" for output in manifest.outputs) or "nothing"
        return (
            f"{what} needs log-probabilities, but this model returns {outputs}, expected an output of role logprobs; "
            f"{instead}"
        )
    if not manifest.can.feed_tokens:
        return (
            f"{what} takes tokens one by one, but this model reads {list(tokens.shape)} with a look-ahead of "
            f"{tokens.lookahead} and returns {list(logprobs.shape)}, expected ids of one kind of shape {ORDERS} and "
            f"V = {manifest.vocab_size} columns more; {instead}"
        )
    if what in ("score", "generate") and not manifest.can.score:
        lengths = _listed(manifest.segment_lengths)
        return (
            f"{what} needs a state after every token, but this model's is that of whole segments of {lengths}; use "
            "run(..., commit=False) to look into a segment and feed for whole ones"
        )
    return ""


def require_tokens(manifest: Manifest, what: str) -> None:
    """Check that a model supports `what`, a stream method that takes token ids.

    Raises:
        UsageError: the model reads other inputs, returns no log-probabilities, or has no state after every token.
    """
    if message := refusal(manifest, what):
        raise UsageError(message)


def token_inputs(manifest: Manifest, ids: Ids) -> dict[str, Array]:
    """Return tokens [b, T] by the input's name and in its order of axes, e.g. {"ids": [T, b]}.

    Tokens [2, 5] become {"ids": [5, 2]} there.
    """
    tokens = manifest.tokens
    assert tokens is not None, "asked for by `require_tokens`"
    return {tokens.name: ids if tokens.axes.plain else tokens.axes.from_rows(ids)}


Checked: TypeAlias = tuple[Arrays, Ids, int, bool]
"""(arrays by name, counts int32 [b], T, flag); the flag is True if this is one segment in which all T
positions count.
"""


class Segments:
    """A checker and runner of a stream's segments of named inputs.

    If all positions count, a check needs types and shapes, and of the values only token ids. So the first segment of
    each combination of types and shapes is checked in full; in later segments of the combination, only the ids are.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._names = manifest, tuple(entry.name for entry in manifest.given)
        self._tokens = tuple((entry.name, entry.vocab) for entry in manifest.given if entry.vocab is not None)
        self._good: dict[tuple[object, ...], tuple[Ids, int]] = {}

    def run(
        self, loop: Loop, b: int, inputs: object, lengths: ArrayLike | None, commit: bool, finite: bool
    ) -> dict[str, Array]:
        """Run one segment, as `Stream.run` describes. For example, {"x": [2, 5, 8]} gives {"y": [2, 5, 8]}."""
        if commit is not True or finite is not False:
            commit, finite = check_flag(commit, "commit"), check_flag(finite, "require_finite")
        arrays, counts, columns, whole = self.check(inputs, lengths, b)
        if not whole:
            check_segment(columns, counts, self._manifest, "inputs")
        if not commit:  # the loop keeps these arrays for a later commit, and the caller may overwrite the originals
            arrays = {name: array.copy() for name, array in arrays.items()}
        if not finite:
            return loop.run(arrays, counts, "rows", commit).outputs()
        return run_finite(loop, self._manifest, arrays, counts, commit)

    def check(self, inputs: Any, lengths: ArrayLike | None, b: int) -> Checked:
        """Return the checked inputs of b sequences; raise the UsageError of `check_inputs`.

        For example, {"x": [2, 5, 8]} with `lengths` [5, 3].
        """
        key = self._kind(inputs, b) if lengths is None else None
        checked = None if key is None else self._good.get(key)
        if checked is not None:
            for name, vocab in self._tokens:
                if not ids_fit(inputs[name], vocab):
                    break
            else:
                return inputs, *checked, True
        arrays, counts, columns = check_inputs(inputs, lengths, self._manifest, b)
        manifest = self._manifest
        size = segment_size(columns, manifest.segment_lengths, manifest.can.run_ragged)
        whole = lengths is None and size == columns
        if key is not None and whole and all(array is inputs[name] for name, array in arrays.items()):
            counts.flags.writeable = False  # later segments of the same shapes share this array
            self._good[key] = counts, columns
        return arrays, counts, columns, whole

    def _kind(self, inputs: Any, b: int) -> tuple[object, ...] | None:
        """Return the number of sequences, shapes and types as a dict key; None if the inputs are not a dict of plain
        arrays.
        """
        if type(inputs) is not dict or len(inputs) != len(self._names):
            return None
        kind: list[object] = [b]
        for name in self._names:
            array = inputs.get(name)
            if type(array) is not np.ndarray:
                return None
            kind += array.shape, array.dtype
        return tuple(kind)


def check_inputs(
    inputs: object, lengths: ArrayLike | None, manifest: Manifest, batch_size: int
) -> tuple[dict[str, Array], Ids, int]:
    """Return arrays by name in the declared types, zero beyond `lengths`; lengths as int32 [b]; and the number of
    positions T.

    Raises:
        UsageError: an input is missing or unknown, has a wrong type or shape, or a token id within `lengths` is out of
            range.
    """
    table = manifest.given
    if not isinstance(inputs, Mapping):
        raise UsageError(f"inputs are a {type(inputs).__name__}, expected a dict of arrays, {_described(table)}")
    names = {entry.name for entry in table}
    if inputs.keys() != names:
        if odd := [name for name in inputs if not isinstance(name, str)]:
            raise UsageError(f"inputs hold {shown(odd[0])}, expected {_described(table)}; take it out")
        missing, unknown = names - inputs.keys(), min(inputs.keys() - names, default=None)
        if unknown is None:
            what, todo = f"lack {min(missing)}", "add it"
        else:
            what, todo = f"hold {shown(unknown)}", todo_about(unknown, missing)
        raise UsageError(f"inputs {what}, expected {_described(table)}; {todo}")
    columns: int | None = None
    arrays: dict[str, Array] = {}
    for entry in table:
        array = arrays[entry.name] = _typed(entry, inputs[entry.name])
        columns = _columns(entry, array, batch_size, columns)
    columns = 1 if columns is None else columns
    check_columns(columns, None, "inputs")
    counts = check_lengths(lengths, batch_size, columns)
    for entry in table:
        array = arrays[entry.name]
        if entry.dtype == "int32" and array.size and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
            raise UsageError(f"{entry.name} holds {int(array.min())} … {int(array.max())}, expected values of int32")
        if lengths is not None:
            array = arrays[entry.name] = array.copy()
            entry.axes.clear_uncounted(array, counts)
        if entry.vocab is not None:
            check_ids(array, (array < 0) | (array >= entry.vocab), entry.vocab, entry.name)
        arrays[entry.name] = array.astype(np.dtype(entry.dtype), copy=False)
    return arrays, counts, columns


def check_segment(columns: int, counts: Ids, manifest: Manifest, what: str) -> None:
    """Check that the model can run a segment of this length, and that lockstep sequences all run or all are idle.

    For example, 5 columns with counts [5, 3].

    Raises:
        UsageError: the model cannot run this segment.
    """
    known = manifest.segment_lengths
    if not manifest.can.run_ragged:
        if columns not in known:
            raise UsageError(
                f"{what} have {columns} positions, expected {_listed(known)}, because this model takes whole segments "
                "alone; use feed for several, or export with another --segment-length"
            )
        _check_whole(counts, [0, columns])
    elif columns > known[0]:
        raise UsageError(
            f"{what} have {columns} positions, expected at most one segment of {known[0]}; use feed for more"
        )
    _check_lockstep(counts, manifest)


def strict_cuts(length: int, counts: Ids, manifest: Manifest) -> list[tuple[int, int, Ids]]:
    """Cut `length` positions into segments that the model can run, and return each as (first, last, counts).

    With exact lengths the longest segments that fit come first: lengths 4 and 1 cut 11 positions into 4, 4, 1, 1 and 1.
    Segments in which no sequence has a position are left out.

    Raises:
        UsageError: the positions that are left over fit no program, a sequence ends inside a segment of exact length,
            or lockstep sequences have different lengths.
    """
    known, ragged = manifest.segment_lengths, manifest.can.run_ragged
    edges = [0]
    while edges[-1] < length:
        rest = length - edges[-1]
        step = segment_size(rest, known, ragged)
        if step is None:
            raise UsageError(
                f"there are {length} positions (look-ahead aside), of which {rest} remain after segments, expected "
                f"what segments of {_listed(known)} add up to; give more or fewer, or export another --segment-length"
            )
        edges.append(edges[-1] + step)
    if not ragged:
        _check_whole(counts, edges)
    cuts = list(cut_at(edges, counts))
    for _, _, inside in cuts:
        _check_lockstep(inside, manifest)
    return cuts


def segment_size(left: int, known: Sequence[int], ragged: bool) -> int | None:
    """Return the number of positions of the next segment; None if every exact length is larger than `left`.

    Args:
        left: positions that are left, at least 1.
        known: the lengths of segments, the longest first.
        ragged: whether a segment may have fewer positions than its program.
    """
    return min(left, known[0]) if ragged else next((size for size in known if size <= left), None)


def check_cuttable(cuts: Sequence[tuple[int, int, Ids]], manifest: Manifest, instead: str) -> None:
    """Check that arrays can be cut: if there is more than one segment, an array may have only one axis of positions.

    For example, cuts (0, 4, [4, 4]) and (4, 5, [1, 0]) are two segments.

    Raises:
        UsageError: an array has several axes of positions, e.g. ["B", "L", "L"]; `instead` is the message's advice.
    """
    for entry in manifest.interface if len(cuts) > 1 else ():
        if len(entry.axes.positions) > 1:
            raise UsageError(
                f"{entry.name} has shape {list(entry.shape)}, expected one axis of positions to cut along; {instead}"
            )


def check_memory_length(memory_length: object, manifest: Manifest) -> int:
    """Return a caller's limit on memory rows, 0 … the manifest's memory_length.

    Raises:
        UsageError: the limit is out of this range or no whole number, or the model counts no memory rows.
    """
    if not manifest.can.count_rows:
        raise UsageError(
            f"memory_length is {shown(memory_length)}, but this model counts no memory rows; leave it out, and reset "
            "the state where it is to forget"
        )
    most = manifest.memory_length
    if not is_whole(memory_length) or not 0 <= memory_length <= most:
        raise UsageError(
            f"memory_length is {shown(memory_length)}, expected 0 … {most}; export with --memory-length for more"
        )
    return int(memory_length)


def _check_whole(counts: Ids, edges: Sequence[int]) -> None:
    wrong = [count for count in counts.tolist() if count not in edges]
    if wrong:
        raise UsageError(
            f"lengths are {counts.tolist()}, expected {_listed(edges)} each, because this model takes whole segments "
            "alone; sequences of other lengths need calls of their own"
        )


def _check_lockstep(counts: Ids, manifest: Manifest) -> None:
    if not manifest.can.run_apart and counts.any() and not counts.all():
        raise UsageError(
            f"lengths are {counts.tolist()} within a segment, expected all sequences to run or none, because this "
            "model's sequences run in lockstep; give all of them the same length, or open a stream for each"
        )


def _typed(entry: Input, values: Any) -> Array:
    array = as_array(values, entry.name)
    if array.dtype.kind not in KINDS.get(entry.dtype, "f"):
        raise UsageError(f"{entry.name} is {array.dtype}, expected {entry.dtype}; convert it")
    return array


def _columns(entry: Input, array: Array, batch_size: int, columns: int | None) -> int | None:
    """Return T, the number of positions, from this input; raise UsageError if it differs from `columns`,
    the T so far.
    """
    axes, shape = entry.axes, array.shape
    if columns is None and axes.positions and axes.positions[0] < array.ndim:
        columns = axes.length(array)
    if shape != axes.sizes(batch_size, columns or 0) or (axes.positions and (columns or 0) < 1):
        known = "T" if columns is None or columns < 1 else str(columns)
        more = f"{known} + {entry.lookahead}" if entry.lookahead else known
        sizes = ", ".join(map(str, axes.filled(str(batch_size), more)))
        todo = ", with the same T of at least 1 in all inputs" if axes.positions else ""
        if not todo and axes.batch is not None and shape[axes.batch : axes.batch + 1] != (batch_size,):
            todo = f"; the stream has {batch_size} sequences, model.stream(b) opens others"
        raise UsageError(f"{entry.name} has shape {list(shape)}, expected [{sizes}]{todo or '; reshape it'}")
    return columns


def _described(table: Sequence[Input]) -> str:
    entries = [f"{entry.name} {entry.dtype} {list(entry.shape)}" for entry in table]
    return ", ".join(entries) or "none"


def _listed(numbers: Sequence[int]) -> str:
    values = sorted(set(numbers))
    if len(values) > 20:
        return f"{', '.join(map(str, values[:10]))} … or {values[-1]}"
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])]) if len(values) > 1 else str(values[0])
