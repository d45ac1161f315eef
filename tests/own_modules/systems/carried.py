"""A language model of the surveys: the rows that it carries of each layer, and a step over them.

A file beside this one has the layer, and `build`. The input of a layer at position p is kept in slot p, of the `first`
ones, or in a ring of the newest. `count` says how many positions each sequence has read, so all are independent.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


def standing(count: Tensor, rows: int, first: int = 0) -> Tensor:
    """The position of each slot's row, [B, rows], when `count` [B] positions have been read; -1 for none."""
    slots, last = torch.arange(rows), count[:, None] - 1
    place = torch.where(slots < first, slots, last - (last - slots) % (rows - first))
    return torch.where((place <= last) & (place >= slots.clamp(max=first)), place, -1)


def written(memory: Tensor, new: Tensor, count: Tensor, first: int = 0) -> Tensor:
    """The slots [layers, B, rows, D] after new rows [layers, B, L, D] of the positions from `count` on."""
    place = standing(count + new.shape[2], memory.shape[2], first) - count[:, None]
    taken = new.gather(2, place.clamp(0, new.shape[2] - 1)[None, ..., None].expand_as(memory))
    return torch.where((place >= 0)[None, ..., None], taken, memory)


class Model(nn.Module):
    def __init__(self, layers: Any, rows: int, first: int = 0, vocab: int = 20, width: int = 16) -> None:
        super().__init__()
        self.layers, self.rows, self.first = nn.ModuleList(layers), rows, first
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)

    def through(self, x: Tensor, memory: Tensor, now: Tensor, then: Tensor) -> Any:
        """All layers: what leaves the last, and each one's input."""
        below = []
        for layer, rows in zip(self.layers, memory, strict=True):
            below.append(x)
            x = layer(x, torch.cat((rows, x), 1), now[:, None, :, None], then[:, None, None])
        return x, below

    def forward(self, tokens: Tensor, memory: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        """tokens [B, L], memory [layers, B, rows, D], count [B] → logits [B, L, V], more, memory, count."""
        length = tokens.shape[1]
        now, then = count[:, None] + torch.arange(length), standing(count, self.rows, self.first)
        x, below, *more = self.through(self.embed(tokens), memory, now, torch.cat((then, now), 1))
        return self.head(x), *more, written(memory, torch.stack(below), count, self.first), count + length


def built(make: Callable[..., Model], weights: str, *more: OutputSpec) -> StepSpec:
    """The step of the model that a file of weights tells of."""
    stored = read_weights(weights)
    model = make(**stored["config"])
    model.load_state_dict(stored["model"])
    tokens = InputSpec("tokens", ("B", "L"), tokens=model.embed.num_embeddings)
    rows = StateSpec("memory", (len(model.layers), "B", model.rows, model.embed.embedding_dim))
    states = [rows, StateSpec("count", ("B",), dtype="int32")]
    return StepSpec(model, [tokens], states, [OutputSpec("logits", role="logits"), *more])
