"""The network that tells where a model looks: the attention probabilities of one segment, and nothing else.

    inputs    tokens int32 [1, L] · valid int32 [1] · fill int32 [1] · memory per layer, as `step` has it, float32
    output    attention float32 [layers, 1, H, L, K], K = M + L

Slot k of a query is row k of (memory ‖ segment): memory first, oldest row first, then the segment. A row of slots sums
to 1. It is 0 for a query that is not among the `valid` ones.

A look runs beside a stream, for one sequence at a time, and never on a device. So its graph has a B of 1, it returns no
state, and it computes in float32 whatever the precision of the bundle: weights that are stored in half precision are
widened where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

from txl_export.families.transformer_xl.step import Step, StepShape


class Attention(Step):
    """One program: where each query of a segment looks, in every layer and head.

    Args:
        config, dialect: the model.
        shape: L, M and the form of the memory; B is 1.
        folded: the parameters from `fold`; what is in half precision is computed with in float32.
        distances: see `Step`.
    """

    landmarks: tuple[str, ...] = ()

    def __init__(
        self, config: ModelConfig, dialect: Dialect, shape: StepShape, folded: Mapping[str, Tensor], distances: int
    ) -> None:
        exact = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in folded.items()}
        super().__init__(config, dialect, shape._replace(batch_size=1), exact, distances)

    def forward(self, tokens: Tensor, valid: Tensor, fill: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """One look; see the module's table for names, shapes and dtypes."""
        rows = self.counted(valid, fill)
        hidden = self.embed(tokens)
        looks = []
        for i in range(self.config.n_layer):
            hidden, query, key, value, _ = self.project(i, hidden, memory, valid, rows)
            look = self.look(i, query, key, self.index(query), rows.visible)  # [1, H, L, K]
            hidden = self.around(i, hidden, self.gather_heads(i, look @ value))
            looks.append(look)
        counts = torch.arange(self.shape.segment_length, dtype=torch.int32)[None] < valid[:, None]  # [1, L]
        visible = rows.visible & counts[:, None, :, None]
        return (torch.where(visible[None], torch.stack(looks), torch.zeros(())),)
