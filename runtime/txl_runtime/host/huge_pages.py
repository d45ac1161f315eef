"""Large pages for the memory that ONNX Runtime fills while it opens a bundle, on Linux.

A decode step reads all weights once, and some processors have to wait for the addresses of pages of 4 kB. With pages of
2 MB a step took 0.78 of the time on an AMD EPYC (Zen 4), and 0.99 on an Intel Xeon (Cascade Lake), both virtual
machines. ONNX Runtime allocates its matrices itself, and the caller cannot choose where. So this module finds the
memory that was mapped while ONNX Runtime opened a bundle, and asks the kernel to put it into large pages. Contents and
addresses do not change.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

LEAST = 2**25
"""Minimum number of bytes of new memory, 32 MiB: smaller weights stay in a processor's caches."""
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
"""Folder of Linux's settings of large pages."""
PROCESS = Path("/proc/self")
"""Folder with information on this process."""
PART = 2**30
"""Number of bytes whose pages are inspected together, 1 GiB: a multiple of every size of large pages."""
LAST = 2**64
"""An address above all real addresses, which ends a search."""
COLLAPSE = 25
"""The number of MADV_COLLAPSE, which Linux has since 6.1; an older kernel refuses it."""

Range = tuple[int, int]
"""A range of addresses, [first, last)."""


@contextmanager
def in_huge_pages() -> Iterator[None]:
    """Put memory that is mapped and filled inside the `with` block into large pages, if the system has any.

    A large page is formed only if all its small pages are in memory, so that weights take no more memory than before.
    Memory that a different thread maps at the same time may be affected as well.
    """
    try:
        size, before = _size(), _anonymous()
    except (OSError, ValueError):  # this is not Linux, its kernel has no large pages, or a container hides these files
        size, before = 0, []
    yield
    if not size:
        return
    started = time.monotonic()
    try:
        new = _new(before, _anonymous(), size)
        whole = [address for start, end in new for address in _whole(start, end, size)]
    except OSError as error:  # a process that has changed its user may not read its page table
        logger.info("no memory is put into large pages: %s", error)
        return
    if len(whole) * size < LEAST:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    put = sum(not advise(start, size, COLLAPSE) for start in whole)
    seconds = time.monotonic() - started
    logger.info("put %d of %d MB into large pages in %.2f s", put * size >> 20, len(whole) * size >> 20, seconds)


def _size() -> int:
    """Return the size of a large page in bytes; 0 if the administrator has turned large pages off."""
    off = "[never]" in (SETTINGS / "enabled").read_text()
    return 0 if off else int((SETTINGS / "hpage_pmd_size").read_text())


def _anonymous() -> list[Range]:
    """Return the process's private memory that belongs to no file, as address ranges in ascending order."""
    ranges = []
    # split at b"\n" only, because a file's name may hold any other character
    for line in (PROCESS / "maps").read_bytes().split(b"\n"):
        place, access, _, _, _, *name = line.split(maxsplit=5) if line else [b""] * 5
        if access == b"rw-p" and (not name or name[0] == b"[heap]"):
            start, end = place.split(b"-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def _new(before: list[Range], after: list[Range], size: int) -> list[Range]:
    """Return the parts of `after` that are not in `before` and have at least `size` bytes; both lists are ascending."""
    ranges, old = [], iter([*before, (LAST, LAST)])
    first, last = next(old)
    for begin, end in after:
        start = begin
        while first < end:
            ranges.append((start, first))
            start = max(start, last)
            if last >= end:
                break
            first, last = next(old)
        ranges.append((start, end))
    return [(start, end) for start, end in ranges if end - start >= size]


def _whole(start: int, end: int, size: int) -> list[int]:
    """Return the addresses in a range at which a large page could be formed: all its small pages are in memory."""
    addresses, page = list[int](), mmap.PAGESIZE
    with (PROCESS / "pagemap").open("rb") as file:
        for first in range(-(-start // size) * size, end // size * size, PART):
            count = (min(first + PART, end // size * size) - first) // page
            file.seek(first // page * 8)
            entries = np.frombuffer(file.read(count * 8), np.uint64).reshape(-1, size // page)
            present = (entries >> np.uint64(63)).all(axis=1)
            addresses += [first + int(number) * size for number in np.flatnonzero(present)]
    return addresses
