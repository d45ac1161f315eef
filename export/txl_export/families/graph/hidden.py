"""States that are hidden in a graph, made explicit."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from txl_runtime.errors import UsageError
from txl_runtime.types import Array


@dataclass(frozen=True)
class Hidden:
    """A state that was made explicit.

    Attributes:
        name: of it.
        input, output: of the graph.
        initial: what it holds first; None for zeros.
    """

    name: str
    input: str
    output: str
    initial: Array | None


def open_hidden(model: ir.Model) -> list[Hidden]:
    """Make hidden states explicit, in place.

    Raises:
        UsageError: they cannot be.
    """
    raise UsageError(f"{model.graph.name}: this version opens no hidden states; leave out --open")
