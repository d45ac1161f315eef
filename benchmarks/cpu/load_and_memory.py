"""Measure the time from loading to the first token, and peak memory; 12 layers, d_model 512, M 640.

    python benchmarks/cpu/load_and_memory.py [--out FOLDER]

Each of these figures is measured in a fresh process, for both ways to load a bundle: at full speed, where the engine
packs a copy of the weights, and lean, where the engine uses the mapped file as it is. Steps of both are timed in turns.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import txl_runtime
from txl_report.schema.measurement import Row

from benchmarks.shared.models import TINY, random_bundle, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log
from txl_deploy.bench.competitor import BundleCompetitor, fill
from txl_deploy.bench.measuring import time_tasks
from txl_deploy.bench.processes import measure_footprint, measure_load
from txl_deploy.bench.works import Works

MODEL = shape(12, 512, 8, 64, 2048, 204)
MEGABYTE = 1e6


def speeds(path: Path, threads: int, seconds: float) -> tuple[Row, ...]:
    """Time decoding and prefill of a bundle that is loaded at full speed and lean, in turns."""
    both = []
    for name in ("full speed", "lean"):
        model = txl_runtime.load(path, threads=threads, lean=name == "lean")
        competitor = BundleCompetitor(name, model)
        fill(competitor, model)
        both.append(competitor)
    works = Works(model)
    tasks = [task for task in works.tasks if task.kind != "score"]
    return time_tasks(works, both, tasks, None, seconds, 5)


def main() -> int:
    """Read the command line, measure both ways to load, and print the tables."""
    arguments = parser(__doc__).parse_args()
    values, longest, memory_length = (TINY, 4, 7) if arguments.quick else (MODEL, 64, 640)
    loads = Table(("", "load, s", "first token, s", "together", "without hashes", "from starting Python"))
    peaks = Table(("", "peak, MB", "settled", "private", "before loading", "weights", "state", "peak / weights"))
    document: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = random_bundle(Path(folder) / "model.txl", values, (longest, 1), memory_length)
        for name in ("full speed", "lean"):
            log(name)
            load = measure_load(path, arguments.threads, 1 if arguments.quick else 5, lean=name == "lean")
            memory = measure_footprint(path, arguments.threads, lean=name == "lean")
            document[name] = {"load": load, "memory": memory}
            loads.add(name, load.load, load.first_token, load.total, load.without_hashes, load.process)
            parts = (memory.peak, memory.settled, memory.private, memory.before, memory.weights, memory.state)
            ratio = "not measured on this system" if memory.peak is None else f"{memory.peak / memory.weights:.2f}"
            peaks.add(name, *(None if size is None else size / MEGABYTE for size in parts), ratio)
        rows = speeds(path, arguments.threads, 0.05 if arguments.quick else arguments.seconds)
    steps = Table(("work", "", "ms p50", "p90", "full speed is faster"))
    for row in rows:
        steps.add(f"{row.task} L {row.segment_length}", row.competitor, row.ms.p50, row.ms.p90, f"{row.ratio:.2f}×")
    finish("load_and_memory", arguments, [loads, peaks, steps], document | {"speed": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
