"""silero-vad's network for 16 kHz as a model of one's own: 64 samples that were read before, then 512 new ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from txl_export import InputSpec, StateSpec, StepSpec, read_weights

STRIDES = (1, 2, 2, 1)


class Voice(nn.Module):
    """The chance that somebody speaks."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.basis = nn.Parameter(weights["_model.stft.forward_basis_buffer"])
        self.encoder = nn.ModuleList()
        for number, stride in enumerate(STRIDES):
            after, before, kernel = weights[f"_model.encoder.{number}.reparam_conv.weight"].shape
            self.encoder.append(nn.Conv1d(before, after, kernel, stride, padding=1))
        self.rnn, self.head = nn.LSTMCell(128, 128), nn.Conv1d(128, 1, 1)
        own = {"rnn": "decoder.rnn", "head": "decoder.decoder.2"}
        own |= {f"encoder.{number}": f"encoder.{number}.reparam_conv" for number in range(len(STRIDES))}
        for name, theirs in own.items():
            inside = f"_model.{theirs}."
            layer = {key.removeprefix(inside): value for key, value in weights.items() if key.startswith(inside)}
            self.get_submodule(name).load_state_dict(layer)

    def forward(self, samples: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(chance [B, 1], state [2, B, 128]) of samples [B, 576]."""
        waves = F.conv1d(F.pad(samples[:, None], (0, 64), "reflect"), self.basis, stride=128)
        real, imaginary = waves.chunk(2, 1)
        x = (real**2 + imaginary**2).sqrt()
        for layer in self.encoder:
            x = F.relu(layer(x))
        h, c = self.rnn(x[:, :, 0], (state[0], state[1]))
        return torch.sigmoid(self.head(F.relu(h)[:, :, None])).mean(2), torch.stack((h, c))


def build(weights: str) -> StepSpec:
    """Return the step of the archive that the package has."""
    states = [StateSpec("state", (2, "B", 128))]
    return StepSpec(Voice(read_weights(weights)), [InputSpec("input", ("B", 576))], states, ["output"])
