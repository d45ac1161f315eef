"""How many memory rows sequences may keep and see: the limit that a caller hands in."""

from __future__ import annotations

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import is_whole, shown
from txl_runtime.streaming.loop import Loop


def check_memory_length(memory_length: object, manifest: Manifest) -> int:
    """A limit on memory rows, 0 … M.

    Raises:
        UsageError: it is something else, or the model carries no rows that are counted.
    """
    if not manifest.can.count_rows:
        raise UsageError(
            f"memory_length is {shown(memory_length)}, but this model counts no memory rows; leave it out, and reset "
            "the state where it is to forget"
        )
    most = manifest.memory_length
    if not is_whole(memory_length) or not 0 <= memory_length <= most:
        raise UsageError(
            f"memory_length is {shown(memory_length)}, expected 0 … {most}; export with --memory-length for more"
        )
    return int(memory_length)


def limit_all(loop: Loop, manifest: Manifest, memory_length: object) -> None:
    """Let all sequences of a loop keep and see at most so many memory rows, from now on and for ever.

    Raises:
        UsageError: as `check_memory_length`.
    """
    loop.limit(np.arange(manifest.batch_size), check_memory_length(memory_length, manifest))
