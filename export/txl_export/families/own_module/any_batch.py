"""Opens the batch axis of captured graphs, so that they take any number of sequences up to B, if the module allows it.

A step is captured a second time with B + 1 sequences; the differences show which sizes follow from B
(`graphs.opening`). The opened graph runs with few, with many and with idle sequences, and is compared with the module,
which ran with B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir
from txl_runtime.errors import one_line

from txl_export.families.own_module.capture import Captured
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.rehearsal import (
    Example,
    RehearsalError,
    examples_for,
    first_sequences,
    rehearse,
)
from txl_export.families.own_module.sizes import fresh_states
from txl_export.families.own_module.stages import Stage, Transition, shapes_of
from txl_export.graphs.opening import FixedBatchError, open_batch

EVERY = 8
"""Every number of sequences from 1 to 8 is tried; above 8 only powers of two, B - 1 and B, to save time."""


def may_be_open(plan: Plan) -> bool:
    """Return whether graphs may leave B open: sequences are independent, and B is at least two."""
    return plan.batch_size > 1 and plan.streams == "independent"


def leave_open(plan: Plan, found: Sequence[Captured]) -> str:
    """Open the batch axis in the graphs of all programs, or in none; return the reason for none, else ""."""
    others = []
    for program in found:
        try:
            others.append(_tried(plan, program))
        except FixedBatchError as error:
            return f"the graph of {program.name} works for exactly {plan.batch_size} sequences: {error}"
    for program, other in zip(found, others, strict=True):
        open_batch(program.model, other, plan.batch_size)
    return ""


def _tried(plan: Plan, captured: Captured) -> ir.Model:
    """Open the batch axis in a copy of the program's graph and compare it with the module.

    Returns:
        The graph of B + 1 sequences, with which `open_batch` opens the program's own graph.

    Raises:
        FixedBatchError: the graph works for one number of sequences only, or computes something else with fewer
            sequences.
    """
    model, network, other = captured.model.clone(), captured.network, _of_one_more(plan, captured)
    open_batch(model, other, plan.batch_size)
    few = [first_sequences(one, network, count) for count in _counts(plan.batch_size) for one in captured.examples]
    try:
        rehearse(model, network, few)
    except RehearsalError as error:
        raise FixedBatchError(str(error) if error.fed_size else f"run with fewer, {error}") from error
    return other


def _of_one_more(plan: Plan, captured: Captured) -> ir.Model:
    """Return the graph of the program with B + 1 sequences; raise FixedBatchError if it cannot be captured."""
    count = plan.batch_size + 1
    try:
        network, examples = of_sequences(plan, captured.network.length, count)
        return captured.again(network, examples[0])
    except Exception as error:  # the user's code may allow only one B, and torch raises many kinds of errors
        raise FixedBatchError(f"it cannot be captured with B + 1 = {count}: {one_line(error)}") from error


def of_sequences(plan: Plan, length: int, count: int, tries: int = 1) -> tuple[StepNetwork, list[Example]]:
    """Return the network of a plan with `count` sequences in place of B, and `tries` examples of it.

    Raises:
        TxlError: the module does not take this number of sequences.
    """
    more = replace(plan, batch_size=count)
    stage = Stage(0, shapes_of(fresh_states(more.spec, count)))
    transition = Transition(stage, length, stage)
    network = StepNetwork(replace(more, transitions=(transition,)), transition)
    return network, examples_for(more, transition, network, tries)


def _counts(batch_size: int) -> list[int]:
    """Return the numbers of sequences that a graph is tried with; see `EVERY`."""
    powers = [2**power for power in range(batch_size.bit_length())]
    return sorted({*range(1, min(batch_size, EVERY) + 1), *powers, batch_size - 1, batch_size})
