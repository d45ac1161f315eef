"""Why a step could not be captured, told after it failed: the cause, the user's line, and which routes it stops too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch import fx, nn
from txl_runtime.errors import UsageError, one_line

from txl_export.families.own_module.own_code import place_in, users_frames
from txl_export.families.own_module.rehearsal import RehearsalError
from txl_export.families.own_module.tracer_worker import TracerError
from txl_export.families.own_module.value_reads import UNKNOWN, Reads
from txl_export.graphs.settling import UnsettledError

Route = Literal["export", "decomposed", "tracer"]
ROUTES: tuple[Route, ...] = ("export", "decomposed", "tracer")
_LACKS = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)'[^>]*>(.*for the (real|complex)-valued)?")
_BY_VALUES = re.compile("DataDependent|Unbacked")
_NAMED = re.compile(r"(?:'|node name: )([^')]+)")
_INSTEAD = (
    "write torch.where(mask, new, old) or x.masked_fill(mask, value) for x[mask], x[:, n[None]] = … for x[:, n] = …"
)
_TRACER_LACKS = re.compile(r"Exporting the operator '([^']+)'")


class ReadError(Exception):
    """A step decides by a value; the message says where."""


class CaptureError(UsageError):
    """No route gives a graph of a step.

    Attributes:
        final: whether the cause is of the step itself, so that no other sizes of its states change it.
    """

    def __init__(self, message: str, final: bool) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True)
class Reason:
    """Why a route failed.

    Attributes:
        route: that failed.
        weight: of several reasons, the one of the highest weight is told.
        text: for the message.
        in_vain: the routes that the same cause stops.
    """

    route: Route
    weight: int
    text: str
    in_vain: Sequence[Route] = ()


def reason_of(
    route: Route,
    error: Exception,
    module: nn.Module,
    reads: Reads,
    narrower: bool = False,
    origins: Sequence[tuple[ir.Node, str]] = (),
) -> Reason:
    """What stopped a route.

    Args:
        route: that failed.
        error: with which it failed.
        module: the user's.
        reads: what a run of the step has shown.
        narrower: whether what `torch.export` made of the step is for some of its sizes alone.
        origins: the nodes of the graph that the route has made, and as which torch notes the lines that led to each.
    """
    chain, origin = _chain(error), _origin(error, origins)
    by_values = any("data-dependent" in str(one) or _BY_VALUES.search(type(one).__name__) for one in chain)
    inside = reads.anywhere not in (None, UNKNOWN) and reads.by_python is None
    if inside and (by_values or (isinstance(error, RehearsalError) and error.fed_size)):
        text = f"what the step does next, or a size, depends on a value that it reads at {reads.anywhere}; {_INSTEAD}"
        return Reason(route, 5, text, ROUTES)
    if isinstance(error, ReadError):
        return Reason(route, 5, str(error), ROUTES)
    if isinstance(error, UnsettledError):
        return Reason(route, 2, f"{error}{place_in(error.trace) or origin}", ROUTES if error.final else ())
    if isinstance(error, RehearsalError):
        return Reason(route, 2, f"{error}{origin}", ("decomposed",) if narrower and error.elsewhere else ())
    if isinstance(error, TracerError):
        return Reason(route, 1, str(error))
    said, place = " ".join(str(one) for one in chain), _place(chain)
    if lacking := _LACKS.search(said):
        lacks = f"ONNX lacks the operator {lacking[1]}"
        if lacking[3] == "complex":
            text = f"{lacks} for complex numbers{place}; compute with real and imaginary parts"
            return Reason(route, 4, text, ROUTES)
        return Reason(route, 4, f"{lacks}{place}", ("decomposed",) if lacking[3] else ())
    if lacking := _TRACER_LACKS.search(said):
        return Reason(route, 4, f"ONNX lacks the operator {lacking[1]}{place}")
    if by_values:
        return Reason(route, 3, f"what it does next depends on values{_at(chain)}")
    if reads.gradients is not None:
        text = f"it computes gradients at {reads.gradients}, and a graph computes none; write them as a formula"
        return Reason(route, 4, text, ("decomposed",))
    compiled = [path for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if compiled:
        what = f"the part {compiled[0]} of the module" if compiled[0] else "the module"
        text = f"{what} is TorchScript, whose Python is gone; make it from its class, and load its state dict into that"
        return Reason(route, 4, text, ROUTES)
    if type(error).__module__.startswith("torch.onnx"):  # what it says is where to look for the cause: that is the last
        return Reason(route, 2, f"{_brief(chain[-1])}{place}")
    return Reason(route, 2, _brief(error, _at(chain)))


def _chain(error: BaseException) -> list[BaseException]:
    """An exception, and those that led to it."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _brief(error: BaseException, at: str = "") -> str:
    return f"{type(error).__name__}{at}: {one_line(error)}"


def _origin(error: Exception, origins: Sequence[tuple[ir.Node, str]]) -> str:
    """The user's line of the node that a message names, such as "… at Expand ['val_42']"; "" where it names none."""
    said = set(_NAMED.findall(str(error)))
    found = (trace for node, trace in origins if said & {node.name, *(value.name for value in node.outputs)})
    return place_in(next(found, ""))


def _at(chain: Sequence[BaseException]) -> str:
    """Where in the user's code an exception arose, the innermost place that any of the chain tells."""
    for one in reversed(chain):
        frames = users_frames(one.__traceback__)
        if frames:
            return f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
    return ""


def _place(chain: Sequence[BaseException]) -> str:
    """The user's line of the operator that the exporter was at: it stands in no message, but its frames hold it."""
    node: Any = None
    for one in chain:
        trace = one.__traceback__
        while trace is not None:
            node = next((value for value in trace.tb_frame.f_locals.values() if isinstance(value, fx.Node)), node)
            trace = trace.tb_next
    return "" if node is None else place_in(node.meta.get("stack_trace") or "")
