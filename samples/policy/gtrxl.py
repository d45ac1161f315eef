"""A GTrXL policy: Transformer-XL's attention over the last steps, with gates in place of residual sums.

Its states are the inputs of all layers in the last steps, and the number of filled rows of each sequence, which allows
single sequences to be reset.
"""

from __future__ import annotations

import torch
from maze import SEEN
from policy import Policy
from torch import Tensor, nn
from txl_export import InputSpec, StateSpec, StepSpec

LAYERS, WIDTH, HEADS, MEMORY = 2, 64, 4, 32


class Gate(nn.Module):
    """The gates of a GRU, which decide how much of a result replaces its input; before training, little."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.kept = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.candidate = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.constant_(self.found.bias[WIDTH : 2 * WIDTH], -1.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the gated sum of an input x and its result y, both [B, L, d]. For example, [2, 1, 32]."""
        (r, z, h), (kept_r, kept_z) = self.found(y).chunk(3, -1), self.kept(x).chunk(2, -1)
        r, z = torch.sigmoid(r + kept_r), torch.sigmoid(z + kept_z)
        return (1 - z) * x + z * torch.tanh(h + self.candidate(r * x))


class Layer(nn.Module):
    """Attention to earlier rows, by content and by distance, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.gates = nn.ModuleList(Gate() for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.far = nn.Linear(WIDTH, WIDTH, bias=False)
        self.content, self.distance = (nn.Parameter(torch.zeros(HEADS, 1, WIDTH // HEADS)) for _ in range(2))
        self.wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, rows: Tensor, table: Tensor, behind: Tensor, visible: Tensor) -> Tensor:
        """Run the layer on rows [B, memory + L, width]; return the results of the last L rows, [B, L, width].

        Args:
            rows: the remembered rows, then the new rows.
            table: a row for each distance, [memory + L, width].
            behind: distance of each new row to every row, int [L, memory + L].
            visible: True where a new row may attend to a row, bool [B, 1, L, memory + L].
        """
        batch, new = rows.shape[0], behind.shape[0]
        q, k, v = (
            part.view(batch, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norms[0](rows)).chunk(3, -1)
        )
        q, far = q[:, :, -new:], self.far(table).view(-1, HEADS, WIDTH // HEADS).transpose(0, 1)
        by_distance = ((q + self.distance) @ far.transpose(1, 2)).gather(-1, behind.expand(batch, HEADS, -1, -1))
        scores = ((q + self.content) @ k.transpose(2, 3) + by_distance) * (WIDTH // HEADS) ** -0.5
        attended = torch.where(visible, scores, -1e4).softmax(-1) @ v
        x = self.gates[0](rows[:, -new:], torch.relu(self.out(attended.transpose(1, 2).reshape(batch, new, WIDTH))))
        after: Tensor = self.gates[1](x, torch.relu(self.wide(self.norms[1](x))))
        return after


class GtrxlPolicy(Policy):
    """A policy that takes any number of observations of each sequence, and the states of `forward`."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.embed = nn.Linear(SEEN, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, observation: Tensor, memory: Tensor, fill: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run observations [B, L, 9], memory [B, layers, memory, width] and filled rows, int32 [B].

        Return scores of actions [B, L, 3], values [B, L], and the new memory and filled rows.
        """
        x, new = self.embed(self.normal(observation)), observation.shape[1]
        place, slot = torch.arange(MEMORY, MEMORY + new), torch.arange(MEMORY + new)
        behind = place[:, None] - slot
        visible = (behind >= 0) & (slot >= MEMORY - fill[:, None, None, None])
        turns = slot[:, None] * 10000 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        table = torch.cat((turns.sin(), turns.cos()), 1)
        memory_after = []
        for layer, old in zip(self.layers, memory.unbind(1), strict=True):
            rows = torch.cat((old, x), 1)
            memory_after.append(rows[:, new:])
            x = layer(rows, table, behind.clamp(min=0), visible)
        return *self.heads(x), torch.stack(memory_after, 1), torch.clamp(fill + new, max=MEMORY)


def build(weights: str | None) -> StepSpec:
    """Return the model with names and shapes of inputs, states and outputs; `txl-deploy export` calls this function."""
    policy = GtrxlPolicy()
    if weights:
        policy.read(weights)
    states = [StateSpec("memory", ("B", LAYERS, MEMORY, WIDTH)), StateSpec("fill", ("B",), dtype="int32")]
    return StepSpec(policy, [InputSpec("observation", ("B", "L", SEEN))], states, ["action", "value"])
