"""The graph computes without overflow what PyTorch computes without: near zero, far out, and at infinities."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from txl_export.families.own_module import capture as capturing
from txl_export.graphs.emulation import in_float32
from txl_export.graphs.half import to_half, weights_of_products
from txl_export.graphs.settling import settle
from txl_export.graphs.stable import FORMS, stable
from txl_export.graphs.tracing import quick, quiet
from txl_runtime.bundle.tables import TensorSpec

INFINITE = float("inf")
SIZES = (0.0, 1e-30, 1e-8, 1e-4, 0.3, 0.999, 1.0, 1.5, 5.0, 20.0, 30.0, 60.0, 89.0, 104.0, 1e3, 1e4)
FINITE = torch.tensor([-size for size in reversed(SIZES)] + list(SIZES))
NUMBERS = torch.cat([torch.tensor([-INFINITE]), FINITE, torch.tensor([INFINITE])])
PAIRS = torch.cartesian_prod(NUMBERS, NUMBERS).T.contiguous()
ROWS = torch.stack(
    [
        torch.full((9,), 1e4),
        torch.full((9,), -1e4),
        torch.linspace(-1e4, 1e4, 9),
        torch.linspace(1e4, -1e4, 9),
        torch.full((9,), 1e-8),
        torch.tensor([0, 200, -200, 100, -90, 1e4, 0, 1e-8, -1e-8]),
        torch.tensor([1.0, 2.0, 3.0, -1.0, 0.5, 0.1, 0.0, 0.0, -2.0]),
    ]
)
ABSENT = torch.tensor([[-INFINITE] * 9, [-INFINITE] * 7 + [0.0, 5.0]])

MENDED = {
    "logsigmoid": lambda x, y, rows: F.logsigmoid(x),
    "log1p": lambda x, y, rows: torch.log1p(x),
    "expm1": lambda x, y, rows: torch.expm1(x),
    "log of expm1": lambda x, y, rows: torch.log(-torch.expm1(-x.abs())),
    "logaddexp": lambda x, y, rows: torch.logaddexp(x, y),
    "logaddexp2": lambda x, y, rows: torch.logaddexp2(x, y),
    "atan2": lambda x, y, rows: torch.atan2(x, y),
    "logcumsumexp": lambda x, y, rows: torch.logcumsumexp(torch.cat([rows, ABSENT.to(rows)]), 1),
    "logcumsumexp over rows": lambda x, y, rows: torch.logcumsumexp(rows, 0),
}
NEIGHBOURS = {
    "softplus": lambda x, rows: F.softplus(x),
    "softplus with a threshold": lambda x, rows: F.softplus(x, beta=2.0, threshold=5.0),
    "mish": lambda x, rows: F.mish(x),
    "selu": lambda x, rows: F.selu(x),
    "elu": lambda x, rows: F.elu(x, 2.0),
    "celu": lambda x, rows: F.celu(x, 0.5),
    "gelu": lambda x, rows: F.gelu(x),
    "gelu by tanh": lambda x, rows: F.gelu(x, approximate="tanh"),
    "silu": lambda x, rows: F.silu(x),
    "sinc": lambda x, rows: torch.sinc(x),
    "asinh": lambda x, rows: torch.asinh(x),
    "acosh": lambda x, rows: torch.acosh(x),
    "atanh": lambda x, rows: torch.atanh(x),
    "erf": lambda x, rows: torch.erf(x),
    "logsumexp": lambda x, rows: torch.logsumexp(rows, -1),
    "log_softmax": lambda x, rows: F.log_softmax(rows, -1),
    "softmax": lambda x, rows: F.softmax(rows, -1),
    "normalize": lambda x, rows: F.normalize(rows, dim=-1),
    "cosine_similarity": lambda x, rows: F.cosine_similarity(rows, rows.flip(0), dim=-1),
    "var": lambda x, rows: rows.var(-1),
    "var of one": lambda x, rows: rows[..., :1].var(-1, correction=0),
    "std": lambda x, rows: rows.std(-1),
}


class Functions(nn.Module):
    """All of them, and log-space gates of a product with a weight."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(9, 9, bias=False)
        self.gate.weight.data = torch.eye(9) / 2

    def forward(self, x, y, finite, rows):
        gates = self.gate(rows)
        kept = torch.logaddexp(F.logsigmoid(gates), F.logsigmoid(-gates) - 100)
        found = [form(x, y, rows) for form in MENDED.values()]
        found += [form(finite, rows) for form in NEIGHBOURS.values()]
        return (*found, kept, torch.logcumsumexp(kept, 0))


