"""What each version of TensorRT and TensorRT-RTX has. This table is the only place that asks for a version number.

A row holds from its version to the next row's. A test holds them against the member lists of six versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from txl_runtime.errors import BackendError
from txl_runtime.installing import pip_line

Compiled = Literal["rtx", "tensorrt"]
"""The targets whose engines a library compiles."""
MODULES: dict[Compiled, str] = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
JETPACK = (
    "; not on a Jetson: there apt install python3-libnvinfer, and make the environment with python3 -m venv "
    "--system-site-packages"
)
"""A Jetson's TensorRT belongs to its system; pip would bring one of another version beside it."""


@dataclass(frozen=True)
class LibraryFeatures:
    """One range of versions.

    Attributes:
        target, since: which library, and the first version that the row is true for.
        opset: the newest ONNX opset that its parser is made for. The parser takes graphs of newer ones silently.
        ring: TensorScatter becomes an update in place (KV_CACHE_UPDATE).
        reads_in_place: an attention of one position that is given as ONNX's Attention reads a ring where it is. Told
            from the kernels of engines that were built; of the others nobody has looked.
        gpus: compute capabilities that engines can be built for on any machine. Empty where an engine is built for the
            GPU of the machine at hand.
    """

    target: Compiled
    since: tuple[int, int]
    opset: int
    ring: bool
    reads_in_place: bool = False
    gpus: tuple[int, ...] = ()

    @property
    def portable(self) -> bool:
        """Engines are built for a list of GPUs. The machine that builds needs none of them."""
        return bool(self.gpus)


RTX_GPUS = (75, 80, 86, 89, 120, 121)

FACTS: tuple[LibraryFeatures, ...] = (
    LibraryFeatures("tensorrt", (10, 0), opset=20, ring=False),
    LibraryFeatures("tensorrt", (10, 9), opset=22, ring=False),
    LibraryFeatures("tensorrt", (10, 13), opset=24, ring=False),
    LibraryFeatures("tensorrt", (10, 15), opset=24, ring=True),
    LibraryFeatures("tensorrt", (11, 0), opset=25, ring=True),
    LibraryFeatures("rtx", (1, 7), opset=24, ring=True, reads_in_place=True, gpus=RTX_GPUS),
)


def how_to_install(name: str) -> str:
    """What to do where the package of a backend is missing."""
    return pip_line(name) + (JETPACK if name == "tensorrt" else "")


def find_facts(target: Compiled, version: str) -> LibraryFeatures:
    """The row for an installed version.

    Raises:
        BackendError: it is older than the oldest row.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    rows = [row for row in FACTS if row.target == target]
    fitting = [row for row in rows if row.since <= number]
    if not fitting:
        oldest = ".".join(map(str, rows[0].since))
        raise BackendError(f"{MODULES[target]} is {version}, expected {oldest} or newer; upgrade it")
    return fitting[-1]
