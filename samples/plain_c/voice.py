"""A small noise gate for voices: convolutions over samples, and an LSTM that opens the gate, in hops of 10 ms.

    python samples/plain_c/voice.py voice.pt
    txl-deploy export samples/plain_c/voice.py:build --weights voice.pt -o voice.txl --segment-length 1 --batch-size 1

The first command trains for half a minute on simulated voices: gliding harmonics in noise, with pauses.
"""

from __future__ import annotations

import sys

import torch
import txl_export
from torch import Tensor, nn
from txl_export import InputSpec, StateSpec, StepSpec

HOP, WIDTH, RATE = 160, 48, 16000


class Voice(nn.Module):
    """A model of one hop; it keeps the last samples, so that convolutions see beyond the hop's beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv1d(1, 16, 40, stride=20), nn.Conv1d(16, 32, 5, stride=2)
        self.cell, self.open = nn.LSTMCell(32 * 6, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, seen: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run samples [B, 160], the samples before them, and two states [B, width]; return the gated samples and the
        states.
        """
        sound = torch.cat((seen, x), 1)
        features = torch.relu(self.far(torch.relu(self.near(5 * sound[:, None]))))
        h, c = self.cell(features.flatten(1), (h, c))
        return x * torch.sigmoid(self.open(h)), x, h, c


def build(weights: str | None) -> StepSpec:
    """Return the step with names and shapes; `txl-deploy export` calls this."""
    module = Voice()
    if weights is not None:
        module.load_state_dict(txl_export.read_weights(weights))
    states = [StateSpec("seen", ("B", HOP)), *(StateSpec(name, ("B", WIDTH)) for name in "hc")]
    return StepSpec(module.eval(), [InputSpec("x", ("B", HOP))], states, ["y"])


def simulate(rows: int, hops: int) -> tuple[Tensor, Tensor]:
    """Simulate sounds [rows, hops, HOP], e.g. [8, 100, 160]; return them, and the voice in them."""
    time = torch.arange(hops * HOP) / RATE
    pitch = 100 + 150 * torch.rand(rows, 1) + 10 * torch.sin(2 * torch.pi * (1 + 3 * torch.rand(rows, 1)) * time)
    phase = 2 * torch.pi * (pitch / RATE).cumsum(1)
    voice = torch.stack([torch.sin(k * phase) / k for k in range(1, 9)]).sum(0) * 0.1
    speaks = (torch.rand(rows, -(-hops // 20), 1) < 0.5).float().expand(-1, -1, 20).flatten(1)[:, :hops, None]
    voice = voice.reshape(rows, hops, HOP) * speaks
    return voice + 0.1 * torch.rand(rows, 1, 1) * torch.randn(rows, hops, HOP), voice


def main() -> None:
    """Train, and write the weights."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # one thread: in steps this small, threads cost more than they gain
    module = Voice()
    optimizer = torch.optim.Adam(module.parameters(), 2e-3)
    for update in range(1, 101):
        sound, voice = simulate(16, 40)
        seen, h, c, loss = torch.zeros(16, HOP), torch.zeros(16, WIDTH), torch.zeros(16, WIDTH), torch.zeros(())
        for hop in range(40):
            y, seen, h, c = module(sound[:, hop], seen, h, c)
            loss = loss + (y - voice[:, hop]).square().mean() / voice.square().mean() / 40
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if update % 25 == 0:
            print(f"{update} updates: {loss.item():.2f} of the voice's energy is wrong")
    torch.save(module.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
