"""Graphs that take any number of sequences up to B, made of those that were captured with B of them, where they can be.

Each is captured again with one sequence more, which shows what in it follows from B (`graphs.opening`). What comes of
that is run with few sequences, with many, and with some of them idle, and compared with the module, which ran with B.
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
"""Up to so many sequences every number is tried, beyond them powers of two, B and the number before it."""


def may_be_open(plan: Plan) -> bool:
    """Whether graphs may leave B open: not where the sequences run all or none, or where there is one."""
    return plan.batch_size > 1 and plan.streams == "independent"


def leave_open(plan: Plan, found: Sequence[Captured]) -> str:
    """Leave B open in the graphs of all programs of a step; or in none, and say why one of them needs its B."""
    others = []
    for program in found:
        try:
            others.append(_tried(plan, program))
        except FixedBatchError as error:
            return f"the graph of {program.name} works for exactly {plan.batch_size} sequences: {error}"
    for program, other in zip(found, others, strict=True):
        open_batch(program.model, other, plan.batch_size)
    return ""


def _tried(plan: Plan, found: Captured) -> ir.Model:
    """The graph of B + 1 sequences, with which a copy of the program's graph was opened and tried.

    Raises:
        FixedBatchError: the graph is of one number of sequences, or with fewer it computes something else.
    """
    model, network, other = found.model.clone(), found.network, _of_one_more(plan, found)
    open_batch(model, other, plan.batch_size)
    few = [first_sequences(one, network, count) for count in _counts(plan.batch_size) for one in found.examples]
    try:
        rehearse(model, network, few)
    except RehearsalError as error:
        raise FixedBatchError(str(error) if error.fed_size else f"run with fewer, {error}") from error
    return other


def _of_one_more(plan: Plan, found: Captured) -> ir.Model:
    """The graph of B + 1 sequences."""
    count = plan.batch_size + 1
    try:
        network, examples = of_sequences(plan, found.network.length, count)
        return found.again(network, examples[0])
    except Exception as error:  # the user's code may be of one B, and torch raises many kinds
        raise FixedBatchError(f"it cannot be captured with B + 1 = {count}: {one_line(error)}") from error


def of_sequences(plan: Plan, length: int, count: int, tries: int = 1) -> tuple[StepNetwork, list[Example]]:
    """The network of another number of sequences than a plan's, and examples of it.

    Raises:
        TxlError: the module does not take them.
    """
    more = replace(plan, batch_size=count)
    stage = Stage(0, shapes_of(fresh_states(more.spec, count)))
    transition = Transition(stage, length, stage)
    network = StepNetwork(replace(more, transitions=(transition,)), transition)
    return network, examples_for(more, transition, network, tries)


def _counts(batch_size: int) -> list[int]:
    """The numbers of sequences that a graph is tried with."""
    powers = [2**power for power in range(batch_size.bit_length())]
    return sorted({*range(1, min(batch_size, EVERY) + 1), *powers, batch_size - 1, batch_size})
