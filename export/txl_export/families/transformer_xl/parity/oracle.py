"""Lets `PaperModel` serve as the reference of a bundle (see `proof.references`).

Token ids go in, log-probabilities and hidden memory come out, and memory rows are shown in the bundle's form (keys and
values, or hidden rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.types import Array, Arrays, Ids

from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.weights import layer_name
from txl_export.proof.references import Reference, ReferenceStreams, Returned, States, whole

MOST_PARAMETERS = 200_000_000
"""Maximum number of parameters of a model that is copied to float64; the copy takes twice the memory of float32
weights."""


class Oracle(Reference):
    """Implements `Reference`. A step's states are hidden memories, even if the bundle keeps keys and values.

    Args:
        network: the model in float64, or in float32 if it is too large for float64.
        form: the form of the bundle's memory, "kv" or "hidden".
    """

    together, masks, resumes = True, False, False

    def __init__(self, network: PaperModel, form: str) -> None:
        self.network, self._form = network, form
        self.small, self.large = network.dtype == torch.float64, network.dtype != torch.float64
        self.described = f"computed in {str(network.dtype).removeprefix('torch.')}"

    def fresh(self, count: int) -> States:
        return {**self._named(self.network.initial_memory(count))}

    def step(self, inputs: Arrays, states: States, valid: Ids | None) -> tuple[dict[str, Returned], Arrays]:
        (tokens,) = inputs.values()
        count = tokens.shape[1] if valid is None else int(valid[0])
        hidden, after = self.network.hidden(torch.from_numpy(tokens[:, :count]), handed_over(states))
        return {"logprobs": partial(self._logprobs, hidden)}, self._named(after)

    def in_single(self) -> Oracle | None:
        return Oracle(self.network.in_precision(torch.float32), self._form) if self.small else None

    def precisions(self) -> tuple[Reference, Reference] | None:
        if self.network.parameters > MOST_PARAMETERS:
            return None
        double, single = (self.network.in_precision(dtype) for dtype in (torch.float64, torch.float32))
        return Oracle(double, self._form), Oracle(single, self._form)

    def shown(self, states: States) -> Iterator[tuple[str, Array]]:
        layers = [torch.from_numpy(layer) for layer in states.values()] if self.network.memory_length else []
        if self._form == "hidden":
            yield from ((name, layer.numpy()) for name, layer in zip(states, layers, strict=False))
            return
        for i, (key, value) in enumerate(self.network.keys_and_values(layers)):
            yield f"{layer_name(i)}.key", key.numpy()
            yield f"{layer_name(i)}.value", value.numpy()

    def _named(self, memory: list[Tensor]) -> Arrays:
        return {f"{layer_name(i)}.hidden": layer.numpy() for i, layer in enumerate(memory)}

    def _logprobs(self, hidden: Tensor, row: int) -> Iterator[Array]:
        for some in self.network.log_probabilities(hidden[row]) if hidden.shape[1] else ():
            yield some.numpy()


class OracleStreams(ReferenceStreams):
    """Sequences that the reference advances together, as a `Stream` does."""

    def __init__(self, manifest: Manifest, network: PaperModel, count: int) -> None:
        self._network = network
        super().__init__(manifest, Oracle(network, manifest.transformer_xl.memory), count)

    def step(self, tokens: Ids, counts: Ids) -> NDArray[np.floating]:
        """Run a segment: tokens [b, T] and counts [b] → log-probabilities [b, T, V], zero in rows beyond the counts.

        For example, tokens [2, 5] with counts [5, 3] → [2, 5, 256].
        """
        dtype = np.float64 if self.reference.small else np.float32
        result = np.zeros((*tokens.shape, self._network.config.vocab_size), dtype)
        for rows, outputs in self.run({"tokens": tokens}, counts):
            logprobs = whole(outputs["logprobs"], len(rows))
            result[rows, : logprobs.shape[1]] = logprobs
        return result

    @property
    def rows(self) -> list[int]:
        """The number of memory rows of each sequence."""
        return [next(layer.shape[1] for layer in held.values() if layer is not None) for held in self._held]


def handed_over(states: States) -> Iterator[Tensor]:
    """Yield each layer of a memory and remove it from `states`, because a long memory is larger than the model.

    For example, each layer is [2, 16, 32].
    """
    for name in list(states):
        yield torch.from_numpy(states.pop(name))
