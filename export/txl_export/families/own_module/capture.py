"""From the user's step to a graph, by three routes: the first whose graph computes what the module computes counts.

    export      torch.export, then ONNX; first by running the module, then by reading its source
    decomposed  the same with operators taken apart, which repairs some that ONNX has in another form
    tracer      one run of the module, as it went; in a process of its own

Each graph is loaded, run on real values and compared (`rehearsal`) before it counts.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir
import torch

from txl_export.families.own_module.attributes import untouched
from txl_export.families.own_module.diagnosis import ROUTES, CaptureError, ReadError, Reason, Route, reason_of
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.own_code import failure, own_code
from txl_export.families.own_module.rehearsal import Example, rehearse
from txl_export.families.own_module.tracer_worker import trace
from txl_export.families.own_module.value_reads import UNKNOWN, Reads, value_reads
from txl_export.graphs.indexing import plain_indices
from txl_export.graphs.settling import OPSET, STACK_TRACE, UnsettledError, settle
from txl_export.graphs.stable import stable
from txl_export.graphs.tracing import quick, quiet

_READING = ("_local_scalar_dense", "item", "_assert_async", "_assert_scalar")
"""In the names of the operators by which `torch.export` keeps that a value is read."""


@dataclass(frozen=True)
class Captured:
    """A program's graph in float32, its weights inside.

    Attributes:
        name: of the program.
        network: that was captured.
        examples: on which the graph was compared.
        model: the graph.
        route: by which it was found.
        again: gives the graph of a network of another number of sequences, in the same way; not compared. It raises
            whatever stands in the way.
    """

    name: str
    network: StepNetwork
    examples: Sequence[Example]
    model: ir.Model
    route: str
    again: Callable[[StepNetwork, Example], ir.Model]


Capture = Callable[[StepNetwork, str, Sequence[Example], Sequence[Route]], Captured]
"""What makes graphs of networks; see `capture`."""


def capture(network: StepNetwork, name: str, examples: Sequence[Example], routes: Sequence[Route] = ROUTES) -> Captured:
    """The graph of a network.

    A value that the step gives to Python, which may decide by it, has to be in the graph. `torch.export` keeps such
    values as numbers of its graph, and fails where Python decides by one. If the step reads a value and the graph of
    `torch.export` does not, the step does something else while it is captured: then the graph is refused. The tracer
    takes every value that is read for a constant, so it may not be used where one is.

    Args:
        network: to capture.
        name: of the program.
        examples: to trace with, the first, and to compare on, all of them.
        routes: to try, in order.

    Raises:
        OwnCodeError: the module ended the program, as by `sys.exit`.
        CaptureError: no route's graph computes what the module computes; the message names the most telling reason.
    """
    network.eval()
    reasons: list[Reason] = []
    made, origins = _Made(_reads(network, examples[0])), list[tuple[ir.Node, str]]()
    for route in routes:
        if any(route in reason.in_vain for reason in reasons):
            continue
        try:
            with untouched(network.module), silence(), torch.no_grad():
                origins.clear()
                model = _ROUTES[route](network, examples[0], made)
                origins += [(node, node.metadata_props.get(STACK_TRACE, "")) for node in model.graph]  # settled: none
                settle(model, name, network.inputs, network.outputs)
                rehearse(model, network, examples)
        except Exception as error:  # torch raises many kinds, and so may the user's code
            narrower = _is_narrower(network, made.exported, examples)
            reasons.append(reason_of(route, error, network.module, made.reads, narrower, origins))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # such as sys.exit
            raise failure(error, "the module failed while it was captured") from error
        else:
            return Captured(name, network, examples, model, route, partial(_again, name, route))
    best = max(reasons, key=lambda reason: reason.weight)
    tried = ", ".join(reason.route for reason in reasons)
    raise CaptureError(
        f"{name} cannot be captured as a graph (tried {tried}): {best.text}; expected a step whose "
        "operators do not depend on values and that ONNX has; see docs/own-models-reference.md",
        final=tuple(best.in_vain) == ROUTES,
    )


def _again(name: str, route: Route, network: StepNetwork, example: Example) -> ir.Model:
    """See `Captured`."""
    network.eval()
    with untouched(network.module), silence(), torch.no_grad():
        model = _ROUTES[route](network, example, _Made(Reads()))
        settle(model, name, network.inputs, network.outputs)
    return model


@dataclass
class _Made:
    """What routes share: the values that the step reads, and what `torch.export` made of it, or how it failed."""

    reads: Reads
    exported: Any = None
    failed: Exception | None = None


def _reads(network: StepNetwork, example: Example) -> Reads:
    """Where the step reads values; an exception of its code comes again in every route, and is told there."""
    with own_code("the module failed"), untouched(network.module), silence(), contextlib.suppress(Exception):
        return value_reads(network, [tensor.clone() for tensor in example.given])
    return Reads(UNKNOWN)


def _export(network: StepNetwork, example: Example, made: _Made) -> ir.Model:
    """By `torch.export`; what it made is kept for taking it apart."""
    return _to_onnx(_symbolic(network, example, made), network)


def _decomposed(network: StepNetwork, example: Example, made: _Made) -> ir.Model:
    return _to_onnx(_symbolic(network, example, made).run_decompositions(), network)


def _symbolic(network: StepNetwork, example: Example, made: _Made) -> Any:
    """What `torch.export` makes of the step, once; so it fails once."""
    if made.failed is not None:
        raise made.failed
    if made.exported is None:
        try:
            made.exported = _exported(network, example)
        except Exception as error:
            made.failed = error
            raise
    if made.reads.by_python is not None and not any(_reads_a_value(node) for node in made.exported.graph.nodes):
        raise ReadError(
            f"the step reads a value at {made.reads.by_python}, and not while it is captured, so that the graph may "
            "compute something else"
        )
    return made.exported


def _is_narrower(network: StepNetwork, exported: Any, examples: Sequence[Example]) -> bool:
    """Whether `torch.export` has taken an open size for one that only some of the examples have.

    Its graph may be right for all of them: one that cuts off rows beyond a limit is right where there are fewer rows.
    """
    if exported is None:
        return False
    shapes = {node.name: node.meta["val"].shape for node in exported.graph.nodes if node.op == "placeholder"}
    for index, name in enumerate(exported.graph_signature.user_inputs):
        for axis in network.open_axes[index]:
            size, wanted = shapes[name][axis], {example.given[index].shape[axis] for example in examples}
            bounds = {size} if isinstance(size, int) else exported.range_constraints.get(size.node.expr, wanted)
            if any(one not in bounds for one in wanted if one > 1):  # torch takes no open size for 0 or 1
                return True
    return False


def _reads_a_value(node: Any) -> bool:
    return node.op == "call_function" and any(word in str(node.target) for word in _READING)


def _traced(network: StepNetwork, example: Example, made: _Made) -> ir.Model:
    place = made.reads.anywhere
    if place is not None:
        raise ReadError(f"what the step does next depends on a value that it reads at {place}")
    inputs, outputs = ([spec.name for spec in side] for side in (network.inputs, network.outputs))
    return trace(network, tuple(tensor.clone() for tensor in example.given), inputs, outputs, OPSET)


_ROUTES: dict[Route, Callable[[StepNetwork, Example, _Made], ir.Model]] = {
    "export": _export,
    "decomposed": _decomposed,
    "tracer": _traced,
}


def _exported(network: StepNetwork, example: Example) -> Any:
    """Running the module shows more modules; reading its source keeps values symbolic that running would ask for."""
    shapes = (tuple(network.open_axes),) if any(network.open_axes) else None
    given = tuple(tensor.clone() for tensor in example.given)
    try:
        return torch.export.export(network, given, dynamic_shapes=shapes, strict=False)
    except Exception as first:
        with contextlib.suppress(Exception):
            return torch.export.export(network, given, dynamic_shapes=shapes, strict=True)
        raise first


def _to_onnx(exported: Any, network: StepNetwork) -> ir.Model:
    plain = stable(plain_indices(exported))
    program = torch.onnx.export(plain, dynamo=True, opset_version=OPSET, verbose=False, external_data=False)
    if program is None:
        raise UnsettledError("torch.onnx.export returned nothing")
    model: ir.Model = program.model
    for value, spec in zip(model.graph.inputs, network.inputs, strict=True):
        value.name = spec.name
    return model


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without what torch warns of, logs and prints while it captures."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with quiet(), quick(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
