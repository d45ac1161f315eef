"""Plays mazes with a bundle, without torch; with the weights given, PyTorch plays the same mazes and is compared.

python samples/policy/play.py lstm.txl
python samples/policy/play.py lstm.txl --against lstm lstm.pt
"""

from __future__ import annotations

import argparse
import importlib

import numpy as np
import txl_runtime
from maze import FORGETFUL, Array, Episode, play
from txl_runtime.ladder import NEAR_TIE


class BundlePlayer:
    """A bundle's stream in the control loop: one row for each environment."""

    def __init__(self, model: txl_runtime.Model) -> None:
        self.stream = model.stream()

    def scores(self, observation: Array) -> Array:
        """[rows, 9] → scores of actions [rows, 3]."""
        return self.stream.run({"observation": observation[:, None]})["action"][:, 0]

    def reset(self, rows: Array) -> None:
        """Only these rows begin anew."""
        if rows.any():
            self.stream.reset(rows)


def compare(ours: list[Episode], theirs: list[Episode]) -> dict[str, int]:
    """Count how two players of the same mazes differ, episode by episode, up to the first action that differs.

    A near-tie is a step at which the two best scores of `theirs` are so close that rounding may choose.
    """
    counts = dict.fromkeys(
        ("decisions", "differ", "near_ties", "differ_at_near_tie", "without_tie", "returns_differ"), 0
    )
    for one, other in zip(ours, theirs, strict=True):
        ties = 0
        for scores, action, expected in zip(other.scores, one.actions, other.actions, strict=False):
            lower, best = np.sort(scores)[-2:]
            tie = bool(best - lower < NEAR_TIE)
            ties += tie
            counts["decisions"] += 1
            counts["near_ties"] += tie
            if action != expected:
                counts["differ_at_near_tie" if tie else "differ"] += 1
                break
        counts["without_tie"] += not ties
        counts["returns_differ"] += not ties and one.returned != other.returned
    return counts


def main() -> None:
    """Play."""
    parser = argparse.ArgumentParser(description="Play mazes with a bundle.")
    parser.add_argument("bundle")
    parser.add_argument("--against", nargs=2, metavar=("POLICY", "WEIGHTS"), help="lstm or gtrxl, and its weights")
    parser.add_argument("--episodes", type=int, default=200, help="default: %(default)s")
    arguments = parser.parse_args()
    model = txl_runtime.load(arguments.bundle)
    rows, episodes = model.batch_size, arguments.episodes
    player, forgetful = BundlePlayer(model), BundlePlayer(model)
    ours = play(player.scores, player.reset, rows, episodes)
    print(f"return {mean(ours):.2f} of 3 in {episodes} mazes, {rows} at once, {model.manifest.precision}")
    without = play(forgetful.scores, lambda left: forgetful.reset(np.ones_like(left)), rows, episodes)
    print(f"reset after every step: {mean(without):.2f}; nobody without a memory has more than {FORGETFUL} on average")
    if arguments.against:
        from train import TorchPlayer

        name, weights = arguments.against
        torch_player = TorchPlayer(importlib.import_module(name).build(weights), rows)
        counts = compare(ours, play(torch_player.scores, torch_player.reset, rows, episodes))
        print(
            f"PyTorch: {counts['decisions']} decisions, {counts['differ']} differ off near-ties; {counts['near_ties']} "
            f"near-ties, {counts['differ_at_near_tie']} differ there; {counts['without_tie']} mazes without one, "
            f"{counts['returns_differ']} with another return"
        )


def mean(episodes: list[Episode]) -> float:
    """The mean return."""
    return float(np.mean([episode.returned for episode in episodes]))


if __name__ == "__main__":
    main()
