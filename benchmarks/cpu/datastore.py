"""Measure a datastore's gain on a text for several K, T and W, the recall of its clusters, and the cost of a search.

    python benchmarks/cpu/datastore.py BUNDLE STORE HELDOUT [--tokens 20000] [--plot FILE.png]
    python benchmarks/cpu/datastore.py BUNDLE STORE HELDOUT --cost 100000 1000000 10000000

`txl-deploy datastore build BUNDLE TEXT -o STORE` makes the STORE. K is the number of neighbours, T the temperature of
their shares, and W the weight of the neighbours beside the model. The neighbours of each position are searched once,
and all curves are computed from these neighbours. `--cost` times searches of one query in stores of each given number
of rows, in turns with steps of one token. If STORE has fewer rows, its rows are repeated with noise.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import txl_runtime
from txl_export.token_files import read_ids
from txl_runtime.errors import UsageError

from txl_deploy.plotting import draw
from txl_deploy.retrieval.folder import check_files, mapped, read_header
from txl_deploy.retrieval.searching import Clustered, Exact, Search, nearest, write_index
from txl_deploy.retrieval.store import feature_columns

NEIGHBOURS = (1, 4, 16, 32, 64, 128)
TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
TURNS = 200
"""The number of searches, and of steps, that are timed for each number of rows."""
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def losses(nll: np.ndarray, far: np.ndarray, hits: np.ndarray, temperature: float, weights: Any) -> list[float]:
    """Return the mean bits per token for each weight W, e.g. [5.1, 5.0] of (0.0, 0.1).

    Args:
        nll: the model's negative log-likelihoods in nats, [n], e.g. [1000].
        far: the distances of each position's K neighbours, nearest first, [n, K], e.g. [1000, 8].
        hits: True for neighbours with the right token, [n, K].
        temperature: T.
        weights: the values of W.
    """
    shares = np.exp((far[:, :1] - far) / temperature)
    results = (shares * hits).sum(1) / shares.sum(1)
    with np.errstate(divide="ignore"):
        return [
            float(-np.log2(weight * results + (1 - weight) * np.exp(-nll.astype(np.float64))).mean())
            for weight in weights
        ]


def gain(model: txl_runtime.Model, store: Path, ids: np.ndarray) -> dict[str, Any]:
    """Return bits per token for all K, T and W on the tokens `ids` [n], e.g. [20000], and the figures of the search.

    The recall compares the 32 neighbours that the search finds with those of a comparison with all rows.
    """
    header = read_header(store, model.manifest.model_id)
    check_files(store, header)
    features, tokens = mapped(store, header)
    search: Search = Clustered(store, features.shape) if header.clustered else Exact(features)
    columns = feature_columns(model)[header.feature]
    queries, nll = model.stream(1).features(ids[None, :-1])[0, :, columns], model.stream(1).score(ids[None])[0]
    began = time.perf_counter()
    parts = [
        nearest(search, features, queries[first : first + 256], max(NEIGHBOURS), (0, 0))
        for first in range(0, len(queries), 256)
    ]
    seconds = time.perf_counter() - began
    rows, far = (np.concatenate(each) for each in zip(*parts, strict=True))
    hits = np.asarray(tokens)[rows] == ids[1:, None]
    curves = {
        f"K {count}, T {heat:g}": losses(nll, far[:, :count], hits[:, :count], heat, WEIGHTS)
        for count in NEIGHBOURS
        for heat in TEMPERATURES
    }
    some = np.random.default_rng(0).choice(len(queries), min(100, len(queries)), replace=False)
    exact, result = brute(features, queries[some], 32), nearest(search, features, queries[some], 32, (0, 0))[0]
    recall = np.mean([len(set(a) & set(b)) / 32 for a, b in zip(result.tolist(), exact.tolist(), strict=True)])
    return {
        "rows": header.rows,
        "feature": header.feature,
        "tokens": len(ids) - 1,
        "bits_without": float(nll.mean(dtype=np.float64) / np.log(2)),
        "recall_32": float(recall),
        "search_ms": 1e3 * seconds / len(queries),
        "median_distance": float(np.median(far[:, 0])),
        "weights": WEIGHTS,
        "curves": curves,
    }


def brute(features: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    """Return the numbers of the `count` nearest rows by comparison with all rows in float64, [n, count].

    For example, [2, 8] for queries [2, 512] and a count of 8.
    """
    best_far, best = np.full((len(queries), 0), np.inf), np.zeros((len(queries), 0), np.int64)
    for first in range(0, len(features), 1 << 16):
        some = features[first : first + (1 << 16)].astype(np.float64)
        far = np.square(some).sum(1) - 2 * queries.astype(np.float64) @ some.T
        best_far = np.concatenate([best_far, far], 1)
        best = np.concatenate([best, np.broadcast_to(np.arange(first, first + len(some)), far.shape)], 1)
        order = np.argsort(best_far, axis=1, kind="stable")[:, :count]
        best_far, best = np.take_along_axis(best_far, order, 1), np.take_along_axis(best, order, 1)
    return best


def cost(
    model: txl_runtime.Model, store: Path, ids: np.ndarray, sizes: Sequence[int], turns: int = TURNS
) -> list[dict[str, Any]]:
    """Time a search of one query and a step of one token, in turns, for stores of several sizes.

    Args:
        model: the model.
        store: the datastore.
        ids: tokens of a text, [n], at least `turns`.
        sizes: numbers of rows, e.g. (100000, 1000000); stores of more than 100000 rows get an index.
        turns: the number of timed searches.

    Returns:
        For each size the median processor time of both in ms, and the seconds and memory that the index takes.
    """
    features = mapped(store, read_header(store, model.manifest.model_id))[0]
    columns = feature_columns(model)[read_header(store, model.manifest.model_id).feature]
    queries, result = model.stream(1).features(ids[None, : turns + 1])[0, :, columns], list[dict[str, Any]]()
    for rows in sizes:
        with tempfile.TemporaryDirectory(dir=store.parent) as folder:
            place = Path(folder)
            held = np.memmap(place / "features.f16", "<f2", "w+", shape=(rows, features.shape[1]))
            draws = np.random.default_rng(0)
            for first in range(0, rows, len(features)):
                some = features[: rows - first].astype(np.float32)
                if first:
                    some += draws.normal(size=some.shape).astype(np.float32) * 0.05
                held[first : first + len(some)] = some.astype(np.float16)
            held.flush()
            began, before = time.perf_counter(), memory()
            if rows > 10**5:
                write_index(place / "index.faiss", held, lambda count: None)
                built = time.perf_counter() - began
                search: Search = Clustered(place, held.shape)
            else:
                search, built = Exact(held), 0.0
            stream, searching, stepping = model.stream(1), list[float](), list[float]()
            for turn in range(turns):
                began = time.process_time()
                nearest(search, held, queries[turn : turn + 1], 32, (0, 0))
                searching.append(time.process_time() - began)
                began = time.process_time()
                stream.step(ids[None, turn : turn + 1])
                stepping.append(time.process_time() - began)
            result.append(
                {
                    "rows": rows,
                    "search": type(search).__name__,
                    "search_ms": 1e3 * float(np.median(searching)),
                    "step_ms": 1e3 * float(np.median(stepping)),
                    "index_seconds": built,
                    "resident_mb": memory(),
                    "resident_before_mb": before,
                    "index_mb": (place / "index.faiss").stat().st_size / 1e6 if rows > 10**5 else 0,
                }
            )
            print(json.dumps(result[-1]), flush=True)
            del held, search
    return result


def memory() -> float:
    """Return the largest resident memory so far of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def panel(result: dict[str, Any]) -> Callable[[Any], None]:
    """Return a function that draws bits per token over W: a curve for each K at its best T, a line for no store."""

    def drawn(axes: Any) -> None:
        for count in NEIGHBOURS:
            curves = {heat: result["curves"][f"K {count}, T {heat:g}"] for heat in TEMPERATURES}
            heat = min(curves, key=lambda each: min(curves[each]))
            axes.plot(WEIGHTS, curves[heat], marker="o", markersize=3, label=f"K {count}, T {heat:g}")
        axes.axhline(result["bits_without"], color="black", linewidth=1, linestyle="--", label="without a store")
        axes.set_xlabel("W, the share of the neighbours")
        axes.set_ylabel("bits per token")
        axes.legend(fontsize=8)

    return drawn


def main() -> None:
    """Read the command line, measure the gain or the cost, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bundle", "store", "heldout"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text, from its beginning")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--cost", type=int, nargs="+", metavar="ROWS", default=())
    options = parser.parse_args()
    model = txl_runtime.load(options.bundle, threads=1)
    if options.heldout.suffix == ".npy":
        ids = read_ids(options.heldout)[: options.tokens]
    elif model.vocabulary is None:
        raise UsageError(f"{options.bundle}: has no vocabulary, expected one to read the text with, or ids in .npy")
    else:
        ids = model.vocabulary.encode(options.heldout.read_bytes())[: options.tokens]
    if options.cost and len(ids) < TURNS:
        parser.error(
            f"{options.heldout}: holds {len(ids)} tokens, expected at least {TURNS} for --cost; give a longer text"
        )
    if options.cost:
        cost(model, options.store, ids, options.cost)
        return
    result = gain(model, options.store, ids)
    print(json.dumps(result, indent=1))
    if options.plot:
        draw(options.plot, [panel(result)])


if __name__ == "__main__":
    main()
