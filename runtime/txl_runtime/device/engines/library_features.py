"""The features of each version of TensorRT and TensorRT-RTX. Only this table decides by a version number.

A row is valid from its version up to the next row's. A test compares the rows with the member lists of six versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from txl_runtime.bundle.engines.sidecar import FLAVOURS
from txl_runtime.errors import BackendError
from txl_runtime.installing import pip_line

Compiled = Literal["rtx", "tensorrt"]
"""The targets whose engines a library compiles."""
JETPACK = (
    "; not on a Jetson: there apt install python3-libnvinfer, and make the environment with python3 -m venv "
    "--system-site-packages"
)
"""Advice for a Jetson, whose TensorRT belongs to its system; pip would install a second, different version."""


@dataclass(frozen=True)
class LibraryFeatures:
    """The features of one range of versions.

    Attributes:
        target, since: the library, and the first version of the range.
        opset: the newest ONNX opset that the library's parser supports. The parser accepts newer opsets silently.
        ring: whether TensorScatter becomes an update in place (KV_CACHE_UPDATE).
        reads_in_place: whether ONNX's Attention of one position reads a ring in place. Known from the kernels of built
            engines; False means unknown.
        gpus: compute capabilities, times 10, for which engines can be built on any machine. Empty if an engine is built
            for the GPU of the building machine.
    """

    target: Compiled
    since: tuple[int, int]
    opset: int
    ring: bool
    reads_in_place: bool = False
    gpus: tuple[int, ...] = ()

    @property
    def portable(self) -> bool:
        """True if engines are built for a list of GPUs; the building machine needs none of them."""
        return bool(self.gpus)


RTX_GPUS = (75, 80, 86, 89, 120, 121)
"""Compute capabilities, times 10, that TensorRT-RTX can build engines for."""

FACTS: tuple[LibraryFeatures, ...] = (
    LibraryFeatures("tensorrt", (10, 0), opset=20, ring=False),
    LibraryFeatures("tensorrt", (10, 9), opset=22, ring=False),
    LibraryFeatures("tensorrt", (10, 13), opset=24, ring=False),
    LibraryFeatures("tensorrt", (10, 15), opset=24, ring=True),
    LibraryFeatures("tensorrt", (11, 0), opset=25, ring=True),
    LibraryFeatures("rtx", (1, 7), opset=24, ring=True, reads_in_place=True, gpus=RTX_GPUS),
)


def how_to_install(name: str) -> str:
    """Return advice for a missing package of a backend."""
    return pip_line(name) + (JETPACK if name == "tensorrt" else "")


def find_facts(target: Compiled, version: str) -> LibraryFeatures:
    """Return the row of `FACTS` that holds for an installed version.

    Raises:
        BackendError: the version is older than the oldest row.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    rows = [row for row in FACTS if row.target == target]
    fitting = [row for row in rows if row.since <= number]
    if not fitting:
        oldest = ".".join(map(str, rows[0].since))
        raise BackendError(f"{FLAVOURS[target]} is {version}, expected {oldest} or newer; upgrade it")
    return fitting[-1]
