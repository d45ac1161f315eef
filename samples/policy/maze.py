"""Mazes that need a memory: three signs at the entrance say which of two ways is right at each of three later doors.

Sign 2 says the way at door 2, for example; it was seen for one step, up to 21 steps earlier. A player without memory is
right at the first door half of the time, and at all three doors once in eight times. A wrong action ends the maze. This
module does not import torch, because applications play mazes too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
AHEAD, LEFT, RIGHT = range(3)
DOORS, SEEN, LONGEST = 3, 9, 24
FORGETFUL = 0.5 + 0.25 + 0.125
"""The best mean return, the number of doors passed, without a memory; with a memory it is 3."""


@dataclass
class Episode:
    """One walk through a maze: the scores and the action of every step, and the return, the number of doors passed."""

    scores: list[Array] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    returned: int = 0


class Mazes:
    """Several mazes at once, one per row. Row r always plays the episodes r, r + rows, r + 2 · rows, …"""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed, self.number = rows, seed, np.arange(rows) - rows
        self.signs, self.doors = np.zeros((2, rows, DOORS), int)
        self.noise, self.step = np.zeros((rows, LONGEST, 3)), np.zeros(rows, int)
        self.enter(np.ones(rows, bool))

    def enter(self, rows: Array) -> None:
        """Begin the next episode in these rows. For example, `enter([True, False])` begins an episode in row 0."""
        self.number[rows] += self.rows
        for row in np.flatnonzero(rows):
            random = np.random.default_rng((self.seed, self.number[row]))
            self.signs[row] = random.choice([LEFT, RIGHT], DOORS)
            self.doors[row] = DOORS - 1 + random.integers(2, 8, DOORS).cumsum()
            self.noise[row] = random.normal(size=(LONGEST, 3))
        self.step[rows] = 0

    def at_door(self) -> Array:
        """Return bool [rows, doors], True where a row is at a door: [[False, True, False]] for one row at door 1."""
        doors: Array = self.doors == self.step[:, None]
        return doors

    def observe(self) -> Array:
        """Return observations [rows, 9].

        Their columns: the sign (-1 left, 1 right), the number of the sign or door (3 columns), 1 at a door, the step,
        light, temperature and noise.
        """
        reading = np.eye(DOORS)[np.minimum(self.step, DOORS - 1)] * (self.step < DOORS)[:, None]
        sign = (reading * np.where(self.signs == LEFT, -1, 1)).sum(1)
        light, temperature, noise = self.noise[np.arange(self.rows), self.step].T
        rest = [self.at_door().any(1), self.step, 80 + 20 * light, 293 + 2 * temperature, noise]
        return np.column_stack([sign, reading + self.at_door(), *rest]).astype(np.float32)

    def right_action(self) -> Array:
        """Return for each row the action of a player who remembers the signs, e.g. [1, 0]: LEFT and AHEAD."""
        return np.where(self.at_door().any(1), (self.signs * self.at_door()).sum(1), AHEAD)

    def act(self, actions: Array) -> tuple[Array, Array]:
        """Take one action per row; return rewards, and the rows that left the maze by a wrong action or the last door.

        For example, ([1, 0], [True, False]): row 0 passed its last door, row 1 went ahead.
        """
        right = actions == self.right_action()
        rewards = (right & self.at_door().any(1)).astype(int)
        left = ~right | self.at_door()[:, -1]
        self.step += 1
        self.enter(left)
        return rewards, left


def play(
    scores_of: Callable[[Array], Array], reset: Callable[[Array], None], rows: int, episodes: int, seed: int = 1
) -> list[Episode]:
    """Run the control loop: observe, take the best action, reset the rows that begin a new episode.

    Return the first `episodes` episodes.

    Args:
        scores_of: f(observations [rows, 9]) → scores [rows, 3].
        reset: f(rows to reset, bool [rows]).
        rows: number of environments that run at once.
        episodes: number of episodes to play in all.
        seed: seed of the mazes.
    """
    mazes = Mazes(rows, seed)
    episodes_by_number = {number: Episode() for number in range(episodes)}
    while (mazes.number < episodes).any():
        numbers, scores = mazes.number.tolist(), scores_of(mazes.observe())
        actions = scores.argmax(-1)
        rewards, left = mazes.act(actions)
        reset(left)
        for row, number in enumerate(numbers):
            if number in episodes_by_number:
                episode = episodes_by_number[number]
                episode.scores.append(scores[row].copy())
                episode.actions.append(int(actions[row]))
                episode.returned += int(rewards[row])
    return [episodes_by_number[number] for number in range(episodes)]


def lessons(rows: int, seed: int) -> tuple[Array, Array, Array, Array]:
    """Return the walks of a player with a memory through `rows` mazes, for a policy to imitate.

    Returns:
        Observations [rows, steps, 9], right actions, doors still to come, and the weight of each step, all
        [rows, steps]; the weight is 0 after the last door.
    """
    mazes = Mazes(rows, seed)
    walked = []
    for _ in range(LONGEST):
        alive = mazes.number < rows
        door = mazes.at_door().any(1)
        to_come = (mazes.doors >= mazes.step[:, None]).sum(1)
        walked.append((mazes.observe(), mazes.right_action(), to_come, alive * np.where(door, 1.0, 0.2)))
        mazes.act(mazes.right_action())
    observations, actions, to_come, weights = zip(*walked, strict=True)
    return tuple(np.stack(part, 1) for part in (observations, actions, to_come, weights))  # type: ignore[return-value]
