"""Compare `generate(lookup=4)`, which drafts tokens, with plain decoding: tokens of a run, time, equal tokens.

    python benchmarks/cpu/lookup.py --case code code.txl heldout.txt --case music music.txl music.npy --threads 1
    python benchmarks/cpu/lookup.py --equal 10000 --case code code.txl heldout.txt
    python benchmarks/cpu/lookup.py --cost

A case is a name, a bundle, and a text that the model has not seen: a file for the bundle's vocabulary, or token ids as
.npy. Prompts are cut from the text. Both ways draw after the same prompt with the same seed, in turns, and the way that
begins alternates. Times are processor time, without that of the prompt. A run is a step, or a segment with a draft. The
last row of a case draws at temperature 5 from the 4 best tokens: the latest tokens occur earlier too, but the tokens
that followed there seldom follow again.

`--equal NUMBER` instead compares this number of tokens, drawn after one prompt. For each token that differs, it prints
the log-probabilities of both tokens, the distance of the random number from the nearest border between two tokens'
shares (greedy: the difference of the two log-probabilities), and the largest difference between log-probabilities by a
segment and by single steps. The comparison continues after the plain token.

`--cost` instead times segments of 5 positions beside steps, for random models of 12 layers, d_model 512 and M 640.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import txl_runtime
from txl_runtime.model import Model
from txl_runtime.streaming import lookup
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Floats, Ids

from benchmarks.shared.models import TINY, random_bundle, random_tokens, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log

PROMPT, NEW, DRAFT = 1024, 512, 4
"""The number of tokens of a prompt, the number drawn in a turn, and the largest number in a draft."""
How = dict[str, Any]
DRAWS: dict[str, How] = {
    "0": {"temperature": 0.0},
    "0.7": {"temperature": 0.7},
    "1": {"temperature": 1.0},
    "5, 4 best": {"temperature": 5.0, "top_k": 4},
}
LARGE = shape(12, 512, 8, 64, 2048, 204)


class Noted(lookup.Pace):
    """A pace that counts runs by kind, (True for a draft, number of tokens that the run yielded): {(True, 3): 17}."""

    runs: ClassVar[Counter[tuple[bool, int]]] = Counter()

    def count(self, draft: bool = False, steps: float = 1) -> None:
        super().count(draft, steps)
        self.runs[draft, int(steps)] += 1


def text_of(model: Model, text: Path) -> Ids:
    """Return the token ids of a file, int32 [n], e.g. [17, 4, 9]."""
    if text.suffix == ".npy":
        return np.asarray(np.load(text), np.int32)
    vocabulary = model.vocabulary
    if vocabulary is None:
        raise SystemExit(f"{text} is text, but the bundle has no vocabulary; give token ids as .npy")
    return np.asarray(vocabulary.encode(text.read_text(errors="replace")), np.int32)


def drawn(stream: Stream, prompt: Ids, number: int, seed: int, most: int, how: How) -> tuple[list[int], float]:
    """Draw tokens after a prompt; return the tokens, and the processor seconds of all but the first token.

    Args:
        stream: a stream of one sequence, which is reset first.
        prompt: token ids [n].
        number: of tokens to draw.
        seed: of the draws.
        most: the largest number of tokens in a draft; 0 for plain decoding.
        how: further options of `generate`.
    """
    stream.reset()
    tokens = stream.generate(prompt, number, seed=seed, lookup=most, **how)
    results, began = [int(next(tokens)[0])], time.process_time()
    results += [int(token[0]) for token in tokens]
    return results, time.process_time() - began


def gains(name: str, model: Model, text: Ids, turns: int, number: int, table: Table) -> dict[str, Any]:
    """Draw with and without drafts in each way of `DRAWS`, and add a row to the table for each way.

    Args:
        name: the case's name.
        model: the model.
        text: token ids [n], from which prompts are cut.
        turns: the number of prompts.
        number: of tokens drawn after each prompt.
        table: the table.
    """
    stream, every = model.stream(1), dict[str, Any]()
    prompts = [text[at : at + PROMPT] for at in np.linspace(0, len(text) - PROMPT, turns).astype(int)]
    for said, how in DRAWS.items():
        Noted.runs.clear()
        times: dict[int, list[float]] = {0: [], DRAFT: []}
        same = 0
        for turn, prompt in enumerate(prompts):
            results = {}
            for most in (0, DRAFT) if turn % 2 else (DRAFT, 0):
                results[most], took = drawn(stream, prompt, number, turn, most, how)
                times[most].append(took)
            same += next((i for i in range(number) if results[0][i] != results[DRAFT][i]), number)
        runs = Noted.runs.total()
        yielded = sum(steps * count for (_, steps), count in Noted.runs.items())
        of = {steps: count for (draft, steps), count in Noted.runs.items() if draft}
        drafts = sum(of.values())
        true = sum((steps - 1) * count for steps, count in of.items()) / max(1, drafts)
        ratios = np.divide(times[0], times[DRAFT])
        low, high = np.quantile(ratios, [0.25, 0.75])
        plain = 1e6 * statistics.median(times[0]) / number
        table.add(
            *(name, said, f"{plain:.0f}", f"{yielded / runs:.2f}", f"{100 * drafts / runs:.0f} %, {true:.1f}"),
            *(f"{np.median(ratios):.2f}", f"{low:.2f} to {high:.2f}", f"{same} of {number * turns}"),
        )
        every[said] = {"times": times, "runs": [[*key, count] for key, count in Noted.runs.items()], "same": same}
        log(f"{name}, temperature {said}: {table.rows[-1][3:]}")
    return every


def row(stream: Stream, past: Ids, singly: bool) -> Floats:
    """Return the log-probabilities [V], e.g. [256], after the tokens `past` [n].

    The last 5 tokens run as single steps if `singly` is True, otherwise as one segment.
    """
    stream.reset()
    stream.feed(past[None, :-5], last=True)
    parts = [past[None, i : i + 1] for i in range(len(past) - 5, len(past))] if singly else [past[None, -5:]]
    for part in parts:
        result = stream.step(part)
    return np.asarray(result[0, -1])


def equal(name: str, model: Model, text: Ids, number: int, table: Table) -> dict[str, Any]:
    """Compare the tokens of drafts with plain tokens, greedy and at temperature 1; add a row to the table for each.

    Args:
        name: the case's name.
        model: the model.
        text: token ids [n], whose beginning is the prompt.
        number: of tokens to compare.
        table: the table.
    """
    stream, every = model.stream(1), dict[str, Any]()
    for said in ("0", "1"):
        past, same, places = text[:PROMPT], 0, []
        Noted.runs.clear()
        while same < number:
            left, seed = number - same, same
            plain, guessed = (drawn(stream, past, left, seed, most, DRAWS[said])[0] for most in (0, DRAFT))
            apart = next((i for i in range(left) if plain[i] != guessed[i]), left)
            same += apart
            past = np.concatenate([past, np.asarray(plain[: apart + 1], np.int32)])
            if apart < left:
                steps, segment = row(stream, past[:-1], True), row(stream, past[:-1], False)
                one, two = float(steps[plain[apart]]), float(steps[guessed[apart]])
                # the random numbers that a `Sampler` draws with this seed
                draws = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
                shares = np.cumsum(np.exp(steps)) / np.exp(steps).sum()
                border = float(np.abs(shares - draws.random(apart + 1)[-1]).min()) if said == "1" else abs(one - two)
                places.append(
                    {"plain": one, "draft": two, "border": border, "row": np.abs(steps - segment).max().item()}
                )
                log(f"{name}, temperature {said}, token {same}: {places[-1]}")
                same += 1
        drafts = sum(count for (draft, _), count in Noted.runs.items() if draft)
        farthest = max((place["border"] for place in places), default=0.0)
        rows = max((place["row"] for place in places), default=0.0)
        table.add(name, said, str(number), str(drafts), str(len(places)), f"{farthest:.1e}", f"{rows:.1e}")
        every[said] = places
        log(f"{name}, temperature {said}: {len(places)} of {number} tokens differ")
    return every


def cost(path: Path, threads: int, rounds: int) -> dict[int, list[float]]:
    """Time steps and segments of 5 positions in turns, with full memory; return processor seconds by length."""
    model = txl_runtime.load(path, threads=threads)
    stream, prompt = model.stream(1), random_tokens(model.manifest.config.vocab_size, (1, 64))
    for _ in range(model.manifest.memory_length // 64 + 1):
        stream.feed(prompt, last=True)
    results: dict[int, list[float]] = {1: [], 5: []}
    for turn in range(rounds):
        for length in (1, 5) if turn % 2 else (5, 1):
            for _ in range(2):  # only the second call is timed, when the caches hold this program's data
                began = time.process_time()
                stream.run({"tokens": prompt[:, :length]}, commit=False)
                took = time.process_time() - began
            results[length].append(took)
    return results


def costs(options: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Time steps beside segments of 5 positions, in fp32 and int8; add a row to the table for each precision."""
    every: dict[str, object] = {}
    for precision in ("fp32", "int8"):
        with tempfile.TemporaryDirectory() as folder:
            values, memory = (TINY, 16) if options.quick else (LARGE, 640)
            path = random_bundle(Path(folder, "bundle"), values, [64, 5, 1], memory, precision=precision)
            result = cost(path, options.threads, 2 if options.quick else 80)
        ratio = statistics.median(np.divide(result[5], result[1]).tolist())
        table.add(precision, *(f"{1e3 * statistics.median(result[length]):.2f}" for length in (1, 5)), f"{ratio:.2f}")
        every[precision] = result
    return every


