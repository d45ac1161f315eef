"""The protocol of an engine on the CPU: it binds programs to arrays, or runs them on arrays of any size."""

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
        description: the engine's name and version, for people.
        least_rows: number of rows from which on a softmax program gives a row the same bits for any number of rows.
    """

    description: str
    least_rows: int

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        """Bind a program to C-contiguous arrays of the program's shapes and dtypes, and return the call.

        Arrays of a softmax program may have any number of rows. Outputs must not overlap inputs, except for the state
        of a ring, which is one array for both.
        """

    def kept(self, program: Program) -> Collection[str]:
        """Return the state outputs in which the caller has to restore idle sequences, since the graph does not."""

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        """Run a program that leaves sizes open; return its outputs by name, in new arrays.

        Raises:
            BackendError: the engine failed.
        """

    def release_pages(self) -> None:
        """Release mapped pages of the weight file, as `Backend.release_pages` does."""
