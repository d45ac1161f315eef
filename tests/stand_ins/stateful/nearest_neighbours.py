"""kNN-LM: what the nearest neighbours in a datastore were followed by, mixed with a language model's prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded


class NearestNeighbours(Loaded):
    """queries [L, n], lm_logprobs [L, V] → knn_logprobs [L, V], logprobs [L, V], margin [L]."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.k, self.temperature, self.share = config["k"], config["temperature"], config["lmbda"]

    def forward(self, queries: Tensor, lm_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One segment."""
        far = (queries[:, None] - self.tensor("keys")[None]).square().sum(-1)
        nearest, found = torch.topk(far, self.k + 1, largest=False)
        weights = (-nearest[:, : self.k] / self.temperature).softmax(-1)
        followed = self.tensor("values")[found[:, : self.k]]
        hits = followed[..., None] == torch.arange(lm_logprobs.shape[-1], device=queries.device)
        mass = (weights[..., None] * hits.to(weights.dtype)).sum(1)
        knn = torch.where(mass > 0, mass.clamp(min=1e-40).log(), torch.full_like(mass, -1e4))
        mixed = torch.logaddexp(lm_logprobs + math.log(1 - self.share), knn + math.log(self.share))
        return knn, mixed, nearest[:, self.k] - nearest[:, self.k - 1]


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case kn01."""
    return StepSpec(
        NearestNeighbours(weights, config).eval(),
        [InputSpec("queries", ("L", config["dimension"])), InputSpec("lm_logprobs", ("L", config["vocab"]))],
        [],
        [OutputSpec(name, ("L", config["vocab"])) for name in ("knn_logprobs", "logprobs")]
        + [OutputSpec("margin", ("L",))],
    )
