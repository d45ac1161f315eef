"""Attention of few queries over remembered rows: no keys and values of all rows, and the same numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn
from txl_export.graphs.opening import open_batch
from txl_export.graphs.passes.improving import improve
from txl_export.graphs.passes.values import sizes_of
from txl_export.graphs.passes.views import product_of
from txl_export.graphs.settling import settle
from txl_export.graphs.tracing import quiet
from txl_runtime.bundle.tables import TensorSpec

WIDTH, HEADS, ROWS = 24, 3, 20
D = WIDTH // HEADS


class Chunked(nn.Module):
    """Queries, keys and values in one product, then heads: what most codes do."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)

    def forward(self, rows: Tensor, new: int) -> Tensor:
        batch = rows.shape[0]
        q, k, v = (x.view(batch, -1, HEADS, D).transpose(1, 2) for x in self.qkv(rows).chunk(3, -1))
        found = ((q[:, :, -new:] * 0.5) @ k.transpose(2, 3) * D**-0.5).softmax(-1) @ v
        return found.transpose(1, 2).reshape(batch, new, WIDTH)


class Fused(Chunked):
    """By torch's own attention, which scales queries and keys."""

    def forward(self, rows: Tensor, new: int) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, D)).transpose(1, 2) for x in self.qkv(rows).chunk(3, -1))
        return F.scaled_dot_product_attention(q[:, :, -new:], k, v).transpose(1, 2).flatten(2)


class Interleaved(Chunked):
    """The queries, keys and values of a head beside one another."""

    def forward(self, rows: Tensor, new: int) -> Tensor:
        q, k, v = self.qkv(rows).unflatten(-1, (HEADS, 3, D)).unbind(-2)
        scores = torch.einsum("bihd,bjhd->bhij", q[:, -new:], k) * D**-0.5
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)


class Apart(nn.Module):
    """Layers of their own, time first, sequences and heads as one axis, and shares of a query that are not 1 in all."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))

    def forward(self, rows: Tensor, new: int) -> Tensor:
        turned = rows.transpose(0, 1)
        count, batch, _ = turned.shape
        q = self.q(turned[-new:]).reshape(new, batch * HEADS, D).transpose(0, 1)
        k = self.k(turned).reshape(count, batch * HEADS, D).permute(1, 2, 0)
        v = self.v(turned).reshape(count, batch * HEADS, D).transpose(0, 1)
        found = torch.bmm(torch.sigmoid(torch.bmm(q, k)), v)
        return found.transpose(0, 1).reshape(new, batch, WIDTH).transpose(0, 1)


class OneHead(nn.Module):
    """No heads; what is remembered is read by columns in another order."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, 2 * WIDTH, bias=bias)

    def forward(self, rows: Tensor, new: int) -> Tensor:
        k, v = self.kv(rows).unflatten(-1, (WIDTH, 2)).unbind(-1)
        return (self.q(rows[:, -new:]) @ k.transpose(1, 2)).softmax(-1) @ v


class Step(nn.Module):
    """Remembers rows, and asks with the new ones."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.cat((memory, x), 1)
        return self.attention(rows, x.shape[1]), rows[:, x.shape[1] :]


def made(module: nn.Module, batch: int, new: int, opened: bool = False) -> tuple[ir.Model, list[Tensor]]:
    """A step's settled graph, and what it was traced with; B is left open as an export does it."""
    given = [torch.randn(batch, new, WIDTH), torch.randn(batch, ROWS - new, WIDTH)]
    with quiet(), torch.no_grad():
        program = torch.onnx.export(module.eval(), tuple(given), dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    model: ir.Model = program.model
    inputs = [
        TensorSpec(name=name, dtype="float32", shape=tuple(tensor.shape))
        for name, tensor in zip(("x", "old"), given, strict=True)
    ]
    y = TensorSpec(name="y", dtype="float32", shape=(batch, new, WIDTH))
    for value, spec in zip(model.graph.inputs, inputs, strict=True):
        value.name = spec.name
    settle(model, "step", inputs, [y, replace(inputs[1], name="kept")])
    if opened:
        open_batch(model, made(module, batch + 1, new)[0], batch)
    return model, given


def run(model: ir.Model, given: list[Tensor]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    found: list[np.ndarray] = session.run(None, dict(zip(names, [t.numpy() for t in given], strict=True)))
    return found


def rows_multiplied(model: ir.Model) -> list[int]:
    """Return the number of remembered rows that each product with a weight multiplies."""
    products = [product_of(node.outputs[0]) for node in model.graph if node.op_type in ("MatMul", "Gemm")]
    counted = [sizes_of(product.rows)[:-1] for product in products if product is not None]
    return [max((size for size in found if isinstance(size, int)), default=1) for found in counted]


@pytest.mark.parametrize(
    ("kind", "bias", "opened"),
    [
        (Chunked, True, False),
        (Fused, True, True),
        (Interleaved, False, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((Apart, True, False), (OneHead, True, True))),
    ],
)
def test_one_query_asks_the_rows_themselves(kind, bias, opened):
    torch.manual_seed(0)
    step = Step(kind(bias))
    model, given = made(step, 2, 1, opened)
    improve(model)
    for batch in (1, 2, 5) if opened else (2,):
        given = [torch.randn(batch, *tensor.shape[1:]) for tensor in given]
        expected = [tensor.detach().numpy() for tensor in step(*given)]
        for one, other in zip(run(model, given), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    assert max(rows_multiplied(model)) < ROWS


@pytest.mark.parametrize("kind", [Chunked, Interleaved])
def test_where_there_are_as_many_queries_as_rows_keys_and_values_stay(kind):
    torch.manual_seed(0)
    step = Step(kind())
    model, given = made(step, 1, ROWS - 2)
    before, expected = rows_multiplied(model), run(model, given)
    improve(model)
    assert rows_multiplied(model) == before
    for one, other in zip(run(model, given), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_keys_that_something_else_reads_stay_beside_it():
    class Shown(Chunked):
        def forward(self, rows: Tensor, new: int) -> Tensor:
            _, k, _ = self.qkv(rows).chunk(3, -1)
            return super().forward(rows, new) + torch.tanh(k).amax(1, keepdim=True)

    torch.manual_seed(0)
    step = Step(Shown())
    model, given = made(step, 2, 1)
    improve(model)
    for one, other in zip(run(model, given), step(*given), strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=0, atol=2e-6)
    assert max(rows_multiplied(model)) == ROWS
