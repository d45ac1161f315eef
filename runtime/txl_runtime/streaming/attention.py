"""Where a model looks: the attention probabilities of a segment that is read from a stream's present memory.

The memory is taken out of the loop, whatever the engine, and given to a program that runs on the CPU and returns no
state. So a look changes nothing, and whoever does not look carries none of this.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from txl_runtime.bundle.attention_program import ATTENTION, attention_program
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import as_array, check_tokens, zeros
from txl_runtime.streaming.loop import Loop
from txl_runtime.streaming.states import as_declared, gathered
from txl_runtime.types import Array, Arrays, Floats

Look = Callable[[Program, Arrays], Arrays]
"""Runs a program that stands beside the streams, on arrays by the names of its inputs."""


def attend(
    tokens: ArrayLike, lengths: ArrayLike | None, manifest: Manifest, sequences: int, loop: Loop, look: Look | None
) -> Floats:
    """The attention of one segment; see `Stream.attention`.

    Args:
        tokens, lengths: what the stream was asked for.
        manifest: of the stream.
        sequences: b.
        loop: that holds the memory.
        look: what runs the program; None for a stream that was put together without a bundle.

    Raises:
        UsageError: the bundle has no such program, or tokens or lengths are no segment of the model.
        BackendError: the program cannot be run on this CPU.
        BundleError: the bundle's files are no longer those that it was loaded from.
    """
    program = attention_program(manifest)
    if program is None or look is None:
        raise UsageError(
            "attention needs a program of kind attention, which this bundle lacks; export the model again with "
            "--attention"
        )
    (result,), length = program.outputs, program.segment_length
    found = as_array(tokens, "tokens")
    if found.ndim == 2 and found.shape[1] > length:
        raise UsageError(
            f"tokens have {found.shape[1]} columns, expected at most one segment of {length}; feed what comes before, "
            "then look at the rest"
        )
    ids, counts = check_tokens(found, sequences, manifest.vocab_size, lengths)
    layers, _, heads, _, slots = result.fixed
    width, memory_length = ids.shape[1], slots - length
    whole = zeros((layers, sequences, heads, width, memory_length + width), "attention")
    padded = np.zeros((1, length), np.int32)
    names, table = {entry.role: entry.name for entry in manifest.inputs}, manifest.states_of("rolled")
    for row in np.flatnonzero(counts).tolist():
        state = loop.take(row)
        padded[0, :width] = ids[row]
        inputs: dict[str, Array] = {names["tokens"]: padded, names["valid"]: counts[row : row + 1]}
        inputs[names["fill"]] = np.array([state.fill], np.int32)
        memory = as_declared(gathered([state], table, 1, memory_length), table)
        inputs |= {entry.input: memory[entry.name] for entry in table}
        seen = look(program, inputs)[ATTENTION]
        whole[:, row] = seen[:, 0, :, :width, : memory_length + width]
    return whole
