"""An LSTM as an own module beside torch's, for a long time: streams that are reset one by one, at random moments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from torch import Tensor, nn
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

BATCH, INPUTS, HIDDEN, LAYERS, STEPS = 3, 6, 16, 2, 10_000
LIMIT = 1e-5
SHARE = 0.01
"""The share of steps that reset a sequence: runs of a hundred steps, some of several hundred."""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN, LAYERS)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(x[None], (h, c))
        return y[0], h, c


@pytest.fixture(scope="module")
def lstm() -> nn.LSTM:
    torch.manual_seed(0)
    module = Recurrent()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.lstm.eval()


@pytest.fixture(scope="module")
def bundle(lstm: nn.LSTM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = Recurrent()
    module.lstm = lstm
    states = [StateSpec(name, (LAYERS, "B", HIDDEN)) for name in ("h", "c")]
    spec = StepSpec(module, [InputSpec("x", ("B", INPUTS))], states, [OutputSpec("y", ("B", HIDDEN))])
    path = tmp_path_factory.mktemp("lstm") / "lstm.txl"
    return txl_export.export(spec, path, batch_size=BATCH, verify=False).path


def largest_error(lstm: nn.LSTM, bundle: Path, forget: int | None = None) -> float:
    """Return the largest error of all outputs and of the last states; the resets of step `forget` may be left out."""
    draws = np.random.default_rng(0)
    observations = draws.standard_normal((STEPS, BATCH, INPUTS), np.float32)
    resets = draws.random((STEPS, BATCH)) < SHARE
    stream = txl_runtime.load(bundle, "cpu").stream()
    h, c = torch.zeros(2, LAYERS, BATCH, HIDDEN)
    worst = 0.0
    with torch.no_grad():
        for step in range(STEPS):
            if resets[step].any():
                rows = torch.from_numpy(resets[step])
                h[:, rows], c[:, rows] = 0.0, 0.0
                if step != forget:
                    stream.reset(resets[step])
            y, (h, c) = lstm(torch.from_numpy(observations[step])[None], (h, c))
            ours = stream.run({"x": observations[step]})["y"]
            worst = max(worst, float(np.abs(ours - y[0].numpy()).max()))
    state = stream.state()
    return max(worst, *(float(np.abs(state[name] - own.numpy()).max()) for name, own in (("h", h), ("c", c))))


@pytest.mark.slow
def test_an_lstm_stays_with_torchs_over_ten_thousand_steps_with_resets(lstm: nn.LSTM, bundle: Path) -> None:
    assert largest_error(lstm, bundle) <= LIMIT


@pytest.mark.slow
def test_one_forgotten_reset_of_an_lstm_shows(lstm: nn.LSTM, bundle: Path) -> None:
    draws = np.random.default_rng(0)
    draws.standard_normal((STEPS, BATCH, INPUTS), np.float32)
    first = int(np.flatnonzero((draws.random((STEPS, BATCH)) < SHARE).any(1))[5])
    assert largest_error(lstm, bundle, forget=first) > 100 * LIMIT
