"""Operators that ONNX Runtime can make one of are written so that it does, and compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from txl_export.graphs.passes.improving import improve
from txl_export.graphs.settling import settle
from txl_export.graphs.tracing import quiet
from txl_runtime.bundle.tables import TensorSpec


class Norm(nn.Module):
    """By the root of a mean square, as most codes write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class WithoutAxis(nn.Module):
    """By means that lie along another axis, because the one that they were taken over is gone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :3]
        return x * torch.rsqrt(x.pow(2).mean(-1) + 1e-5) * torch.arange(3.0)


def test_means_without_their_axis_are_no_norm(tmp_path: Path):
    x = torch.randn(3, 16)
    found, _ = fused(WithoutAxis(), x, 3, tmp_path)
    np.testing.assert_allclose(found, WithoutAxis()(x).numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "operator"), [(nn.GELU(), "Gelu"), (Norm(), "SimplifiedLayerNormalization")], ids=("gelu", "norm")
)
def test_it_is_one_operator_of_onnx_runtime(module, operator, tmp_path: Path):
    x = torch.randn(3, 16)
    x[1, 2] = float("nan")
    found, operators = fused(module, x, 16, tmp_path)
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=0, atol=1e-6)
    assert operator in operators


def fused(module: nn.Module, x: torch.Tensor, width: int, folder: Path) -> tuple[np.ndarray, set[str]]:
    """Return the results of ONNX Runtime, and the operators that it computes them with."""
    with quiet(), torch.no_grad():
        program = torch.onnx.export(module, (x,), dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    model = program.model
    model.graph.inputs[0].name = "x"
    settle(
        model,
        "step",
        [TensorSpec(name="x", dtype="float32", shape=(3, 16))],
        [TensorSpec(name="y", dtype="float32", shape=(3, width))],
    )
    improve(model)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "fused.onnx")
    options.log_severity_level = 3
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x.numpy()})
    return found, {node.op_type for node in ir.load(folder / "fused.onnx").graph}
