"""The error of a graph that no bundle can hold."""

from __future__ import annotations

STACK_TRACE = "pkg.torch.onnx.stack_trace"
"""Under this name torch notes beside a node the lines that led to it."""


class UnsettledError(Exception):
    """A graph that no bundle can hold; the message says why.

    Attributes:
        trace: as which torch notes the lines that led to it; "" where none did.
        final: whether it is the same however the step is captured.
    """

    def __init__(self, message: str, trace: str = "", final: bool = False) -> None:
        super().__init__(message)
        self.trace, self.final = trace, final
