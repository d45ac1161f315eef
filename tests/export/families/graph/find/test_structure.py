"""What the nodes of a foreign graph say: what begins anew in every call, which context they need, which tables."""

from __future__ import annotations

from pathlib import Path

import foreign_graphs as graphs
import pytest
import torch
from foreign_graphs import B, Case, D, H, T, exported, paired, step
from torch import nn
from torch.nn import functional
from txl_export.families.graph.find.structure import Recurrence, Structure


def structure_of(case: Case, folder: Path) -> Structure:
    return paired(exported(case)[0], folder)[1]


def net(function, x, **layers) -> Case:
    return Case(step(function, **layers), {"x": x}, ("y",), {})


@pytest.mark.parametrize(
    ("layer", "op", "direction"),
    [
        (lambda: nn.GRU(D, H), "GRU", "forward"),
        (lambda: nn.LSTM(D, H), "LSTM", "forward"),
        (lambda: nn.RNN(D, H), "RNN", "forward"),
        (lambda: nn.LSTM(D, H, bidirectional=True), "LSTM", "bidirectional"),
    ],
)
def test_a_recurrence_that_begins_anew_is_named_with_its_size(layer, op, direction, tmp_path):
    found = structure_of(net(lambda self, x: self.l(x)[0], graphs.normal(T, B, D), l=layer), tmp_path)
    assert [(each.op, each.hidden, each.direction, each.starts) for each in found.recurrences] == [
        (op, H, direction, "anew")
    ]
    assert op in found.recurrences[0].node


def test_a_recurrence_that_is_given_its_start_forgets_nothing(tmp_path):
    found = structure_of(graphs.STATEFUL["lstm"], tmp_path)
    assert [each.starts for each in found.recurrences] == ["given"]


def test_zeros_in_the_size_of_an_input_are_a_start_anew(tmp_path):
    """What a size alone reaches, no number of an input does."""

    def run(self, x):
        return self.l(x, torch.zeros(1, x.shape[1], H))[0]

    case = net(run, graphs.normal(T, B, D), l=lambda: nn.GRU(D, H))
    found = structure_of(Case(case.make, case.given, case.returned, {}, {"x": {1: "batch"}}), tmp_path)
    assert [each.starts for each in found.recurrences] == ["anew"]


def test_a_scan_is_named(tmp_path):
    _, found = paired(graphs.scanned(), tmp_path)
    assert found.recurrences == [Recurrence("scan", "Scan", 0, "forward", "given", "")]


def _padded(self, x):
    return self.c(functional.pad(x, (8, 0)))


def _cut(self, x):
    return self.d(x)[..., :-8]


CAUSAL = lambda **more: lambda: nn.Conv1d(D, D, 3, dilation=4, **more)  # noqa: E731


@pytest.mark.parametrize("function", [_padded, _cut])
def test_a_convolution_with_zeros_on_the_left_alone_forgets(function, tmp_path):
    found = structure_of(net(function, graphs.normal(1, D, T), c=CAUSAL(), d=CAUSAL(padding=8)), tmp_path)
    assert [(each.before, each.step, each.padded) for each in found.windows] == [(8, 1, True)]


def test_a_convolution_that_looks_both_ways_is_none_of_them(tmp_path):
    layer = lambda: nn.Conv1d(D, D, 3, padding=1)  # noqa: E731
    assert structure_of(net(lambda self, x: self.c(x), graphs.normal(1, D, T), c=layer), tmp_path).windows == []


def test_windows_over_an_input_that_overlap_need_context_in_front(tmp_path):
    """A spectrum of 256 samples every 128, with 64 more at the end as a mirror: 64 samples of the call before."""

    def run(self, x):
        return self.c(functional.pad(x, (0, 64), mode="reflect"))

    layer = lambda: nn.Conv1d(1, 4, 256, stride=128)  # noqa: E731
    found = structure_of(net(run, graphs.normal(1, 1, 576), c=layer), tmp_path)
    assert [(each.input, each.before, each.step, each.padded) for each in found.windows] == [("x", 64, 128, False)]


def test_windows_with_a_cache_in_front_need_none(tmp_path):
    assert structure_of(graphs.STATEFUL["convolutions"], tmp_path).windows == []


def test_indices_are_drawn_from_the_smallest_table_that_they_select_from(tmp_path):
    def run(self, ids, other):
        return self.a(ids) + self.b(ids.flip(0)) + other.to(torch.float32)[..., None]

    given = {"ids": torch.zeros(2, 3, dtype=torch.int64), "other": torch.zeros(2, 3, dtype=torch.int64)}
    case = Case(step(run, a=lambda: nn.Embedding(7, 4), b=lambda: nn.Embedding(5, 4)), given, ("y",), {})
    assert structure_of(case, tmp_path).rows == {"ids": 5}


def test_what_decides_between_branches_is_named_with_what_it_is_compared_with(tmp_path):
    """The state goes through both branches, one of which has a recurrence that begins anew."""
    found, structure = paired(graphs.branched(), tmp_path)
    assert (structure.branching, structure.compared) == ({"rate"}, {"rate": [16000]})
    assert [(state.input, state.output, state.proof) for state in found.states] == [("h", "hn", "recurrent")]
    assert sorted((each.branch, each.starts) for each in structure.recurrences) == [("if", "anew"), ("if", "given")]
