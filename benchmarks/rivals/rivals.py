"""Time bundles of 14 kinds of steps beside other ways to run the steps on a CPU: PyTorch, and ONNX Runtime by hand.

    python benchmarks/rivals/rivals.py [--only NAME …] [--ways WAY …] [--threads 1 2] [--work FOLDER] [--out FOLDER]
    python benchmarks/rivals/rivals.py --reprint FILE.json …

Each step is exported once. In one process, its bundle takes turns with the module in PyTorch, with the file that
`torch.onnx.export` makes of the module, and with the publisher's file, if there is one; `ways.py` describes these ways.
First the outputs of each way are compared with the bundle's over chained segments; a way that differs is not timed. A
figure is the median over rounds of a step's processor time, of all threads together. A ratio is the median of the
rounds' ratios. With 2 threads, read the wall time: a thread of ONNX Runtime that waits is busy, and so counts as
processor time.

`--work` keeps bundles and exported files in a folder, under the step's name, and uses those that it finds there.
`--bundles` takes the bundles from a second such folder. `--outside` names the folder with checkouts of GTCRN and DTLN.
`--reprint` prints the tables of runs that `--out` has stored.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import txl_runtime
from all_steps import made, names
from foreign_steps import AbsentError
from msgspec import Struct
from operator_times import OperatorTimes, operator_times
from timed_step import Step
from turns import Timed, in_turns, ratio
from txl_export import export
from txl_runtime.errors import TxlError, one_line
from txl_runtime.model import Model
from ways import BY_HAND, NAMES, TORCH_WAYS, makers

from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log
from txl_deploy.bench.competitor import BundleCompetitor, Competitor
from txl_deploy.bench.competitors.agreement import agree
from txl_deploy.bench.works import Works

OURS = "bundle"


class Row(Struct, frozen=True, kw_only=True):
    """The measurements of one step with one number of threads.

    Attributes:
        ways: the times by way; the bundle's way is `OURS`.
        left_out: the reason for each way that was not timed.
        profiles: the times of operators in ONNX Runtime, for the bundle and for the best way by hand.
    """

    step: str
    threads: int
    ways: dict[str, Timed]
    left_out: dict[str, str]
    profiles: dict[str, OperatorTimes] = {}

    def against(self, names: tuple[str, ...]) -> float | None:
        """Return the bundle's time divided by that of the fastest of the named ways; None if none was timed."""
        return ratio(self.ways[OURS], [self.ways[name] for name in names if name in self.ways])


def bundle_of(name: str, step: Step, folder: Path) -> Path:
    """Return the path of a step's bundle in a folder; export it without verification if it is missing."""
    path = folder / f"{name}.txl"
    if not path.exists():
        log(f"export {name}")
        folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"batch_size": step.batch, "verify": False}
        if not isinstance(step.source, Path) and any("L" in entry.shape for entry in step.source.inputs):
            options["segment_length"] = (step.length,)
        export(step.source, path, **options)
    return path


def measure(name: str, step: Step, bundle: Path, folder: Path, threads: int, options: argparse.Namespace) -> Row:
    """Compare all ways to run one step with its bundle, and time those that agree, in turns.

    Args:
        name: the step's name.
        step: the step.
        bundle: the path of its bundle.
        folder: the folder for exported files.
        threads: of each way.
        options: the command line.
    """
    works = Works(_opened(bundle, threads))
    (task,) = works.tasks
    others: dict[str, Competitor] = {}
    opening: dict[str, Callable[[], Competitor]] = {OURS: lambda: BundleCompetitor(OURS, _opened(bundle, threads))}
    left_out: dict[str, str] = {}
    for way, make in makers(options.ways, step, works.model, folder, threads).items():
        log(f"{name}, {threads} threads: {way}")
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                other = make()
                agree(works.ours, other, works.model)
        except Exception as error:  # exporters and compilers raise any error; the other ways are still timed
            left_out[way] = f"{type(error).__name__}: {one_line(error)}"
            log(f"  left out: {left_out[way][:300]}")
        else:
            others[way], opening[way] = other, make
    calls = {OURS: works.call(works.ours, task)} | {way: works.call(other, task) for way, other in others.items()}
    timed = in_turns(calls, options.rounds, options.seconds)
    row = Row(step=name, threads=threads, ways=timed, left_out=left_out)
    slower = row.against(BY_HAND)
    if options.profile is None or slower is None or slower <= options.profile:
        return row
    best = min((way for way in BY_HAND if way in timed), key=lambda way: timed[way].median)
    results = {
        way: operator_times(
            opening[way], lambda other: works.call(other, task), max(100, min(2000, int(2e5 / timed[way].p50)))
        )
        for way in (OURS, best)
    }
    return msgspec.structs.replace(row, profiles=results)


def _opened(bundle: Path, threads: int) -> Model:
    return txl_runtime.load(bundle, threads=threads)


