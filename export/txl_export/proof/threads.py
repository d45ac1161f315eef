"""How many threads the reference takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def few_threads(small: bool) -> Iterator[None]:
    """One thread of torch for a small model: where cores are shared, threads that wait for each other after every
    small operation use ten times the processor time that they save.
    """
    threads = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
