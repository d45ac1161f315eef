"""The step in C, compiled once for all tests of a process, and models that run it beside ONNX Runtime."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from txl_engines.native import compile_step, find_compiler
from txl_runtime import Model, load
from txl_runtime.errors import BackendError
from txl_runtime.host.processor import processor_flags
from txl_runtime.native.opening import FLAGS, open_step

BUILT = tempfile.TemporaryDirectory(prefix="txl-native-")


@cache
def compiled(instructions: str, *more: str) -> Path:
    """The library for these instructions; where there is no compiler or no such processor, the test skips."""
    try:
        command = find_compiler()
    except BackendError as error:
        pytest.skip(str(error))
    if not processor_flags().issuperset(FLAGS[instructions]):
        pytest.skip(f"this processor lacks {instructions}")
    library = Path(BUILT.name) / f"{instructions}{''.join(more).replace(',', '')}.so"
    compile_step(command, library, instructions, ("-Wall", "-Wextra", "-Werror", *more))
    return library


def best() -> str:
    """The best instructions that the processor has."""
    return next(name for name, flags in FLAGS.items() if processor_flags().issuperset(flags))


def pair(
    path: Path, instructions: str = "", cache: str = "fp32", threads: int = 1, bf16: bool = False
) -> tuple[Model, Model]:
    """A bundle in ONNX Runtime, and in the step in C."""
    expected, found = (load(path, "cpu", threads=1, update="ring") for _ in range(2))
    shared = ("-DTXL_SHARED=0",) * (threads > 1)  # else one thread alone computes steps as small as these
    found.backend = open_step(found.bundle, compiled(instructions or best(), *shared), cache, threads, bf16=bf16)
    return expected, found


def ragged(model: Model, segments: int, seed: int = 0):
    """Yield tokens [B, T] and lengths [B] of random segments; some sequences are idle, some are longer than L."""
    rng = np.random.default_rng(seed)
    for _ in range(segments):
        columns = int(rng.integers(1, 2 * model.segment_lengths[0] + 1))
        tokens = rng.integers(0, model.vocab_size, (model.batch_size, columns))
        yield tokens, rng.integers(0, columns + 1, model.batch_size)


def largest(expected: Model, found: Model, segments: int = 40) -> float:
    """The largest |Δ| of log-probabilities, relative to max(1, largest |value|), over ragged segments and resets."""
    one, other = expected.stream(), found.stream()
    worst, size = 0.0, 1.0
    for number, (tokens, lengths) in enumerate(ragged(expected, segments)):
        if number % 15 == 14:
            one.reset([0])
            other.reset([0])
        wanted, given = one.feed(tokens, lengths), other.feed(tokens, lengths)
        worst, size = max(worst, float(np.abs(wanted - given).max())), max(size, float(np.abs(wanted).max()))
    memory, held = one.memory(), other.memory()
    assert all(np.allclose(memory[name], held[name], atol=1e-4) for name in memory)
    return worst / size
