"""Plays mazes with a bundle, without torch; given the weights, PyTorch plays the same mazes for comparison.

    python samples/policy/play.py lstm.txl
    python samples/policy/play.py lstm.txl --against lstm lstm.pt

The exit code is 1 if the bundle differs from PyTorch by more than rounding explains, and 2 if it cannot play.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass

import numpy as np
import txl_runtime
from maze import FORGETFUL, Array, Episode, play
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.ladder import limit_of, rung


class BundlePlayer:
    """A bundle's stream in the control loop, with one row for each maze."""

    def __init__(self, model: txl_runtime.Model) -> None:
        self.stream = model.stream()

    def scores(self, observation: Array) -> Array:
        """Return scores of actions [rows, 3] for observations [rows, 9]."""
        return self.stream.run({"observation": observation[:, None]})["action"][:, 0]

    def reset(self, rows: Array) -> None:
        """Reset the states of only these rows: `[True, False]` resets row 0."""
        if rows.any():
            self.stream.reset(rows)


@dataclass
class Comparison:
    """The differences of two players of the same mazes, in each maze up to the first action that differs.

    A near-tie is a step at which the two best scores of the second player are so close that rounding may choose.

    Attributes:
        decisions, near_ties: number of compared steps, and number of near-ties among these steps.
        differ, differ_at_near_tie: number of different actions, off near-ties and at near-ties.
        without_tie, returns_differ: number of mazes without a near-tie, and of such mazes whose returns differ.
        margin: the smallest distance of the two best scores.
        largest: the largest difference of a score, relative to max(1, the largest score).
        deviation: root of the mean squared difference, relative to the scores' standard deviation.
    """

    decisions: int = 0
    near_ties: int = 0
    differ: int = 0
    differ_at_near_tie: int = 0
    without_tie: int = 0
    returns_differ: int = 0
    margin: float = np.inf
    largest: float = 0.0
    deviation: float = 0.0

    def excess(self, precision: str, engine: str) -> list[str]:
        """Return a line for each figure above the limit that `txl_runtime.ladder` has for this precision and engine.

        A figure without a limit is not checked: only half precisions have a limit of the deviation.
        """
        limits, lines = rung(precision, engine), []
        for name, value, limit in (
            ("difference of scores", self.largest, limits.logprobs),
            ("deviation of scores", self.deviation, limits.deviation),
            ("share of other actions off near-ties", self.differ / max(1, self.decisions), 1 - (limits.top1 or 1.0)),
        ):
            if limit is not None and not value <= limit:
                lines.append(f"{name} {value:.1e}, expected at most {limit:.1e}")
        return lines


def compare(ours: list[Episode], theirs: list[Episode]) -> Comparison:
    """Compare two players episode by episode; the scores of `theirs` say which steps are near-ties."""
    counts, pairs = Comparison(), []
    for one, other in zip(ours, theirs, strict=True):
        ties = 0
        for mine, scores, action, expected in zip(one.scores, other.scores, one.actions, other.actions, strict=False):
            lower, best = np.sort(scores)[-2:]
            tie = bool(best - lower < limit_of("near tie"))
            ties += tie
            pairs.append((mine, scores))
            counts.margin = min(counts.margin, float(best - lower))
            if action != expected:
                counts.differ_at_near_tie += tie
                counts.differ += not tie
                break
        counts.near_ties += ties
        counts.without_tie += not ties
        counts.returns_differ += not ties and one.returned != other.returned
    mine, scores = np.array(pairs).swapaxes(0, 1)
    apart = mine - scores
    counts.decisions = len(pairs)
    counts.largest = float(np.abs(apart).max() / max(1.0, np.abs(scores).max()))
    counts.deviation = float(np.sqrt((apart**2).mean()) / scores.std())
    return counts


def run(bundle: str, against: tuple[str, str] | None, episodes: int) -> list[str]:
    """Play mazes and print the returns; return a line for each difference from PyTorch that is too large."""
    model = txl_runtime.load(bundle)
    if "action" not in [entry.name for entry in model.manifest.outputs]:
        raise UsageError(
            f"{bundle}: returns no action, expected a bundle of samples/policy; export lstm.py or gtrxl.py"
        )
    rows, precision = model.batch_size, model.manifest.precision
    player, forgetful = BundlePlayer(model), BundlePlayer(model)
    ours = play(player.scores, player.reset, rows, episodes)
    print(f"return {mean(ours):.2f} of 3 in {episodes} mazes, {rows} at once, {precision}")
    without = play(forgetful.scores, lambda left: forgetful.reset(np.ones_like(left)), rows, episodes)
    print(f"reset after every step: {mean(without):.2f}; without a memory at most {FORGETFUL} in the long run")
    if not against:
        return []
    from train import TorchPlayer

    name, weights = against
    torch_player = TorchPlayer(importlib.import_module(name).build(weights), rows)
    counts = compare(ours, play(torch_player.scores, torch_player.reset, rows, episodes))
    print(
        f"PyTorch: {counts.decisions} decisions, {counts.differ} differ off near-ties; {counts.near_ties} "
        f"near-ties, {counts.differ_at_near_tie} differ there; {counts.without_tie} mazes without one, "
        f"{counts.returns_differ} with another return"
    )
    print(
        f"scores: largest difference {counts.largest:.1e}, relative to max(1, largest score); deviation "
        f"{counts.deviation:.1e}; smallest margin of the two best {counts.margin:.1e}"
    )
    return counts.excess(precision, model.backend.name)


def mean(episodes: list[Episode]) -> float:
    """Return the mean of the episodes' returns."""
    return float(np.mean([episode.returned for episode in episodes]))


def main() -> int:
    """Read the arguments and play; return the exit code."""
    parser = argparse.ArgumentParser(description="Play mazes with a bundle.")
    parser.add_argument("bundle")
    parser.add_argument("--against", nargs=2, metavar=("POLICY", "WEIGHTS"), help="lstm or gtrxl, and its weights")
    parser.add_argument("--episodes", type=int, default=200, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.against and arguments.against[0] not in ("lstm", "gtrxl"):
        parser.error(f"argument --against: the policy is {arguments.against[0]!r}, expected lstm or gtrxl")
    try:
        excess = run(arguments.bundle, arguments.against, arguments.episodes)
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for line in excess:
        print(f"NOT as PyTorch: {line}")
    return int(bool(excess))


if __name__ == "__main__":
    sys.exit(main())
