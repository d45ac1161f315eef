"""Time a Transformer-XL's package in plain C beside code of the general generator and beside ONNX Runtime, in turns.

    python benchmarks/cpu/native_package.py [--memory 640] [--lengths 1 8] [--rounds 15] [--out FOLDER] [--quick]

The script packages a random model of 12 layers, d_model 512, in fp32 and int8: with the native step, as a package has
it, and in fp32 also without the native step, so that the generator writes the code. Each package is compiled with the
flags of its Makefile. The times are processor time of one thread with full memory. Each round has its own ratios to the
fp32 bundle.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import txl_runtime
from numpy.typing import NDArray

from benchmarks.shared.models import TINY, random_bundle, shape, weights_of
from txl_deploy.plain_c import package
from txl_deploy.plain_c.compiling import find_compiler
from txl_deploy.plain_c.native import packed_step

MODEL = shape(12, 512, 8, 64, 2048, 204)
STEPS = 3
"""The number of steps that each side runs in a round."""
Step = Callable[[NDArray[np.int32]], object]


def packaged(bundle: Path, folder: Path, length: int, generated: bool) -> Step:
    """Package a bundle, unless the folder exists, compile it, and return its step, a function of tokens [1, L].

    With `generated` the package has the generator's code instead of the native step.
    """
    if not folder.exists():
        kept = (lambda *given: None) if generated else packed_step
        with mock.patch.object(package, "packed_step", kept):
            result = package.package_c(bundle, folder, name="m", lengths=(length,), batch_size=1, weights_file=True)
        print(f"{folder.name}: {result.verified}", file=sys.stderr)
    match = re.search(r"^CFLAGS = (.*)$", (folder / "Makefile").read_text(), re.MULTILINE)
    flags = shlex.split(match[1]) if match else []
    library = folder.with_suffix(".so")
    command = [*find_compiler(), *flags, "-std=c99", "-shared", "-fPIC", str(folder / "m.c"), "-o", str(library)]
    subprocess.run([*command, "-lm"], check=True)
    sizes = re.findall(r"STATE_BYTES .* (\d+) where|LOGPROBS_VALUES (\d+)", (folder / "m.h").read_text())
    state_bytes, values = (int(next(filter(None, size))) for size in sorted(sizes, key=lambda size: not size[0]))
    called, weights = ctypes.CDLL(str(library)), np.fromfile(folder / "m.weights", np.uint8)
    room, out = np.zeros(state_bytes + 64, np.uint8), np.zeros(values, np.float32)
    state = ctypes.c_void_p(-(-room.ctypes.data // 64) * 64)
    called.m_init(state, ctypes.c_void_p(weights.ctypes.data))

    def step(tokens: NDArray[np.int32], held: object = (room, weights)) -> object:
        called.m_step(state, ctypes.c_void_p(tokens.ctypes.data), None, ctypes.c_void_p(out.ctypes.data))
        return out

    return step


def measure(ways: dict[str, Step], length: int, memory: int, vocab: int, rounds: int) -> str:
    """Fill the memory of each side, time the sides in turns, and return a table of medians in ms and of ratios."""
    rng = np.random.default_rng(0)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(memory // length + 2 + rounds):
        tokens = rng.integers(0, vocab, (1, length), dtype=np.int32)
        timed = number >= memory // length + 2
        for name, step in ways.items():
            began = time.process_time()
            for _ in range(STEPS if timed else 1):
                step(tokens)
            if timed:
                spent[name].append((time.process_time() - began) / STEPS * 1e3)
    first = np.array(next(iter(spent.values())))
    lines = [f"| L {length}, ms of processor time | median | ratio (quartiles) |", "|---|---|---|"]
    for name, times in spent.items():
        low, middle, high = np.quantile(np.array(times) / first, (0.25, 0.5, 0.75))
        lines.append(f"| {name} | {np.median(times):.2f} | {middle:.2f} ({low:.2f} … {high:.2f}) |")
    return "\n".join(lines)


def main() -> int:
    """Read the command line, package the bundles, and print a table for each segment length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=int, default=640)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder that keeps bundles and packages")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: measures nothing")
    options = parser.parse_args()
    values, memory, rounds = (TINY, 6, 2) if options.quick else (MODEL, options.memory, options.rounds)
    lengths = sorted({*options.lengths, 1}, reverse=True)
    with tempfile.TemporaryDirectory() as place:
        folder = options.out or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        whole, low = folder / "whole.txl", folder / "int8.txl"
        if not whole.exists():
            random_bundle(whole, values, lengths, memory)
        if not low.exists():
            random_bundle(low, values, lengths, memory, state=weights_of(txl_runtime.load(whole)), precision="int8")
        for length in options.lengths:
            one, other = (txl_runtime.load(path, "cpu", threads=1).stream(1) for path in (whole, low))
            ways: dict[str, Step] = {
                "ONNX Runtime, fp32": one.step,
                "the generator's, fp32": packaged(whole, folder / f"generated-{length}", length, True),
                "package, fp32": packaged(whole, folder / f"package-{length}", length, False),
                "ONNX Runtime, int8": other.step,
                "package, int8": packaged(low, folder / f"package-int8-{length}", length, False),
            }
            print(measure(ways, length, memory, values["vocab_size"], rounds) + "\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
