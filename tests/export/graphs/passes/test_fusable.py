"""What ONNX Runtime can make one operator of is written so that it does, and computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from txl_export.graphs.keeping_nan import keep_nan
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


@pytest.mark.parametrize(
    ("module", "operator"), [(nn.GELU(), "Gelu"), (Norm(), "SimplifiedLayerNormalization")], ids=("gelu", "norm")
)
def test_it_is_one_operator_of_onnx_runtime(module, operator, tmp_path: Path):
    x = torch.randn(3, 16)
    x[1, 2] = float("nan")
    with quiet(), torch.no_grad():
        program = torch.onnx.export(module, (x,), dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    model = program.model
    model.graph.inputs[0].name = "x"
    settle(
        model,
        "step",
        [TensorSpec(name="x", dtype="float32", shape=(3, 16))],
        [TensorSpec(name="y", dtype="float32", shape=(3, 16))],
    )
    improve(model)
    keep_nan(model)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    options.log_severity_level = 3
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=0, atol=1e-6)
    assert operator in {node.op_type for node in ir.load(tmp_path / "fused.onnx").graph}
