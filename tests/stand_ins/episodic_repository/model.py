"""The `model` of episodic-transformer-memory-ppo, written from its interface and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from transformer import Transformer


class ActorCriticModel(nn.Module):
    """Observation, rows, mask and indices → a distribution for each branch, value [B], new row."""

    def __init__(
        self, config: Mapping[str, Any], observation_space: Any, action_space_shape: tuple[int, ...], longest: int
    ) -> None:
        super().__init__()
        width, hidden = config["transformer"]["embed_dim"], config["hidden_layer_size"]
        self.observation_space_shape = observation_space.shape
        size = observation_space.shape[0]
        if len(observation_space.shape) > 1:
            self.conv1, self.conv2 = nn.Conv2d(size, 32, 8, 4), nn.Conv2d(32, 64, 4, 2)
            self.conv3 = nn.Conv2d(64, 64, 3, 1)
            size = self._seen(torch.zeros(1, *observation_space.shape)).shape[1]
        self.lin_hidden = nn.Linear(size, width)
        self.transformer = Transformer(config["transformer"], width, longest)
        self.lin_policy, self.lin_value = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.policy_branches = nn.ModuleList(nn.Linear(hidden, actions) for actions in action_space_shape)
        self.value = nn.Linear(hidden, 1)

    def _seen(self, image: Tensor) -> Tensor:
        for layer in (self.conv1, self.conv2, self.conv3):
            image = layer(image).relu()
        return image.flatten(1)

    def forward(self, obs: Tensor, rows: Tensor, mask: Tensor, indices: Tensor) -> tuple[list[Any], Tensor, Tensor]:
        x = self._seen(obs) if len(self.observation_space_shape) > 1 else obs
        x, row = self.transformer(self.lin_hidden(x).relu(), rows, mask, indices)
        policy, value = self.lin_policy(x).relu(), self.value(self.lin_value(x).relu())
        return [Categorical(logits=branch(policy)) for branch in self.policy_branches], value[:, 0], row
