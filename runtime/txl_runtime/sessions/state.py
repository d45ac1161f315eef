"""The state of a session between requests: its memory, its pending token, and the number of positions it has seen.

A session's file is a saved state of one sequence; the pending token and the number of positions are in its metadata. So
`StreamState.load` reads it, too, and any saved state of one sequence is read as a session without a pending token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import BYTES, StateTensor
from txl_runtime.bundle.writing import write_named
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import check_path, is_whole, shown
from txl_runtime.streaming.snapshot import StreamState, decoded, encoded
from txl_runtime.streaming.state import RowState
from txl_runtime.streaming.state_files import read_tensors, tensors_of
from txl_runtime.streaming.states import check_fits, parted, snapshot_of_row
from txl_runtime.types import Array

LONGEST_NAME = 256
"""Maximum number of characters of a session's name."""
MOST_SEEN = 10**15
"""Upper limit of `seen`, above the number of positions of any real session: a larger forged number could
not be saved.
"""
PENDING, SEEN = "session.pending", "session.seen"
"""Keys in a file's metadata; their values are decimal numbers."""


@dataclass(frozen=True)
class SessionState:
    """The state of one session, independent of a stream.

    Attributes:
        state: the state of one sequence, bound to the model.
        pending: the last drawn token, if the next request has to feed it; else None.
        seen: number of positions that the session was fed.
    """

    state: StreamState
    pending: int | None = None
    seen: int = 0

    @classmethod
    def of(
        cls, row: RowState, manifest: Manifest, table: Sequence[StateTensor], pending: int | None, seen: int
    ) -> SessionState:
        """Return the state of a sequence that was taken from a stream; the arrays are shared, not copied.

        Args:
            row: the result of `Stream.take`.
            table: the stream's state table, `manifest.states_of(update)`.
            pending, seen: see the class.
        """
        return cls(snapshot_of_row(row, manifest, table), pending, seen)

    def row(self, manifest: Manifest, table: Sequence[StateTensor]) -> RowState:
        """Return the checked state for `Stream.put`; the arrays are shared, not copied.

        Raises:
            UsageError: the state has a different model, form of memory or number of sequences, or a wrong tensor or
                number.
        """
        check_fits(self.state, manifest, table, 1)
        size, pending = manifest.vocab_size, self.pending
        if pending is not None and not (is_whole(pending) and 0 <= pending < size):
            expected = f"none or an id of 0 … {size - 1}" if size else "none, since the model reads no tokens"
            raise UsageError(f"the state's pending token is {shown(pending)}, expected {expected}; take it again")
        if not is_whole(self.seen) or not 0 <= self.seen < MOST_SEEN:
            raise UsageError(f"the state has seen {shown(self.seen)}, expected a number of positions; take it again")
        return next(parted(self.state, table))

    @property
    def model_id(self) -> str:
        """The `model_id` of the bundle that the state belongs to."""
        return self.state.model_id

    def to_bytes(self) -> bytes:
        """Return the bytes of the file that `save` writes."""
        more = {SEEN: str(self.seen)}
        if self.pending is not None:
            more[PENDING] = str(self.pending)
        return encoded(self.state, more)

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the state") -> SessionState:
        """Read the bytes that `to_bytes` returned, or the bytes of any saved state of one sequence; arrays are copies.

        Raises:
            UsageError: the bytes are damaged, or no saved state, or the state of several sequences.
        """
        return _read(*tensors_of(data, source), source)

    def save(self, path: str | Path) -> None:
        """Write a file, as `StreamState.save` does."""
        write_named(check_path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> SessionState:
        """Read a file that `save` wrote, or any saved state of one sequence.

        Raises:
            UsageError: the file is missing or damaged, or no saved state, or the state of several sequences.
        """
        source = check_path(path)
        return _read(*read_tensors(source), str(source))


def check_name(name: object) -> str:
    """Return the name of a session after checking it: a text of 1 … 256 characters that UTF-8 can encode.

    Raises:
        UsageError: the name is not such a text.
    """
    if isinstance(name, str) and 1 <= len(name) <= LONGEST_NAME:
        try:
            name.encode()
        except UnicodeEncodeError:  # raised for a lone surrogate, as in JSON's "\ud800"
            pass
        else:
            return str(name)
    shown_name = f"{shown(name)}, {len(name)} characters" if isinstance(name, str) else shown(name)
    raise UsageError(f"the session's name is {shown_name}, expected text of 1 … {LONGEST_NAME} characters of Unicode")


def largest_state(manifest: Manifest, table: Sequence[StateTensor]) -> int:
    """Return the largest possible size of a session's state in bytes; memory is kept as float32, "replace" states in
    their type.
    """
    return sum(BYTES.get(entry.taken_dtype, 4) * entry.values(manifest.memory_length) for entry in table)


def _read(facts: dict[str, str], tensors: dict[str, Array], source: str) -> SessionState:
    state = decoded(facts, tensors, source)
    if state.batch_size != 1:
        raise UsageError(
            f"{source}: the state of {state.batch_size} sequences, expected one; take the sequences one by one"
        )
    numbers = {}
    for name in (PENDING, SEEN):
        value = facts.get(name)
        if value is not None and not re.fullmatch("[0-9]{1,18}", value):
            raise UsageError(f"{source}: its {name} is {shown(value)}, expected a whole number; take the state again")
        numbers[name] = None if value is None else int(value)
    seen = numbers[SEEN]
    return SessionState(state, numbers[PENDING], max(0, int(state.fill[0])) if seen is None else seen)
