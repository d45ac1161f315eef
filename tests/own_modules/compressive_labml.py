"""labml's Compressive Transformer. Its training script merges the memories, so the step does.

txl-deploy export tests/own_modules/compressive_labml.py:build --weights labml.pt -o labml.txl --segment-length 64
"""

from __future__ import annotations

import torch
from labml_nn.transformers.compressive import CompressiveTransformer, CompressiveTransformerLayer, Conv1dCompression
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.utils import subsequent_mask
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention
from torch import Tensor, nn
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights

PARTS = ("mem", "c_mem")


class Model(nn.Module):
    """tokens [L, B], mem [0…M, B, D] and c_mem [0…C, B, D] of each layer → logits [L, B, V], memories."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.config, width = config, config["d_model"]
        layer = CompressiveTransformerLayer(
            d_model=width,
            self_attn=RelativeMultiHeadAttention(config["heads"], width, 0.0),
            feed_forward=FeedForward(width, config["d_ff"], 0.0),
            dropout_prob=0.0,
            compress=Conv1dCompression(config["compression_rate"], width),
        )
        self.src_embed = nn.Embedding(config["n_vocab"], width)
        self.transformer = CompressiveTransformer(layer, config["n_layers"])
        self.generator = nn.Linear(width, config["n_vocab"])

    def forward(self, tokens: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        mem, compressed = list(states[0::2]), list(states[1::2])
        length, rows = len(tokens), len(mem[0]) + len(compressed[0])
        mask = torch.cat((torch.ones(length, rows, 1, dtype=torch.bool), subsequent_mask(length)), 1)
        x, new = self.transformer(self.src_embed(tokens), mem, compressed, mask)
        after: list[Tensor] = []
        for layer, (old, squeezed, rows_of) in enumerate(zip(mem, compressed, new, strict=True)):
            after += self._merged(torch.cat((old, rows_of)), squeezed, self.transformer.layers[layer].compress)
        return self.generator(x), *after

    def _merged(self, mem: Tensor, compressed: Tensor, compress: nn.Module) -> tuple[Tensor, Tensor]:
        """Whole groups of the oldest rows leave a memory that is longer than it may be, and are compressed."""
        rate = self.config["compression_rate"]
        old = -(-max(len(mem) - self.config["mem_len"], 0) // rate) * rate
        if old == 0:
            return mem, compressed.clone()
        return mem[old:], torch.cat((compressed, compress(mem[:old])))[-self.config["c_mem_len"] :]


def spec(model: Model) -> StepSpec:
    """Return the step with its inputs, states and outputs; time stands first."""
    config = model.config
    rows = {"mem": config["mem_len"], "c_mem": config["c_mem_len"]}
    names = [(layer, part) for layer in range(config["n_layers"]) for part in PARTS]
    return StepSpec(
        model,
        [InputSpec("tokens", ("L", "B"), tokens=config["n_vocab"])],
        [
            StateSpec(f"layers.{layer:02d}.{part}", (rows[part], "B", config["d_model"]), grows=0)
            for layer, part in names
        ],
        [OutputSpec("logits", ("L", "B", config["n_vocab"]))],
    )


def build(weights: str) -> StepSpec:
    """The model of a checkpoint."""
    stored = read_weights(weights)
    model = Model(stored["config"])
    model.load_state_dict(stored["model"])
    return spec(model)
