"""Measure the cost of a vocabulary of 267,735 words: wt103-base's layers with M 640 decode one token at a time.

    python benchmarks/cpu/large_vocabulary.py [--tails] [--out FOLDER]

A model of the same layers with 204 words shows the time of the layers; the additional time of a step with the large
vocabulary is the softmax's. Steps are measured that compute all log-probabilities (`step`), and that draw with
`generate`: sampling, greedy, top-k and top-p. With random weights nearly every drawn word is in the head cluster. So
`--tails` adds a bundle whose tail clusters have higher biases: about a third of its drawn words come from tails.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import txl_runtime
from numpy.typing import NDArray
from txl_runtime.model import Model

from benchmarks.shared.models import TINY, WT103, deviation, random_bundle, random_state, random_tokens, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log
from txl_deploy.bench.competitor import BundleCompetitor, fill
from txl_deploy.bench.timing import Timed, Work, interleave

BODY: dict[str, Any] = {"same_length": True, "clamp_length": 400}
WORDS, FEW = 267_735, 204
DRAWS: dict[str, dict[str, Any]] = {
    "sampling": {"temperature": 1.0},
    "sampling, temperature 0.8": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "top-k 40": {"top_k": 40},
    "top-p 0.9": {"top_p": 0.9},
}
ENDLESS = 1_000_000


class Drawing:
    """A stream that generates tokens without end; each call of the object draws one token."""

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        ours = BundleCompetitor("bundle", model)
        fill(ours, model)
        self.stream, self._model, self._options = ours.stream, model, options
        self._tokens = self._start()
        next(self._tokens)
        self.tokens = self.tails = 0
        self._before = (self.stream.draws.tokens, self.stream.draws.tails)

    def __call__(self, index: int) -> None:
        """Feed the token that was drawn last, and draw the next token."""
        if next(self._tokens, None) is None:
            self._tokens = self._start()

    @property
    def tails_per_token(self) -> float:
        """Return the mean number of tail clusters that were computed for a drawn token, e.g. 0.3."""
        tokens, tails = self.stream.draws.tokens - self._before[0], self.stream.draws.tails - self._before[1]
        return tails / tokens if tokens else 0.0

    def _start(self) -> Iterator[NDArray[np.int32]]:
        return self.stream.generate([[1]], ENDLESS, seed=0, **self._options)


def stepping(model: Model) -> Work:
    """Return a function that feeds one token and computes all log-probabilities."""
    ours = BundleCompetitor("bundle", model)
    fill(ours, model)
    tokens = random_tokens(model.manifest.vocab_size, (16, 1, 1))
    return lambda index: ours.logprobs(tokens[index % 16])


def bundles(folder: Path, quick: bool, tails: bool) -> dict[str, Path]:
    """Return the bundles by name: "layers" with few words, "head" with many, and with `tails` also "tails".

    Words drawn from the bundle "tails" often come from tail clusters.
    """
    few: dict[str, Any] = TINY | {"same_length": True} if quick else shape(16, 410, 10, 41, 2100, FEW, **BODY)
    cutoffs, words = ((20, 40), 60) if quick else (WT103, WORDS)
    many = few | {"vocab_size": words, "cutoffs": cutoffs}
    lengths, memory = ((4, 1), 7) if quick else ((64, 1), 640)
    result = {
        "layers": random_bundle(folder / "layers.txl", few, lengths, memory),
        "head": random_bundle(folder / "head.txl", many, lengths, memory),
    }
    if tails:
        state = random_state(many, deviation=deviation(many["d_model"]))
        # each of the n tail clusters gets the weight of cutoffs[0] / 2n words, so that all have a third of the whole
        state["softmax.cluster.bias"] += float(np.log(cutoffs[0] / (2 * len(cutoffs))))
        result["tails"] = random_bundle(folder / "tails.txl", many, lengths, memory, state=state)
    return result


def main() -> int:
    """Read the command line, time every bundle, and print the table."""
    options = parser(__doc__)
    options.add_argument("--tails", action="store_true", help="a model whose drawn words are often not in the head too")
    arguments = options.parse_args()
    seconds, rounds = (0.05, 2) if arguments.quick else (arguments.seconds, 5)
    table = Table(("model", "work", "ms p50", "p90", "softmax, ms", "of the layers", "tails computed per token"))
    document: dict[str, dict[str, Timed]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = bundles(Path(folder), arguments.quick, arguments.tails)
        layers = stepping(txl_runtime.load(paths.pop("layers"), threads=arguments.threads))
        for name, path in paths.items():
            log(f"time {name}")
            model = txl_runtime.load(path, threads=arguments.threads)
            drawing = {draw: Drawing(model, how) for draw, how in DRAWS.items()}
            calls: dict[str, Callable[[int], object]] = {"layers": layers, "all log-probs": stepping(model), **drawing}
            timed = interleave(calls, rounds=rounds, slice_seconds=seconds / rounds)
            document[name] = timed
            floor = timed["layers"].times.p50
            for work, result in timed.items():
                cost = None if work == "layers" else result.times.p50 - floor
                share = None if cost is None else f"{cost / floor:.0%}"
                tails = drawing[work].tails_per_token if work in drawing else None
                table.add(name, work, result.times.p50, result.times.p90, cost, share, tails)
    finish("large_vocabulary", arguments, [table], document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
