"""The error for a graph that no bundle may contain."""

from __future__ import annotations

STACK_TRACE = "pkg.torch.onnx.stack_trace"
"""Key of a node's metadata under which torch stores the source lines that led to it."""


class UnsettledError(Exception):
    """No bundle may contain the graph; the message says why.

    Attributes:
        trace: the source lines that torch stored for the node; "" if there are none.
        final: True if no different way of capturing could help.
    """

    def __init__(self, message: str, trace: str = "", final: bool = False) -> None:
        super().__init__(message)
        self.trace, self.final = trace, final
