"""Attention by random features, by config["kind"]: exp (Performer, arXiv 2009.14794) and waves (RFA, 2103.02143).

Carried are two sums for each head: of features times values, and of features. RFA's fade by a gate.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights

VOCAB, WIDTH, HEADS, DRAWN, LAYERS = 20, 16, 2, 32, 2


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.mix = kind, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, HEADS)
        self.register_buffer("drawn", torch.randn(HEADS, WIDTH // HEADS, DRAWN))

    def features(self, x: Tensor) -> Tensor:
        """x [B, H, d] → [B, H, F]."""
        x = x * x.shape[2] ** -0.25 if self.kind == "exp" else F.normalize(x, dim=2)
        near = torch.einsum("bhd,hdf->bhf", x, self.drawn)
        found = (near - x.square().sum(2, keepdim=True) / 2).exp(), torch.cat((near.sin(), near.cos()), 2)
        return found[self.kind == "waves"] * DRAWN**-0.5

    def forward(self, x: Tensor, total: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, D], total [B, H, F, d], mass [B, H, F] → the same."""
        q, k, v = self.qkv(x).unflatten(1, (3, HEADS, -1)).unbind(1)
        q, k, share = self.features(q), self.features(k), torch.sigmoid(self.gate(x))[..., None]
        keep, add = (share, 1 - share) if self.kind == "waves" else (torch.ones_like(share), torch.ones_like(share))
        mass = keep * mass + add * k
        total = keep[..., None] * total + (add * k)[..., None] * v[:, :, None]
        found = (q[:, :, None] @ total)[:, :, 0] / (q * mass).sum(2, keepdim=True)
        return x + self.mix(found.flatten(1)), total, mass


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
        x, kept = self.embed(tokens), []
        for layer, total, mass in zip(self.layers, held[::2], held[1::2], strict=True):
            x, *after = layer(x, total, mass)
            kept += after
        return self.head(x), *kept


def build(weights: str) -> StepSpec:
    stored, states = read_weights(weights), []
    model, count = Model(**stored["config"]), DRAWN * (2 if stored["config"]["kind"] == "waves" else 1)
    model.load_state_dict(stored["model"])
    for number in range(LAYERS):
        states.append(StateSpec(f"layers.{number}.total", ("B", HEADS, count, WIDTH // HEADS)))
        states.append(StateSpec(f"layers.{number}.mass", ("B", HEADS, count)))
    return StepSpec(model, [InputSpec("tokens", ("B",), tokens=VOCAB)], states, [OutputSpec("logits", role="logits")])
