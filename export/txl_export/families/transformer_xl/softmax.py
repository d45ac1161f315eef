"""The softmax apart from the layers: programs that take any number n of hidden rows.

    head        hidden float32 [n, D] → logprobs [n, words of cluster 0 + further clusters]
    tail.<c>    hidden float32 [n, D] → logprobs [n, words of cluster c], given that the word is in c

log p(word of c) = head[n, words of cluster 0 + c - 1] + tail.<c>[n, word]. A model without clusters has a head alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

from txl_export.families.transformer_xl.network import Network


class Softmax(Network):
    """A program of one cluster: its tail, or the head for cluster 0."""

    dynamic_shapes = ({0: torch.export.Dim("rows", min=1)},)

    def __init__(self, config: ModelConfig, dialect: Dialect, folded: Mapping[str, Tensor], cluster: int = 0) -> None:
        super().__init__(config, dialect, folded, 0)
        self.cluster = cluster

    def example_inputs(self) -> tuple[Tensor, ...]:
        return (torch.zeros(2, self.config.d_model),)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Run the program; see the module's table."""
        rows = hidden.to(self.dtype)
        return (self.tail_logprobs(self.cluster, rows) if self.cluster else self.head_logprobs(rows),)
