"""Saved states: loaded, held against streams of three forms, and saved again; those of one sequence as a session's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import msgspec
import numpy as np
from safetensors.numpy import save
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.errors import UsageError
from txl_runtime.sessions.state import SessionState
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.streaming.states import check_fits

from fuzz.choices import Choices
from fuzz.edits import edited
from fuzz.targets.places import BASES, folder, written


def one_input(data: bytes) -> None:
    """Load a file; what is loaded saves and loads again as the same, and fits a stream or is refused by name."""
    choices = Choices(data)
    kind = choices.number(len(_good()))
    path = written("saved.state", choices.rest() if kind == 0 else _changed(_good()[kind - 1], choices))
    state = StreamState.load(path)
    assert sum(tensor.nbytes for tensor in (state.states or state.memory).values()) <= path.stat().st_size
    again = folder() / "again.state"
    state.save(again)
    assert _equal(StreamState.load(again), state)
    _as_a_session(path.read_bytes(), state)
    errors, fits = [], 0
    for known in _manifests():
        manifest = msgspec.structs.replace(known, model_id=state.model_id)  # else no forged state came any further
        for update in manifest.updates:
            states = manifest.states_of(update)
            try:
                check_fits(state, manifest, states, state.batch_size)
            except UsageError as error:
                errors.append(error)
                continue
            fits += 1
            if state.states is None:
                assert set(state.memory) == {spec.name for spec in states}
                for spec in states:
                    rows = state.memory[spec.name]
                    assert rows.dtype == np.float32
                    assert rows.shape == (state.batch_size, int(state.fill.max(initial=0)), *spec.row_shape)
            else:
                assert set(state.states) <= {spec.name for spec in states}
    if not fits:
        raise errors[0]


def _as_a_session(data: bytes, state: StreamState) -> None:
    """Read from bytes it is the same, unless what it says of a session is no number."""
    try:
        session = SessionState.from_bytes(data)
    except UsageError as error:
        if state.batch_size == 1 and "its session." not in str(error):
            raise AssertionError("a saved state of one sequence is no session's") from error
        return
    again = SessionState.from_bytes(session.to_bytes())
    if not (_equal(session.state, state) and _equal(again.state, state)):
        raise AssertionError("another state than was loaded")
    if (again.pending, again.seen) != (session.pending, session.seen):
        raise AssertionError("another token or number of positions")


def seeds() -> Iterator[bytes]:
    """Good snapshots as they are, and changed."""
    for number, good in enumerate(_good(), 1):
        yield b"\0" + good
        yield bytes([number])
        for kind in range(8):
            yield bytes([number, 2, kind * 3, kind, kind * 5, 1, kind, 0])


@cache
def _good() -> tuple[bytes, ...]:
    found = []
    for manifest in _manifests():
        states = manifest.states_of(manifest.updates[0])
        facts = {"format": "txl-deploy.state/1", "model_id": manifest.model_id}
        if "fill" in manifest.counters:
            tensors = {spec.name: np.ones((2, 2, *spec.row_shape), np.float32) for spec in states}
            found.append(save({"fill": np.array([1, 2], np.int32), "head": np.zeros(2, np.int32), **tensors}, facts))
        else:
            facts |= {"format": "txl-deploy.state/2", "batch_size": "2"}
            tensors = {spec.name: np.ones(spec.shape, spec.dtype) for spec in states}
            found.append(save(tensors, facts))
    rows = np.ones((1, 2, 3), np.float32)
    facts = {"format": "txl-deploy.state/1", "session.pending": "7", "session.seen": "30"}
    found.append(save({"fill": np.array([2], np.int32), "rows": rows}, facts))
    return tuple(found)


@cache
def _manifests() -> tuple[Manifest, ...]:
    paths = [BASES / name / "manifest.json" for name in ("step", "transformer_xl")]
    return tuple(decode_manifest(path.read_bytes(), str(path)) for path in paths)


def _changed(good: bytes, choices: Choices) -> bytes:
    """The good file with another header over the same bytes, of the right length."""
    length = int.from_bytes(good[:8], "little")
    text = json.dumps(edited(json.loads(good[8 : 8 + length]), choices, 4)).encode()
    return len(text).to_bytes(8, "little") + text + good[8 + length :] + choices.some()


def _equal(one: StreamState, other: StreamState) -> bool:
    """Return whether two states are the same, bit for bit."""
    pairs = [(one.fill, other.fill), (one.head, other.head)]
    for left, right in ((one.memory, other.memory), (one.states or {}, other.states or {})):
        if left.keys() != right.keys():
            return False
        pairs += [(left[name], right[name]) for name in left]
    same = all(
        (left is None) == (right is None)
        and (
            left is None
            or (left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
        )
        for left, right in pairs
    )
    return same and one.model_id == other.model_id
