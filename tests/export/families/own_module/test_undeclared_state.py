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
            self.inner = nn.Module()
            self.inner.last = None

        def forward(self, x, h):
            added = read(self.map)
            weights = (self.query(x) * h).softmax(-1)
            self.map, self.inner.last = weights.detach(), x * 2
            return weights + added, h + weights

    return StepSpec(Drawn(), [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"])


def test_what_no_later_call_reads_is_left_out_and_told(tmp_path: Path) -> None:
    spec, heard = leaving(lambda last: 0.0), Heard()
    plan = make_plan(spec, 2, (), heard)
    assert plan.streams == "independent"
    assert heard.warnings == [
        "a call leaves inner.last and 1 more in the module, which no later call reads; the bundle has none of it"
    ]
    made = txl_export.export(spec, tmp_path / "drawn.txl", batch_size=2)
    assert (spec.module.map, spec.module.inner.last) == (None, None)
    stream = txl_runtime.load(made.path, "cpu").stream()
    x, h = torch.randn(2, 4), torch.zeros(2, 4)
    for _ in range(3):
        with torch.no_grad():
            y, h = spec.module(x, h)
        assert np.allclose(stream.run({"x": x.numpy()})["y"], y.numpy(), atol=1e-6)


READS = {
    "in the graph": lambda last: 0.0 if last is None else last,
    "its presence": lambda last: 0.0 if last is None else 1.0,
    "where a value says so": lambda last: 0.0 if last is None else torch.where(last > 2, last, 0.0),
    "its size alone": lambda last: 0.0 if last is None else 0.0 * last.shape[0],
    "outside of torch": lambda last: 0.0 if last is None else 0.0 * float(last.numpy().max() > 2),
    "by another view": lambda last: 0.0 if last is None else torch.where(last[0] > 2, last[0], 0.0),
}


@pytest.mark.parametrize("read", READS)
def test_what_a_later_call_may_read_is_refused(read: str) -> None:
    with pytest.raises(UsageError, match=r"a call changes (inner\.last, )?map of the module, which no state declares"):
        make_plan(leaving(READS[read]), 2, (), Heard())
