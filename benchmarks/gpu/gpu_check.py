"""Check this project on the GPU of this machine with one command, `python3 gpu_check.py`, in at most ten minutes.

    python benchmarks/gpu/gpu_check.py [--budget 570] [--site FOLDER] [--out FOLDER]
    python benchmarks/gpu/gpu_check.py --engine cuda rtx … [--quick] [--bundle BUNDLE] [--batch 1 8 32]
                                   [--precision fp32 fp16] [--vocabulary 267735] [--memory 3800] [--update rolled]
                                   [--segments 12] [--seconds 2] [--budget SECONDS] [--site FOLDER]
                                   [--bundles FOLDER] [--out FOLDER]
    python benchmarks/gpu/gpu_check.py --prepare [--bundles FOLDER] …

Without --engine, --bundle and --prepare, the script does a first contact with a machine. It checks the project's own
CUDA code call by call, and the project's loop with PyTorch as the engine, also under compute-sanitizer. It measures the
cost of the host and of a graph's nodes. Then it times one model in ONNX Runtime, in TensorRT-RTX (recorded by the loop,
and recorded by TensorRT-RTX itself) and in PyTorch. A first contact needs NumPy, PyTorch and msgspec; an engine whose
package is missing is not run. With --engine, the script builds, verifies and times bundles on each named engine.

Each item runs in a process of its own, so that a CUDA error ends only that process. Its result is on the disk before
the next item begins. Ctrl-C, or the end of the budget, ends the check with the results so far. At the end OUT.tar.gz
holds all results. Without a GPU the script writes a page that says so, and ends with 0.

The script needs neither pip nor a network. It finds packages that were carried to the machine in --site, the project's
packages beside this file, and bundles that were exported elsewhere (--prepare needs no GPU) in --bundles.

Some engines run only if --engine names them: `cpu` does all steps on the CPU, as a rehearsal. `torch-autotuned` is
torch.compile in mode max-autotune, which compiles for minutes. `rtx-alone` is TensorRT-RTX that records itself.
`rtx-own` is `rtx` with engines that each hold all weights. `rtx-int8`, `rtx-fp8` and `rtx-int4` are `rtx` with rounded
matrices, which only the self-test judges here.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN = [ROOT, ROOT / "export", ROOT / "runtime"]
ENGINES = ("cuda", "tensorrt", "rtx", "torch", "torch-compiled")
REHEARSAL = "cpu"
NAMED = (REHEARSAL, "torch-autotuned", "rtx-alone", "rtx-own", "rtx-int8", "rtx-fp8", "rtx-int4")
"""Engines that run only if --engine names them."""
PRECISIONS = ("fp32", "fp16", "bf16")
INTERRUPTED = 130
BUDGET = 570.0
"""Seconds for a first contact: under ten minutes, with the time to end a process that hangs."""
OF_ENGINES = ("quick", "batch", "precision", "update", "vocabulary", "memory", "segments", "seconds")
"""Options that a first contact refuses, because they only concern engines that are named."""


def environment_of(site: Path | None) -> dict[str, str]:
    """Return the environment of child processes, which import packages of `site` first, then the project's own.

    Every folder below `site` that holds libraries is on the library path, because NVIDIA's packages use many folders.
    """
    carried = [] if site is None else [site.resolve()]
    libraries = [] if site is None else sorted({file.parent.resolve() for file in site.rglob("*.so*")})
    results = dict(os.environ)
    for name, folders in (("PYTHONPATH", [*carried, *OWN]), ("LD_LIBRARY_PATH", libraries)):
        before = [part for part in results.get(name, "").split(os.pathsep) if part]
        if folders:
            results[name] = os.pathsep.join([*map(str, folders), *before])
    return results


def count(text: str) -> int:
    """Read an option's whole number, of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}, expected at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Read an option's duration in seconds, of at least 0."""
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}, expected seconds from 0 on")
    return float(text)


def options() -> argparse.ArgumentParser:
    """Return the parser of all options."""
    option_parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    option_parser.add_argument(
        "--quick", action="store_true", help="tiny shapes: proves that it runs, measures nothing"
    )
    option_parser.add_argument("--bundle", type=Path, help="take this bundle, with its own B, instead of random models")
    option_parser.add_argument(
        "--batch", type=count, nargs="+", default=[1, 8, 32], help="of random models (default 1 8 32)"
    )
    option_parser.add_argument(
        "--precision", nargs="+", choices=PRECISIONS, default=["fp32"], help="of them (default fp32)"
    )
    option_parser.add_argument(
        "--engine", nargs="+", choices=(*ENGINES, *NAMED), help="which to run (of a --bundle: all)"
    )
    option_parser.add_argument(
        "--update", choices=("ring", "rolled"), help="of the engines' memory (default: the target's)"
    )
    option_parser.add_argument(
        "--vocabulary", type=count, default=204, help="of the random models; adaptive softmax from 20001 on"
    )
    option_parser.add_argument(
        "--memory", type=count, default=640, metavar="M", help="rows of their memory (default 640)"
    )
    option_parser.add_argument(
        "--segments", type=count, default=12, help="of the verification's longest chain (default 12)"
    )
    option_parser.add_argument(
        "--seconds", type=seconds, default=2.0, help="of timing, per engine and kind of work (default 2)"
    )
    option_parser.add_argument(
        "--budget", type=seconds, metavar="SECONDS", help="what does not fit is listed as not run"
    )
    option_parser.add_argument(
        "--site", type=Path, metavar="FOLDER", help="packages and libraries that were carried here"
    )
    option_parser.add_argument(
        "--bundles", type=Path, metavar="FOLDER", help="keep random models here (default OUT/bundles)"
    )
    option_parser.add_argument("--prepare", action="store_true", help="export the random models, and no more")
    option_parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("gpu-check"), help="results go here")
    return option_parser


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line and check that its options agree; the result's `first` is True for a first contact."""
    option_parser = options()
    given = option_parser.parse_args(arguments)
    if given.site is not None and not given.site.is_dir():
        option_parser.error(f"--site is {given.site}, expected a folder")
    if given.prepare and given.bundle is not None:
        option_parser.error("--prepare exports random models and --bundle is exported already: leave out one of them")
    given.first = given.engine is None and given.bundle is None and not given.prepare
    for name in OF_ENGINES if given.first else ():
        if getattr(given, name) != option_parser.get_default(name):
            option_parser.error(f"--{name} is of engines: name these too, e.g. --engine {' '.join(ENGINES)}")
    if given.first and given.budget is None:
        given.budget = BUDGET
    given.engine, given.out = given.engine or list(ENGINES), given.out.resolve()
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return 1 if a step failed or was ended, 130 after Ctrl-C."""
    given = parsed(arguments)
    environment = environment_of(given.site)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    if absent := [name for name in ("numpy", "msgspec") if find_spec(name) is None]:
        options().error(f"{', '.join(absent)} missing, expected here or in --site; carry.py brings wheels to a machine")
    from gpu_items import Runner, plan
    from gpu_journal import ENDED, FAILED, writing
    from gpu_page import pack, write_machine, write_page
    from txl_runtime.errors import TxlError

    try:
        items, runner = plan(given), Runner(given, environment)
    except TxlError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return error.exit_code
    with writing("gpu_check"):
        write_page(runner.outcomes, given)
        shutil.rmtree(given.out / "steps", ignore_errors=True)  # so that the archive holds only this run's steps
        (given.out / "steps").mkdir()
        write_machine(given.out)
    stopped = False
    with writing("gpu_check"):
        try:
            runner.begin()
            for item in items:
                runner.run(item)
                write_page(runner.outcomes, given)
        except KeyboardInterrupt:
            stopped = True
            runner.leave_out("interrupted")
        except OSError:  # e.g. of a full disk
            runner.leave_out("the check could not go on")
            raise
        print(write_page(runner.outcomes, given, final=True), flush=True)
        print(f"all results: {pack(given.out)}", file=sys.stderr)
    if stopped:
        return INTERRUPTED
    return int(any(step.state in (FAILED, ENDED) for outcome in runner.outcomes for step in outcome.found))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` and the machine's owner send SIGTERM
    sys.exit(main())
