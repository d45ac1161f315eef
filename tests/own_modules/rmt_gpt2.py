"""A Recurrent Memory Transformer over GPT-2 of transformers: memory tokens before and behind each segment.

txl-deploy export tests/own_modules/rmt_gpt2.py:build --weights rmt.pt -o rmt.txl --segment-length 128

The names of the weights are those of booydar/recurrent-memory-transformer: `memory` and `model.…`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


class MemoryCell(nn.Module):
    """tokens [B, L], memory [B, m, D] → logits [B, L, V], memory."""

    def __init__(self, model: Any, tokens: int) -> None:
        super().__init__()
        self.model = model
        self.memory = nn.Parameter(torch.zeros(tokens, model.config.n_embd))

    def forward(self, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One segment."""
        words = self.model.get_input_embeddings()(tokens)
        found = self.model(inputs_embeds=torch.cat((memory, words, memory), 1), output_hidden_states=True)
        rows = memory.shape[1]
        return found.logits[:, rows:-rows], found.hidden_states[-1][:, -rows:]


def spec(cell: MemoryCell) -> StepSpec:
    """Return the step with its inputs, states and outputs; the memory starts as what was learned."""
    config = cell.model.config
    return StepSpec(
        cell,
        [InputSpec("tokens", ("B", "L"), tokens=config.vocab_size)],
        [StateSpec("memory", ("B", *cell.memory.shape), initial="memory")],
        [OutputSpec("logits", role="logits")],
    )


def build(weights: str) -> StepSpec:
    """The model of a checkpoint."""
    stored = read_weights(weights)
    cell = MemoryCell(GPT2LMHeadModel(GPT2Config(**stored["config"]["base"])), stored["config"]["num_mem_tokens"])
    cell.load_state_dict(stored["model"])
    return spec(cell)
