"""Attention as small pictures: who looks where in one segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from txl_runtime.types import Floats, Ids

from txl_report.measuring.results import HeadFacts, HeadPicture, Pictures
from txl_report.measuring.texts import shown_text

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary

MOST_QUERIES, MOST_COLUMNS = 128, 512
MOST_BYTES = 1 << 20
"""Of all pictures together, before they are compressed."""


def pictures_of(
    looked: Floats, tokens: Ids, rows: int, facts: Sequence[HeadFacts], vocabulary: Vocabulary | None
) -> Pictures:
    """Pictures of the heads in one segment, within bounds.

    Args:
        looked: float32 [layers, heads, T, M + T].
        tokens: int32 [M + T], of the slots.
        rows: M.
        facts: every head, nearest first: where not all fit, they are chosen evenly along this order.
        vocabulary: of the bundle.
    """
    layers, heads, length, slots = looked.shape
    shown = min(length, MOST_QUERIES)
    width = -(-slots // MOST_COLUMNS)
    edges = [*_edges(0, rows, width), *_edges(rows, slots, width)]
    fit = max(1, MOST_BYTES // (shown * len(edges)))
    chosen = [facts[index] for index in np.linspace(0, len(facts) - 1, min(fit, len(facts))).round().astype(int)]
    notes = []
    if len(chosen) < len(facts):
        notes.append(f"{len(chosen)} of {layers * heads} heads have pictures: evenly chosen from near to far.")
    if width > 1:
        notes.append(f"One column of a picture stands for {width} slots and shows the sum of their attention.")
    if shown < length:
        notes.append(f"Pictures show the last {shown} of the segment's {length} tokens.")
    ends = [*edges[1:], slots]
    return Pictures(
        heads=tuple(
            _picture(np.add.reduceat(looked[head.layer, head.head, length - shown :], edges, axis=1), head)
            for head in sorted(chosen, key=lambda head: (head.layer, head.head))
        ),
        query_texts=tuple(shown_text(vocabulary, tokens[slot : slot + 1]) for slot in range(slots - shown, slots)),
        column_texts=tuple(shown_text(vocabulary, tokens[first:last]) for first, last in zip(edges, ends, strict=True)),
        column_width=width,
        memory_columns=sum(edge < rows for edge in edges),
        notes=tuple(notes),
    )


def _picture(values: Floats, head: HeadFacts) -> HeadPicture:
    largest = float(values.max())
    brightness = np.sqrt(np.maximum(values, 0) / largest) if largest > 0 else np.zeros_like(values)
    return HeadPicture(head.layer, head.head, np.rint(255 * brightness).astype(np.uint8), largest)


def _edges(first: int, last: int, width: int) -> list[int]:
    """Where columns of up to `width` slots begin; the first one is the narrow one, if one has to be."""
    edges = list(range(last - width, first, -width))[::-1]
    return [first, *edges] if last > first else []