def tables(rows: list[Row]) -> list[Table]:
    """Return the tables of processor time and of wall time, of the ways that were left out, and of profiles."""
    ways = [OURS, *(name for name in NAMES if any(name in row.ways for row in rows))]
    cpu = Table(
        ("step", "threads", *ways, "bundle / best ONNX by hand", "bundle / best torch"),
        title="Processor time of a step, µs",
    )
    wall = Table(("step", "threads", *ways), title="Wall time of a step, µs: p50 (p99)")
    for row in rows:
        medians = [row.ways[name].median if name in row.ways else None for name in ways]
        ratios = [
            None if result is None else f"{result:.2f}" for result in (row.against(BY_HAND), row.against(TORCH_WAYS))
        ]
        cpu.add(row.step, row.threads, *medians, *ratios)
        spread = [f"{result.p50:.3g} ({result.p99:.3g})" if (result := row.ways.get(name)) else None for name in ways]
        wall.add(row.step, row.threads, *spread)
    left_out = Table(("step", "threads", "way", "why it was not timed"), title="Left out")
    for row in rows:
        for way, why in row.left_out.items():
            left_out.add(row.step, row.threads, way, why[:200])
    return [cpu, wall, *([left_out] if left_out.rows else []), *(_profile(row) for row in rows if row.profiles)]


def _profile(row: Row) -> Table:
    """Return a table of the operators' times in the bundle's graph beside those in the best file by hand."""
    (ours, theirs), other = row.profiles.values(), [*row.profiles][1]
    title = f"{row.step}, {row.threads} threads: bundle / {other} = {row.against((other,)):.2f} by processor time"
    table = Table(("µs", "bundle, nodes", "bundle", f"{other}, nodes", other, "difference"), title=title)
    for what, one, two in (
        ("a call", ours.call, theirs.call),
        ("the engine's run", ours.engine, theirs.engine),
        ("around it", ours.call - ours.engine, theirs.call - theirs.engine),
    ):
        table.add(what, None, one, None, two, one - two)
    names = {*ours.operators, *theirs.operators}
    none = (0.0, 0.0)
    pairs = {name: (ours.operators.get(name, none), theirs.operators.get(name, none)) for name in names}
    for name, (here, there) in sorted(pairs.items(), key=lambda pair: pair[1][1][1] - pair[1][0][1]):
        table.add(name, *here, *there, here[1] - there[1])
    return table


def _arguments() -> argparse.Namespace:
    options = parser(
        __doc__,
        seconds=0.1,
        quick="one short round: proves that it runs, measures nothing",
        threads="of each measurement (default 1)",
        several_threads=True,
    )
    options.add_argument(
        "--only", nargs="+", metavar="NAME", help=f"steps to measure, or how their names begin: {', '.join(names())}"
    )
    options.add_argument(
        "--ways",
        nargs="*",
        choices=NAMES,
        default=[w for w in NAMES if w != "torch-compile"],
        help="to measure beside the bundle; torch-compile, which takes minutes, only where it is named",
    )
    options.add_argument("--rounds", type=int, default=9, help="turns of every way (default 9)")
    options.add_argument("--work", type=Path, metavar="FOLDER", help="keep bundles and exported files here")
    options.add_argument("--bundles", type=Path, metavar="FOLDER", help="measure the bundles of this folder")
    options.add_argument("--outside", type=Path, metavar="FOLDER", help="has checkouts of gtcrn and DTLN")
    options.add_argument(
        "--profile",
        type=float,
        metavar="RATIO",
        help="list the time by operators of each step whose bundle takes more than this times the best ONNX",
    )
    options.add_argument(
        "--reprint",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="print the tables of stored runs, of which a later one has a step's newer figures, and do nothing else",
    )
    arguments = options.parse_args()
    wanted = arguments.only or names()
    if unknown := [only for only in wanted if not any(_called(name, only) for name in names())]:
        options.error(f"--only has {unknown[0]!r}, expected some of {', '.join(names())}, or how they begin")
    arguments.only = [name for name in names() if any(_called(name, only) for only in wanted)]
    arguments.ways = tuple(arguments.ways)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.01
    return arguments


def _called(name: str, only: str) -> bool:
    return name == only or name.startswith(f"{only}-")


def main() -> int:
    """Read the command line, measure every step, and print the tables; or print the tables of stored runs."""
    arguments = _arguments()
    if arguments.reprint is not None:
        stored = [msgspec.json.decode(file.read_bytes()) for file in arguments.reprint]
        kept = [row for run in stored for row in msgspec.convert(run["results"], list[Row])]
        newest = {(row.step, row.threads): row for row in kept}
        print("\n\n".join(table.markdown() for table in tables([*newest.values()])))
        print(f"\n{stored[-1]['conditions']}")
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        for name in arguments.only:
            try:
                step = made(name, arguments.outside)
                bundle = bundle_of(name, step, arguments.bundles or work)
                for threads in arguments.threads:
                    rows.append(measure(name, step, bundle, work / name, threads, arguments))
                    log("  " + "; ".join(f"{way} {timed.median:.4g}" for way, timed in rows[-1].ways.items()))
            except (AbsentError, TxlError) as error:
                log(f"{name} is left out: {error}")
    finish("rivals", arguments, tables(rows), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
