"""A module's change of its weights at its first call is done once; one that depends on its inputs stays refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import txl_export
from torch import nn
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent
from verified_steps import Heard


class Scaled(nn.Module):
    """Halves its weights when it is first called in evaluation mode, as RWKV of transformers does."""

    def __init__(self, scale):
        super().__init__()
        self.layer, self.scaled, self.scale = nn.Linear(4, 4), False, scale

    def forward(self, x, h):
        if not self.scaled:
            with torch.no_grad():
                self.layer.weight.mul_(self.scale(x))
            self.scaled = True
        h = torch.tanh(self.layer(x) + h)
        return h * 2, h


def spec_of(module):
    return StepSpec(module, [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"])


def test_weights_are_scaled_once_whatever_is_tried(tmp_path: Path) -> None:
    module = Scaled(lambda x: 0.5)
    before = module.layer.weight.detach().clone()
    made = txl_export.export(spec_of(module), tmp_path / "scaled.txl", batch_size=2)
    assert torch.equal(module.layer.weight, before * 0.5)
    assert module.scaled
    other = Scaled(lambda x: 0.5)
    with torch.no_grad():
        other.layer.weight.copy_(before)
        other.layer.bias.copy_(module.layer.bias)
    heard = Heard()
    report = txl_export.verify(made.path, module=spec_of(other), segments=8, listener=heard)
    assert report.passed
    assert not any("weights" in said for said in heard.warnings)


def test_what_the_first_call_s_inputs_decide_is_refused() -> None:
    module = Scaled(lambda x: x.abs().max())
    with pytest.raises(UsageError, match=r"a call changes layer\.weight"):
        make_plan(spec_of(module), 2, (), Silent())


def test_what_every_call_changes_is_refused() -> None:
    class Counted(Scaled):
        def forward(self, x, h):
            self.scaled = False
            return super().forward(x, h)

    with pytest.raises(UsageError, match=r"a call changes layer\.weight"):
        make_plan(spec_of(Counted(lambda x: 0.5)), 2, (), Silent())
