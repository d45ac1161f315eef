"""Which of the loaded programs runs a segment."""

from __future__ import annotations

from collections.abc import Sequence

from txl_runtime.bundle.tables import Program
from txl_runtime.device.interface import Executable
from txl_runtime.errors import BackendError


class Programs:
    """Executables of one update rule. "logprobs" serve every call; "last" and "score" are shortcuts.

    Args:
        backend: its name, for messages.
        executables: what is loaded.
    """

    def __init__(self, backend: str, executables: Sequence[Executable]) -> None:
        self._backend = backend
        self._by_length = sorted(executables, key=lambda item: item.program.segment_length)
        self._found: dict[tuple[str, int], Executable | None] = {}

    @property
    def all(self) -> tuple[Program, ...]:
        """The programs, shortest segments first."""
        return tuple(item.program for item in self._by_length)

    def find(self, kind: str, length: int) -> Executable:
        """The smallest program that holds a segment of that many tokens: of a kind, or log-probabilities.

        A shortcut is taken unless log-probabilities have a program of shorter segments, which is less work.

        Raises:
            BackendError: there is none.
        """
        whole, shortcut = self._smallest("logprobs", length), self._smallest(kind, length)
        if shortcut is None or (whole and whole.program.segment_length < shortcut.program.segment_length):
            shortcut = whole
        if shortcut is None:
            raise BackendError(f"backend {self._backend} has no program for {length} tokens; build the engines again")
        return shortcut

    def _smallest(self, kind: str, length: int) -> Executable | None:
        key = (kind, length)
        if key not in self._found:
            fitting = (
                item for item in self._by_length if item.program.kind == kind and item.program.segment_length >= length
            )
            self._found[key] = next(fitting, None)
        return self._found[key]
