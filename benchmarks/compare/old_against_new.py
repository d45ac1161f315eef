"""Time two checkouts in turns, to see by how much a refactoring is slower or faster.

    python benchmarks/compare/old_against_new.py OLD --bundles demo/model.txl policy.txl [--update rolled]
    python benchmarks/compare/old_against_new.py OLD --models FOLDER [--each] [--threads 1 2] [--only NAME …]

With `--models` the old checkout exports a set of models, unless they are in the folder already: Transformer-XLs of 12
layers of width 512 with 160 and 640 rows of memory, and the LSTM and the GTrXL of samples/policy with 1 and 16
sequences. Both sides open these bundles. With `--each`, each side opens the bundles that its own checkout exported.
With `--bundles`, `--new-bundles` names the bundles that the new side opens instead.

Each side is a process that opens a bundle and does a slice of work for each request. While one process works, the other
sleeps; the one that begins changes with every round. The table has the median and the quartiles of the rounds' ratios,
because changes on the machine during a round affect both sides. A round in which other processes used more than 5 % of
the machine is left out, if at least three quiet rounds remain. Both processes start anew after some rounds, because the
place of a process in memory changes its times by a few per cent as long as it lives. The time of fresh processes to the
first token, and their peak memory, are measured in turns too.

A Transformer-XL decodes, reads prompts and scores, with its memory full. All other models run their shortest and their
longest segments. A model of at least 4 independent sequences also runs its shortest segments with a quarter of the
sequences: the first ones, every fourth one, and a stream of only a quarter. `--update` chooses the update rule.
Python's share of a step is measured twice, by a clock around ONNX Runtime's `run_with_iobinding`: the time of a step
outside these calls (caches are as cold as the engine leaves them), and the time of a step whose calls do nothing
(caches are warm).

On a machine with other work, --processor and one thread give steadier ratios, since waiting for a core is not counted.

Run a checkout against a copy of itself to see the noise. Both processes run this file, which uses only the documented
names of `txl_runtime` and the manifest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from asking import Ask, asked
from bit_equality import environment_of, runtime_of

TOKENS, ARRAYS = ("decode", "prefill", "score"), ("shortest segment", "longest segment")
"""The timed kinds of work of a Transformer-XL, and the timed kinds of work of all other models."""
FIRST, SPREAD, FEW = "shortest, first quarter runs", "shortest, every fourth runs", "shortest, stream of a quarter"
"""The timed kinds of work in which a quarter of a model's sequences runs."""
PYTHON = ("outside the engine", "without an engine")
LOADS = ("import", "load", "first token", "load to first token", "peak memory")
UNITS = dict.fromkeys((*TOKENS, *ARRAYS, FIRST, SPREAD, FEW), ("ms", 1e-6)) | dict.fromkeys(PYTHON, ("µs", 1e-3))
UNITS |= dict.fromkeys(LOADS, ("ms", 1e3)) | {"peak memory": ("MB", 1e-6)}
WARM_UP_CALLS, LEAST_CALLS = 3, 3
REST = 0.1
"""Seconds between two slices of work, because the threads of an engine spin for a moment after its last call."""
FOREIGN, LEAST_QUIET = 0.05, 3
"""A round is quiet if other processes used at most 5 % of the machine; with 3 quiet rounds, the others are left out."""
SIDES = ("old", "new")

MEMORIES, BATCHES, POLICIES = (160, 640), (1, 16), ("lstm", "gtrxl")
"""Memory rows, batch sizes and policies of the models that `--models` exports."""

Rounds = dict[str, list[dict[str, float]]]
"""For each measured quantity and round: one value per side, and the share of the machine that other processes used,
e.g. {"decode": [{"old": 1.1e6, "new": 1.0e6, "foreign": 0.01}]}.
"""


