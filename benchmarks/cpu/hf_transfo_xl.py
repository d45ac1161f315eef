"""Time a bundle beside Hugging Face's TransfoXL (transformers 4.37.2, eager) with the same weights, in turns.

TransfoXL was removed in transformers 5.0 and does not run in 4.38 … 4.57, so it needs an environment of its own:

    python -m venv ../hf-venv
    ../hf-venv/bin/pip install transformers==4.37.2 torch==2.13.0      # any torch from 2.0 on; safetensors comes along
    python benchmarks/cpu/hf_transfo_xl.py --python ../hf-venv/bin/python [--memory 160] [--out FOLDER]

The Hugging Face process makes a random model and saves it. This process exports the saved model. Both processes compute
the same segments, and are timed only if their log-probabilities agree. While one process is timed, the other waits on a
pipe and uses no core.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txl_deploy.bench.competitor import BundleCompetitor

WORDS = 204
SEGMENTS = (64, 64, 64, 1, 1, 1, 64, 1)
"""Lengths of the segments that are compared first; a length over the bundle's longest segment is cut to that length."""
LIMIT = 1e-3
PAUSE = 0.1
"""Seconds until the threads of the Hugging Face process, once it has answered, stop spinning."""
WARM_UP_CALLS = 3
SIZES = {"n_layer": 12, "d_model": 512, "d_embed": 512, "n_head": 8, "d_head": 64, "d_inner": 2048}
SMALL = {"n_layer": 2, "d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8, "d_inner": 32}


def worker() -> None:
    """Run the Hugging Face side, without this project: read one JSON request a line, and print one JSON answer each."""
    import torch

    transformers = import_module("transformers")  # imported by name, for mypy: this project's environment lacks it
    asked = json.loads(sys.stdin.readline())
    torch.set_num_threads(asked["threads"])
    torch.manual_seed(0)
    config = transformers.TransfoXLConfig(
        vocab_size=WORDS, cutoffs=[], div_val=1, clamp_len=-1, same_length=False, **asked["config"]
    )
    model = transformers.TransfoXLLMHeadModel(config).eval()
    model.save_pretrained(asked["folder"])
    _answer({"versions": {"transformers": transformers.__version__, "torch": torch.__version__}})
    mems: Any = None
    with torch.inference_mode():
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "logprobs":
                result = model(torch.tensor(asked["tokens"]), mems=mems)
                mems = result.mems
                _answer(result.prediction_scores[0].tolist())
                continue
            tokens = torch.tensor(asked["tokens"])
            samples: list[int] = []
            for _ in range(WARM_UP_CALLS):
                mems = model(tokens, mems=mems).mems
            while len(samples) < WARM_UP_CALLS or sum(samples) < asked["seconds"] * 1e9:
                started = time.perf_counter_ns()
                mems = model(tokens, mems=mems).mems
                samples.append(time.perf_counter_ns() - started)
            _answer(samples)


def _answer(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class HuggingFace:
    """The Hugging Face process, which answers requests over pipes."""

    def __init__(self, python: Path, folder: Path, config: dict[str, int], threads: int) -> None:
        command = [str(python), __file__, "--worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions: dict[str, str] = self.ask({"folder": str(folder), "config": config, "threads": threads})[
            "versions"
        ]

    def ask(self, request: object) -> Any:
        """Send a request to the process, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the Hugging Face process ended with code {self._process.wait()}; its own error is above")
        return json.loads(line)

    def close(self) -> None:
        """Close the process's input, which ends the process, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Read the command line, compare every memory length, and print the table; or run the Hugging Face side."""
    if "--worker" in sys.argv:
        worker()
        return 0
    from benchmarks.shared.results import finish, parser
    from benchmarks.shared.tables import Table, log

    options = parser(__doc__)
    help_python = "python of the environment that has transformers 4.37.2; the head of this file says how to make it"
    options.add_argument("--python", type=Path, help=help_python)
    options.add_argument("--memory", type=int, nargs="+", default=[160], metavar="M")
    arguments = options.parse_args()
    if arguments.python is None:
        options.error(f"--python is not given, expected the {help_python}")
    table, document = Table(("M", "work", "", "ms p50", "p90", "p99", "ratio")), {}
    for memory in [7] if arguments.quick else arguments.memory:
        log(f"M {memory}")
        result = compare(arguments.python, memory, arguments.quick, arguments.threads, arguments.seconds)
        log(f"both agree: log-probabilities within {result['agreement']:.1e} over {len(SEGMENTS)} chained segments")
        for work, times in result["times"].items():
            for name, row in times.items():
                table.add(memory, work, name, row.p50, row.p90, row.p99, f"{row.p50 / times['bundle'].p50:.1f}×")
        document[str(memory)] = result
    finish("hf_transfo_xl", arguments, [table], document)
    return 0


def compare(python: Path, memory: int, quick: bool, threads: int, seconds: float) -> dict[str, Any]:
    """Check that both sides agree at one memory length, then time both; return the difference, times and versions.

    Args:
        python: the Python of the environment with transformers.
        memory: M.
        quick: True for a tiny model.
        threads: of each side.
        seconds: of timing for each side and segment length.
    """
    import txl_runtime
    from txl_export import export

    from txl_deploy.bench.competitor import BundleCompetitor
    from txl_deploy.bench.timing import percentiles

    longest, rounds, seconds = (4, 2, 0.05) if quick else (64, 5, seconds)
    with tempfile.TemporaryDirectory() as made:
        folder, sizes = Path(made), (SMALL if quick else SIZES) | {"mem_len": memory}
        other = HuggingFace(python, folder / "hf", sizes, threads)
        lengths = (longest, 1)
        export(folder / "hf", folder / "m.txl", segment_length=lengths, memory_length=memory, verify=False)
        ours = BundleCompetitor("bundle", txl_runtime.load(folder / "m.txl", threads=threads))
        agreement = largest_difference(ours, other, longest)
        if not agreement <= LIMIT:
            raise SystemExit(f"log-probabilities differ by {agreement:.2e}, expected at most {LIMIT}: nothing is timed")
        times = {}
        for length in (1, longest):
            samples = turns(ours, other, length, rounds, seconds / rounds)
            times[f"L {length}"] = {name: percentiles(values) for name, values in samples.items()}
        other.close()
    return {"agreement": agreement, "times": times, "versions": other.versions}


def largest_difference(ours: BundleCompetitor, other: HuggingFace, longest: int) -> float:
    """Return the largest difference of both sides' log-probabilities over the chained segments of `SEGMENTS`."""
    import numpy as np

    from benchmarks.shared.models import random_tokens

    worst = 0.0
    for index, length in enumerate(SEGMENTS):
        tokens = random_tokens(WORDS, (1, min(length, longest)), index)
        theirs = np.asarray(other.ask({"do": "logprobs", "tokens": tokens.tolist()}))
        worst = float(np.fmax(worst, np.abs(ours.logprobs(tokens)[0] - theirs).max()))
    return worst


def turns(ours: BundleCompetitor, other: HuggingFace, length: int, rounds: int, seconds: float) -> dict[str, list[int]]:
    """Time segments of one length on both sides, in turns; return the nanoseconds of every call by side."""
    from benchmarks.shared.models import random_tokens
    from txl_deploy.bench.timing import come_to_rest, time_slice

    tokens = random_tokens(WORDS, (1, length), 0)
    samples: dict[str, list[int]] = {"bundle": [], "Hugging Face": []}
    for _ in range(rounds):
        come_to_rest()
        samples["Hugging Face"] += other.ask({"do": "time", "tokens": tokens.tolist(), "seconds": seconds})
        time.sleep(PAUSE)
        samples["bundle"] += time_slice(lambda _: ours.logprobs(tokens), seconds)
    return samples


if __name__ == "__main__":
    sys.exit(main())
