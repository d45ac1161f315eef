"""Defines programs of the softmax without the layers; each takes any number n of hidden rows.

    head        hidden float32 [n, D] → logprobs [n, words of cluster 0 + further clusters]
    tail.<c>    hidden float32 [n, D] → logprobs [n, words of cluster c], within the cluster c

With features, rows are [n, 2 D], of which the softmax reads the first D (`ring`).

log p(word of c) = head[n, words of cluster 0 + c - 1] + tail.<c>[n, word]. A model with one cluster has only a head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

from txl_export.families.transformer_xl.network import Network


class Softmax(Network):
    """The program of one cluster: the head for cluster 0, else the cluster's tail.

    Args:
        features: whether rows end with D numbers that the softmax does not read.
    """

    dynamic_shapes = ({0: torch.export.Dim("rows", min=1)},)

    def __init__(
        self,
        config: ModelConfig,
        dialect: Dialect,
        folded: Mapping[str, Tensor],
        cluster: int = 0,
        features: bool = False,
    ) -> None:
        super().__init__(config, dialect, folded, 0)
        self.cluster, self.features = cluster, features

    def example_inputs(self) -> tuple[Tensor, ...]:
        return (torch.zeros(2, (1 + self.features) * self.config.d_model),)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Run the program, whose shapes are above, e.g. hidden [3, 32] gives log-probabilities [3, 256]."""
        rows = (hidden[:, : self.config.d_model] if self.features else hidden).to(self.dtype)
        return (self.tail_logprobs(self.cluster, rows) if self.cluster else self.head_logprobs(rows),)
