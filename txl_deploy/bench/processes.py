"""Measure a bundle's time to its first result, and its memory, in separate processes.

    python -m txl_deploy.bench.processes load|memory BUNDLE OPTIONS

This command prints one JSON object; `measure_load` and `measure_footprint` run it. OPTIONS are options of
`txl_runtime.load` as a JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from txl_report.schema.measurement import BUNDLE, Footprint, LoadTime
from txl_runtime.errors import BackendError
from txl_runtime.model import load
from txl_runtime.starting import APART, environment

from txl_deploy.bench.competitor import BundleCompetitor, fill
from txl_deploy.bench.driving import random_inputs, shortest_length
from txl_deploy.bench.floor import state_bytes
from txl_deploy.bench.on_device import import_library

SAMPLE_SECONDS = 0.02
"""Seconds between two samples of a process's memory."""
DECODED = 20
"""Number of short segments that a process runs before its memory is read for the last time."""
SMAPS = Path("/proc/self/smaps")
"""Linux's list of this process's memory mappings."""


def measure_load(bundle: Path, threads: int, runs: int = 3, lean: bool = False, backend: str = "auto") -> LoadTime:
    """Load a bundle and run it once, in `runs` new processes one after the other; return the median times.

    `lean` and `backend` are options of `txl_runtime.load`.
    """
    options = {"backend": backend, "threads": threads, "lean": lean}
    _child("load", bundle, **options)  # reads the files into the system's cache
    hashed: list[dict[str, float]] = []
    unhashed: list[dict[str, float]] = []
    for _ in range(runs):
        for verify_files, rows in ((True, hashed), (False, unhashed)):
            started = time.time()
            row = _child("load", bundle, **options, verify_files=verify_files)
            rows.append(row | {"process": row["drawn_at"] - started, "total": row["load"] + row["first_token"]})

    def median(name: str, rows: list[dict[str, float]]) -> float:
        return float(np.median([row[name] for row in rows]))

    return LoadTime(
        load=median("load", hashed),
        first_token=median("first_token", hashed),
        total=median("total", hashed),
        process=median("process", hashed),
        without_hashes=median("total", unhashed),
        runs=runs,
    )


def measure_footprint(bundle: Path, threads: int, lean: bool = False, backend: str = "auto") -> Footprint:
    """Measure the memory of a new process that runs long and short segments.

    `lean` and `backend` are options of `txl_runtime.load`.
    """
    return msgspec.convert(_child("memory", bundle, backend=backend, threads=threads, lean=lean), Footprint)


def _child(what: str, bundle: Path, **options: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, what, str(bundle.absolute()), json.dumps(options)]
    done = subprocess.run(  # noqa: S603 - this very module
        command, capture_output=True, text=True, check=False, cwd=APART, env=environment()
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BackendError(
            f"a process to measure {what} ended with code {done.returncode}: {why}; expected one JSON object; "
            "try `txl-deploy selftest` on the bundle"
        ) from None
    return dict(answer)


def _load_and_draw(bundle: str, options: dict[str, Any]) -> dict[str, float]:
    started = time.perf_counter()
    model = load(bundle, **options)
    loaded = time.perf_counter()
    inputs = random_inputs(model.manifest, shortest_length(model.manifest))
    prepared = time.perf_counter()
    BundleCompetitor(BUNDLE, model).advance(inputs)
    drawn = time.perf_counter()
    return {"load": loaded - started, "first_token": drawn - prepared, "drawn_at": time.time()}


def _load_and_run(bundle: str, options: dict[str, Any]) -> Footprint:
    # imported first, so that `before` includes the memory that every process with this backend needs
    import_library(options["backend"])
    before, samples, done = resident_bytes(), [], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            resident = resident_bytes()
            if resident is not None:
                samples.append(resident[0])

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        model = load(bundle, **options)
        ours = BundleCompetitor(BUNDLE, model)
        fill(ours, model)  # runs the longest segments
        inputs = random_inputs(model.manifest, shortest_length(model.manifest))
        for _ in range(DECODED):
            ours.run(inputs)
    finally:
        done.set()
        sampler.join()
    settled, manifest = resident_bytes(), model.manifest
    of_rows = manifest.state_bytes * model.batch_size  # counts the rows that streams show; a ring has more rows
    return Footprint(
        before=before[0] if before else None,
        peak=max([*samples, settled[0]]) if settled else None,
        settled=settled[0] if settled else None,
        private=settled[1] if settled else None,
        high_water=_high_water(),
        weights=model.bundle.file(model.manifest.weights).stat().st_size,
        state=of_rows if manifest.can.count_rows else state_bytes(manifest),
    )


def resident_bytes() -> tuple[int, int] | None:
    """Return (physical memory of this process, private part of this memory) in bytes; None except on Linux.

    A page that is mapped several times counts once.
    /proc/self/smaps_rollup cannot be used: its resident size counts a page once per mapping, and its proportional size
    depends on other processes that map the same file.
    """
    try:
        lines = SMAPS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    # for each mapping: the mapped part of a file, or None for memory without a file, and the mapping's sizes
    mappings: list[tuple[tuple[str, str, int] | None, dict[str, int]]] = []
    for words in map(str.split, lines):
        if words[0][-1] != ":":
            first, last = (int(bound, 16) for bound in words[0].split("-"))
            key = None if words[4] == "0" else (words[3] + " " + words[4], words[2], last - first)
            sizes: dict[str, int] = {}
            mappings.append((key, sizes))
        elif words[0] in ("Rss:", "Private_Dirty:"):
            sizes[words[0]] = int(words[1]) * 1024
    own = 0
    of_files: Counter[tuple[str, str, int]] = Counter()
    for key, sizes in mappings:
        if key is None:
            own += sizes["Rss:"]  # includes memory that is shared without a file, which a forked process has
        else:  # a clean page belongs to the file, even if only this process maps it; a dirty page is private
            own += sizes["Private_Dirty:"]
            of_files[key] = max(of_files[key], sizes["Rss:"] - sizes["Private_Dirty:"])
    return own + of_files.total(), own


def _high_water() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def main(arguments: list[str]) -> None:
    """Run one measurement in this process, and print its result as JSON."""
    what, bundle, options = arguments
    measure = _load_and_draw if what == "load" else _load_and_run
    sys.stdout.write(msgspec.json.encode(measure(bundle, json.loads(options))).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
