"""Read the engines of a bundle, and the faults of engines that cannot be described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from txl_runtime.bundle.engines.files import engine_names
from txl_runtime.bundle.engines.sidecar import ANYWHERE, Sidecar, read_sidecar, sidecar_path
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import BundleError

from txl_report.facts.plain import Missing, some
from txl_report.numbers import prefixed

Engine = tuple[str, Sidecar]
"""An engine: the path of its file in the bundle, and its sidecar, whose texts may have any length."""


@dataclass(frozen=True)
class Engines:
    """The engines that can be described, and the faults of the engines that cannot."""

    engines: tuple[Engine, ...]
    problems: tuple[str, ...]


def read_engines(bundle: Bundle) -> Engines | Missing:
    """Read the engines of a bundle; the size and hash of each are compared with the manifest."""
    engines, broken = engines_of(bundle)
    if not engines and not broken:
        return Missing(
            "The bundle has no engines for a GPU; on the CPU its graphs run as they are.",
            "txl-deploy build BUNDLE --target rtx",
        )
    return Engines(some(engines), some(broken))


def engines_of(bundle: Bundle) -> tuple[list[Engine], list[str]]:
    """Return the engines that can be described, and the faults of the engines that cannot."""
    engines, broken = [], []
    for name in engine_names(bundle):
        try:
            bundle.check(name)
            engines.append((name, read_sidecar(bundle.file(sidecar_path(name)))))
        except BundleError as error:
            broken.append(str(error))
    return engines, broken


def weights_held(engines: int, total: int, shared: int) -> str:
    """Write the bytes of weights that `engines` engines hold on a device; `shared` bytes of `total` are held once (see
    `held_weights`).
    """
    if not shared:
        return f"weights on the device: {prefixed(total)} in {engines} engines, each of which holds its own"
    own = f"{prefixed(total - shared)} in {engines} engines"
    return f"weights on the device: {prefixed(shared)} once + {own} = {prefixed(total)}"


def built_for(compute_capabilities: Sequence[int], device: str | None, platform: str) -> str:
    """Name the GPUs on which an engine runs, from the engine's identity, e.g. "SM 86, 89"."""
    if compute_capabilities:
        return f"SM {', '.join(map(str, compute_capabilities))}"
    return str(device or ("any GPU" if platform == ANYWHERE else "the library's default GPUs"))
