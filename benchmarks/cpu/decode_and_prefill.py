"""Time decoding, prefill and scoring of bundles beside the same model in PyTorch; 12 layers, d_model 512, full memory.

    python benchmarks/cpu/decode_and_prefill.py [--memory 160 640 2100] [--against torch,torch-kv,…]
                                            [--precision int8 int4] [--out FOLDER]

The script measures as `txl-deploy bench` does: all competitors run in turns in one process, and the same run measures
the machine's read bandwidth. --against names the competitors. --precision adds bundles of the same weights in low
precision.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import txl_runtime
from txl_report.schema.measurement import Measurement
from txl_runtime.errors import TxlError
from txl_runtime.listener import Silent

from benchmarks.shared.models import TINY, random_bundle, shape, weights_of
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log
from txl_deploy.bench.competitor import BundleCompetitor, Competitor
from txl_deploy.bench.competitors.agreement import compared
from txl_deploy.bench.measuring import bench
from txl_deploy.bench.works import Works

sys.path.append(str(Path(__file__).parents[1] / "rivals"))
from torch_forms import FORMS, USUAL, forms

MODEL = shape(12, 512, 8, 64, 2048, 204)
COLUMNS = (
    "M",
    "work",
    "competitor",
    "ms p50",
    "p90",
    "p99",
    "tokens/s",
    "bundle is faster",
    "MB/token",
    "GB/s",
    "of reads",
)


class _Says(Silent):
    """A listener that prints the title of each stage on stderr."""

    def stage(self, title: str, total: int | None = None) -> None:
        """Print the title of a stage; see `txl_runtime.listener.Listener`."""
        log(f"  {title}")


def measure(
    folder: Path, quick: bool, memory: int, names: tuple[str, ...], precisions: list[str], threads: int, seconds: float
) -> Measurement:
    """Export a model with one memory length, check that all competitors agree, and time them in turns.

    Args:
        folder: the folder for the bundles.
        quick: True for a tiny model.
        memory: M.
        names: the competitors in PyTorch and other runtimes.
        precisions: the low precisions of further bundles.
        threads: of every competitor.
        seconds: of timing for each competitor and kind of work.
    """
    values, longest = (TINY, 4) if quick else (MODEL, 64)
    path = random_bundle(folder / f"m{memory}.txl", values, (longest, 1), memory)
    model = txl_runtime.load(path, threads=threads)
    makers, left_out = forms(names, model, threads, folder / f"others-{memory}")
    for precision in precisions:
        low = folder / f"m{memory}-{precision}.txl"
        try:
            random_bundle(low, values, (longest, 1), memory, state=weights_of(model), precision=precision)
        except TxlError as error:
            left_out[precision] = str(error)
            continue
        makers[precision] = partial(_low, precision, low, threads)
    works = Works(model)
    others, agreement, failed = compared(works, makers, _Says())
    left_out |= failed
    return bench(
        works,
        others,
        agreement,
        threads=threads,
        seconds=seconds,
        left_out=left_out,
        processes=False,
        listener=_Says(),
    )


def _low(precision: str, path: Path, threads: int) -> Competitor:
    return BundleCompetitor(precision, txl_runtime.load(path, threads=threads))


def main() -> int:
    """Read the command line, measure every memory length, and print the tables."""
    options = parser(__doc__)
    options.add_argument("--memory", type=int, nargs="+", default=[160, 640, 2100], metavar="M")
    options.add_argument("--against", default=",".join(USUAL), help=f"some of {', '.join(FORMS)}, separated by commas")
    options.add_argument("--precision", nargs="*", default=[], choices=("int8", "int4"), help="bundles to add")
    arguments = options.parse_args()
    memories = [7] if arguments.quick else arguments.memory
    seconds = 0.05 if arguments.quick else arguments.seconds
    names = tuple(arguments.against.split(",")) if arguments.against != "none" else ()
    table, python = (
        Table(COLUMNS),
        Table(("M", "Python per decode step, µs", "share of the step", "without an engine, µs")),
    )
    reports: dict[str, Measurement] = {}
    with tempfile.TemporaryDirectory() as folder:
        for memory in memories:
            log(f"M {memory}")
            (Path(folder) / f"others-{memory}").mkdir()
            report = measure(
                Path(folder), arguments.quick, memory, names, arguments.precision, arguments.threads, seconds
            )
            reports[str(memory)] = report
            for name, why in report.left_out.items():
                log(f"{name} is left out: {why}")
            for row in report.rows:
                share = None if row.of_bandwidth is None else f"{row.of_bandwidth:.0%}"
                speed = (row.ms.p50, row.ms.p90, row.ms.p99, row.tokens_per_second, f"{row.ratio:.2f}×")
                work = f"{row.task} L {row.segment_length}"
                size = (row.bytes_per_token or 0) / 1e6
                table.add(memory, work, row.competitor, *speed, size, row.gb_per_second, share)
            if report.overhead is not None:
                result = report.overhead
                python.add(memory, result.in_step, f"{result.share:.1%}", result.without_engine)
    finish("decode_and_prefill", arguments, [table, python], reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
