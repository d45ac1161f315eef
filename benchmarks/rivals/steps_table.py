"""Make one table of decode steps and segments of 64: bundles and native steps, an older checkout's bundles, rivals.

    python benchmarks/rivals/steps_table.py --work FOLDER [--before CHECKOUT] --prepare
    python benchmarks/rivals/steps_table.py --work FOLDER [--before CHECKOUT] --out FOLDER [--threads 1 2]
                                            [--model NAME …] [--memory M …] [--batch B …] [--against WAYS]
    python benchmarks/rivals/steps_table.py --reprint FILE.json …

A cell of the table is a model, M, B and a number of threads. In each cell, every way to run the model is first compared
with the fp32 bundle over chained segments, until the memory is full. Then all ways that agree run in turns. With
--prepare the script does everything but the timing, and keeps bundles, exported and compiled files, so that the machine
has to be quiet only for the second command. A cell is written to --out as soon as it is measured.

Each checkout exports the same random weights in fp32, int8 and int4. This checkout's bundles are opened in every way of
`LOADS`, and compiled by `build --target native`, with keys and values in each precision of --native that the native
step supports. Bundles of --before run in a process of that checkout, all other ways in this process. To see the effect
of the separate process, name this checkout as --before. `torch_forms` and `plain_exports` describe the rivals. On a
processor without bfloat16, openvino-bf16 runs only if --against names it.

"CPU" is the median over rounds of a step's processor time, of all threads together. "of fp32" is the median of the
rounds' ratios to the fp32 bundle. With 2 threads, read the wall time: a thread that waits is busy, and so counts as
processor time. The floor is the number of bytes that a step has to read, as `txl-deploy bench` counts them, divided by
the read bandwidth, which every round measures. "of the floor" is the floor divided by the CPU time with 1 thread, and
by the wall time with more threads.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import txl_runtime
from msgspec import Struct
from plain_exports import emulates_bf16
from torch_forms import FORMS, forms
from turns import Slice, Timed, in_turns, ratio
from txl_engines.native import build_native
from txl_runtime.errors import TxlError, UsageError, one_line
from txl_runtime.native.opening import Cache

from benchmarks.shared.models import TINY, WT103, shape
from benchmarks.shared.results import finish, parser, store
from benchmarks.shared.tables import Table, log
from txl_deploy.bench.competitor import BundleCompetitor, Competitor, Maker, fill
from txl_deploy.bench.competitors.agreement import agree
from txl_deploy.bench.floor import HostBandwidth, floor_of
from txl_deploy.bench.works import Works

sys.path.append(str(Path(__file__).parents[1] / "compare"))
from asking import asked
from bit_equality import environment_of

ROOT = Path(__file__).parents[2]
OURS, LEFT_OUT = "bundle fp32", "left out"
PRECISIONS = ("fp32", "int8", "int4")
CACHES: tuple[Cache, ...] = get_args(Cache)
LOADS: dict[str, dict[str, Any]] = {
    "": {},
    " (small pages)": {"huge_pages": False},
}
"""Further arguments of `load`, by the suffix of the way's name; a way is left out if `load` lacks the parameter."""
RIVALS = "torch-kv,torch-bf16,torch-compile,onnx-kv,openvino"
MODELS: dict[str, dict[str, Any]] = {
    "12x512": shape(12, 512, 8, 64, 2048, 204),
    "4x192": shape(4, 192, 6, 32, 768, 256),
    "wt103": shape(16, 410, 10, 41, 2100, 267_735, cutoffs=WT103, same_length=True, clamp_length=400),
    "tiny": TINY,
}
MEMORIES = {"12x512": (160, 640, 2100), "4x192": (128,), "wt103": (150, 640), "tiny": (7,)}
BATCHES = (1, 8, 16)
SHORT = [("12x512", 640, 1), ("12x512", 160, 1), ("12x512", 2100, 1), ("wt103", 150, 1)]
SHORT += [("4x192", 128, 1), ("4x192", 128, 8), ("4x192", 128, 16)]
"""Cells that are measured without --model, --memory and --batch, in 20 minutes on two cores: model, M and B."""
EXPORT = """import json, pathlib, sys
from benchmarks.shared.models import random_bundle
random_bundle(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2]))"""
RATE = 50e9
"""The assumed operations per second of one thread, to estimate the time of a cell."""


