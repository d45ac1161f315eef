"""The reference run as the runtime runs streams: each sequence has a memory and a length of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from txl_runtime.types import Ids

from txl_export.families.transformer_xl.reference import Memory, Reference
from txl_export.families.transformer_xl.weights import layer_name
from txl_export.proof.distributions import Logprobs


class ReferenceStreams:
    """Sequences that advance together through the reference.

    Attributes:
        large: whether the model is so large that the reference computes in float32.
    """

    def __init__(self, reference: Reference, count: int) -> None:
        self.reference = reference
        self.memories: list[Memory] = [reference.initial_memory(1) for _ in range(count)]
        self.large = reference.dtype != torch.float64

    def run(self, tokens: Ids, counts: Ids) -> list[Tensor]:
        """One segment [b, T] of which counts [b] rows count: per sequence, what the softmax reads, [count, D].

        Sequences of the same length and with as many remembered rows are computed together.
        """
        hidden = [torch.empty(0)] * len(counts)
        alike: dict[tuple[int, int], list[int]] = {}
        for row, count in enumerate(counts.tolist()):
            if count:
                alike.setdefault((count, self.memories[row][0].shape[1]), []).append(row)
        for (count, _), rows in alike.items():
            memories = [self.memories[row] for row in rows]
            alone = len(rows) == 1  # then nothing is copied: a long memory is larger than the model
            joined = memories[0] if alone else [torch.cat(layer) for layer in zip(*memories, strict=True)]
            for row in rows:
                self.memories[row] = []
            del memories
            found, after = self.reference.hidden(torch.from_numpy(tokens[rows, :count]), _handed_over(joined))
            for index, row in enumerate(rows):
                hidden[row] = found[index]
                self.memories[row] = [layer[index : index + 1] for layer in after]
        return hidden

    def attention(self, tokens: Ids, counts: Ids) -> Logprobs:
        """Where one segment [b, T] looks, of which counts [b] rows count: [layers, b, H, T, M + T], as
        `Stream.attention` has it. The sequences stay where they are.
        """
        config, length = self.reference.config, tokens.shape[1]
        most, dtype = self.reference.memory_length, np.float32 if self.large else np.float64
        result = np.zeros((config.n_layer, len(counts), config.n_head, length, most + length), dtype)
        for row in np.flatnonzero(counts).tolist():
            count, memory = int(counts[row]), self.memories[row]
            found = self.reference.attention(torch.from_numpy(tokens[row : row + 1, :count]), memory)
            result[:, row, :, :count, most - memory[0].shape[1] : most + count] = found[:, 0].numpy()
        return result

    def logprobs(self, hidden: Tensor) -> Iterator[Logprobs]:
        """Log-probabilities for rows [n, D], some rows [·, V] at a time, each good until the next is asked for."""
        for some in self.reference.log_probabilities(hidden) if len(hidden) else ():
            yield some.numpy()

    def step(self, tokens: Ids, counts: Ids) -> Logprobs:
        """One segment's log-probabilities at once, [b, T, V]; rows beyond the counts are zero."""
        dtype = np.float32 if self.large else np.float64
        result = np.zeros((*tokens.shape, self.reference.config.vocab_size), dtype)
        for row, hidden in enumerate(self.run(tokens, counts)):
            first = 0
            for some in self.logprobs(hidden):
                result[row, first : first + len(some)] = some
                first += len(some)
        return result

    def memory(self, form: str) -> Iterator[tuple[str, Logprobs]]:
        """Name and values as `Stream.memory()` has them, shorter sequences zero-padded on the left; one at a time,
        because all of them together would be several times the model where the memory is long.
        """
        rows = max(memory[0].shape[1] for memory in self.memories)
        streams = (_named(self.reference, memory, form) for memory in self.memories)
        for tensors in zip(*streams, strict=True):
            padded = []
            for _, tensor in tensors:
                plain = tensor[0].numpy()
                padded.append(np.pad(plain, [(rows - plain.shape[0], 0), *[(0, 0)] * (plain.ndim - 1)]))
            yield tensors[0][0], np.stack(padded)


def _handed_over(memory: Memory) -> Iterator[Tensor]:
    """The layers of a memory, each gone as soon as the next is asked for."""
    memory.reverse()
    while memory:
        yield memory.pop()


def _named(reference: Reference, memory: Memory, form: str) -> Iterator[tuple[str, Tensor]]:
    if form == "hidden":
        yield from ((f"{layer_name(i)}.hidden", rows) for i, rows in enumerate(memory))
        return
    for i, (key, value) in enumerate(reference.keys_and_values(memory)):
        yield f"{layer_name(i)}.key", key
        yield f"{layer_name(i)}.value", value
