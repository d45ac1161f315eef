"""Compare the runtimes in Python, in Node and in WebAssembly on the same bundles: time, downloads of a page, memory.

    python benchmarks/compare/javascript.py [--rounds 12] [--seconds 0.2] [--steps 20000] [--out FOLDER]

All sides fill their memory and then run segments of one position with all outputs on one thread, in turns. WebAssembly
runs in Node too, which has Chromium's compiler. The clock counts the processor time of all threads, so waiting for a
core costs nothing. The table has each side's median over all rounds, and the median and quartiles of the rounds' ratios
to Python. The time to the first token is that of a fresh process, and includes its start and WebAssembly's compilation.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from asking import asked
from c_against_python import POLICIES, Case, timed, turns
from host_cost import spread
from txl_runtime.bundle.reading import open_bundle

from benchmarks.shared.models import random_bundle, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log

ROOT = Path(__file__).parents[2]
MODULES = ROOT / ".js" / "node_modules"
WASM = ("onnxruntime-web/dist/ort.wasm.min.mjs", "onnxruntime-web/dist/ort-wasm-simd-threaded.mjs")
WASM_BINARY = "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm"


def cases(folder: Path, quick: bool) -> list[Case]:
    """Export the bundles into a folder, and return the cases to time: Transformer-XLs once for each update rule."""
    results = [Case("GRU", POLICIES / "policy-1", "replace", 1)]
    if quick:
        return results
    voice = folder / "voice.txl"
    words = ["export", f"{ROOT}/samples/plain_c/voice.py:build", "-o", str(voice), "--segment-length", "1"]
    command = [sys.executable, "-m", "txl_deploy", *words, "--batch-size", "1"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    large = random_bundle(folder / "4x192.txl", shape(4, 192, 6, 32, 768, 256), (64, 1), 128)
    results.append(Case("voice", voice, "replace", 1))
    for name, bundle in (("tiny (int8)", ROOT / "samples" / "tiny.txl"), ("4 × 192", large)):
        results += [Case(f"{name}, {update}", bundle, update, 1) for update in ("ring", "rolled")]
    return results


def commands(case: Case) -> dict[str, list[str]]:
    """Return the command of each side for a case's bundle."""
    told = [str(case.bundle), case.update]
    side = [shutil.which("node") or "node", str(Path(__file__).with_name("javascript_side.js")), str(MODULES)]
    results = {"Python": [sys.executable, str(Path(__file__).with_name("python_side.py")), *told]}
    results["Node"] = [*side, "node", *told]
    return results if case.update == "ring" else results | {"wasm": [*side, "wasm", *told]}


def started(case: Case, rounds: int) -> dict[str, list[float]]:
    """Return ms of processor time from the start of a fresh process to the end of a first step, by side and round."""
    starting = commands(case)
    results: dict[str, list[float]] = {side: [] for side in starting}
    for sides in turns(rounds, tuple(starting)):
        for side in sides:
            done = subprocess.run([*starting[side], "first"], check=True, capture_output=True, text=True)
            results[side].append(json.loads(done.stdout)["seconds"] * 1e3)
    return results


def table(title: str, figures: dict[str, dict[str, list[float]]]) -> Table:
    """Return a table of each side's median, and of the median and quartiles of its ratios to Python in each round."""
    table = Table((title, "Python", "Node", "wasm", "Node / Python (quartiles)", "wasm / Python (quartiles)"))
    for row, sides in figures.items():
        ratios = {side: np.array(sides[side]) / np.array(sides["Python"]) for side in sides}
        medians = [float(np.median(sides[side])) if side in sides else "–" for side in ("Python", "Node", "wasm")]
        table.add(row, *medians, *(spread(ratios[side], 2) if side in ratios else "–" for side in ("Node", "wasm")))
    return table


def size(*paths: Path) -> tuple[float, float]:
    """Return kB of all files together, as they are and packed by gzip."""
    data = [path.read_bytes() for path in paths]
    return sum(map(len, data)) / 1e3, sum(len(gzip.compress(part)) for part in data) / 1e3


def downloads(chosen: list[Case]) -> Table:
    """Return a table of kB that a page downloads: the runtime's module, the engine, and the files of each bundle."""
    table = Table(("kB that a page downloads", "plain", "gzip"))
    sources = [ROOT / "runtime/js/index.js", *(ROOT / "runtime/js/src").glob("*.js")]
    table.add("txl-runtime", *size(*sources))
    table.add("onnxruntime-web, script", *size(*(MODULES / name for name in WASM)))
    table.add("onnxruntime-web, wasm", *size(MODULES / WASM_BINARY))
    for case in chosen:
        if case.update != "ring":
            m = open_bundle(case.bundle).manifest
            named = {"manifest.json", m.weights, *([m.vocabulary] if m.vocabulary else [])}
            named |= {program.file for program in m.programs if program.update == case.update}
            table.add(case.name, *size(*(case.bundle / name for name in sorted(named))))
    return table


def memory(chosen: list[Case], steps: int) -> Table:
    """Return a table of MB of resident memory after a tenth of the steps, and after all steps."""
    table = Table(("MB resident", "after a tenth", f"after {steps:,} steps"))
    for case in chosen:
        for side, command in commands(case).items():
            if side != "Python":
                with asked(command, ROOT, side) as ask:
                    held = [
                        ask({"positions": 1, "calls": calls})["resident"] for calls in (steps // 10, steps * 9 // 10)
                    ]
                table.add(f"{case.name}, {side}", *(each / 1e6 for each in held))
    return table


def main() -> int:
    """Read the command line, measure every case, and print the tables."""
    option_parser = parser(__doc__, seconds=0.2, threads="not asked: all sides have one")
    option_parser.set_defaults(threads=1)
    option_parser.add_argument("--rounds", type=int, default=12, help="turns of each side (default 12)")
    option_parser.add_argument(
        "--steps", type=int, default=20_000, help="steps over which memory is watched (default 20000)"
    )
    options = option_parser.parse_args()
    if not MODULES.exists():
        raise SystemExit(f"{MODULES}: missing, expected ONNX Runtime for Node and browsers; make js")
    rounds, seconds = (1, 0.01) if options.quick else (options.rounds, options.seconds)
    steps, starts = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        chosen = cases(Path(folder), options.quick)
        for case in chosen:
            log(case.name)
            steps[case.name] = timed(commands(case), case, rounds, seconds)
            starts[case.name] = started(case, min(rounds, 4))
        tables = [
            table("µs of processor time of one step", steps),
            table("ms of processor time to the first token", starts),
            downloads(chosen),
            memory(chosen, 20 if options.quick else options.steps),
        ]
    finish("javascript", options, tables, {"steps": steps, "starts": starts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
