"""The Compressive Transformer (arXiv 1911.05507): rows that leave the memory are compressed by a convolution.

Segments are of SEGMENT positions, all of them: as many leave the memory, once it is full, and are compressed.
"""

import carried
import torch
from positions import Layer
from torch import Tensor, nn
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights

SEGMENT, RATE, ROWS, COMPRESSED, LAYERS, WIDTH = 4, 2, 8, 4, 2, 16


class Model(carried.Model):
    def __init__(self) -> None:
        super().__init__([Layer("relative") for _ in range(LAYERS)], ROWS)
        self.squeeze = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, RATE, RATE) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, memory: Tensor, older: Tensor, count: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """tokens [B, SEGMENT], memory [layers, B, ROWS, D], older [layers, B, COMPRESSED, D], count [B]."""
        left = (count - ROWS).clamp(min=0)  # positions that are no longer in the memory
        number = carried.standing(left // RATE, COMPRESSED)
        place = torch.where(number < 0, -1, number + (left - left // RATE)[:, None])  # a compressed row is one place
        now = count[:, None] + torch.arange(SEGMENT)
        then = torch.cat((place, carried.standing(count, ROWS), now), 1)
        x, below = self.through(self.embed(tokens), torch.cat((older, memory), 2), now, then)
        leaving = (now - ROWS) % ROWS
        leaving = memory.gather(2, leaving[None, ..., None].expand(LAYERS, -1, -1, WIDTH))
        squeezed = torch.stack([layer(rows.mT).mT for layer, rows in zip(self.squeeze, leaving, strict=True)])
        after = torch.where((count >= ROWS)[:, None, None], carried.written(older, squeezed, left // RATE), older)
        return self.head(x), carried.written(memory, torch.stack(below), count), after, count + SEGMENT


def build(weights: str) -> StepSpec:
    model = Model()
    model.load_state_dict(read_weights(weights)["model"])
    states = [StateSpec("memory", (LAYERS, "B", ROWS, WIDTH)), StateSpec("older", (LAYERS, "B", COMPRESSED, WIDTH))]
    states.append(StateSpec("count", ("B",), dtype="int32"))
    tokens = InputSpec("tokens", ("B", "L"), tokens=model.embed.num_embeddings)
    return StepSpec(model, [tokens], states, [OutputSpec("logits", role="logits")], segment_lengths=(SEGMENT,))
