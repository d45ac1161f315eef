"""The engines that a bundle has: what they were built by and for, and what became of the model in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from txl_runtime.bundle.reading import Bundle
from txl_runtime.device.engines.files import engine_facts, engine_names
from txl_runtime.device.engines.sidecar import ANYWHERE, read_sidecar, sidecar_path
from txl_runtime.errors import BundleError

from txl_report.facts.plain import Missing, some


@dataclass(frozen=True)
class EngineFacts:
    """One engine.

    Attributes:
        file: its name in the bundle.
        program, update: what it runs.
        bytes: of the file.
        built_by: library and version.
        built_for: the GPUs that it fits.
        precision: of the bundle that it was built of.
        seconds: that the build took.
        kernels: that start work on the device; None where nothing lists them.
        attention_layers, fused_attention: attentions, and those that became one kernel each.
        fused_kernels: their names.
        in_place, read_in_place: states that are updated, and read, where they are.
        copying: kernels that do nothing but copy states.
        verified_on: what was checked, and where; none where nothing was.
        layers: pairs of a layer and its kind, in the order in which they run.
    """

    file: str
    program: str
    update: str
    bytes: int
    built_by: str
    built_for: str
    precision: str
    seconds: float
    kernels: int | None
    attention_layers: int
    fused_attention: int
    fused_kernels: tuple[str, ...]
    in_place: int
    read_in_place: int
    copying: int
    verified_on: tuple[str, ...]
    layers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Engines:
    """The engines that can be described, and what is wrong with the others."""

    engines: tuple[EngineFacts, ...]
    problems: tuple[str, ...]


def read_engines(bundle: Bundle) -> Engines | Missing:
    """The engines of a bundle, each held against the manifest."""
    found, broken = described_engines(bundle)
    if not found and not broken:
        return Missing(
            "The bundle has no engines for a GPU; on the CPU its graphs run as they are.",
            "txl-deploy build BUNDLE --target rtx",
        )
    return Engines(some(_facts(one) for one in found), some(broken))


def described_engines(bundle: Bundle) -> tuple[list[dict[str, Any]], list[str]]:
    """The engines that can be described, as plain data, and what is wrong with the others."""
    found, broken = [], []
    for name in engine_names(bundle):
        try:
            bundle.check(name)
            found.append({"file": name} | engine_facts(read_sidecar(bundle.file(sidecar_path(name)))))
        except BundleError as error:
            broken.append(str(error))
    return found, broken


def built_for(facts: Mapping[str, Any]) -> str:
    """The GPUs that an engine fits."""
    if gpus := facts["compute_capabilities"]:
        return f"SM {', '.join(map(str, gpus))}"
    return str(facts["device"] or ("any GPU" if facts["platform"] == ANYWHERE else "the library's default GPUs"))


def _facts(facts: dict[str, Any]) -> EngineFacts:
    said = {
        "built_by": f"{facts['flavour']} {facts['version']}",
        "built_for": built_for(facts),
        "fused_kernels": some(facts["fused_kernels"]),
        "verified_on": some(facts["verified_on"]),
        "layers": some(facts["layers"]),
    }
    return msgspec.convert(facts | said, EngineFacts)  # the others are called alike there
