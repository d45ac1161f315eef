"""Finds the family that exports a source or made a bundle, and defines the functions that each family has.

To add a family, write its folder with a module `family` that has the functions of `Family`, and a module `facts` that
has the functions of `FamilyFacts`; then add one line to `FAMILIES`. The manifest's family block has the family's name.
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
"""Every family's folder by name. The first family that takes a source exports it; the last takes every checkpoint."""


@dataclass(frozen=True)
class VerifyRequest:
    """The arguments of `verify`; a family refuses arguments that it does not use.

    Attributes:
        bundle: the opened bundle.
        checkpoint: the file that the bundle was exported from, to repeat the import; or None.
        module, weights: the user's FILE.py:FUNCTION, or specification, and its weights.
        text, tokens: real text, or its token ids.
        segments: number of segments of the longest chain.
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
        vocabulary: the vocabulary as bundle JSON; None without a vocabulary.
        provenance: the model's origin, for the manifest.
    """

    vocabulary: bytes | None
    provenance: Mapping[str, Any]

    def write(self, folder: Path, listener: Listener) -> Manifest:
        """Write weight file and graphs; return the manifest without files, vocabulary and provenance."""

    def vectors(self, manifest: Manifest) -> dict[str, NDArray[Any]]:
        """Compute the self-test's inputs and expected results with the reference, as arrays by name.

        For example, {"counts": an array [3, 2]} for three steps of two sequences.
        """

    def verify(self, folder: Path, manifest: Manifest, listener: Listener) -> Parity:
        """Compare the bundle in a folder with PyTorch over chained segments."""


class Family(Protocol):
    """The functions of the module `family` in a family's folder."""

    def prepare(self, source: Any, options: ExportOptions, listener: Listener) -> Prepared:
        """Read a source, and check all that can be checked before anything is written.

        Raises:
            TxlError: the source cannot be exported, or an option does not apply to it.
        """

    def verify(self, request: VerifyRequest, listener: Listener) -> tuple[Parity, bytes | None]:
        """Compare an existing bundle with PyTorch; return the result, and the reference's vocabulary or None.

        Raises:
            TxlError: the bundle, the reference or an option is not usable.
        """


class FamilyFacts(Protocol):
    """The functions of the module `facts` in a family's folder; this module imports no torch."""

    def takes(self, source: object) -> bool:
        """Return whether this family exports a source, which may be a path, a state dict or a specification."""

    def facts(self, manifest: Manifest) -> dict[str, str]:
        """Return the lines that `inspect` shows of a bundle of this family besides its tables: title and text."""


def family_of_source(source: object) -> Family:
    """Return the family that exports a source.

    Raises:
        UsageError: no family exports it.
    """
    for folder in FAMILIES.values():
        if cast(FamilyFacts, import_module(f"{folder}.facts")).takes(source):
            return cast(Family, import_module(f"{folder}.family"))
    raise UsageError(
        f"the checkpoint is {type(source).__name__}, expected a path, a state dict, a StepSpec or FILE.py:FUNCTION"
    )


def family_of_bundle(manifest: Manifest) -> Family:
    """Return the family of a bundle.

    Raises:
        UsageError: this version does not know the family.
    """
    return cast(Family, import_module(f"{_folder(manifest)}.family"))


def facts_of_bundle(manifest: Manifest) -> dict[str, str]:
    """Return the lines that `inspect` shows about the bundle's family; {} if this version does not know the family."""
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
