"""Chooses the number of threads for a comparison: one thread per side for a small model.

On shared cores, threads that wait for each other after every small operation use ten times the processor time that they
save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from txl_runtime.bundle.manifest import Manifest

SMALL = 10_000_000
"""Number of parameters below which a model runs fastest in one thread."""


@contextlib.contextmanager
def few_threads(small: bool) -> Iterator[None]:
    """Let torch use one thread inside the block if the model is small."""
    threads = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def engine_threads(manifest: Manifest, asked: int | None) -> int | None:
    """Return the engine's number of threads: the user's if given, else 1 for a small model, and None (all cores) for a
    large one.
    """
    return 1 if asked is None and 0 < manifest.parameters < SMALL else asked
