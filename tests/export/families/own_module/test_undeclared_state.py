"""What a call leaves in a module and no later call reads is no state; what one may read is refused as before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from torch import nn
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.errors import UsageError
from verified_steps import Heard


def leaving(read):
    """Attention that keeps its map to be drawn; `read` is what it does with the last call's."""

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.map = nn.Linear(4, 4), None
            self.inner, self.past = nn.Module(), []
            self.inner.last, self.plain = None, torch.zeros(2, 4)
            self.register_buffer("copied", torch.zeros(2, 4))

        def forward(self, x, h):
            added = read(self.map)
            weights = (self.query(x) * h).softmax(-1)
            self.map, self.inner.last, self.gate = weights.detach(), x * 2, x.sigmoid()
            self.copied.copy_(x[:2])
            self.plain.copy_(x[:2])
            self.past.append(weights)
            return weights * self.gate + added, h + weights

    return StepSpec(Drawn(), [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"])


def test_what_no_later_call_reads_is_left_out_and_told(tmp_path: Path) -> None:
    spec, heard = leaving(lambda last: 0.0), Heard()
    plan = make_plan(spec, 2, (), heard)
    assert plan.streams == "independent"
    assert heard.warnings == [
        "a call leaves copied and 5 more in the module, which no later call reads; the bundle has none of it"
    ]
    made = txl_export.export(spec, tmp_path / "drawn.txl", batch_size=2)
    assert (spec.module.map, spec.module.inner.last, spec.module.past) == (None, None, [])
    assert not hasattr(spec.module, "gate")
    assert not spec.module.copied.any()
    assert not spec.module.plain.any()
    stream = txl_runtime.load(made.path, "cpu").stream()
    x, h = torch.randn(2, 4), torch.zeros(2, 4)
    for _ in range(3):
        with torch.no_grad():
            y, h = spec.module(x, h)
        assert np.allclose(stream.run({"x": x.numpy()})["y"], y.numpy(), atol=1e-6)


READS = {
    "in the graph": lambda last: 0.0 if last is None else last,
    "its presence": lambda last: 0.0 if last is None else 1.0,
    "where a value says so": lambda last: 0.0 if last is None else torch.where(last > 0.3, last, 0.0),
    "its size alone": lambda last: 0.0 if last is None else 0.1 * last.shape[0],
    "outside of torch": lambda last: 0.0 if last is None else float(last.numpy().max() > 0.3),
    "by another view": lambda last: 0.0 if last is None else torch.where(last[0] > 0.3, last[0], 0.0),
}


@pytest.mark.parametrize("read", READS)
def test_what_a_later_call_reads_is_refused_and_what_lies_beside_it_is_not_named(read: str) -> None:
    with pytest.raises(UsageError, match="a call changes map of the module, which no state declares"):
        make_plan(leaving(READS[read]), 2, (), Heard())
