"""What packages for the server have in common: what they are, and which models and numbers are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError

VERSION = "1"
"""The server's name for the folder of a model's only version."""
SEQUENCES = 16
"""So many sequences may be at once, or the bundle's B where that is more."""


@dataclass(frozen=True)
class Package:
    """A package that was written.

    Attributes:
        folder: where it is.
        target: what it is for.
        models: the names of its models.
        sequences: that may be at once.
        state_bytes: of each sequence at most.
    """

    folder: Path
    target: str
    models: tuple[str, ...]
    sequences: int
    state_bytes: int


def checked(manifest: Manifest, sequences: int | None, idle_seconds: float) -> int:
    """How many sequences may be at once.

    Raises:
        UsageError: the model, or one of the numbers, cannot be served.
    """
    if not manifest.can.run_fewer and manifest.batch_size > 1:
        raise UsageError(
            f"this model's {manifest.batch_size} sequences influence one another, expected a model whose sequences "
            "can be served to different clients; export it with --batch-size 1"
        )
    odd = [entry.name for entry in manifest.interface if entry.dtype in ("float16", "bfloat16")]
    if odd:
        raise UsageError(f"{odd[0]} is of half precision, expected float32, int32 or bool; export the model in fp32")
    if sequences is not None and not 1 <= sequences <= 1 << 16:
        raise UsageError(f"--sequences is {sequences}, expected 1 … {1 << 16}; choose how many may be at once")
    if not 0.001 <= idle_seconds <= 1e6:
        raise UsageError(f"--idle-seconds is {idle_seconds}, expected 0.001 … 1000000; choose another time")
    return max(manifest.batch_size, SEQUENCES) if sequences is None else sequences