def measure(bundles: dict[str, Path], sources: dict[str, Path], threads: int, options: argparse.Namespace) -> Rounds:
    """Measure all kinds of work, and all quantities of fresh processes, of one model.

    Args:
        bundles: the bundle of each side.
        sources: the checkout of each side.
        threads: of the engines.
        options: the command line.
    """
    results: Rounds = {}
    for wrap, works in ((False, works_of(json.loads((bundles["old"] / "manifest.json").read_text()))), (True, PYTHON)):
        for first in range(0, options.rounds, options.renew):
            with ExitStack() as stack:
                ask = {
                    side: stack.enter_context(_child(sources[side], bundles[side], threads, options, wrap))
                    for side in SIDES
                }
                for turn in range(first, min(first + options.renew, options.rounds)):
                    for work in works:
                        values = {"foreign": 0.0}
                        for side in _order(turn):
                            time.sleep(REST)
                            machine = _Machine()
                            answer = ask[side]({"work": work, "seconds": options.seconds})
                            values["foreign"] = max(values["foreign"], machine.foreign(answer["cpu"]))
                            values[side] = answer["median"]
                        results.setdefault(work, []).append(values)
    for turn in range(options.loads + 1):
        rows, share = {}, 0.0
        for side in _order(turn):
            machine = _Machine()
            with _child(sources[side], bundles[side], threads, options, False) as ask_fresh:
                rows[side] = ask_fresh({"work": "load"})
                share = max(share, machine.foreign(rows[side]["cpu"]))
        for name in LOADS if turn else ():  # turn 0 is not counted, since it reads the files into the system's cache
            results.setdefault(name, []).append({side: rows[side][name] for side in SIDES} | {"foreign": share})
    return results


def works_of(manifest: dict[str, Any]) -> tuple[str, ...]:
    """Return the kinds of work to time with a bundle of this manifest, e.g. ("decode", "prefill", "score")."""
    if "fill" in manifest["counters"]:
        return TOKENS
    works = ARRAYS[: len({program["segment_length"] for program in manifest["programs"]} - {0})]
    independent = manifest["streams"] == "independent" and not manifest["joint"]
    return (*works, FIRST, SPREAD, FEW) if independent and manifest["batch_size"] >= 4 else works


class _Machine:
    """The load of the whole machine since this object was made."""

    def __init__(self) -> None:
        self._started, self._busy = time.perf_counter(), self._seconds()

    def foreign(self, own: float) -> float:
        """Return the share of the machine that other processes used, e.g. 0.05; `own` are our processor seconds."""
        capacity = (os.cpu_count() or 1) * (time.perf_counter() - self._started)
        return max(0.0, (self._seconds() - self._busy - own) / capacity)

    @staticmethod
    def _seconds() -> float:
        """Return the processor seconds of all processes so far: everything except idle time and waiting for disks."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _order(turn: int) -> tuple[str, ...]:
    return SIDES if turn % 2 == 0 else SIDES[::-1]


@contextmanager
def _child(source: Path, bundle: Path, threads: int, options: argparse.Namespace, wrap: bool) -> Iterator[Ask]:
    """Start one side's process, which imports its checkout's packages and opens the bundle; wait until it is ready."""
    command = [sys.executable, __file__, str(source), "--child", str(bundle), "--threads", str(threads)]
    command += ["--update", options.update] if options.update else []
    command += ["--processor"] * options.processor
    with asked(command + ["--wrap"] * wrap, source, f"of {source}") as ask:
        ask({"work": "load"})  # the answer says that the process is ready
        yield ask


def export_models(source: Path, folder: Path, only: Sequence[str] | None) -> dict[str, Path]:
    """Export the missing models of `--models` with a checkout's packages; return the paths of all by name."""
    names = [f"xl-{memory}" for memory in MEMORIES]
    names += [f"{policy}-{batch}" for policy in POLICIES for batch in BATCHES]
    bundles = {name: folder / f"{name}.txl" for name in only or names}
    for name, path in bundles.items():
        if not path.exists():
            command = [sys.executable, __file__, str(source), "--export", str(path.resolve())]
            if subprocess.run(command, env=environment_of(source), check=False).returncode:
                raise SystemExit(f"{source} did not export {name}; its message is above")
    return bundles


