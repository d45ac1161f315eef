"""Captures the user's step as a graph, with `torch.export` and its conversion to ONNX.

If this fails, torch first decomposes operators into simpler operators (route "decomposed"): ONNX lacks some of the
original operators. A graph is accepted only after it has run on real values and was compared with the module
(`rehearsal`).
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
from txl_export.graphs.tracing import exact, quick, quiet
from txl_export.graphs.unsettled import STACK_TRACE, UnsettledError

ROUTES = ("export", "decomposed")


@dataclass(frozen=True)
class Captured:
    """A program's graph in float32, which contains its weights.

    Attributes:
        name: the program's name.
        network: the network that was captured.
        examples: the arguments and results on which the graph was compared.
        model: the graph.
        route: "export" or "decomposed".
        again: captures a network with a different number of sequences by the same route, without comparing the graph.
            Errors of torch and of the user's code pass through.
    """

    name: str
    network: StepNetwork
    examples: Sequence[Example]
    model: ir.Model
    route: str
    again: Callable[[StepNetwork, Example], ir.Model]


Capture = Callable[[StepNetwork, str, Sequence[Example]], Captured]
"""A function that captures the graph of a network, as `capture` does."""


def capture(network: StepNetwork, name: str, examples: Sequence[Example]) -> Captured:
    """Capture the graph of a network and compare it with the module.

    Args:
        examples: the first example is used to capture, all examples are used to compare.

    Raises:
        OwnCodeError: the module tried to end the program, e.g. by `sys.exit`.
        CaptureError: no graph computes what the module computes; the message names the cause and the user's line.
    """
    exported, message, final = None, "", False
    for route in ROUTES:
        origins = list[tuple[ir.Node, str]]()
        try:
            with _capturing(network):
                exported = exported or _exported(network, examples[0])
                model = _to_onnx(exported, network, route)
                # settle removes these stack traces
                origins += [(node, node.metadata_props.get(STACK_TRACE, "")) for node in model.graph]
                settle(model, name, network.inputs, network.outputs)
                rehearse(model, network, examples)
        except Exception as error:  # torch raises many kinds of errors, and the user's code may raise any
            reason, final = reason_of(error, network.module, origins)
            message = message or reason
            if exported is None or final or (isinstance(error, RehearsalError) and error.elsewhere):
                break
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # e.g. SystemExit by sys.exit
            raise failure(error, "the module failed while it was captured") from error
        else:
            return Captured(name, network, examples, model, route, partial(_again, name, route))
    raise CaptureError(
        f"{name} cannot be captured as a graph: {message}; expected a step whose operators do not depend on values and "
        "that ONNX has; see docs/own-models-reference.md",
        final,
    )


def _again(name: str, route: str, network: StepNetwork, example: Example) -> ir.Model:
    """Capture a network by a route that has worked; see `Captured.again`."""
    with _capturing(network):
        model = _to_onnx(_exported(network, example), network, route)
        settle(model, name, network.inputs, network.outputs)
    return model


@contextlib.contextmanager
def _capturing(network: StepNetwork) -> Iterator[None]:
    """Restore the module when the block ends, and silence torch's warnings, logs and output.

    For each operator torch records only source lines inside functions called `forward`. An operator in a helper or in
    `step=` would have none, so here torch records the innermost of the user's lines.
    """

    def lines(_: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(innermost(in_the_step(frames)))

    network.eval()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    silence = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    noting = mock.patch.object(TracerBase, "_filter_traceback_frames", lines, create=True)
    try:
        with untouched(network.module), quiet(), quick(), exact(), silence[0], silence[1], torch.no_grad(), noting:
            yield
    finally:
        logging.disable(before)


def _exported(network: StepNetwork, example: Example) -> Any:
    """Run `torch.export` on the step; if it fails, run it again with the constants' values that Python reads."""

    def export(reads: contextlib.AbstractContextManager[Any]) -> Any:
        shapes = (tuple(network.open_axes),) if any(network.open_axes) else None
        arguments = tuple(tensor.clone() for tensor in example.given)
        with untouched(network.module), reads:
            return torch.export.export(network, arguments, dynamic_shapes=shapes, strict=False)

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
