"""Reads and writes at int32 indices and at truth values are captured, and compute what PyTorch computes."""

from __future__ import annotations

import torch
import txl_export
from torch import nn
from txl_export.families.own_module.capture import capture
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.rehearsal import examples_for
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.listener import Silent

ROWS = torch.arange(3)


def changed(cache, place, value):
    cache = cache.clone()
    cache[place] = value
    return cache


FORMS = {
    "written": lambda x, cache, n: changed(cache, (ROWS, n), x),
    "both_int32": lambda x, cache, n: changed(cache, (ROWS.int(), n), x),
    "one_index": lambda x, cache, n: changed(cache, (slice(None), n[:1]), x[:, None]),
    "around_a_slice": lambda x, cache, n: changed(cache, (ROWS, slice(1, 3), n % 4), x[:, :2]),
    "accumulated": lambda x, cache, n: cache.index_put((ROWS, n), x, accumulate=True),
    "read": lambda x, cache, n: cache[ROWS, n],
    "read_by_one": lambda x, cache, n: cache[:, n],
    "chosen": lambda x, cache, n: changed(cache, cache > 0.1, float("-inf")),
    "rows_chosen": lambda x, cache, n: changed(cache, cache.sum(-1) > 0, x[0]),
    "chosen_behind": lambda x, cache, n: changed(cache, (slice(None), cache[0].sum(-1) > 0), x[:, None]),
    "whole_numbers": lambda x, cache, n: changed(n, n >= 2, 1),
    "chosen_and_added": lambda x, cache, n: cache.index_put((cache > 0.1,), x[0, 0], accumulate=True),
}


class Indexes(nn.Module):
    """All of them."""

    def forward(self, x, cache, n):
        found = [form(x, cache, n % 6) for form in FORMS.values()]
        return *found, torch.cat([cache[:, 1:], x[:, None]], 1), n + 1


def test_every_form_is_captured_by_the_first_route_and_computes_the_same():
    states = [StateSpec("cache", ("B", 6, 4)), StateSpec("n", ("B",), dtype="int32")]
    spec = StepSpec(Indexes(), [InputSpec("x", ("B", 4))], states, list(FORMS))
    plan = make_plan(spec, 3, (), Silent())
    network = StepNetwork(plan, plan.transitions[0])
    captured = capture(network, "step-1", examples_for(plan, plan.transitions[0], network))
    assert captured.route == "export"
    assert not {"NonZero", "ScatterElements"} & {node.op_type for node in captured.model.graph}


class Ring(nn.Module):
    """A cache that a counter writes to, and an attention of four axes that masks what is 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(8, 8)

    def forward(self, x, cache, n):
        cache = cache.clone()
        cache[torch.arange(x.shape[0]), n % 6] = x
        query, keys = (part.view(x.shape[0], -1, 2, 4).transpose(1, 2) for part in (self.query(x), cache))
        score = query @ keys.transpose(2, 3)
        score[score == 0] = float("-inf")
        return (score.softmax(-1) @ keys).flatten(1), cache, n + 1


def test_a_ring_that_a_counter_writes_to_is_exported_and_its_sequences_are_independent(tmp_path):
    states = [StateSpec("cache", ("B", 6, 8)), StateSpec("n", ("B",), dtype="int32")]
    spec = StepSpec(Ring(), [InputSpec("x", ("B", 8))], states, ["y"])
    result = txl_export.export(spec, tmp_path / "a.txl", batch_size=3)
    assert (result.parity.passed, result.manifest.streams) == (True, "independent")
