"""Whether segments may be parted, by what comes later, too."""

from __future__ import annotations

import pytest
import torch
from txl_export.families.graph.open.chaining import divisible
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec


class Late(torch.nn.Module):
    """Sums up means of segments, and returns them from the 8th position on."""

    def forward(self, x: torch.Tensor, h: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[B, L], [B, 1] and [B, 1] → [B, L], [B, 1], [B, 1]."""
        return x + torch.where(seen < 8, 0, h), h + x.mean(1, keepdim=True), seen + x.shape[1]


def test_a_segment_that_leaves_another_state_behind_is_told_by_the_next_ones():
    states = [StateSpec("h", ("B", 1)), StateSpec("seen", ("B", 1))]
    spec = StepSpec(Late(), [InputSpec("x", ("B", "L"))], states, [OutputSpec("y", ("B", "L"))])
    assert not divisible(spec, 2, 8, 1)


class Running(torch.nn.Module):
    """Sums up."""

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[B, L] and [B, 1] → [B, L] and [B, 1]."""
        y = h + x.cumsum(1)
        return y, y[:, -1:]


@pytest.mark.parametrize(("length", "shorter"), [(8, 1), (8, 4), (6, 4)])
def test_segments_that_end_together_are_compared_where_one_is_no_multiple_of_the_other(length, shorter):
    spec = StepSpec(Running(), [InputSpec("x", ("B", "L"))], [StateSpec("h", ("B", 1))], [OutputSpec("y", ("B", "L"))])
    assert divisible(spec, 2, length, shorter)
