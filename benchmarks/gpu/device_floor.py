"""Compute, without a GPU, the shortest time of a step of one token on several GPUs, from their stated memory speed.

    python benchmarks/gpu/device_floor.py [--out FOLDER]

Nothing is measured. The functions with which `txl-deploy bench` prints a device's floor compute the bytes and times.
Each model is exported in fp16 at full width, once with one layer and once with two: every further layer adds exactly
the bytes that the second one adds. The number of kernels, from the sidecars of TensorRT-RTX engines, grows in the same
way. The speeds in `DEVICES` come from the makers' data sheets; real devices are slower.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtx_weights import DEEP, MB, PUBLISHED
from txl_engines import build_bundle
from txl_runtime.bundle.reading import open_bundle

from benchmarks.shared.models import TINY, random_bundle
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log
from txl_deploy.bench.floor import GOAL, device_floor, floor_of

DEVICES = {
    "H100 SXM": 3350.0,
    "RTX 4090": 1008.0,
    "RTX 3060, 12 GB": 360.0,
    "Jetson AGX Orin": 204.8,
    "Jetson Orin Nano Super": 102.0,
}
"""The stated memory speed of each device, in GB/s."""
MODELS = {"12 layers, d_model 512, M 640": DEEP, "enwik8-24, M 3800": PUBLISHED["enwik8-24"][:2]}
Least = tuple[dict[str, int], int]
"""The bytes that a step reads, by kind of data, and the number of kernels of the step."""


def extended(one: Least, two: Least, layers: int) -> Least:
    """Compute bytes and kernels of a model with `layers` layers from the figures of the models with one and two."""

    def more(first: int, second: int) -> int:
        return first + (layers - 1) * (second - first)

    return {name: more(size, two[0][name]) for name, size in one[0].items()}, more(one[1], two[1])


def least_of(values: dict[str, Any], memory: int, folder: Path) -> Least:
    """Export and build a model with one layer and with two; return bytes and kernels of a step of the whole model.

    Args:
        values: the model's config.
        memory: M.
        folder: the folder for the bundles.
    """
    small: list[Least] = []
    for layers in (1, 2):
        path = folder / f"{len(list(folder.iterdir()))}.txl"
        random_bundle(path, values | {"n_layer": layers}, (1,), memory, precision="fp16")
        log(f"build {path.name}")
        (engine,) = build_bundle(path, "rtx", (86,), kinds=("logprobs",)).engines
        assert engine.sidecar.kernels is not None
        small.append((floor_of(open_bundle(path), 1), engine.sidecar.kernels))
    return extended(small[0], small[1], values["n_layer"])


def tables_of(found: dict[str, Least]) -> list[Table]:
    """Return a table of the bytes that a step reads, and a table of the time that reading takes on each device."""
    parts = Table(("model", *(f"{name}, MB" for name in next(iter(found.values()))[0]), "a token, MB", "kernels"))
    parts.title = "What a step of one token reads in fp16, B 1: computed; kernels counted from a build without a GPU"
    for title, (size, kernels) in found.items():
        parts.add(title, *(value / MB for value in size.values()), sum(size.values()) / MB, kernels)
    times = Table(("model", "device", "GB/s", "floor, µs", f"at {GOAL:.0%}, µs", "µs per kernel", "measured"))
    times.title = f"Floor of that step: computed; at {GOAL:.0%} of the stated speed, and per kernel of that"
    for title, (size, kernels) in found.items():
        for device, speed in DEVICES.items():
            floor = device_floor("stated", speed, sum(size.values()), kernels)
            times.add(title, device, speed, floor.us, floor.goal_us, floor.us_per_kernel, "not measured")
    return [parts, times]


def main(least: Callable[[dict[str, Any], int, Path], Least] = least_of) -> int:
    """Read the command line, compute all models with `least`, and print both tables."""
    arguments = parser(__doc__, seconds=None).parse_args()
    models = {"tiny": (TINY, 16)} if arguments.quick else MODELS
    with tempfile.TemporaryDirectory() as folder:
        results = {title: least(values, memory, Path(folder)) for title, (values, memory) in models.items()}
    tables = tables_of(results)
    finish("device_floor", arguments, tables, [dataclasses.asdict(table) for table in tables])
    return 0


if __name__ == "__main__":
    sys.exit(main())