class Cell(Struct, frozen=True):
    """A cell of the table: a model, M, B and a number of threads, measured together."""

    model: str
    memory: int
    batch: int
    threads: int

    @property
    def name(self) -> str:
        """Return the start of the names of the cell's files, e.g. "12x512-m640-b1", for any number of threads."""
        return f"{self.model}-m{self.memory}-b{self.batch}"

    def seconds(self, ways: int, rounds: int, turn: float) -> float:
        """Estimate the seconds of a cell, without exports and compilers: comparisons, and turns.

        Args:
            ways: the number of ways.
            rounds: the number of rounds.
            turn: the seconds of a turn.
        """
        size = MODELS[self.model]
        inside, words = size["n_head"] * size["d_head"], size["d_model"] * size["vocab_size"]
        layer = (4 * inside + 2 * size["d_inner"]) * size["d_model"] + 3 * (self.memory + 64) * inside
        segment = 128 * self.batch * size["n_layer"] * layer / RATE / self.threads
        compared = 2 * (self.memory / 64 + 6) * segment + 640 * self.batch * words / RATE
        return float(ways * (compared + rounds * (max(turn, 4 * segment) + turn + 0.2)))


class Found(Struct, frozen=True, kw_only=True):
    """The figures of a cell.

    Attributes:
        gb_per_second: the median read bandwidth over the rounds; None if nothing was timed.
        timed: the times by kind of work and by way.
        sizes: the bytes that a step has to read, by kind of work and by way.
        ways: for each way, the code that runs and its difference from the fp32 bundle; or "left out" and the reason.
    """

    cell: Cell
    gb_per_second: float | None
    timed: dict[str, dict[str, Timed]]
    sizes: dict[str, dict[str, int]]
    ways: dict[str, tuple[str, str]]


class Native(BundleCompetitor):
    """A copy of a bundle that runs the native step; the copy is made and compiled if it is missing."""

    def __init__(self, name: str, path: Path, cache: Cache, threads: int, bf16: bool = False) -> None:
        copy = path.with_name(f"{path.stem}-native-{'bf16-' if bf16 else ''}{cache}.txl")
        if not copy.exists():
            log(f"    compiles {copy.name}")
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                build_native(shutil.copytree(path, Path(folder) / copy.name), cache, bf16=bf16)
                (Path(folder) / copy.name).rename(copy)
        super().__init__(name, txl_runtime.load(copy, "native", threads=threads))
        self._cache, self._bf16 = cache, bf16
        if self.precision == "fp32" and (bf16 or cache != "fp32"):
            self.precision = "bf16" if bf16 else "fp16"

    def step_bytes(self, length: int) -> int:
        parts, values = floor_of(self._bundle, length), {"fp32": 1, "fp16": 2, "int8": 4}
        kept = {"memory", "positions"}
        return sum(
            size // (values[self._cache] if part in kept else 2 if self._bf16 else 1) for part, size in parts.items()
        )


class Before(BundleCompetitor):
    """A bundle of the checkout --before, which this process opens only to compare outputs; `slices` are timed in a
    process of that checkout.
    """

    def __init__(self, name: str, path: Path, source: Path, threads: int) -> None:
        super().__init__(name, txl_runtime.load(path, threads=threads))
        self._path, self._source, self._threads = path, source, threads
        self.description = "bundle and runtime of --before, in a process of its own"

    @contextmanager
    def slices(self) -> Iterator[Callable[[str], Slice]]:
        """Start a process that opens the bundle and fills its memory; yield a function that returns a work's slices."""
        script = ROOT / "benchmarks" / "compare" / "old_against_new.py"
        child = ("--child", str(self._path), "--threads", str(self._threads))
        with asked([sys.executable, str(script), str(self._source), *child], self._source, "of --before") as ask:
            ask({"work": "load"})  # this waits until the process is ready

            def run(work: str, seconds: float) -> tuple[float, list[float]]:
                answer = ask({"work": work, "seconds": seconds})
                return 1e6 * answer["cpu"] / answer["calls"], [answer["median"] / 1e3]

            yield lambda work: partial(run, work)


