"""Make the steps that `rivals.py` and other scripts time, by their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import foreign_steps as foreign
import frame_steps as frames
import mixer_steps as mixers
import torch
from timed_step import Step

__all__ = ["made", "names"]

_RECURRENT = {
    f"{kind.__name__}-{layers}x{width}-b{batch}": partial(kind, layers, width, batch)
    for kind in (frames.lstm, frames.gru)
    for layers, width in ((2, 128), (1, 256))
    for batch in (1, 16, 64)
}


def _steps(outside: Path | None) -> dict[str, Callable[[], Step]]:
    return {
        **_RECURRENT,
        "gtrxl-b1": partial(foreign.gtrxl, 1),
        "gtrxl-b64": partial(foreign.gtrxl, 64),
        "voice": frames.voice,
        "slices-layer": frames.layer_slices,
        "slices-newest": frames.newest_slices,
        "tcn-ring": frames.ring_tcn,
        "llama-window": mixers.llama,
        "retnet": mixers.retnet,
        "rwkv": mixers.rwkv,
        "deltanet": mixers.deltanet,
        "zipformer": mixers.zipformer,
        "emformer": foreign.emformer,
        "mamba": foreign.mamba,
        "x-transformers": foreign.x_transformers,
        "gtcrn": partial(foreign.gtcrn, outside),
        "gtcrn-file": partial(foreign.gtcrn, outside, "gtcrn"),
        "gtcrn-simple-file": partial(foreign.gtcrn, outside, "gtcrn_simple"),
        "dtln-1-file": partial(foreign.dtln, outside, 1),
        "dtln-2-file": partial(foreign.dtln, outside, 2),
    }


def names() -> list[str]:
    """Return the names of all steps, which `--only` takes, e.g. "mamba"."""
    return list(_steps(None))


def made(name: str, outside: Path | None) -> Step:
    """Make the step of this name, with the same random weights in every process.

    Args:
        name: one of `names`.
        outside: the folder with checkouts of other repositories; None without one.

    Raises:
        AbsentError: a package or checkout that the step needs is missing.
    """
    torch.manual_seed(0)
    return _steps(outside)[name]()
