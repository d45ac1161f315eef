"""PyTorch on a GPU with a bundle's weights: eager, and torch.compile in mode reduce-overhead, which is CUDA graphs.

Both keep keys and values and fold what does not depend on the input, as the bundle does; scores come back to the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from txl_runtime.model import Model

from txl_deploy.bench.competitors import weights_of
from txl_deploy.bench.competitors.cached import CompiledKeyValue, KeyValue
from txl_deploy.bench.competitors.parts import Parts

__all__ = ["TorchOnGpu"]


class _Recorded(CompiledKeyValue):
    """The compiled form with CUDA graphs; its ring stays where it is, which they have to be told."""

    def __init__(self, parts: Parts, batch_size: int, longest: int) -> None:
        super().__init__(parts, batch_size, longest)
        self._compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(
            self._in_ring, dynamic=False, mode="reduce-overhead"
        )
        self._told = False

    def segment(self, tokens: Tensor) -> Tensor:
        """See `Eager`."""
        if not self._told and self.rows >= self.parts.memory_length > 0:
            self._ring = [torch.nn.functional.pad(rows, (0, 0, 0, self._longest)) for rows in self.memory()]
            self._head = self._head + self.parts.memory_length
            for rows in self._ring:
                torch._dynamo.mark_static_address(rows)
            self._told = True
        return super().segment(tokens)


class TorchOnGpu:
    """PyTorch on a GPU, as a competitor.

    Args:
        model: the bundle, loaded anywhere.
        compiled: with CUDA graphs; eager otherwise.
        device: "cuda"; tests say "cpu".
    """

    def __init__(self, model: Model, compiled: bool, device: str) -> None:
        m, self._device, self._compiled = model.manifest, torch.device(device), compiled
        self._batch, self._length = m.batch_size, m.segment_lengths[0]
        torch.backends.cuda.matmul.allow_tf32 = False
        with self._device, torch.inference_mode():
            state = {name: tensor.to(self._device) for name, tensor in weights_of(model).items()}
            self.parts = Parts(m.config, m.dialect, m.memory_length, state)
            self._inner = (
                _Recorded(self.parts, self._batch, self._length) if compiled else KeyValue(self.parts, self._batch)
            )

    def fill(self, tokens: NDArray[np.int32]) -> None:
        """Segments until the memory is full, and one of each length, so that what is computed once is there."""
        with self._device:
            for _ in range(-(-self.parts.memory_length // self._length) + 1):
                self._segment(tokens[:, : self._length])
            self._segment(tokens[:, :1])

    def logprobs(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """int32 [B, T] → float32 [B, T, V]."""
        with self._mode(), torch.inference_mode():
            hidden = self._segment(tokens).flatten(0, 1)
            return self._array(self.parts.log_probabilities(hidden)).reshape(*tokens.shape, -1)

    def score(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """int32 [B, T] → nats of tokens[:, 1:], float32 [B, T-1]."""
        with self._mode(), torch.inference_mode():
            targets = torch.from_numpy(np.ascontiguousarray(tokens[:, 1:])).to(self._device).long().flatten()
            hidden = self._segment(tokens[:, :-1]).flatten(0, 1)
            return self._array(self.parts.nll(hidden, targets)).reshape(len(tokens), -1)

    def _mode(self) -> AbstractContextManager[Any]:
        """A default device costs time in every eager call: eager, nothing is created any more once memory is full."""
        return self._device if self._compiled else contextlib.nullcontext()

    def _segment(self, tokens: NDArray[np.int32]) -> Tensor:
        with torch.inference_mode():
            return self._inner.segment(torch.from_numpy(np.ascontiguousarray(tokens)).to(self._device).long())

    def _array(self, tensor: Tensor) -> NDArray[np.float32]:
        array: NDArray[np.float32] = tensor.cpu().numpy()
        return array
