"""Trains a policy in about a minute on two idle cores, by imitation of a player who remembers the signs.

python samples/policy/train.py lstm lstm.pt
python samples/policy/train.py gtrxl gtrxl.pt
"""

from __future__ import annotations

import argparse
import importlib
import time
from types import ModuleType

import numpy as np
import torch
from maze import DOORS, FORGETFUL, Array, lessons, play
from policy import Policy
from torch import Tensor, nn
from torch.nn import functional
from txl_export import StepSpec

ROWS, UPDATES = 64, 400


class TorchPlayer:
    """A policy that PyTorch runs in the control loop; this class carries and resets its states."""

    def __init__(self, spec: StepSpec, rows: int) -> None:
        self.policy, self.axes = spec.module.eval(), [entry.axes for entry in spec.states]
        self.states = fresh_states(spec, rows)

    @torch.inference_mode()
    def scores(self, observation: Array) -> Array:
        """Return scores of actions [rows, 3] for observations [rows, 9]."""
        scores, _, *self.states = self.policy(torch.from_numpy(observation)[:, None], *self.states)
        return np.asarray(scores[:, 0])

    @torch.inference_mode()
    def reset(self, rows: Array) -> None:
        """Reset the states of only these rows: `[True, False]` resets row 0."""
        for state, axes in zip(self.states, self.axes, strict=True):
            state[axes.at(torch.from_numpy(rows))] = 0


def fresh_states(spec: StepSpec, rows: int) -> list[Tensor]:
    """Return the states that sequences begin with: zeros, e.g. [4, 2, 32, 64] as GTrXL's memory for 4 rows."""
    return [torch.zeros(entry.axes.sizes(rows, 0), dtype=getattr(torch, entry.dtype)) for entry in spec.states]


def train(model: ModuleType, updates: int = UPDATES, seconds: float = 600, seed: int = 0) -> StepSpec:
    """Train a policy to take the right action and to predict the number of remaining doors.

    Training ends after `updates` updates or `seconds` seconds.
    """
    torch.manual_seed(seed)
    spec: StepSpec = model.build(None)
    policy: Policy = spec.module.train()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, updates)
    ends = time.monotonic() + seconds
    for update in range(updates):
        if time.monotonic() > ends:
            break
        observations, actions, doors, weights = map(torch.from_numpy, lessons(ROWS, seed * updates + update + 10))
        policy.see(observations)
        scores, value, *_ = policy(observations, *fresh_states(spec, ROWS))
        wrong = functional.cross_entropy(scores.transpose(1, 2), actions, reduction="none")
        loss = ((wrong + 0.1 * (value - doors) ** 2) * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return spec


def main() -> None:
    """Train a policy, write its weights, and print its mean return."""
    parser = argparse.ArgumentParser(description="Train a policy.")
    parser.add_argument("policy", choices=("lstm", "gtrxl"))
    parser.add_argument("weights", help="file to write")
    parser.add_argument("--updates", type=int, default=UPDATES, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600, help="time after which it ends (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    started = time.monotonic()
    spec = train(importlib.import_module(arguments.policy), arguments.updates, arguments.seconds, arguments.seed)
    torch.save(spec.module.state_dict(), arguments.weights)
    player = TorchPlayer(spec, 64)
    returned = np.mean([episode.returned for episode in play(player.scores, player.reset, 64, 200)])
    took = time.monotonic() - started
    print(f"return {returned:.2f} of {DOORS} after {took:.0f} s; without a memory at most {FORGETFUL} in the long run")


if __name__ == "__main__":
    main()
