"""Simulates frames with a tone to detect, and counts how much of it was detected. Imports no torch."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

BANDS = 8
FRAME = 10
"""Milliseconds of one frame."""
Array: TypeAlias = np.ndarray[Any, Any]


def simulate(length: int, seed: int) -> tuple[Array, Array]:
    """Return frames [length, 8] as a filter bank makes them, and a mask of those that belong to the first tone.

    Tones last 6 frames or more, clicks 3 at most: only later frames distinguish them.
    """
    random = np.random.default_rng(seed)
    frames, labels = random.normal(size=(length, BANDS)) * 0.3, np.zeros(length, np.bool_)
    wanted, place = int(random.integers(BANDS)), 10
    frames[1:8, wanted] += 3
    while place < length - 12:
        band = wanted if random.random() < 0.5 else int(random.integers(BANDS))
        lasts = int(random.integers(6, 10) if random.random() < 0.5 else random.integers(1, 4))
        frames[place : place + lasts, band] += 2
        labels[place : place + lasts] = band == wanted and lasts >= 6
        place += lasts + int(random.integers(2, 7))
    return frames.astype(np.float32), labels


def agreement(scores: list[Array], labels: list[Array]) -> float:
    """Return F1, the agreement of scores with labels: 2 · both / (called by the scores + called by the labels).

    For example, 1.0 if both call the same frames the tone's.
    """
    called, wanted = np.concatenate(scores) > 0, np.concatenate(labels)
    return float(2 * (called & wanted).sum() / (called.sum() + wanted.sum()))
