"""Time packages in plain C beside the bundles that they were made of: 12 kinds of steps, and two larger models.

    python benchmarks/compare/plain_against_library.py [--only NAME …] [--rounds 12] [--installed PREFIX]

Making a package compares the package with its bundle over chained segments. The first table has the largest error of
that comparison, and the sizes that the package states. Then three sides run in turns, once memory is full, each with
one thread: the function in plain C, the library for C and C++, and the runtime in Python. The latter two use the same
ONNX Runtime, and the update rule ring if the bundle has it. The clock counts processor time, and each round has its own
ratio. `--work` keeps bundles in a folder, and uses those that it finds there. A step whose Python package is not
installed is left out, which the log says.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import txl_runtime
from c_against_python import ROOT, Case, built, commands, timed
from host_cost import spread
from plain_function import flags_of
from python_side import inputs
from txl_runtime.model import Model

from benchmarks.shared.models import random_bundle, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log
from txl_deploy.plain_c.compiling import find_compiler
from txl_deploy.plain_c.generating import KINDS
from txl_deploy.plain_c.package import PlainPackage, package_c
from txl_deploy.plain_c.rendering import literals

sys.path.append(str(ROOT / "benchmarks" / "rivals"))
from all_steps import made
from foreign_steps import AbsentError
from rivals import bundle_of

STEPS = ["gru-1x256-b1", "lstm-1x256-b1", "lstm-2x128-b1", "gtrxl-b1", "tcn-ring", "voice", "emformer", "rwkv", "mamba"]
"""Names of the steps that the modules of benchmarks/rivals define."""
SMALL = shape(2, 64, 4, 16, 128, 96)
TRANSFORMERS = {
    "txl": (SMALL, 32, {}),
    "txl-hidden": (SMALL, 32, {"memory": "hidden"}),
    "txl-clusters": (SMALL | {"cutoffs": [20, 50]}, 32, {}),
    "txl-4x192": (shape(4, 192, 6, 32, 768, 256), 128, {}),
    "txl-12x512": (shape(12, 512, 8, 64, 2048, 204), 640, {}),
}
"""Transformer-XLs by name: config, M, options of the export. The last two are larger than plain C is meant for."""
SIZES = ("state_bytes", "weight_bytes", "stack_bytes", "code_bytes", "multiply_adds")
SIDES = ("plain C", "library", "Python")


class Measured(NamedTuple):
    """The figures of one package: its largest error, the sizes that it states, µs of a segment by side and round."""

    error: float
    sizes: dict[str, int | None]
    steps: dict[str, list[float]]


def bundle(name: str, work: Path) -> Path:
    """Return the path of the bundle of a named step; export the bundle if it does not exist.

    Raises:
        AbsentError: the Python package of the step is not installed.
    """
    if name in STEPS:
        return bundle_of(name, made(name, None), work)
    path = work / f"{name}.txl"
    if not path.exists():
        values, memory, more = TRANSFORMERS[name]
        random_bundle(path, values, (8, 1), memory, None, **more)
    return path


def side(package: PlainPackage, model: Model, folder: Path) -> list[str]:
    """Compile a program that times a package in plain C on random inputs, and return its command."""
    name, glue = package.name, [f'#include "{package.name}.h"', f"#define WEIGHTS {package.weight_bytes}"]
    given = inputs(model, package.segment_length)
    for number, entry in enumerate(model.manifest.given):
        glue.append(f"static const {KINDS[entry.dtype]} given_{number}[] = {{{literals(given[entry.name])}}};")
    for number, output in enumerate(model.manifest.outputs):
        size = np.prod(output.sizes(package.batch_size, package.segment_length))
        glue.append(f"static {KINDS[output.dtype]} found_{number}[{size}];")
    arguments = [*(f"given_{number}" for number in range(len(model.manifest.given))), "NULL"]
    arguments += [f"found_{number}" for number in range(len(model.manifest.outputs))]
    glue += [f"static {name}_state state;", f"#define INIT(weights) {name}_init(&state, weights)"]
    glue.append(f"#define STEP {name}_step(&state, {', '.join(arguments)})")
    (folder / "glue.h").write_text("\n".join(glue) + "\n")
    source, program = Path(__file__).with_name("plain_side.c"), folder / "plain_side"
    flags = ["-std=c99", *shlex.split(flags_of(package.folder)), f"-I{folder}", f"-I{package.folder}"]
    sources = [source, package.folder / f"{name}.c"]
    subprocess.run([*find_compiler(), *flags, *sources, "-o", program, "-lm"], check=True)
    return [str(program), str(package.folder / f"{name}.weights")]


def measured(path: Path, length: int | None, program: Path, rounds: int, seconds: float) -> Measured:
    """Make a package of a bundle, and time the three sides in turns.

    Args:
        path: the bundle.
        length: the segment length of the package; None takes the bundle's.
        program: the side of the library, as `built` returns it.
        rounds: turns of each side.
        seconds: of one turn.
    """
    model = txl_runtime.load(path, backend="cpu", threads=1)
    with tempfile.TemporaryDirectory() as place:
        lengths = () if length is None else (length,)
        package = package_c(path, Path(place) / "package", name="model", lengths=lengths, weights_file=True)
        case = Case(path.stem, path, model.update, package.segment_length)
        others = commands(program, case)
        starting = dict(zip(SIDES, (side(package, model, Path(place)), others["C"], others["Python"]), strict=True))
        errors = re.findall(r"max abs \(relative\) ([\d.e+-]+)", package.verified)
        sizes = {size: getattr(package, size) for size in SIZES}
        return Measured(max(map(float, errors)), sizes, timed(starting, case, rounds, seconds))


def tables(found: dict[str, Measured]) -> list[Table]:
    """Return a table of errors and sizes, and a table of times."""
    sizes = Table(("step", "largest error", *(size.replace("_", " ") for size in SIZES)))
    times = Table(("µs of processor time of one segment", *SIDES, "library / plain C (quartiles)"))
    for name, one in found.items():
        sizes.add(name, one.error, *(None if size is None else f"{size:,}" for size in one.sizes.values()))
        sides = [np.array(one.steps[side]) for side in SIDES]
        times.add(name, *(float(np.median(each)) for each in sides), spread(sides[1] / sides[0], 2))
    return [sizes, times]


def main() -> int:
    """Read the command line, measure every step, and print the tables."""
    names = [*STEPS, *TRANSFORMERS]
    options = parser(__doc__, seconds=0.1, threads="not asked: all sides have one", quick="the GRU and the txl alone")
    options.set_defaults(threads=1)
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="of these steps alone")
    options.add_argument("--rounds", type=int, default=12, help="turns of each side (default 12)")
    options.add_argument("--installed", type=Path, metavar="PREFIX", help="where the library was installed")
    options.add_argument("--work", type=Path, metavar="FOLDER", help="keep bundles here, and use what is there")
    given = options.parse_args()
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")
    os.environ["TXL_ONNXRUNTIME"] = str(library)
    rounds, seconds, only = (
        (1, 0.01, ["gru-1x256-b1", "txl"]) if given.quick else (given.rounds, given.seconds, given.only)
    )
    results: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = built(Path(folder), given.installed)
        for name in only:
            try:
                path = bundle(name, given.work or Path(folder))
            except AbsentError as absent:
                log(f"{name} is left out: {absent}")
                continue
            for length in (1, 8) if name == "txl" else (1,) if name in TRANSFORMERS else (None,):
                log(called := name if length is None else f"{name}, {length}")
                results[called] = measured(path, length, program, rounds, seconds)
    finish("plain_against_library", given, tables(results), {name: one._asdict() for name, one in results.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
