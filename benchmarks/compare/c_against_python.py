"""Time the runtime in C and the one in Python on the same bundles, in turns: their steps, their start, their memory.

    python benchmarks/compare/c_against_python.py [--rounds 12] [--seconds 0.2] [--installed PREFIX] [--out FOLDER]

The bundles are Transformer-XLs with segments of 1 and of 64 positions, and GRU policies of 1 and 16 sequences. The
sides are the processes `c_side.cpp` and `python_side.py`. Both open the same bundle on the same library of ONNX Runtime
with one thread. They fill the memory first, and then run segments with all outputs. The two processes work in turns,
and the side that begins changes with every round. The clock counts processor time, so waiting for a core costs nothing.
The table has the medians of both sides over all rounds, and the median and quartiles of the rounds' ratios. Start and
peak memory are measured in fresh processes up to the end of one step, with the start of Python itself.

The library for C is built from this checkout, which takes a minute, unless --installed names the folder of a built one.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import txl_runtime
from asking import Ask, asked
from host_cost import spread

from benchmarks.shared.models import TINY, random_bundle, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log

ROOT = Path(__file__).parents[2]
POLICIES = ROOT / "conformance" / "bundles"


class Case(NamedTuple):
    """One row of the first table: a bundle, an update rule and the number of positions in a segment."""

    name: str
    bundle: Path
    update: str
    positions: int


Figures = dict[str, dict[str, list[float]]]
"""Measurements by row of the table, side and round: {"GRU, B 1": {"C": [3.1, 3.2], "Python": [9.0, 9.1]}}."""


def cases(folder: Path, quick: bool) -> list[Case]:
    """Export the Transformer-XLs into a folder; return the cases to time: these, and the policies of this checkout."""
    sizes: Mapping[str, tuple[dict[str, Any], int]] = {
        "4 × 192": (shape(4, 192, 6, 32, 768, 256), 128),
        "12 × 512": (shape(12, 512, 8, 64, 2048, 204), 640),
    }
    if quick:
        sizes = {"tiny": (TINY, 8)}
    long, result = 4 if quick else 64, []
    for name, (values, memory) in sizes.items():
        bundle = random_bundle(folder / f"{name.replace(' ', '')}.txl", values, (long, 1), memory)
        result += [
            Case(f"{name}, {update}, {positions}", bundle, update, positions)
            for update in ("ring", "rolled")
            for positions in (1, long)
        ]
    return [*result, *(Case(f"GRU, B {b}", POLICIES / f"policy-{b}", "replace", 1) for b in (1, 16))]


def built(folder: Path, installed: Path | None) -> Path:
    """Compile `c_side.cpp` with the library, which is built first unless it is installed; return the program's path."""
    if installed is None:
        log("build the library")
        installed = folder / "installed"
        leave_out = ("-DTXL_TESTS=OFF", "-DTXL_SAMPLES=OFF")
        for command in (
            ("cmake", "-S", ROOT / "runtime" / "cpp", "-B", folder / "build", *leave_out),
            ("cmake", "--build", folder / "build", "-j", "2"),
            ("cmake", "--install", folder / "build", "--prefix", installed),
        ):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (place,) = installed.rglob("pkgconfig")
    about = ("pkg-config", "--cflags", "--libs", "txl")
    words = subprocess.run(
        about, check=True, capture_output=True, text=True, env=os.environ | {"PKG_CONFIG_PATH": str(place)}
    ).stdout
    program, source = folder / "c_side", Path(__file__).with_name("c_side.cpp")
    flags = shlex.split(os.environ.get("CXXFLAGS", "-O2"))
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run([*compiler, "-std=c++17", *flags, source, "-o", program, *words.split()], check=True)
    return program


def commands(program: Path, case: Case) -> dict[str, list[str]]:
    """Return the command of each side for a case's bundle."""
    told = [str(case.bundle), case.update]
    return {
        "C": [str(program), *told],
        "Python": [sys.executable, str(Path(__file__).with_name("python_side.py")), *told],
    }


def turns(rounds: int, sides: tuple[str, ...] = ("C", "Python")) -> list[tuple[str, ...]]:
    """Return the order of the sides in each round, e.g. [("C", "Python"), ("Python", "C")] of 2 rounds."""
    return [sides[turn % len(sides) :] + sides[: turn % len(sides)] for turn in range(rounds)]


def timed(starting: Mapping[str, list[str]], case: Case, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return µs of processor time of one segment by side and round; `starting` has the command of each side."""
    with ExitStack() as stack:
        ask: dict[str, Ask] = {
            side: stack.enter_context(asked(command, ROOT, side)) for side, command in starting.items()
        }
        memory = txl_runtime.load(case.bundle, backend="cpu").manifest.memory_length
        request = {"positions": case.positions, "calls": 1 + (memory or 0) // case.positions}
        # this first request fills the memory
        once = {side: each(request)["seconds"] / request["calls"] for side, each in ask.items()}
        calls = {side: max(1, round(seconds / max(took, 1e-7))) for side, took in once.items()}
        results: dict[str, list[float]] = {side: [] for side in ask}
        for sides in turns(rounds, tuple(starting)):
            for side in sides:
                took = ask[side]({"positions": case.positions, "calls": calls[side]})["seconds"]
                results[side].append(took / calls[side] * 1e6)
    return results


def started(program: Path, case: Case, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return ms of processor time until the first step has ended, and peak memory in MB, by side and round."""
    results: dict[str, dict[str, list[float]]] = {what: {"C": [], "Python": []} for what in ("ms", "MB")}
    for sides in turns(rounds):
        for side in sides:
            command = [*commands(program, case)[side], "first"]
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            results["ms"][side].append(answer["seconds"] * 1e3)
            results["MB"][side].append(answer["peak"] / 1e6)
    return results


def table(title: str, figures: Figures) -> Table:
    """Return a table with both sides' medians, and with the median and the quartiles of the rounds' ratios."""
    table = Table((title, "C", "Python", "Python / C (quartiles)"))
    for row, sides in figures.items():
        c, python = np.array(sides["C"]), np.array(sides["Python"])
        table.add(row, float(np.median(c)), float(np.median(python)), spread(python / c, 2))
    return table


def main() -> int:
    """Read the command line, measure every case, and print the tables."""
    option_parser = parser(__doc__, seconds=0.2, threads="not asked: both sides have one")
    option_parser.set_defaults(threads=1)
    option_parser.add_argument("--rounds", type=int, default=12, help="turns of each side (default 12)")
    option_parser.add_argument("--installed", type=Path, metavar="PREFIX", help="where the library was installed")
    options = option_parser.parse_args()
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")
    os.environ["TXL_ONNXRUNTIME"] = str(library)
    steps, starts, peaks = Figures(), Figures(), Figures()
    with tempfile.TemporaryDirectory() as folder:
        rounds, seconds = (1, 0.01) if options.quick else (options.rounds, options.seconds)
        chosen = cases(Path(folder), options.quick)
        program = built(Path(folder), options.installed)
        for case in chosen:
            log(case.name)
            steps[case.name] = timed(commands(program, case), case, rounds, seconds)
            if case.positions == 1:
                result = started(program, case, rounds)
                starts[case.name], peaks[case.name] = result["ms"], result["MB"]
    tables = [
        table("µs of processor time of one segment", steps),
        table("ms of processor time from start to the end of one step", starts),
        table("MB at most until then", peaks),
    ]
    finish("c_against_python", options, tables, {"steps": steps, "starts": starts, "peaks": peaks})
    return 0


if __name__ == "__main__":
    sys.exit(main())
