"""Measure what a datastore gains on a text over K, T and W, how many neighbours clusters find, and a search's cost.

    python benchmarks/cpu/datastore.py BUNDLE STORE HELDOUT [--tokens 20000] [--plot FILE.png]
    python benchmarks/cpu/datastore.py BUNDLE STORE HELDOUT --cost 100000 1000000 10000000

STORE is what `txl-deploy datastore build BUNDLE TEXT -o STORE` made. Each position's neighbours are searched once, and
the curves are computed from these. `--cost` times searches of one query at each number of rows, in turns with the
model's step of one token: the store's rows, repeated with noise where there are fewer.
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
"""Searches that are timed at each number of rows."""
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def losses(nll: np.ndarray, far: np.ndarray, hits: np.ndarray, temperature: float, weights: Any) -> list[float]:
    """Return bits per token for each weight, from the model's nll [n], distances [n, K] and hits [n, K].

    For example, nll [1000] and 8 neighbours: distances and hits [1000, 8].
    """
    shares = np.exp((far[:, :1] - far) / temperature)
    results = (shares * hits).sum(1) / shares.sum(1)
    with np.errstate(divide="ignore"):
        return [
            float(-np.log2(weight * results + (1 - weight) * np.exp(-nll.astype(np.float64))).mean())
            for weight in weights
        ]


def gain(model: txl_runtime.Model, store: Path, ids: np.ndarray) -> dict[str, Any]:
    """Return the curves, and the recall of the store's search against a comparison with all rows.

    For example, ids [20000].
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
    """Return the nearest rows by comparison with all rows, [n, count], in float64: queries [2, 512] give e.g.
    [2, 8].
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
    """Return processor time of one query by the number of rows, in ms, and of a step of the model in turns with it.

    For example, sizes 100000 and 1000000.
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
    """Return this process's largest resident memory in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def panel(result: dict[str, Any]) -> Callable[[Any], None]:
    """Return a function that draws bits per token over W for each K at its best T, and the model alone."""

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
    """Measure, and print JSON."""
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
