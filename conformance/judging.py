"""Replies held against what is expected: arrays by their differences, all else exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError
from txl_runtime.ladder import BISECT
from txl_runtime.selftest import relative_difference
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.types import Array

from conformance.driver import is_array, unpacked, unpacked_bytes

Pairs = Iterator[tuple[str, Array, Array]]


class Wrong(Exception):  # noqa: N818
    """A reply that is not as expected, in one line."""


class Judge:
    """Judges the replies to the vectors of one bundle.

    Attributes:
        limit: what rounding may make of a number, by the ladder: |Δ| of a log-probability, in float32 in nats, else
            relative to max(1, largest |value|).
        largest: the largest difference so far.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.limit, self.largest = BISECT[manifest.precision], 0.0
        name = manifest.logprobs.name if manifest.logprobs is not None and manifest.precision == "fp32" else ""
        self._nats = {"nll", "logprobs", f"outputs.{name}"}

    def check(self, expected: dict[str, Any], reply: dict[str, Any]) -> None:
        """Raise Wrong unless a reply is the one expected."""
        if "refused" in expected:
            if reply.get("kind") != expected["kind"] or "ok" in reply:
                raise Wrong(
                    f"was not refused, expected a refusal of kind {expected['kind']}"
                    if "ok" in reply
                    else f"refused as {reply.get('kind')!r}, expected {expected['kind']!r}"
                )
            return
        if "ok" not in reply:
            raise Wrong(f"refused: {str(reply['refused'])[:160]}")
        for place, ours, theirs in pairs(expected["ok"], reply["ok"]):
            apart = relative_difference(theirs, ours, place in self._nats)
            self.largest = max(self.largest, apart)
            if apart > self.limit:
                raise Wrong(f"{place} differs by {apart:.2g}, limit {self.limit:g}")


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two replies hold the same arrays to the bit; of two refusals, whether both refuse."""
    if not ("ok" in one and "ok" in other):
        return one.keys() == other.keys()
    try:
        return all(ours.tobytes() == theirs.tobytes() for _, ours, theirs in pairs(one["ok"], other["ok"]))
    except Wrong:
        return False


def pairs(expected: Any, found: Any, place: str = "") -> Pairs:
    """Every array of a reply beside the one expected, by its place; both have the same dtype and shape.

    Raises:
        Wrong: something is missing or of another kind, or what is no array differs.
    """
    if is_array(expected):
        try:
            yield place, *_alike(unpacked(expected), unpacked(found), place)
        except UsageError as error:
            raise Wrong(f"{place}: {error}") from None
    elif isinstance(expected, dict):
        named = isinstance(found, dict)
        if not named or not expected.keys() <= found.keys() or (place and expected.keys() != found.keys()):
            names = ", ".join(found) if named else str(found)[:80]
            raise Wrong(f"{place or 'the reply'} has {names or 'nothing'}, expected {', '.join(expected)}")
        for name, value in expected.items():
            inner = f"{place}.{name}" if place else name
            if name == "bytes" and isinstance(value, str) and (state := _state(value)) is not None:
                yield from _states(state, found[name])
            else:
                yield from pairs(value, found[name], inner)
    elif json.dumps(expected) != json.dumps(found):  # 1, 1.0 and true are not the same
        raise Wrong(f"{place} is {str(found)[:80]}, expected {str(expected)[:80]}")


def _alike(ours: Array, theirs: Array, place: str) -> tuple[Array, Array]:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        kinds = [f"{array.dtype} {list(array.shape)}" for array in (theirs, ours)]
        raise Wrong(f"{place} is {kinds[0]}, expected {kinds[1]}")
    if not np.issubdtype(ours.dtype, np.floating) and not np.array_equal(ours, theirs):
        raise Wrong(f"{place} differs: {theirs.ravel()[:8].tolist()} …, expected {ours.ravel()[:8].tolist()} …")
    return ours, theirs


def _state(text: str) -> StreamState | None:
    """A saved state; None for other bytes."""
    try:
        return StreamState.from_bytes(unpacked_bytes(text))
    except UsageError:
        return None


def _states(ours: StreamState, found: Any) -> Pairs:
    """Return pairs of the parts of two saved states, whatever the order of their tensors."""
    try:
        theirs = StreamState.from_bytes(unpacked_bytes(found))
    except UsageError as error:
        raise Wrong(f"bytes: {error}") from None
    if ours.model_id != theirs.model_id:
        raise Wrong(f"the saved state is of model {theirs.model_id[:12]!r}, expected {ours.model_id[:12]!r}")
    parts = [
        {
            "fill": state.fill,
            **({} if state.head is None else {"head": state.head}),
            **state.memory,
            **(state.states or {}),
        }
        for state in (ours, theirs)
    ]
    if parts[0].keys() != parts[1].keys():
        raise Wrong(f"the saved state has {', '.join(parts[1])}, expected {', '.join(parts[0])}")
    for name, array in parts[0].items():
        yield f"saved.{name}", *_alike(array, parts[1][name], f"saved.{name}")