def bundle_of(cell: Cell, precision: str, source: Path, folder: Path) -> Path:
    """Return the path of a cell's bundle in a folder; let the checkout `source` export the bundle if it is missing.

    Raises:
        UsageError: the checkout did not export the bundle.
    """
    path = folder.resolve() / f"{cell.name}-{precision}.txl"
    if not path.exists():
        log(f"    {source} exports {path.name}")
        folder.mkdir(parents=True, exist_ok=True)
        inputs = {
            "values": MODELS[cell.model],
            "lengths": (4, 1) if cell.model == "tiny" else (64, 1),
            "memory_length": cell.memory,
            "batch_size": cell.batch,
            "precision": precision,
        }
        command = [sys.executable, "-c", EXPORT, str(path), json.dumps(inputs)]
        done = subprocess.run(
            command, cwd=source, env=environment_of(source), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UsageError(f"{source} did not export {path.name}: {done.stderr.strip().splitlines()[-1]}")
    return path


def bundles(
    cell: Cell, precisions: Sequence[str], before: Path | None, work: Path, caches: Sequence[Cache] = ()
) -> dict[str, Maker]:
    """Return functions by name that make the competitors of a cell: bundles of both checkouts, and native steps.

    Args:
        cell: the cell.
        precisions: of the bundles.
        before: the older checkout; None without one.
        work: the folder for bundles.
        caches: precisions of the native steps' keys and values.
    """
    takes = inspect.signature(txl_runtime.load).parameters

    def ours(name: str, precision: str, how: dict[str, Any]) -> Competitor:
        path = bundle_of(cell, precision, ROOT, work / "bundles")
        return BundleCompetitor(name, txl_runtime.load(path, threads=cell.threads, **how))

    def compiled(name: str, precision: str, cache: Cache, bf16: bool = False) -> Competitor:
        return Native(name, bundle_of(cell, precision, ROOT, work / "bundles"), cache, cell.threads, bf16)

    def older(name: str, precision: str, source: Path) -> Competitor:
        return Before(name, bundle_of(cell, precision, source, work / "before"), source, cell.threads)

    makers: dict[str, Maker] = {}
    for precision in precisions:
        for more, how in LOADS.items():
            if how.keys() <= takes.keys():
                name = f"bundle {precision}{more}"
                makers[name] = partial(ours, name, precision, how)
        for cache in caches:
            name = f"native {precision}, K and V {cache}"
            makers[name] = partial(compiled, name, precision, cache)
            if precision == "fp32":
                name = f"native bf16, K and V {cache}"
                makers[name] = partial(compiled, name, precision, cache, True)
        if before is not None:
            name = f"before {precision}"
            makers[name] = partial(older, name, precision, before)
    makers.pop(OURS, None)
    return makers


def measure(cell: Cell, arguments: argparse.Namespace, work: Path) -> Found:
    """Compare all ways of a cell with the fp32 bundle, and time those that agree, in turns.

    Raises:
        TxlError: the fp32 bundle cannot be exported or opened.
    """
    makers = bundles(cell, arguments.precision, arguments.before, work, arguments.native)
    works = Works(txl_runtime.load(bundle_of(cell, "fp32", ROOT, work / "bundles"), threads=cell.threads))
    rivals, left_out = forms(arguments.against, works.model, cell.threads, work / cell.name)
    ways: dict[str, Competitor] = {OURS: works.ours}
    text = {name: (LEFT_OUT, why) for name, why in left_out.items()}
    for name, make in (makers | rivals).items():
        log(f"  {name}")
        try:
            other = make()
            result = agree(works.ours, other, works.model)
        except Exception as error:  # exporters and compilers raise any error; the other ways are still timed
            text[name] = LEFT_OUT, f"{type(error).__name__}: {one_line(error)}"[:300]
            log(f"    left out: {text[name][1]}")
        else:
            ways[name], reached = other, result.kl if result.measure == "kl" else result.max_abs
            text[name] = other.description, f"{result.measure} {reached:.1e}, at most {result.limit:g}"
    fill(works.ours, works.model)  # a comparison that failed may have left the bundle's memory half full
    tasks = [] if arguments.prepare else [task for task in works.tasks if task.kind != "score"]
    bandwidth, timed = HostBandwidth(cell.threads), dict[str, dict[str, Timed]]()
    with ExitStack() as stack:
        away = {
            name: stack.enter_context(way.slices()) for name, way in ways.items() if isinstance(way, Before) and tasks
        }
        for task in tasks:
            log(f"  time {task.kind}")
            here = {name: works.call(way, task) for name, way in ways.items() if name not in away}
            there = {name: slices(task.kind) for name, slices in away.items()}
            timed[task.kind] = in_turns(here, arguments.rounds, arguments.seconds, there, bandwidth.measure)
    return Found(
        cell=cell,
        gb_per_second=bandwidth.gb_per_second,
        timed=timed,
        sizes={t.kind: {name: way.step_bytes(t.segment_length) for name, way in ways.items()} for t in tasks},
        ways={OURS: (works.ours.description, "")} | text,
    )


def tables(found: list[Found]) -> list[Table]:
    """Return a table of the steps' times, and a table of the ways: the code that runs, or why a way was left out."""
    cells = ("model", "M", "B", "threads")
    steps = Table((*cells, "work", "way", "CPU ms", "of fp32", "wall ms", "MB", "floor ms", "of the floor"))
    ways = Table((*cells, "way", "what runs", "from the fp32 bundle"))
    for one in found:
        cell = msgspec.structs.astuple(one.cell)
        for kind, timed in one.timed.items():
            for name, way in timed.items():
                size, times, speed = one.sizes[kind][name], ratio(way, [timed[OURS]]), one.gb_per_second or 0.0
                floor = size / speed / 1e6
                share = f"{1e3 * floor / (way.median if one.cell.threads == 1 else way.p50):.0%}"
                steps.add(*cell, kind, name, way.median / 1e3, f"{times:.2f}", way.p50 / 1e3, size / 1e6, floor, share)
        for name, text in one.ways.items():
            ways.add(*cell, name, *text)
    return [steps, ways]


def _arguments() -> argparse.Namespace:
    options = parser(
        __doc__,
        seconds=None,
        quick="a tiny model and one short round: proves that it runs, measures nothing",
        threads="of each measurement, one after the other (default 1)",
        several_threads=True,
    )
    options.add_argument("--model", nargs="+", choices=[*MODELS], help="default: 7 cells, in 20 minutes")
    options.add_argument("--memory", type=int, nargs="+", metavar="M", help="of these lengths alone")
    options.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="of the bundles")
    options.add_argument("--batch", type=int, nargs="+", metavar="B", help="numbers of sequences (default 1 8 16)")
    rivals = RIVALS if emulates_bf16() else f"{RIVALS},openvino-bf16"
    options.add_argument("--against", default=rivals, help=f"some of {', '.join(FORMS)}, separated by commas; or none")
    options.add_argument(
        "--native", nargs="*", choices=CACHES, default=CACHES, help="K and V of compiled steps; or none"
    )
    options.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout, whose bundles are rows")
    options.add_argument("--work", type=Path, metavar="FOLDER", help="keep bundles, exported and compiled files here")
    options.add_argument("--prepare", action="store_true", help="export, compile and compare, and time nothing")
    options.add_argument("--rounds", type=int, default=5, help="turns of every way (default 5)")
    options.add_argument("--seconds", type=float, default=0.2, help="of a turn (default 0.2)")
    options.add_argument("--reprint", type=Path, nargs="+", metavar="FILE", help="print stored runs; the latest counts")
    arguments = options.parse_args()
    arguments.against = tuple(arguments.against.split(",")) if arguments.against != "none" else ()
    if arguments.quick:
        arguments.model, arguments.precision, arguments.batch = ["tiny"], ["fp32"], [2]
        arguments.rounds, arguments.seconds = 1, 0.01
    return arguments


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """Return the cells that the command line chooses; `SHORT` if it chooses none."""
    chosen = SHORT
    if arguments.model or arguments.memory or arguments.batch:
        models = arguments.model or [name for name in MODELS if name != "tiny"]
        every = ((name, m, b) for name in models for m in MEMORIES[name] for b in arguments.batch or BATCHES)
        chosen = [cell for cell in every if not arguments.memory or cell[1] in arguments.memory]
    return [Cell(*cell, threads) for threads in arguments.threads for cell in chosen]


def main() -> int:
    """Read the command line, measure every cell, and print the tables; or print the tables of stored runs."""
    arguments = _arguments()
    if arguments.reprint is not None:
        stored = [msgspec.json.decode(file.read_bytes()) for file in arguments.reprint]
        newest = {one.cell: one for run in stored for one in msgspec.convert(run["results"], list[Found])}
        print(
            "\n\n".join(table.markdown() for table in tables([*newest.values()])), stored[-1]["conditions"], sep="\n\n"
        )
        return 0
    cells, result = cells_of(arguments), list[Found]()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(work.resolve() / "compiled"))
        for number, cell in enumerate(cells):
            ways = (
                1
                + len(bundles(cell, arguments.precision, arguments.before, work, arguments.native))
                + len(arguments.against)
            )
            left = sum(one.seconds(ways, arguments.rounds, arguments.seconds) for one in cells[number:])
            log(f"{cell.name}, threads {cell.threads}: {len(cells) - number} cells, about {left / 60:.0f} minutes")
            try:
                result.append(measure(cell, arguments, work))
            except TxlError as error:
                log(f"  left out: {error}")
            store("steps_table", arguments, tables(result), result)
    finish("steps_table", arguments, tables(result), result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
