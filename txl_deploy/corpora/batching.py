"""Which documents run beside each other: of similar length, so that few rows wait for the longest.

Documents are taken in windows, because a corpus is not held in memory. A window is sorted by length and cut into
batches of as many documents as the bundle has rows. The longest come first: what is left for the end is short, and
several processes end together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from txl_deploy.corpora.documents import Unit

MOST_DOCUMENTS = 4096
"""Of a window."""
ENOUGH_TOKENS, MOST_TOKENS = 1 << 20, 1 << 26
"""Of a window: with which it is large enough, if there are documents for every row; and with which it ends anyway."""


def windows(units: Iterable[Unit], rows: int) -> Iterator[list[Unit]]:
    """Units in windows, in their order; `rows` is how many run beside each other, in all processes together.

    Where reading fails, the window that is begun comes first and the error then.
    """
    window: list[Unit] = []
    tokens = 0
    try:
        for unit in units:
            window.append(unit)
            tokens += unit.length
            full = tokens >= ENOUGH_TOKENS and len(window) >= 4 * rows
            if full or tokens >= MOST_TOKENS or len(window) >= max(MOST_DOCUMENTS, 4 * rows):
                yield window
                window, tokens = [], 0
    except Exception:
        if window:
            yield window
        raise
    if window:
        yield window


def batches(window: Sequence[Unit], rows: int) -> Iterator[list[Unit]]:
    """The units of a window, the longest first, `rows` at a time."""
    ordered = sorted(window, key=lambda unit: (-unit.length, unit.index))
    for first in range(0, len(ordered), rows):
        yield ordered[first : first + rows]
