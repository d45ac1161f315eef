"""A Decision Transformer (arXiv 2106.01345): the return to go, observations and actions of the last WINDOW steps.

These steps themselves are carried, and read anew each time. Rows of each layer, carried as a Transformer-XL's, would
remember steps that have left the window: that is another function than the one that was trained.
"""

import torch
from attention import Attention
from torch import Tensor, nn
from txl_export import InputSpec, StateSpec, StepSpec, read_weights

WINDOW, SEEN, DONE, LONGEST, WIDTH = 5, 6, 3, 64, 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.goal, self.saw, self.did = (nn.Linear(size, WIDTH) for size in (1, SEEN, DONE))
        self.times, self.norm = nn.Embedding(LONGEST, WIDTH), nn.LayerNorm(WIDTH)
        self.layers, self.head = nn.ModuleList(Attention() for _ in range(2)), nn.Linear(WIDTH, DONE)

    def forward(self, goal: Tensor, saw: Tensor, did: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
        """goal [B, 1], saw [B, SEEN], did [B, DONE] in the step before; WINDOW of each, and steps read [B]."""
        goals, saws = (torch.cat((old[:, 1:], new[:, None]), 1) for old, new in zip(held, (goal, saw), strict=False))
        dids = torch.cat((held[2][:, 1:-1], did[:, None], torch.zeros_like(did)[:, None]), 1)
        step = held[3][:, None] - WINDOW + 1 + torch.arange(WINDOW)
        tokens = torch.stack((self.goal(goals), self.saw(saws), self.did(dids)), 2)
        x = self.norm((tokens + self.times(step.clamp(0, LONGEST - 1))[:, :, None]).flatten(1, 2))
        place = (3 * step[..., None] + torch.arange(3)).flatten(1)
        for layer in self.layers:
            x = layer(x, x, place[:, None, :, None], place[:, None, None])
        return torch.tanh(self.head(x[:, -2])), goals, saws, dids, held[3] + 1


def build(weights: str) -> StepSpec:
    model, sizes = Model(), {"goal": 1, "saw": SEEN, "did": DONE}
    model.load_state_dict(read_weights(weights)["model"])
    states = [StateSpec(f"{name}s", ("B", WINDOW, size)) for name, size in sizes.items()]
    inputs = [InputSpec(name, ("B", size)) for name, size in sizes.items()]
    return StepSpec(model, inputs, [*states, StateSpec("count", ("B",), dtype="int32")], ["action"])
