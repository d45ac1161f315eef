"""Makes the vectors of the self-test: a few kilobytes of the reference's results (see `txl_runtime.selftest`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import STATE_DTYPES

from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity.oracle import OracleStreams
from txl_export.proof.selftest_vectors import step_counts

POSITIONS, COLUMNS, MOST_STEPS, ROWS, CHANNELS, SEQUENCES = 4, 64, 48, 256, 16, 2
"""Limits of the vectors' size: positions per step, words of the vocabulary, steps that fill the memory, and memory
rows, channels and sequences."""


def selftest_vectors(manifest: Manifest, reference: PaperModel) -> dict[str, NDArray[Any]]:
    """Return a chain through all programs until memory rolls over, with partial segments and idle sequences.

    For example, {"length": an array [3]} for three steps.
    """
    draws = np.random.default_rng(0)
    lengths, batch = manifest.segment_lengths, manifest.batch_size
    to_fill = math.ceil(manifest.memory_length / lengths[0])
    steps = [*lengths, max(1, lengths[0] // 2), *[lengths[0]] * min(to_fill, MOST_STEPS), *lengths, 1]
    columns = np.sort(draws.permutation(manifest.config.vocab_size)[:COLUMNS]).astype(np.int32)
    shape = (len(steps), batch)
    vectors: dict[str, NDArray[Any]] = {
        "length": np.array(steps, np.int32),
        "tokens": np.zeros((*shape, lengths[0]), np.int32),
        "counts": np.zeros(shape, np.int32),
        "positions": np.zeros((*shape, POSITIONS), np.int32),
        "columns": columns,
        "logprobs": np.zeros((*shape, POSITIONS, len(columns)), np.float32),
    }
    truth = OracleStreams(manifest, reference, batch)
    for step, length in enumerate(steps):
        tokens = draws.integers(0, manifest.config.vocab_size, (batch, length)).astype(np.int32)
        counts = step_counts(manifest, length, step, draws)
        positions = draws.integers(0, np.maximum(counts, 1)[:, None], (batch, POSITIONS)).astype(np.int32)
        positions[:, 0] = np.maximum(counts - 1, 0)
        expected = truth.step(tokens, counts)
        vectors["tokens"][step, :, :length] = tokens
        vectors["counts"][step], vectors["positions"][step] = counts, positions
        vectors["logprobs"][step] = np.take_along_axis(expected, positions[..., None], axis=1)[..., columns]
    for name, rows in truth.shown():
        assert rows is not None, "memory rows are always there"
        oldest = [rows[row, rows.shape[1] - count] for row, count in enumerate(truth.rows)]
        vectors[f"memory/{name}"] = np.stack([np.stack(oldest), rows[:, -1]], axis=1).astype(np.float32)
        if manifest.precision in STATE_DTYPES:
            filled = min(truth.rows[:SEQUENCES])
            width = math.prod(rows.shape[2:])
            vectors["rows"] = np.linspace(0, filled - 1, min(filled, ROWS)).astype(np.int32)
            vectors["channels"] = (np.arange(min(width, CHANNELS)) * width // min(width, CHANNELS)).astype(np.int32)
            some = rows[:SEQUENCES, rows.shape[1] - 1 - vectors["rows"]].reshape(-1, len(vectors["rows"]), width)
            vectors[f"row/{name}"] = some[..., vectors["channels"]].astype(np.float32)
    return vectors
