"""What loops on the CPU ask of an engine: programs bound to arrays, or run on arrays of any size."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from txl_runtime.bundle.tables import Program
from txl_runtime.types import Arrays, Call


class Engine(Protocol):
    """An engine that has opened a bundle's programs on the host.

    Binding ties a program to arrays that the caller owns; running the call reads the inputs, writes the outputs and
    allocates nothing. The same arrays may be bound many times, by many streams. One call may not run twice at the same
    time, different calls may.

    Attributes:
        description: for people.
        least_rows: from this many rows on, what a softmax program gives a row does not depend on how many there are.
    """

    description: str
    least_rows: int

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        """Tie a program to C-contiguous arrays of the program's shapes and dtypes.

        Arrays of a softmax program may have any number of rows. Outputs may not overlap inputs, but for the state of
        a ring: there one array is both.
        """

    def kept(self, program: Program) -> Collection[str]:
        """The states' outputs of a program in which the caller has to keep what idle sequences had."""

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        """Run a program that leaves sizes open; what it returns is in new arrays, by the names of its outputs.

        Raises:
            BackendError: the engine failed.
        """

    def release_pages(self) -> None:
        """See `Backend.release_pages`."""
