"""The families of models: who turns what into a bundle, and what exporting, verifying and describing ask of each.

To add a family, write its folder with a module `family` that has the functions of `Family`, and a module `facts` with
those of `FamilyFacts`; then add one line to `FAMILIES`. The name is what a manifest's family block is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener

from txl_export.options import ExportOptions
from txl_export.proof.parity import Parity

FAMILIES = {
    "own_module": "txl_export.families.own_module",
    "graph": "txl_export.families.graph",
    "transformer_xl": "txl_export.families.transformer_xl",
}
"""Every family and its folder. The first that takes a source exports it; the last one takes every checkpoint."""


@dataclass(frozen=True)
class VerifyRequest:
    """What `verify` was asked for; a family refuses what it has no use for.

    Attributes:
        bundle: opened.
        checkpoint: what it was exported from, to repeat the import.
        module, weights: the user's own file and function, or specification, and its weights.
        text, tokens: real text.
        segments: of the longest chain.
        backend, threads: see `txl_runtime.load`.
    """

    bundle: Bundle
    checkpoint: Path | None = None
    module: Any = None
    weights: str | Path | None = None
    text: str | Path | None = None
    tokens: str | Path | NDArray[np.integer[Any]] | None = None
    segments: int | None = None
    backend: str = "auto"
    threads: int | None = None


class Prepared(Protocol):
    """A model that is ready to be written.

    Attributes:
        vocabulary: the file's content, if there is one.
        provenance: where the model came from, for the manifest.
    """

    vocabulary: bytes | None
    provenance: Mapping[str, Any]

    def write(self, folder: Path, heard: Listener) -> Manifest:
        """Write weight file and graphs; the manifest that belongs to them, but for files, vocabulary and provenance."""

    def vectors(self, manifest: Manifest) -> dict[str, NDArray[Any]]:
        """What the self-test replays, computed by the reference."""

    def verify(self, folder: Path, manifest: Manifest, heard: Listener) -> Parity:
        """Compare the bundle in a folder with PyTorch over chained segments."""


class Family(Protocol):
    """What the module `family` of a family's folder offers."""

    def prepare(self, source: Any, options: ExportOptions, heard: Listener) -> Prepared:
        """Read a source and check everything that can be checked before anything is written.

        Raises:
            TxlError: it cannot be exported, or an option is not for it.
        """

    def verify(self, request: VerifyRequest, heard: Listener) -> tuple[Parity, bytes | None]:
        """Compare a bundle that exists with PyTorch; and the vocabulary of what it was compared with, if that has one.

        Raises:
            TxlError: the bundle, what it is compared with or an option is not usable.
        """


class FamilyFacts(Protocol):
    """What the module `facts` of a family's folder offers; it imports no torch."""

    def takes(self, source: object) -> bool:
        """Whether a source (a path, a state dict, a specification) is this family's to export."""

    def facts(self, manifest: Manifest) -> dict[str, str]:
        """What `inspect` says of a bundle of this family beside what its tables say."""


def family_of_source(source: object) -> Family:
    """The family that exports a source.

    Raises:
        UsageError: none does.
    """
    for folder in FAMILIES.values():
        if cast(FamilyFacts, import_module(f"{folder}.facts")).takes(source):
            return cast(Family, import_module(f"{folder}.family"))
    raise UsageError(
        f"the checkpoint is {type(source).__name__}, expected a path, a state dict, a StepSpec or FILE.py:FUNCTION"
    )


def family_of_bundle(manifest: Manifest) -> Family:
    """The family that a bundle is of.

    Raises:
        UsageError: this version does not know it.
    """
    return cast(Family, import_module(f"{_folder(manifest)}.family"))


def facts_of_bundle(manifest: Manifest) -> dict[str, str]:
    """What the bundle's family says of it; nothing where this version does not know the family."""
    if manifest.family_name not in FAMILIES:
        return {}
    return cast(FamilyFacts, import_module(f"{_folder(manifest)}.facts")).facts(manifest)


def _folder(manifest: Manifest) -> str:
    if manifest.family_name not in FAMILIES:
        raise UsageError(
            f"the bundle's family is {manifest.family_name!r}, this version knows {', '.join(FAMILIES)}; "
            "upgrade txl-deploy, or replay the bundle's vectors with `txl-deploy selftest`"
        )
    return FAMILIES[manifest.family_name]
