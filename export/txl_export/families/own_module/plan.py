"""What a bundle of a user's module will hold: found by running the module before any graph is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from txl_runtime.listener import Listener

from txl_export.families.own_module.spec import OutputSpec, StepSpec
from txl_export.families.own_module.stages import Transition


@dataclass(frozen=True)
class Plan:
    """A step, and what running it has shown.

    Attributes:
        spec: the user's.
        batch_size: B.
        segment_lengths: every L, largest first; (1,) where no input has an "L".
        outputs: with shapes ("B", "L" and numbers) and roles filled in.
        output_dtypes: of a bundle's outputs by name, before log-probabilities are made of logits.
        transitions: a program each.
        streams: whether sequences are independent of one another, or all run or none.
        reason: why they are not; "" for independent ones.
        warnings: what was found besides; the listener has heard it.
    """

    spec: StepSpec
    batch_size: int
    segment_lengths: tuple[int, ...]
    outputs: tuple[OutputSpec, ...]
    output_dtypes: dict[str, str]
    transitions: tuple[Transition, ...]
    streams: Literal["independent", "lockstep"]
    reason: str
    warnings: tuple[str, ...]


def make_plan(spec: StepSpec, batch_size: int, segment_lengths: Sequence[int], heard: Listener) -> Plan:
    """Run the module in every way that a bundle will, and refuse what no bundle can hold.

    Args:
        spec: the user's.
        batch_size: B.
        segment_lengths: L's asked for; none for 64 and 1, as far as the module takes them.
        heard: hears of what is being tried, and of warnings.

    Raises:
        UsageError: the specification and the module do not agree, or the module does what a step must not.
        OwnCodeError: it raised an exception.
    """
    raise NotImplementedError