def export_model(source: Path, path: Path) -> None:
    """Export the model that the file's name says, e.g. xl-160.txl; its random weights are the same in each checkout."""
    import torch
    from txl_export import export

    from benchmarks.shared.models import random_bundle, shape

    runtime_of(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind, number = path.stem.split("-")
    if kind == "xl":
        random_bundle(path, shape(12, 512, 8, 64, 2048, 204), (64, 1), int(number))
    else:
        torch.manual_seed(0)
        policy = f"{source.resolve() / 'samples' / 'policy' / kind}.py:build"
        export(policy, path, segment_length=(1,), batch_size=int(number), verify=False)


def table(title: str, found: Rounds) -> str:
    """Return a markdown table of all measured quantities of one bundle."""
    head = ("", "unit", "old", "new", "new / old", "quartiles", "rounds", "best old", "best new")
    lines = [f"**{title}**", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, rounds in found.items():
        unit, factor = UNITS[name]
        quiet = [values for values in rounds if values["foreign"] <= FOREIGN]
        used = quiet if len(quiet) >= LEAST_QUIET else rounds
        text = f"{len(quiet)} quiet of {len(rounds)}" + ("" if used is quiet else ", all used")
        old, new = ([values[side] * factor for values in used] for side in SIDES)
        low, middle, high = np.percentile(np.array(new) / old, (25, 50, 75))
        figures = [f"{value:.4g}" for value in (statistics.median(old), statistics.median(new), min(old), min(new))]
        cells = (name, unit, *figures[:2], f"{middle:.3f}", f"{low:.3f} … {high:.3f}", text, *figures[2:])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class _Engine:
    """A clock around ONNX Runtime's calls, which can also make these calls do nothing (`idle`)."""

    def __init__(self, clock: Callable[[], int]) -> None:
        import onnxruntime

        self.nanoseconds, self.calls, self.idle = 0, 0, False
        real = onnxruntime.InferenceSession.run_with_iobinding

        def wrapped(*arguments: Any, **more: Any) -> None:
            self.calls += 1
            if self.idle:
                return
            started = clock()
            real(*arguments, **more)
            self.nanoseconds += clock() - started

        onnxruntime.InferenceSession.run_with_iobinding = wrapped


class _Worker:
    """The work of a side's process: a model, and a stream whose memory is full."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._clock = time.process_time_ns if options.processor else time.perf_counter_ns
        started = self._clock()
        runtime = runtime_of(options.old)
        imported = self._clock()
        self._engine = _Engine(self._clock) if options.wrap else None
        model = runtime.load(options.child, backend="cpu", threads=options.threads[0], update=options.update)
        loaded = self._clock()
        manifest = json.loads((options.child / "manifest.json").read_text())
        batch, self._stream, self._numbers = manifest["batch_size"], model.stream(), count()
        self._draws, self._inputs = np.random.default_rng(0), manifest["inputs"]
        self._works, lengths = works_of(manifest), model.segment_lengths
        if self._works == TOKENS:
            first = np.zeros((batch, 1), np.int32)
            next(self._stream.generate(first, 1, temperature=0))
        else:
            self._stream.run(self._arrays(lengths[-1], batch))
        ended = self._clock()
        times = {"import": imported - started, "load": loaded - imported, "first token": ended - loaded}
        self._times = {name: spent / 1e9 for name, spent in (times | {"load to first token": ended - imported}).items()}
        ways = {"prefill": lengths[0], "score": lengths[0] + 1, "longest segment": lengths[0]}
        self._inputs_of = {work: self._many(ways.get(work, lengths[-1]), batch) for work in self._works}
        self._counts = dict.fromkeys(self._works)
        if FEW in self._works:
            self._few, self._inputs_of[FEW] = model.stream(batch // 4), self._many(lengths[-1], batch // 4)
            places = np.arange(batch)
            self._counts |= {FIRST: (places < batch // 4) * lengths[-1], SPREAD: (places % 4 == 1) * lengths[-1]}
        for _ in range(max(model.memory_length or 0, 64) // lengths[0] + 2):
            self._do(next((work for work in self._works if work in ways), self._works[0]))
        for work in self._works:
            self._do(work)

    def _many(self, length: int, batch: int) -> list[dict[str, Any]]:
        return [self._arrays(length, batch) for _ in range(64)]

    def _arrays(self, length: int, batch: int) -> dict[str, Any]:
        """Return random inputs of one segment by name."""
        results: dict[str, Any] = {}
        for given in self._inputs:
            if given["role"] in ("valid", "fill", "head"):
                continue
            places = {"B": batch, "L": length + given["lookahead"]}
            sizes = [places.get(size, size) for size in given["shape"]]
            most = given["vocab"] or 2
            whole = given["dtype"] != "float32"
            drawn = self._draws.integers(0, most, sizes) if whole else self._draws.normal(size=sizes)
            results[given["name"]] = drawn.astype(given["dtype"])
        return results

    def answer(self, work: str, seconds: float = 0) -> dict[str, float]:
        """Return the figures that a request asks for: of the process's start (`work` "load"), or of a slice of work."""
        if work == "load":
            lines = Path("/proc/self/status").read_text().splitlines()
            peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
            return self._times | {"peak memory": peak, "cpu": time.process_time()}
        cpu, engine = time.process_time(), self._engine
        if engine is None:
            samples = self._slice(lambda: self._do(work), seconds)
        else:
            before, engine.idle = engine.calls, work == "without an engine"
            samples = self._slice(lambda: self._do(self._works[0]), seconds)
            engine.idle = False
            if engine.calls == before:
                raise SystemExit("a step did not call InferenceSession.run_with_iobinding, expected that it does")
        calls = len(samples) + WARM_UP_CALLS
        return {"median": statistics.median(samples), "cpu": time.process_time() - cpu, "calls": calls}

    def _do(self, work: str) -> None:
        given = self._inputs_of[work][next(self._numbers) % 64]
        if work == "decode":
            self._stream.step(given["tokens"])
        elif work == "prefill":
            next(self._stream.generate(given["tokens"], 1, temperature=0))
        elif work == "score":
            self._stream.score(given["tokens"])
        elif work == FEW:
            self._few.run(given)
        else:
            self._stream.run(given, self._counts[work])

    def _slice(self, call: Callable[[], None], seconds: float) -> Sequence[int]:
        """Call a function for some seconds; return the ns of each call, without the time in the engine if clocked."""
        for _ in range(WARM_UP_CALLS):
            call()
        samples: list[int] = []
        until = time.perf_counter_ns() + int(seconds * 1e9)
        while time.perf_counter_ns() < until or len(samples) < LEAST_CALLS:
            before = self._engine.nanoseconds if self._engine else 0
            started = self._clock()
            call()
            took = self._clock() - started
            samples.append(took - (self._engine.nanoseconds - before if self._engine else 0))
        return samples


def _chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, dict[str, Path]]:
    """Return the bundles to measure by title, e.g. {"xl-160": {"old": path, "new": path}}; export missing models."""
    if options.models is not None:
        old = export_models(options.old, options.models / "old", options.only)
        new = export_models(options.new, options.models / "new", options.only) if options.each else old
        return {name: {"old": path, "new": new[name]} for name, path in old.items()}
    others = options.new_bundles or options.bundles
    if len(others) != len(options.bundles):
        parser.error(f"--new-bundles names {len(others)}, expected {len(options.bundles)}, one for each of --bundles")
    pairs = zip(options.bundles, others, strict=True)
    return {str(path): {"old": path, "new": other} for path, other in pairs}


def main() -> int:
    """Read the command line; measure every bundle, or work as the process of one side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT", help="what to compare with")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[2], help="by default this checkout")
    parser.add_argument("--bundles", type=Path, nargs="+", default=[Path("demo/model.txl")])
    parser.add_argument("--new-bundles", type=Path, nargs="+", help="what new opens instead, one for each of --bundles")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="export a set of models into it, instead")
    parser.add_argument("--each", action="store_true", help="with --models: each checkout opens what itself exported")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="with --models: these, e.g. xl-160 lstm-16 gtrxl-4")
    parser.add_argument("--update", help="update rule of the streams (default: what load takes)")
    parser.add_argument(
        "--processor", action="store_true", help="processor time instead of time: for one thread on a busy machine"
    )
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side (default 12)")
    parser.add_argument("--renew", type=int, default=3, help="rounds after which both start anew (default 3)")
    parser.add_argument("--loads", type=int, default=7, help="fresh processes of each side (default 7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a slice (default 1)")
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="of the engines, one after the other")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every round's figures here, as JSON")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--wrap", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--export", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.export is not None:
        export_model(options.old, options.export)
        return 0
    if options.child is not None:
        worker = _Worker(options)
        for line in sys.stdin:
            print(json.dumps(worker.answer(**json.loads(line))), flush=True)
        return 0
    sources = {"old": options.old, "new": options.new}
    results = {}
    for title, bundles in _chosen(parser, options).items():
        for threads in options.threads:
            name = f"{title}, {threads} thread{'s' * (threads > 1)}"
            results[name] = measure(bundles, sources, threads, options)
            print(table(name, results[name]), end="\n\n", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
