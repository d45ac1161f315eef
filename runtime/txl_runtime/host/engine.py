"""The protocol of an engine on the CPU, which binds programs to arrays, or runs them on arrays of any size."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from txl_runtime.bundle.tables import Program
from txl_runtime.types import Arrays, Call


class Engine(Protocol):
    """An engine that has opened a bundle's programs on the host.

    Binding ties a program to arrays that the caller owns. The resulting call reads the inputs, writes the outputs and
    allocates nothing. The same arrays may be bound many times, by many streams. Different calls may run at the same
    time, but one call may not run twice at the same time.

    Attributes:
        description: the engine's name and version, for people.
        least_rows: smallest number of rows at which a softmax program computes a row to the same bits as at any larger
            number.
    """

    description: str
    least_rows: int

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        """Bind a program to C-contiguous arrays of its shapes and dtypes, and return a function that runs the program.

        Arrays of a softmax program may have any number of rows. Outputs must not overlap inputs, except for the state
        of a ring, which is one array for both. For example, inputs {"ids": [4, 1]} and outputs {"logprobs":
        [4, 1, 256]}.
        """

    def kept(self, program: Program) -> Collection[str]:
        """Return the state outputs in which the caller must restore idle sequences, because the graph does not."""

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        """Run a program whose outputs have open sizes; return the outputs by name, in new arrays.

        For example, {"x": [1, 5]} gives {"y": [1, 10]}, whose 10 only the run decides.

        Raises:
            BackendError: the engine failed.
        """

    def release_pages(self) -> None:
        """Release memory-mapped pages of the weight file; see `Backend.release_pages`."""
