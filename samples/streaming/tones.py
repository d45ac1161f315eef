"""Simulates frames with a tone to detect, and measures how well it was detected. This module imports no torch."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

BANDS = 8
FRAME = 10
"""Milliseconds of one frame."""
Array: TypeAlias = np.ndarray[Any, Any]


def simulate(length: int, seed: int) -> tuple[Array, Array]:
    """Return frames [length, 8], like a filter bank's, and a mask of the frames in which the wanted tone sounds.

    Frames 1 to 7 present the wanted tone, and are not in the mask. Tones last 6 frames or more, clicks at most 3: only
    later frames distinguish a tone from a click.
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
    """Return F1, the agreement of scores with labels: 2 · both / (scores above 0 + true labels), counted in frames.

    For example, 1.0 if the scores are above 0 exactly where the labels are True.
    """
    called, wanted = np.concatenate(scores) > 0, np.concatenate(labels)
    return float(2 * (called & wanted).sum() / (called.sum() + wanted.sum()))
