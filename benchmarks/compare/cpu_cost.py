"""Time Python's part of a step on the CPU, with an engine that does nothing, in one checkout or in two.

    python benchmarks/compare/cpu_cost.py [../old-checkout] [--rounds 12] [--seconds 0.2] [--out FILE]

The script loads a model as an application does, and replaces its engine by one whose calls return at once. The time
that remains is the runtime's own: of the loop (`run`), and of `run`, `step` and `feed` of a stream around the loop, one
position a call. A Transformer-XL computes its log-probabilities in separate calls (a head beside the layers), which
return at once too. `host_cost.py` measures the same on a device, and makes the bundles.

Each checkout has a process of its own. The processes work in turns, and the one that begins changes with every round.
The clock is the thread's processor time over blocks of calls. A round's figure is the 10 % quantile of its blocks. The
table has medians and quartiles over the rounds, for each side, for the difference and for the ratio of new to old.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from asking import asked
from bit_equality import runtime_of
from host_cost import VOCABULARY, export_bundles, spread, timed

from benchmarks.shared.tables import Table

MODELS = {
    "Transformer-XL, ring": ("one", "ring"),
    "Transformer-XL, rolled": ("one", "rolled"),
    "LSTM over features": ("own", "replace"),
    "GRU over tokens": ("words", "replace"),
}
"""The timed models by title: the name of a bundle that `host_cost.py` makes, of one sequence, and the update rule."""
CALLS = ("Loop.run", "Stream.run", "Stream.step", "Stream.feed")

Rounds = dict[str, dict[str, list[float]]]
"""Nanoseconds of one call by row of the table, side and round: {"Stream.run, GRU over tokens": {"old": [9100.0]}}."""


class NoEngine:
    """An engine whose calls do nothing, in place of a `txl_runtime.host.engine.Engine`, which it is made from."""

    def __init__(self, engine: Any) -> None:
        self.description, self.least_rows = "an engine that does nothing", engine.least_rows
        self.calls = 0

    def bind(self, program: Any, inputs: Any, outputs: Any) -> Callable[[], None]:
        """Return a function that counts its calls and does nothing else."""

        def call() -> None:
            self.calls += 1

        return call

    def kept(self, program: Any) -> Any:
        """Return (): the engine keeps no state."""
        return ()

    def run(self, program: Any, inputs: Any) -> Any:
        """Raise an error: a loop calls this only for programs of open sizes, and no timed model has such a program."""
        raise NotImplementedError(f"{program.name} leaves sizes open, expected a program of fixed sizes")

    def release_pages(self) -> None:
        """Do nothing: the engine has no pages."""


def opened(runtime: Any, bundle: Path, update: str) -> Any:
    """Open a model, and replace its engine by `NoEngine`."""
    model = runtime.load(bundle, backend="cpu", threads=1, update=update)
    model.backend.engine = NoEngine(model.backend.engine)
    return model


def works(model: Any) -> Mapping[str, Callable[[], object]]:
    """Return the timed functions of a model by name, e.g. "Stream.run"; each can be called without end."""
    draws, number = np.random.default_rng(0), itertools.count()
    (name, entry), *_ = ((e.name, e) for e in model.manifest.inputs if e.role in ("tokens", "feature"))
    if entry.role == "tokens":
        arrays: Any = draws.integers(0, VOCABULARY, (64, 1, 1), np.int32)
    else:
        arrays = draws.normal(size=(64, 1, 1, entry.shape[-1])).astype(np.float32)
    inputs, counts = [{name: array} for array in arrays], np.ones(1, np.int32)
    loop, stream = model.open_loop(), model.stream()
    results: dict[str, Callable[[], object]] = {
        "Loop.run": lambda: loop.run(inputs[next(number) % 64], counts),
        "Stream.run": lambda: stream.run(inputs[next(number) % 64]),
    }
    if entry.role == "tokens":
        results["Stream.step"] = lambda: stream.step(arrays[next(number) % 64])
        results["Stream.feed"] = lambda: stream.feed(arrays[next(number) % 64])
    else:
        results["Stream.feed"] = lambda: stream.feed(inputs[next(number) % 64])
    return results


def rows() -> list[str]:
    """Return the names of all rows of the table, e.g. "Stream.run, GRU over tokens"."""
    return [
        f"{call}, {model}" for model in MODELS for call in CALLS if (call, model) != (CALLS[2], "LSTM over features")
    ]


def measure(options: argparse.Namespace, files: Path) -> Rounds:
    """Start one process for each side, and return the nanoseconds of each timed call; the sides take turns."""
    sources = {side: source for side, source in (("old", options.old), ("new", options.new)) if source}
    results: Rounds = {row: {side: [] for side in sources} for row in rows()}
    with ExitStack() as stack:
        command = [sys.executable, __file__, "--files", str(files), "--child"]
        ask = {
            side: stack.enter_context(asked([*command, str(source)], source, side)) for side, source in sources.items()
        }
        for turn, row in itertools.product(range(options.rounds), results):
            for side in list(sources)[:: 1 if turn % 2 == 0 else -1]:
                results[row][side].append(ask[side]({"row": row, "seconds": options.seconds})["tenth"])
    return results


def table(found: Rounds) -> Table:
    """Return a table in microseconds; of two sides, with the differences and the ratios of the new to the old."""
    sides = list(next(iter(found.values())))
    more = ("new - old", "new / old") if len(sides) == 2 else ()
    table = Table(("µs of processor time (quartiles), 1 thread", *sides, *more))
    for row, times in found.items():
        values = [np.array(times[side]) / 1e3 for side in sides]
        cells = [spread(value, 2) for value in values]
        if more:
            cells += [spread(values[1] - values[0], 2), spread(values[1] / values[0], 3)]
        table.add(row, *cells)
    return table


def _answer(source: Path, files: Path) -> None:
    """Read requests from stdin, time the named call with the packages of this process, and print each result."""
    runtime, calls, engines = runtime_of(source), {}, {}
    for name, (bundle, update) in MODELS.items():
        model = opened(runtime, files / f"{bundle}.txl", update)
        for call, work in works(model).items():
            calls[f"{call}, {name}"], engines[f"{call}, {name}"] = work, model.backend.engine
    for line in sys.stdin:
        request = json.loads(line)
        engine = engines[request["row"]]
        result = timed(calls[request["row"]], request["seconds"], partial(getattr, engine, "calls"))
        if not result["calls"]:
            raise SystemExit(f"{request['row']} did not call its engine, expected that it does")
        print(json.dumps(result), flush=True)


def main() -> int:
    """Read the command line; measure, or answer requests as the process of one side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, nargs="?", metavar="OLD_CHECKOUT", help="what to compare with")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[2], help="by default this checkout")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side (default 12)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a slice (default 0.2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every round's figures here, as JSON")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="bundles of an earlier run, made if missing")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        _answer(options.child, options.files)
        return 0
    for source in filter(None, (options.old, options.new)):
        if not (source / "runtime" / "txl_runtime").is_dir():
            parser.error(f"{source} has no runtime/txl_runtime, expected a checkout of this project")
    with tempfile.TemporaryDirectory() as folder:
        files = options.files or Path(folder)
        files.mkdir(parents=True, exist_ok=True)
        if not (files / "words.txl").exists():
            export_bundles(files)
        result = measure(options, files)
    print(table(result).markdown())
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
