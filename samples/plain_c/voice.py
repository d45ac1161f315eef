"""A small noise gate for voices, in hops of 10 ms: convolutions over samples, then an LSTM that opens the gate.

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
    """A model that takes one hop at a time. It keeps the previous hop, so that convolutions reach into it."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv1d(1, 16, 40, stride=20), nn.Conv1d(16, 32, 5, stride=2)
        self.cell, self.open = nn.LSTMCell(32 * 6, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, seen: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run samples x [B, 160], the previous hop `seen` [B, 160], and the LSTM's states h and c [B, width].

        Return the gated samples and the three new states.
        """
        sound = torch.cat((seen, x), 1)
        features = torch.relu(self.far(torch.relu(self.near(5 * sound[:, None]))))
        h, c = self.cell(features.flatten(1), (h, c))
        return x * torch.sigmoid(self.open(h)), x, h, c


def build(weights: str | None) -> StepSpec:
    """Return the model with names and shapes of inputs, states and outputs; `txl-deploy export` calls this function."""
    module = Voice()
    if weights is not None:
        module.load_state_dict(txl_export.read_weights(weights))
    states = [StateSpec("seen", ("B", HOP)), *(StateSpec(name, ("B", WIDTH)) for name in "hc")]
    return StepSpec(module.eval(), [InputSpec("x", ("B", HOP))], states, ["y"])


def simulate(rows: int, hops: int) -> tuple[Tensor, Tensor]:
    """Return simulated noisy voices [rows, hops, HOP], e.g. [8, 100, 160], and the same voices without noise."""
    time = torch.arange(hops * HOP) / RATE
    pitch = 100 + 150 * torch.rand(rows, 1) + 10 * torch.sin(2 * torch.pi * (1 + 3 * torch.rand(rows, 1)) * time)
    phase = 2 * torch.pi * (pitch / RATE).cumsum(1)
    voice = torch.stack([torch.sin(k * phase) / k for k in range(1, 9)]).sum(0) * 0.1
    speaks = (torch.rand(rows, -(-hops // 20), 1) < 0.5).float().expand(-1, -1, 20).flatten(1)[:, :hops, None]
    voice = voice.reshape(rows, hops, HOP) * speaks
    return voice + 0.1 * torch.rand(rows, 1, 1) * torch.randn(rows, hops, HOP), voice


def main() -> None:
    """Train the gate, and write its weights."""
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
