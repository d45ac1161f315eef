"""Losses of the same tokens with every length of context: which runs that takes, and running them.

A run starts at a multiple of Δ with an empty memory and gives the loss of every token from there on: the token c
places behind its start is predicted from c tokens. A token that lies o tokens behind a multiple of Δ (1 ≤ o ≤ Δ) thus
gets losses with o, Δ + o, 2Δ + o … tokens of context from the runs that start there, Δ earlier, 2Δ earlier ….

Segments end at multiples of L of the text in every run, wherever the run starts: a token stands at the same place of
the same segment in each, and its losses differ by the context alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from txl_runtime.listener import Listener
from txl_runtime.types import Ids

from txl_report.measuring.averages import Values

if TYPE_CHECKING:
    from txl_runtime.model import Model
    from txl_runtime.streaming.stream import Stream


@dataclass(frozen=True)
class Plan:
    """Which runs there are.

    Attributes:
        step: Δ.
        lengths: K: contexts c = 0, Δ … (K - 1) Δ, of c + 1 … c + Δ tokens.
        blocks: how many times Δ tokens are compared.
    """

    step: int
    lengths: int
    blocks: int

    @property
    def targets(self) -> int:
        """Tokens of the text behind the first one; those before the compared ones are context alone."""
        return (self.lengths - 1 + self.blocks) * self.step


def contexts_of(model: Model, ids: Ids, plan: Plan, listener: Listener) -> Values:
    """Run a plan.

    Args:
        model: a model whose sequences do not influence one another.
        ids: int32 [targets + 1 or more], the text.
        plan: which runs.
        listener: hears of the runs.

    Returns:
        Losses float64 [lengths, compared tokens], of the tokens that have one at every length.
    """
    losses = np.zeros((plan.lengths, plan.targets))
    starts = plan.targets // plan.step
    stream = model.stream(min(model.batch_size, starts))
    listener.stage("measuring the context", starts)
    for group in _groups(plan, model.segment_lengths[0], stream.batch_size):
        found = _run(stream, ids[: plan.targets + 1], group, plan, model.segment_lengths[0])
        for start, nll in zip(group, found, strict=True):
            count = min(nll.size, plan.targets - start)
            for context, first in enumerate(range(0, count, plan.step)):
                place = start + first
                losses[context, place : place + plan.step] = nll[first : first + plan.step]
        listener.advance(len(group))
    return losses[:, (plan.lengths - 1) * plan.step :]


def _groups(plan: Plan, length: int, rows: int) -> Iterator[list[int]]:
    """Starts of runs that go side by side: those that stand at the same place of a segment, from the text's start."""
    starts = list(range(0, plan.targets, plan.step))
    window = rows * math.lcm(plan.step, length) // plan.step
    for first in range(0, len(starts), window):
        alike = sorted(starts[first : first + window], key=lambda start: start % length)
        for _, group in groupby(alike, lambda start: start % length):
            members = list(group)
            yield from (members[index : index + rows] for index in range(0, len(members), rows))


def _run(stream: Stream, ids: Ids, starts: list[int], plan: Plan, length: int) -> Values:
    """Losses [starts, positions] of runs side by side, zeros behind the text's end."""
    positions = min(plan.lengths * plan.step, len(ids) - 1 - min(starts))
    tokens = np.zeros((stream.batch_size, positions + 1), np.int32)
    for row in range(stream.batch_size):
        start = starts[row] if row < len(starts) else starts[0]  # rows that are left over do as the first one does
        found = ids[start : start + positions + 1]
        tokens[row, : len(found)] = found
    stream.reset()
    losses = np.empty((len(starts), positions))
    first, last = 0, min(length - starts[0] % length, positions)
    while first < positions:
        losses[:, first:last] = stream.score(tokens[:, first : last + 1])[: len(starts)]
        first, last = last, min(last + length, positions)
    return losses
