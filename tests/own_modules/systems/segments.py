"""Whole segments, each for itself: there is nothing to carry.

config["kind"] is vanilla (arXiv 1808.04444) or low_rank (Linformer, 2006.04768), whose keys and values are sums over
all positions of a segment, so that every output depends on what comes later.
"""

import torch
from attention import Attention
from torch import Tensor, nn
from txl_export import InputSpec, OutputSpec, StepSpec, read_weights

SEGMENT, RANK, VOCAB, WIDTH, LAYERS = 8, 3, 20, 16, 2


class LowRank(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = (nn.Parameter(torch.randn(RANK, SEGMENT)) for _ in range(2))

    def found(self, q: Tensor, k: Tensor, v: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return (q @ (self.e @ k).mT * q.shape[3] ** -0.5).softmax(-1) @ (self.f @ v)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(SEGMENT, WIDTH))
        self.layers = nn.ModuleList(LowRank() if kind == "low_rank" else Attention() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x, place = self.embed(tokens) + self.places, torch.arange(SEGMENT)
        for layer in self.layers:
            x = layer(x, x, place[:, None], place)
        return self.head(x)


def build(weights: str) -> StepSpec:
    stored = read_weights(weights)
    model = Model(**stored["config"])
    model.load_state_dict(stored["model"])
    tokens, logits = InputSpec("tokens", ("B", "L"), tokens=VOCAB), OutputSpec("logits", role="logits")
    return StepSpec(model, [tokens], [], [logits], segment_lengths=(SEGMENT,))