def main() -> None:
    """Read the command line, measure the cases or the cost, and print the table."""
    option_parser = parser(__doc__, seconds=None)
    option_parser.add_argument("--case", nargs=3, action="append", default=[], metavar=("NAME", "BUNDLE", "TEXT"))
    option_parser.add_argument("--turns", type=int, default=8, help=f"of {NEW} tokens each, default 8")
    option_parser.add_argument("--equal", type=int, metavar="NUMBER", help="compare so many tokens instead")
    option_parser.add_argument("--cost", action="store_true", help="time segments of 5 beside steps instead")
    options = option_parser.parse_args()
    lookup.Pace = Noted  # type: ignore[misc]
    every: dict[str, object] = {}
    if options.cost:
        table = Table(("precision", "step, ms", "segment of 5, ms", "ratio"))
        finish("lookup", options, [table], costs(options, table))
        return
    columns = ("step, µs", "tokens a run", "drafts: runs, tokens true", "gain", "half of the turns", "same")
    table = Table(("text", "temperature", *columns))
    if options.equal:
        table = Table(("text", "temperature", "tokens", "drafts", "differ", "from the border", "rows apart"))
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            path, text = Path(folder, "quick.txl"), Path(folder, "text.npy")
            random_bundle(path, TINY, [8, 5, 1], 16, same_length=True)
            np.save(text, np.tile(random_tokens(TINY["vocab_size"], (40,)), 40))
            options.case = [("quick", path, text)]
        for name, bundle, text in options.case:
            model = txl_runtime.load(bundle, threads=options.threads)
            ids = text_of(model, Path(text))
            if options.equal:
                every[name] = equal(name, model, ids, options.equal, table)
            else:
                turns, number = (2, 32) if options.quick else (options.turns, NEW)
                every[name] = gains(name, model, ids, turns, number, table)
    finish("lookup", options, [table], every)


if __name__ == "__main__":
    main()