NAMES = [*MENDED, *NEIGHBOURS, "gates", "gates over rows"]
GIVEN = {"x": PAIRS[0], "y": PAIRS[1], "finite": FINITE, "rows": ROWS}


def run(model):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found = session.run(None, {name: values.numpy() for name, values in GIVEN.items()})
    return dict(zip(NAMES, found, strict=True))


def wanted():
    with torch.no_grad():
        found = Functions().double()(*(values.double() for values in GIVEN.values()))
    return {name: tensor.float().numpy() for name, tensor in zip(NAMES, found, strict=True)}


def far_off(found, exact, limit):
    """Return whether values differ by more than rounding, relative to max(1, value), or have infinities elsewhere."""
    finite = np.isfinite(exact)
    with np.errstate(all="ignore"):
        apart = np.abs(found - exact)[finite] / np.maximum(1, np.abs(exact[finite]))
    return not (np.array_equal(found[~finite], exact[~finite], equal_nan=True) and apart.max(initial=0) <= limit)


@pytest.fixture(scope="module")
def exported():
    with torch.no_grad():
        return torch.export.export(Functions().eval(), tuple(GIVEN.values()), strict=False)


def test_functions_are_as_stable_as_in_pytorch(exported):
    inputs = [TensorSpec(name=name, dtype="float32", shape=tuple(values.shape)) for name, values in GIVEN.items()]
    with torch.no_grad(), quiet(), quick():
        model = capturing._to_onnx(exported, SimpleNamespace(inputs=inputs), "export")
    found, exact = run(ir.to_proto(model)), wanted()
    assert [name for name in NAMES if far_off(found[name], exact[name], 1e-5)] == []
    assert np.array_equal(np.signbit(found["atan2"]), np.signbit(exact["atan2"])), "quadrants, and the signs of zeros"
    for name in ("log1p", "expm1"):
        held = np.isfinite(exact[name]) & (exact[name] != 0)
        assert np.abs(found[name][held] / exact[name][held] - 1).max() < 1e-6, "no digit is lost near zero"
    results = [TensorSpec(name=f"y{i}", dtype="float32", shape=values.shape) for i, values in enumerate(exact.values())]
    settle(model, "step-1", inputs, results)
    for precision in ("fp16", "bf16"):
        half = model.clone()
        names = weights_of_products(half.graph, precision, {"gate.weight"})
        assert names == {"gate.weight"}, "the gates are products with a weight"
        to_half(half, precision, names)
        proto = ir.to_proto(half)
        gates = run(in_float32(proto) if precision == "bf16" else proto)
        assert [name for name in NAMES[-2:] if far_off(gates[name], exact[name], 1e-2)] == [], precision


def test_what_was_taken_apart_before_is_stable_as_well(exported):
    with torch.no_grad(), quiet(), quick():
        program = stable(exported.run_decompositions())
        found = program.module()(*GIVEN.values())
    assert not [node for node in program.graph.nodes if node.target in FORMS]
    exact = wanted()
    pairs = zip(MENDED, found, strict=False)
    assert [name for name, tensor in pairs if far_off(tensor.numpy(), exact[name], 1e-5)] == []


def test_a_graph_without_such_functions_stays_as_it_is():
    exported = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
    assert stable(exported) is exported


WHOLE = (torch.ops.aten.atan2.default, torch.ops.aten.log1p.default, torch.ops.aten.expm1.default)
"""Operators that take whole numbers."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_each_form_keeps_the_type_of_its_results(dtype):
    one, other = torch.tensor([[3, 1, -2]]).to(dtype), torch.tensor([[1, -2, 0]]).to(dtype)
    for operator, form in FORMS.items():
        if dtype is not torch.int64 or operator in WHOLE:
            second = {"dim": 1, "other": other}
            given = (one, *(second[argument.name] for argument in operator._schema.arguments[1:]))
            found, expected = form(*given), operator(*given)
            assert found.dtype == expected.dtype, operator
            assert torch.allclose(found.double(), expected.double(), rtol=1e-2, equal_nan=True), operator
