"""Explains a failed capture: the cause, the user's line, and what to write instead."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn
from txl_runtime.errors import UsageError, one_line

from txl_export.families.own_module.own_code import place_in, place_of
from txl_export.families.own_module.rehearsal import RehearsalError
from txl_export.graphs.unsettled import UnsettledError

_LACKS = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)'[^>]*>(.*for the (real|complex)-valued)?")
_BY_VALUES = re.compile(
    r"DataDependent|Unbacked|data-dependent|aten\.sym_"
    r"|\.numpy\(\) is not supported|between instances of 'Sym|Boolean index_put"
)
"""Matches torch's messages that Python asks for a value, or that values decide how many places are read or written."""
_NAMED = re.compile(r"(?:'|node name: |the graph's |computes another )([^')\s]+)")
_INSTEAD = (
    "write torch.where(mask, new, old) or x.masked_fill(mask, value) for a choice by if or x[mask], x[:, n[None]] = … "
    "for x[:, n] = …, x.item() for the number float(x)"
)


class GradientsError(Exception):
    """A step computes gradients, which `torch.export` does not follow; the message is the place in the user's code."""


class CaptureError(UsageError):
    """A step cannot be captured as a graph.

    Attributes:
        final: whether the cause lies in the step itself, so that different state sizes would not help.
    """

    def __init__(self, message: str, final: bool) -> None:
        super().__init__(message)
        self.final = final


def reason_of(error: Exception, module: nn.Module, origins: Sequence[tuple[ir.Node, str]] = ()) -> tuple[str, bool]:
    """Return the cause of a failed capture, for a message, and whether the cause is final (see `CaptureError`).

    Args:
        error: the error of the capture.
        module: the user's module.
        origins: the graph's nodes, each with the source lines that torch recorded for it; () if there is no graph.
    """
    if isinstance(error, UnsettledError):
        return f"{error}{place_in(error.trace) or _origin(error, origins)}", error.final
    if isinstance(error, RehearsalError):
        message = f"{error}{_origin(error, origins)}"
        return (f"{message}; {_INSTEAD}", True) if error.fed_size else (message, False)
    if isinstance(error, GradientsError):
        return f"it computes gradients{error}, and a graph computes none; write them as a formula", True
    chain = _chain(error)
    # use the last cause, because the exporter's own frames lie outside the user's code
    converting = type(error).__module__.startswith("torch.onnx")
    chain_text, place = " ".join(f"{type(one).__name__}: {one}" for one in chain), _place(chain, converting)
    if _BY_VALUES.search(chain_text):
        return f"what the step does next, or a size, depends on values{place}; {_INSTEAD}", True
    if lacking := _LACKS.search(chain_text):
        text = f"ONNX lacks the operator {lacking[1]}"
        if lacking[3] == "complex":
            return f"{text} for complex numbers{place}; compute with real and imaginary parts", True
        return f"{text}{place}", lacking[3] is not None
    compiled = [path for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if compiled:
        what = f"the part {compiled[0]} of the module" if compiled[0] else "the module"
        text = f"{what} is TorchScript, whose Python is gone; make it from its class, and load its state dict into that"
        return text, True
    cause = chain[-1] if converting else error
    return f"{type(cause).__name__}: {one_line(cause)}{place}", False


def _chain(error: BaseException) -> list[Any]:
    """Return an exception and the exceptions that led to it, the latest first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _origin(error: Exception, origins: Sequence[tuple[ir.Node, str]]) -> str:
    """Return the user's line of the node in a text such as "… at Expand ['val_42']"; "" without a node."""
    names = set(_NAMED.findall(f"{error} {getattr(error, 'inner', '')}"))
    traces = (trace for node, trace in origins if names & {node.name, *(value.name for value in node.outputs)})
    return place_in(next(traces, ""))


def _place(chain: Sequence[BaseException], converting: bool) -> str:
    """Return the user's line where an exception arose: the innermost that any exception of the chain shows.

    `converting` says that the exporter failed while it converted an operator. The exporter's frames hold that operator,
    and the line that was recorded for it is returned.
    """
    if not converting:
        places = (place_of(traceback.extract_tb(one.__traceback__)) for one in reversed(chain))
        return next((place for place in places if place), "")
    node: Any = None
    for one in chain:
        trace = one.__traceback__
        while trace is not None:
            node = next((value for value in trace.tb_frame.f_locals.values() if isinstance(value, fx.Node)), node)
            trace = trace.tb_next
    return "" if node is None else place_in(node.meta.get("stack_trace") or "")
