"""Time Transformer-XL's evaluation beside a vanilla model that recomputes its context for every token, as Table 9 does.

    python benchmarks/cpu/evaluation_speedup.py [--lengths 800 1800 2800 3800] [--engine bundle torch] [--plot FILE.png]

Table 9 of the Transformer-XL paper (Dai et al. 2019) says by attention length how many times longer a vanilla
Transformer (Al-Rfou et al. 2018) takes than Transformer-XL to evaluate a token. The vanilla model predicts every token
from a window of that length, which it computes anew and moves by one token. Transformer-XL feeds segments, and keeps a
memory of that length.

Here both models have 12 layers, d_model 512, 8 heads, inner 2048 and random weights, and run in turns on one machine.
The recurrent model has attn_type 0 and M = the attention length, and scores segments of 64. The vanilla model has
attn_type 2 and M 0; for each token it runs one window of the attention length, with the softmax of the last position
only. `--engine bundle` runs both as bundles. `--engine torch` runs both in eager PyTorch, the recurrent model in the
layout of the released code.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import txl_runtime
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_runtime.model import Model

from benchmarks.shared.models import TINY, random_bundle, random_tokens, shape, weights_of
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log
from txl_deploy.bench.competitor import BundleCompetitor, fill
from txl_deploy.bench.competitors.hidden import TimeFirstHidden
from txl_deploy.bench.competitors.shared_layers import SharedLayers
from txl_deploy.bench.timing import Timed, Work, interleave
from txl_deploy.plotting import check_plot, draw

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
MODEL = shape(12, 512, 8, 64, 2048, 204)
SEGMENT = 64


def works_of_bundles(recurrent: Model, vanilla: Model) -> dict[str, Work]:
    """Return the calls to time with this project's runtime, by name: score a segment, run a window, feed a token."""
    segments, windows = BundleCompetitor("r", recurrent), BundleCompetitor("v", vanilla)
    decoding = BundleCompetitor("d", recurrent)
    for competitor in (segments, decoding):
        fill(competitor, recurrent)
    segment = random_tokens(recurrent.manifest.vocab_size, (4, 1, recurrent.segment_lengths[0] + 1))
    window = random_tokens(vanilla.manifest.vocab_size, (4, 1, vanilla.segment_lengths[0]))
    return {
        "recurrent": lambda index: segments.score(segment[index % 4]),
        "vanilla": lambda index: windows.next_token(window[index % 4]),
        "recurrent, token by token": lambda index: decoding.logprobs(segment[index % 4, :, :1]),
    }


def works_of_torch(recurrent: Model, vanilla: Model) -> dict[str, Work]:
    """Return the calls to time in eager PyTorch, by name: score a segment, run a window."""
    m, v = recurrent.manifest, vanilla.manifest
    eager = TimeFirstHidden(SharedLayers(m.config, m.dialect, m.memory_length, weights_of(recurrent)), 1)
    plain = PaperModel(v.config, v.dialect, 0, weights_of(vanilla))
    fill(eager, recurrent)
    segment = random_tokens(recurrent.manifest.vocab_size, (4, 1, recurrent.segment_lengths[0] + 1))
    window = torch.from_numpy(random_tokens(vanilla.manifest.vocab_size, (4, 1, vanilla.segment_lengths[0])))
    return {
        "recurrent": lambda index: eager.score(segment[index % 4]),
        "vanilla": lambda index: plain(window[index % 4], plain.initial_memory()),
    }


ENGINES: dict[str, Callable[[Model, Model], dict[str, Work]]] = {"bundle": works_of_bundles, "torch": works_of_torch}


def measure(
    folder: Path, length: int, engines: list[str], quick: bool, threads: int, seconds: float
) -> dict[str, Timed]:
    """Time all calls of all engines for one attention length; return the times by name, e.g. "bundle recurrent"."""
    values, segment, rounds = (TINY, 4, 2) if quick else (MODEL, SEGMENT, 3)
    recurrent = random_bundle(folder / f"recurrent-{length}.txl", values, (segment, 1), length)
    vanilla = random_bundle(folder / f"vanilla-{length}.txl", values | {"attn_type": 2}, (length,), 0)
    models = tuple(txl_runtime.load(path, threads=threads) for path in (recurrent, vanilla))
    torch.set_num_threads(threads)
    results: dict[str, Timed] = {}
    for engine in engines:
        log(f"attention length {length}, {engine}")
        works = {f"{engine} {name}": work for name, work in ENGINES[engine](*models).items()}
        results |= interleave(works, rounds=rounds, slice_seconds=seconds / rounds)
    return results


def panels(points: list[dict[str, Any]], engines: list[str]) -> list[Callable[[Any], None]]:
    """Return two functions that draw the cost of a token by attention length, and the speed-up beside the paper's."""
    lengths = [point["length"] for point in points]

    def costs(axes: Any) -> None:
        for engine in engines:
            for kind, style in (("vanilla", "o--"), ("recurrent", "o-")):
                axes.plot(lengths, [point[engine][kind] for point in points], style, label=f"{kind}, {engine}")
        axes.set_yscale("log")
        axes.set_ylabel("ms per token")
        axes.set_title("Cost of one token as the context grows", loc="left")
        axes.set_xlabel("attention length")
        axes.legend()

    def speedups(axes: Any) -> None:
        for engine in engines:
            axes.plot(lengths, [point[engine]["speedup"] for point in points], "o-", label=engine)
        axes.plot(list(PAPER), list(PAPER.values()), "k^:", label="the paper, GPU, 2019")
        axes.set_ylabel("times faster")
        axes.set_title("Recurrent against vanilla evaluation", loc="left")
        axes.set_xlabel("attention length")
        axes.legend()

    return [costs, speedups]


def main() -> int:
    """Read the command line, measure every attention length, print the table, and draw the picture if asked for."""
    options = parser(__doc__)
    options.add_argument("--lengths", type=int, nargs="+", default=list(PAPER), help="attention lengths")
    options.add_argument("--engine", nargs="+", choices=ENGINES, default=["bundle"], help="what runs both models")
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture: .png or .svg; needs matplotlib")
    arguments = options.parse_args()
    if arguments.plot is not None:
        check_plot(arguments.plot)
    lengths = [8, 16] if arguments.quick else arguments.lengths
    segment, seconds = (4, 0.05) if arguments.quick else (SEGMENT, arguments.seconds)
    columns = ("attention length", "engine", "recurrent, ms/token", "vanilla, ms/token", "times faster", "paper")
    table, points, document = Table((*columns, "recurrent by single tokens, ms")), [], {}
    for length in lengths:
        with tempfile.TemporaryDirectory() as folder:
            timed = measure(Path(folder), length, arguments.engine, arguments.quick, arguments.threads, seconds)
        point: dict[str, Any] = {"length": length}
        for engine in arguments.engine:
            recurrent = timed[f"{engine} recurrent"].times.p50 / segment
            vanilla, single = timed[f"{engine} vanilla"].times.p50, timed.get(f"{engine} recurrent, token by token")
            point[engine] = {"recurrent": recurrent, "vanilla": vanilla, "speedup": vanilla / recurrent}
            paper = f"{PAPER[length]:,}×" if length in PAPER else None
            alone = None if single is None else single.times.p50
            table.add(length, engine, recurrent, vanilla, f"{vanilla / recurrent:,.0f}×", paper, alone)
        points.append(point)
        document[str(length)] = {"point": point, "timed": timed}
    finish("evaluation_speedup", arguments, [table], document)
    if arguments.plot is not None:
        draw(arguments.plot, panels(points, arguments.engine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
