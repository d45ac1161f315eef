"""Snapshots: copies of streams' state that can be saved, loaded and restored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import check_path
from txl_runtime.types import Array, Floats, Ids

FORMAT = "txl-deploy.state/1"
"""Format name of a state file that holds only memory rows."""
WHOLE = "txl-deploy.state/2"
"""Format name of a state file that holds only whole tensors ("replace" states), of any type."""
BOTH, WHOLE_NAME = "txl-deploy.state/3", "whole/"
"""Format name of a state file with memory rows and whole tensors, and prefix of the whole tensors' names there."""


@dataclass(frozen=True)
class StreamState:
    """A copy of the state of b streams, bound to the model it came from.

    Attributes:
        model_id: id of the model in the manifest; the state fits every bundle of that model with the same form of
            memory.
        fill: int32 [b], number of memory rows of each stream.
        memory: the tensors that `Stream.memory()` returns, oldest row first, zero-padded on the left.
        head: int32 [b], each stream's next slot in its ring; only rounding depends on it.
        states: the tensors of `Stream.state()` that are no memory rows; None if the model has only memory rows.
    """

    model_id: str
    fill: Ids
    memory: dict[str, Floats]
    head: Ids | None = None
    states: dict[str, Array] | None = None

    @property
    def batch_size(self) -> int:
        """The number of streams, b."""
        return int(self.fill.shape[0])

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that survives a power cut; an existing file is replaced in one step.

        Symbolic links are followed.

        Raises:
            UsageError: the path is a folder, a pipe or a device.
            TxlError: the file cannot be written; the path holds the old file or the new one, whole.
        """
        from txl_runtime.bundle.writing import write_named

        write_named(check_path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the bytes of the file that `save` writes."""
        return encoded(self)

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the state") -> StreamState:
        """Read the bytes that `to_bytes` returned; the arrays are copies. Error messages begin with `source`.

        Raises:
            UsageError: the bytes are damaged, or not a saved state.

        Example:
            >>> state = txl_runtime.load("samples/tiny.txl").stream().snapshot()
            >>> txl_runtime.StreamState.from_bytes(state.to_bytes()).fill
            array([0], dtype=int32)
        """
        from txl_runtime.streaming.state_files import tensors_of

        return decoded(*tensors_of(data, source), source)

    @classmethod
    def load(cls, path: str | Path) -> StreamState:
        """Read a file that `save` wrote.

        Raises:
            UsageError: the file is missing, damaged, or not a saved state.
        """
        from txl_runtime.streaming.state_files import read_tensors

        source = check_path(path)
        return decoded(*read_tensors(source), str(source))


def encoded(state: StreamState, more: Mapping[str, str] | None = None) -> bytes:
    """Return a state as the bytes of a safetensors file, with the entries of `more` added to the file's metadata."""
    from safetensors.numpy import save

    whole, counts = state.states, state.states is None or state.head is not None
    kind = FORMAT if whole is None else BOTH if counts else WHOLE
    facts = {**(more or {}), "format": kind, "model_id": state.model_id}
    tensors = {"fill": state.fill, **state.memory} if counts else {}
    if state.head is not None:
        tensors["head"] = state.head
    if whole is not None:
        facts["batch_size"] = str(state.batch_size)
        tensors |= {f"{WHOLE_NAME if counts else ''}{name}": tensor for name, tensor in whole.items()}
    return save({name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}, metadata=facts)


def decoded(facts: dict[str, str], tensors: dict[str, Array], source: str) -> StreamState:
    """Return the state from a file's metadata and tensors, e.g. {"fill": [b], "layers.00.key": [b, rows, …]}.

    With two sequences of up to 16 rows, that is {"fill": [2], "layers.00.key": [2, 16, 32]}.

    Raises:
        UsageError: the file is no saved state; the message begins with `source`.
    """
    model_id, kind = facts.get("model_id", ""), facts.get("format")
    size = facts.get("batch_size", "")
    if kind == WHOLE and re.fullmatch("[1-9][0-9]{0,5}", size):
        return StreamState(model_id, np.zeros(int(size), np.int32), {}, None, tensors)
    fill, head = tensors.pop("fill", None), tensors.pop("head", None)
    if kind not in (FORMAT, BOTH) or fill is None or fill.ndim != 1 or fill.dtype != np.int32:
        raise UsageError(f"{source}: another kind of file, expected a saved state ({FORMAT} or {WHOLE})")
    if head is not None and (head.shape != fill.shape or head.dtype != np.int32):
        raise UsageError(f"{source}: its head is {head.dtype} {list(head.shape)}, expected int32 {list(fill.shape)}")
    if kind == FORMAT:
        return StreamState(model_id, fill, tensors, head)
    whole = {name.removeprefix(WHOLE_NAME): tensors.pop(name) for name in [*tensors] if name.startswith(WHOLE_NAME)}
    return StreamState(model_id, fill, tensors, np.zeros_like(fill) if head is None else head, whole)
