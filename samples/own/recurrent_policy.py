"""A recurrent policy: an LSTM with normalised float observations, scores of three actions and a value.

    python samples/own/recurrent_policy.py --train policy.pt
    txl-deploy export samples/own/recurrent_policy.py:build --weights policy.pt -o policy.txl --batch-size 8
    python samples/own/recurrent_policy.py --run policy.txl

A player walks through a corridor. A sign at its entrance says which side to take where the way parts, some ten steps
later; it is seen only once. A policy without memory takes the correct side half of the time, as `--run` also shows.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import txl_export
import txl_runtime
from torch import Tensor, nn
from torch.nn import functional
from txl_export import InputSpec, StateSpec, StepSpec

LAYERS, WIDTH, OBSERVED = 2, 48, 6
AHEAD, LEFT, RIGHT = range(3)


class Policy(nn.Module):
    """A module that takes one observation of each sequence; it returns scores of actions, values and two states."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(OBSERVED))
        self.register_buffer("deviation", torch.ones(OBSERVED))
        self.lstm = nn.LSTM(OBSERVED, WIDTH, LAYERS)
        self.action, self.value = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, observation: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run observations [B, 6] and the LSTM's two states [layers, B, width].

        Return scores of actions [B, 3], values [B] and the two new states.
        """
        normal = (observation - self.mean) / self.deviation
        rows, (hidden, cell) = self.lstm(normal[None], (hidden, cell))
        return self.action(rows[0]), self.value(rows[0])[:, 0], hidden, cell


def build(weights: str | None) -> StepSpec:
    """Return the model with names and shapes of inputs, states and outputs; `txl-deploy export` calls this function."""
    policy = Policy()
    if weights:
        policy.load_state_dict(txl_export.read_weights(weights))
    return StepSpec(
        policy,
        inputs=[InputSpec("observation", ("B", OBSERVED))],
        states=[StateSpec("hidden", (LAYERS, "B", WIDTH)), StateSpec("cell", (LAYERS, "B", WIDTH))],
        outputs=["action", "value"],
    )


class Corridors:
    """Several corridors at once, with one player per row. A player who leaves a corridor enters a new one."""

    def __init__(self, number: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.sign, self.length, self.place = np.zeros((3, number))
        self.enter(np.ones(number, bool))

    def enter(self, rows: np.ndarray[Any, Any]) -> None:
        """Begin a new corridor in these rows. For example, `enter([True, False])` begins a corridor in row 0."""
        self.sign[rows] = self.random.choice([-1.0, 1.0], rows.sum())
        self.length[rows] = self.random.integers(6, 15, rows.sum())
        self.place[rows] = 0

    def observe(self) -> np.ndarray[Any, Any]:
        """Return observations [rows, 6]: sign, distance walked, 1 where the way parts, light, temperature and noise."""
        noise = self.random.normal(size=(3, len(self.sign)))
        sign = np.where(self.place == 0, self.sign, 0)
        parts = np.where(self.place == self.length, 1.0, 0.0)
        columns = [sign, self.place, parts, 80 + 20 * noise[0], 293 + 2 * noise[1], noise[2]]
        return np.stack(columns, axis=1).astype(np.float32)

    def right_action(self) -> np.ndarray[Any, Any]:
        """Return for each row the action of a player who remembers the sign, e.g. [1, 0]: LEFT and AHEAD."""
        return np.where(self.place < self.length, AHEAD, np.where(self.sign < 0, LEFT, RIGHT))

    def act(self, action: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Take one action per row; return two masks: rows that left their corridor, and rows that did so correctly.

        For example, ([True, False], [True, False]): row 0 left its corridor, on the side that the sign named.
        """
        left = (action != AHEAD) | (self.place >= self.length)
        won = (action == self.right_action()) & left
        self.place += 1
        self.enter(left)
        return left, won


def train(updates: int) -> Policy:
    """Train a policy to act as `right_action`, and to predict the reward: 0.9 to the power of the remaining steps."""
    torch.manual_seed(0)
    policy, number = Policy(), 64
    seen = torch.tensor(np.concatenate([corridor.observe() for corridor in (Corridors(99, seed) for seed in range(9))]))
    policy.mean, policy.deviation = seen.mean(0), seen.std(0) + 1
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    corridors = Corridors(number, seed=1)
    for _ in range(updates):
        corridors.enter(np.ones(number, bool))
        hidden = cell = torch.zeros(LAYERS, number, WIDTH)
        losses = []
        for _ in range(24):
            expert, to_go = corridors.right_action(), corridors.length - corridors.place
            action, value, hidden, cell = policy(torch.from_numpy(corridors.observe()), hidden, cell)
            weight = torch.from_numpy(np.where(expert == AHEAD, 0.1, 1.0)).float()
            losses.append(
                (functional.cross_entropy(action, torch.from_numpy(expert), reduction="none") * weight).mean()
            )
            losses.append(functional.mse_loss(value, torch.from_numpy(0.9**to_go).float()))
            left, _ = corridors.act(expert)
            goes_on = torch.from_numpy(~left)[:, None]
            hidden, cell = torch.where(goes_on, hidden, 0), torch.where(goes_on, cell, 0)
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack(losses).mean())
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return policy


def walk(bundle: str, steps: int, forgetful: bool = False) -> float:
    """Run an application's control loop, without torch; return the share of corridors left on the correct side.

    If `forgetful`, all states are reset after every step.
    """
    model = txl_runtime.load(bundle)
    stream = model.stream()
    corridors, ended, won = Corridors(stream.batch_size, seed=2), 0, 0
    for _ in range(steps):
        action = stream.run({"observation": corridors.observe()})["action"].argmax(-1)
        left, right = corridors.act(action)
        stream.reset(np.ones_like(left) if forgetful else left)  # resets only these sequences
        ended, won = ended + int(left.sum()), won + int(right.sum())
    return won / max(1, ended)


def main() -> None:
    """Train a policy, or let a bundle walk, or both."""
    parser = argparse.ArgumentParser(description="A recurrent policy that remembers a sign.")
    parser.add_argument("--train", metavar="WEIGHTS", help="train, and write the weights to this file")
    parser.add_argument("--run", metavar="BUNDLE", help="let this bundle walk")
    parser.add_argument("--updates", type=int, default=1000, help="of the weights, in training (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.train:
        torch.save(train(arguments.updates).state_dict(), arguments.train)
    if arguments.run:
        print(f"right: {walk(arguments.run, 500):.0%}, without memory: {walk(arguments.run, 500, forgetful=True):.0%}")


if __name__ == "__main__":
    main()
