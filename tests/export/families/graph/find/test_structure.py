"""Facts in the nodes of a foreign graph: what begins anew in every call, which context that needs, which tables."""

from __future__ import annotations

from pathlib import Path

import foreign_graphs as graphs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from foreign_graphs import B, Case, D, exported, paired, step
from torch import nn
from torch.nn import functional
from txl_export.families.graph.find.structure import Structure, read_structure
from txl_export.families.graph.take.reading import Port


def structure_of(case: Case, folder: Path) -> Structure:
    return paired(exported(case)[0], folder)[1]


def net(function, x, **layers) -> Case:
    return Case(step(function, **layers), {"x": x}, ("y",), {})


def test_windows_over_an_input_that_overlap_need_context_in_front(tmp_path):
    """A spectrum of 256 samples every 128, with 64 more at the end as a mirror: 64 samples of the call before."""

    def run(self, x):
        return self.c(functional.pad(x, (0, 64), mode="reflect"))

    layer = lambda: nn.Conv1d(1, 4, 256, stride=128)  # noqa: E731
    found = structure_of(net(run, graphs.normal(1, 1, 576), c=layer), tmp_path)
    assert [(each.input, each.before, each.step) for each in found.contexts] == [("x", 64, 128)]


def test_windows_with_a_cache_in_front_need_none(tmp_path):
    assert structure_of(graphs.STATEFUL["convolutions"], tmp_path).contexts == []


def test_indices_are_drawn_from_the_smallest_table_that_they_select_from(tmp_path):
    def run(self, ids, other):
        return self.a(ids) + self.b(ids.flip(0)) + other.to(torch.float32)[..., None]

    given = {"ids": torch.zeros(2, 3, dtype=torch.int64), "other": torch.zeros(2, 3, dtype=torch.int64)}
    case = Case(step(run, a=lambda: nn.Embedding(7, 4), b=lambda: nn.Embedding(5, 4)), given, ("y",), {})
    assert structure_of(case, tmp_path).rows == {"ids": 5}


def test_random_operators_are_named_with_the_outputs_that_they_reach(tmp_path):
    make = step(lambda self, x: (self.l(x), self.l(x) + torch.randn(B, D)), l=graphs.linear())
    case = Case(make, {"x": graphs.normal(B, D)}, ("mean", "drawn"), {})
    assert structure_of(case, tmp_path).random == (["RandomNormal"], ["drawn"])


@pytest.mark.parametrize(
    ("node", "found"),
    [
        ("y = Concat <axis = 1> (x, h)", {"y": ("Concat", (1, 8))}),
        ("y = Add (x, h)", {"y": ("Add", (1, 8))}),
        ("a = MatMul (h, w) y = Add (x, a)", {"a": ("MatMul", (1, 8))}),
        ("a = MatMul (x, w) y = Add (a, b)", {}),
    ],
)
def test_zeros_that_stand_where_a_state_would_be_fed_are_named(node, found):
    """A matrix of zeros and a bias are none."""
    model = ir.from_onnx_text(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        graph (float[1, 8] x) => (float[n, m] y) {{ {node} }}""")
    for name, shape in {"h": (1, 8), "w": (8, 8), "b": (8,)}.items():
        for value in (value for each in model.graph for value in each.inputs if value and value.name == name):
            value.const_value = ir.tensor(np.zeros(shape, np.float32))
    assert read_structure(model.graph, [Port("x", "float32", (1, 8))]).frozen == found
