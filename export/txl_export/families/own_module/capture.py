"""From the user's step to a graph, by `torch.export` and its conversion to ONNX.

Where that fails, the operators are taken apart first ("decomposed"), which repairs some that ONNX has in another form.
A graph is loaded, run on real values and compared (`rehearsal`) before it counts.
"""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from torch.fx.proxy import TracerBase

from txl_export.families.own_module.attributes import untouched
from txl_export.families.own_module.constant_reads import Reads, constant_reads
from txl_export.families.own_module.diagnosis import CaptureError, GradientsError, reason_of
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.own_code import failure, in_the_step, innermost
from txl_export.families.own_module.rehearsal import Example, RehearsalError, rehearse
from txl_export.graphs.indexing import plain_indices
from txl_export.graphs.settling import OPSET, settle
from txl_export.graphs.stable import stable
from txl_export.graphs.tracing import quick, quiet
from txl_export.graphs.unsettled import STACK_TRACE, UnsettledError

ROUTES = ("export", "decomposed")


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


Capture = Callable[[StepNetwork, str, Sequence[Example]], Captured]
"""What makes graphs of networks; see `capture`."""


def capture(network: StepNetwork, name: str, examples: Sequence[Example]) -> Captured:
    """The graph of a network.

    Args:
        examples: to capture with, the first, and to compare on, all of them.

    Raises:
        OwnCodeError: the module ended the program, as by `sys.exit`.
        CaptureError: no graph computes what the module computes; the message has the cause and the user's line.
    """
    exported, said, final = None, "", False
    for route in ROUTES:
        origins = list[tuple[ir.Node, str]]()
        try:
            with _capturing(network):
                exported = exported or _exported(network, examples[0])
                model = _to_onnx(exported, network, route)
                origins += [(node, node.metadata_props.get(STACK_TRACE, "")) for node in model.graph]  # settled: none
                settle(model, name, network.inputs, network.outputs)
                rehearse(model, network, examples)
        except Exception as error:  # torch raises many kinds, and so may the user's code
            reason, final = reason_of(error, network.module, origins)
            said = said or reason
            if exported is None or final or (isinstance(error, RehearsalError) and error.elsewhere):
                break
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # such as sys.exit
            raise failure(error, "the module failed while it was captured") from error
        else:
            return Captured(name, network, examples, model, route, partial(_again, name, route))
    raise CaptureError(
        f"{name} cannot be captured as a graph: {said}; expected a step whose operators do not depend on values and "
        "that ONNX has; see docs/own-models-reference.md",
        final,
    )


def _again(name: str, route: str, network: StepNetwork, example: Example) -> ir.Model:
    """See `Captured`."""
    with _capturing(network):
        model = _to_onnx(_exported(network, example), network, route)
        settle(model, name, network.inputs, network.outputs)
    return model


@contextlib.contextmanager
def _capturing(network: StepNetwork) -> Iterator[None]:
    """With the module put back afterwards, and without what torch warns of, logs and prints.

    torch notes beside an operator the lines of functions called `forward` alone, so that one in a helper or a `step=`
    would have none: here it notes the innermost of all.
    """

    def lines(_: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(innermost(in_the_step(frames)))

    network.eval()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    silence = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    noting = mock.patch.object(TracerBase, "_filter_traceback_frames", lines, create=True)
    try:
        with untouched(network.module), quiet(), quick(), silence[0], silence[1], torch.no_grad(), noting:
            yield
    finally:
        logging.disable(before)


def _exported(network: StepNetwork, example: Example) -> Any:
    """Run `torch.export` on the step; where it stops, once more with the values of constants."""

    def export(reads: contextlib.AbstractContextManager[Any]) -> Any:
        shapes = (tuple(network.open_axes),) if any(network.open_axes) else None
        given = tuple(tensor.clone() for tensor in example.given)
        with untouched(network.module), reads:
            return torch.export.export(network, given, dynamic_shapes=shapes, strict=False)

    try:
        return export(contextlib.nullcontext())
    except Exception as error:
        with untouched(network.module):
            reads = constant_reads(network, example.given)
        if any(value is not None for _, value in reads.found):
            return export(Reads(reads.found))
        if reads.gradients:
            raise GradientsError(reads.gradients) from error
        raise


def _to_onnx(exported: Any, network: StepNetwork, route: str) -> ir.Model:
    plain = stable(plain_indices(exported.run_decompositions() if route == "decomposed" else exported))
    program = torch.onnx.export(plain, dynamo=True, opset_version=OPSET, verbose=False, external_data=False)
    if program is None:
        raise UnsettledError("torch.onnx.export returned nothing")
    model: ir.Model = program.model
    for value, spec in zip(model.graph.inputs, network.inputs, strict=True):
        value.name = spec.name
    return model
