"""How many threads a comparison takes: one on each side for a small model.

Where cores are shared, threads that wait for each other after every small operation use ten times the processor time
that they save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from txl_runtime.bundle.manifest import Manifest

SMALL = 10_000_000
"""A model of fewer parameters runs best in one thread."""


@contextlib.contextmanager
def few_threads(small: bool) -> Iterator[None]:
    """One thread of torch for a small model's reference."""
    threads = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def engine_threads(manifest: Manifest, asked: int | None) -> int | None:
    """Threads of the engine that is compared: as many as were asked for, else one for a small model.

    None stands for all cores.
    """
    return 1 if asked is None and 0 < manifest.parameters < SMALL else asked
