"""Play noise through `.nam` files of the trainer's sizes in plain C, in ONNX Runtime and in eager PyTorch.

    python benchmarks/compare/audio_blocks.py [--only standard lstm] [--samples 1000000] [--rounds 15] [--work FOLDER]

The weights are random. The first table has the largest difference between the output of the C code and that of the
PyTorch module, in float32, over all samples. The C code gets the samples in blocks of 1 to 512, a random number in
each call. The second table has µs of processor time of a block of 64 samples and of one sample, as medians and
quartiles. The three sides run in turns, each with one thread; the runtime in Python calls ONNX Runtime. A block of 64
plays for 1333 µs at 48 kHz. `--work` keeps bundles and packages in a folder, and uses those that it finds there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import txl_export
import txl_runtime
from host_cost import spread
from numpy.typing import NDArray
from plain_function import PlainFunction
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states
from txl_runtime.types import Floats

from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log
from txl_deploy.plain_c.package import package_c

sys.path.append(str(Path(__file__).parents[2] / "samples" / "audio"))
import nam
import random_nam

SIZES = ("standard", "feather", "nano", "lstm")
BLOCKS = (64, 1)
SIDES = ("plain C", "ONNX Runtime", "eager")


class Played:
    """One `.nam` file with random weights, ready to be played in plain C, in ONNX Runtime and in eager PyTorch."""

    def __init__(self, size: str, work: Path, quick: bool) -> None:
        file, bundle, package = (work / f"{size}{ending}" for ending in (".nam", ".txl", "-c"))
        result = random_nam.lstm(1, 24) if size == "lstm" else random_nam.wavenet(*random_nam.WAVENETS[size])
        if quick:
            result = random_nam.wavenet((3,), ([1, 2],))
        if not package.exists():
            file.write_text(json.dumps(result))
            txl_export.export(nam.build(str(file)), bundle, batch_size=1, verify=False)
            package_c(bundle, package, name="amp", lengths=(64, 8, 1))
        self.model = txl_runtime.load(bundle, "cpu", threads=1)
        self.plain = PlainFunction(package, self.model.manifest, work)
        self.weights = len(result["weights"])
        self.spec = nam.build(str(file))
        self.module = Eager(self.spec)
        self.stream, self.states = self.model.stream(1), fresh_states(self.spec, 1)

    def eager(self, block: Floats) -> Floats:
        """Run the PyTorch module on a block [1, samples], e.g. [1, 64], from the states that its last call left."""
        outputs, after = self.module({"input": torch.from_numpy(block)}, self.states)
        self.states = dict(after)
        return outputs["output"].numpy()

    def apart(self, samples: Floats) -> tuple[float, float]:
        """Return the largest difference between C and PyTorch over all samples, and PyTorch's largest: (2e-6, 0.9)."""
        wanted = np.concatenate([self.eager(part) for part in np.split(samples, range(8192, samples.size, 8192), 1)], 1)
        draws, place, results = np.random.default_rng(1), 0, np.empty(samples.shape, np.float32)
        while place < samples.size:
            block = slice(place, place + int(draws.integers(1, 513)))
            self.plain.feeding(samples[0, block], results[0, block])()
            place = block.stop
        return float(np.abs(results - wanted).max()), float(np.abs(wanted).max())

    def costs(self, block: int, rounds: int, calls: int) -> dict[str, NDArray[np.float64]]:
        """Return µs of processor time of a block by side and round, e.g. {"plain C": [12.1, 12.3]}."""
        given = np.random.default_rng(2).uniform(-1, 1, (1, block)).astype(np.float32)
        sides: dict[str, Callable[[], object]] = {
            "plain C": self.plain.feeding(given, np.empty_like(given)),
            "ONNX Runtime": lambda: self.stream.run({"input": given}),
            "eager": lambda: self.eager(given),
        }
        results: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(rounds + 1):
            for side in SIDES:
                began = time.process_time()
                for _ in range(calls):
                    sides[side]()
                results[side].append((time.process_time() - began) / calls * 1e6)
        return {side: np.array(times[1:]) for side, times in results.items()}


def main() -> None:
    """Measure every size and print the tables."""
    options = parser(__doc__, seconds=None)
    options.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES), help="sizes (default all)")
    options.add_argument("--samples", type=int, default=1_000_000, help="that are compared")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--work", type=Path, metavar="FOLDER", help="keep bundles and packages here")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    samples, calls = (2000, 2) if arguments.quick else (arguments.samples, 50)
    noise = np.random.default_rng(0).uniform(-1, 1, (1, samples)).astype(np.float32)
    errors = Table(("size", "weights", "samples", "largest difference", "largest sample"))
    times = Table(("µs of a block", *(f"{side} (quartiles)" for side in SIDES), "ONNX Runtime / C", "eager / C"))
    document = []
    with tempfile.TemporaryDirectory() as place:
        work = arguments.work or Path(place)
        work.mkdir(exist_ok=True)
        for size in arguments.only:
            log(size)
            (folder := work / size).mkdir(exist_ok=True)
            played = Played(size, folder, arguments.quick)
            far, most = played.apart(noise)
            errors.add(size, f"{played.weights:,}", f"{samples:,}", f"{far:.1e}", f"{most:.2g}")
            entry: dict[str, object] = {"size": size, "difference": far, "largest": most}
            for block in BLOCKS:
                costs = played.costs(block, 2 if arguments.quick else arguments.rounds, calls)
                entry[f"block of {block}"] = {side: one.tolist() for side, one in costs.items()}
                ratios = [f"{np.median(costs[side] / costs['plain C']):.1f}" for side in SIDES[1:]]
                times.add(f"{size}, {block}", *(spread(costs[side], 1) for side in SIDES), *ratios)
            document.append(entry)
    finish("audio_blocks", arguments, [errors, times], document)


if __name__ == "__main__":
    main()
