"""What an export says of a model that nothing can judge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import txl_export
from torch import Tensor, nn
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.errors import CheckError


class _Waves(nn.Module):
    """Float32 does not say where such short waves stand."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x + 5e-4 * torch.sin((x + h[:, None]) * (1e9 / 3)), h + x[:, -1]


def test_the_self_test_of_a_model_that_is_far_from_itself_says_so(tmp_path: Path) -> None:
    spec = StepSpec(_Waves(), [InputSpec("x", ("B", "L", 4))], [StateSpec("h", ("B", 4))], ["y"])
    with pytest.raises(
        CheckError, match=r"so is the model from itself, .*; it amplifies rounding: look whether its weights"
    ):
        txl_export.export(spec, tmp_path / "waves.txl", batch_size=1, segment_length=1, verify=False)
    assert not (tmp_path / "waves.txl").exists()
