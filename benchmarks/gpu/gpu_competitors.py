"""Run a bundle's weights in PyTorch on a GPU: eager, and by torch.compile with CUDA graphs.

Both forms work as the bundle does: they keep keys and values, compute everything that does not depend on the input in
advance, and use the bundle's precision. Ids go to the GPU and answers come back through page-locked memory, with one
wait per call. Before a form is timed, it is compared with `RELEASED`, the layout of the released code in float32, on
the same GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from txl_export.families.transformer_xl.family import weights_of_bundle
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import CheckError
from txl_runtime.ladder import competitor_limit
from txl_runtime.types import Array

from txl_deploy.bench.competitors.cached import KeyValue
from txl_deploy.bench.competitors.hidden import TimeFirstHidden
from txl_deploy.bench.competitors.shared_layers import Eager, Work

sys.path.append(str(Path(__file__).parents[1] / "rivals"))
from torch_forms import CompiledKeyValue, GraphLayers

__all__ = ["DTYPES", "EAGER", "MODES", "RELEASED", "TorchOnGpu", "compare"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype in which PyTorch computes, by the bundle's precision; log-probabilities are float32."""
EAGER, RELEASED = "torch", "torch-released"
MODES = {"torch-compiled": "reduce-overhead", "torch-autotuned": "max-autotune"}
"""Forms made by torch.compile, with its mode. Both modes use CUDA graphs; max-autotune also tries many kernels."""
COMPARED = 3
"""The number of compared steps of one token; CUDA graphs run from the third call on."""


class TorchOnGpu:
    """A competitor that computes in PyTorch on a GPU.

    Args:
        bundle: the bundle, whose precision is in `DTYPES`.
        form: `EAGER`, `RELEASED`, or one of `MODES`.
        device: "cuda"; tests say "cpu" or "meta".
        temperature, top_k: the options of all draws.
    """

    def __init__(self, bundle: Bundle, form: str, device: str, temperature: float = 0.8, top_k: int = 50) -> None:
        m, self._device = bundle.manifest, torch.device(device)
        self._length, self._temperature, self._top_k = m.segment_lengths[0], temperature, min(top_k, m.vocab_size)
        self.name, self.precision = form, "fp32" if form == RELEASED else str(m.precision)
        torch.backends.cuda.matmul.allow_tf32 = False  # the bundle does not use TF32 for fp32 products either
        weights = weights_of_bundle(bundle.file(m.weights), m)
        state = {name: tensor.to(self._device) for name, tensor in weights.items()}
        self.parts = GraphLayers(m.config, m.dialect, m.memory_length, state, DTYPES[self.precision])
        self.inner: Eager
        if form in MODES:
            self.inner = CompiledKeyValue(self.parts, m.batch_size, self._length, MODES[form])
        else:
            self.inner = (TimeFirstHidden if form == RELEASED else KeyValue)(self.parts, m.batch_size)
        self._locked: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._ids: dict[torch.Size, Tensor] = {}

    def fill(self, tokens: NDArray[np.int32]) -> None:
        """Run segments, e.g. tokens [4, 64], until the memory is full."""
        for _ in range(-(-self.parts.memory_length // self._length)):
            self.logprobs(tokens[:, : self._length])

    def logprobs(self, tokens: NDArray[np.int32]) -> Array:
        """Return log-probabilities after each token: int32 [B, T] → float32 [B, T, V], e.g. [4, 1] → [4, 1, 256]."""
        return self._answer(self.inner.distribution, tokens)

    def draw(self, tokens: NDArray[np.int32]) -> Array:
        """Draw one of the `top_k` most likely ids: int32 [B, T] → int32 [B], e.g. [4, 1] → [17, 4, 9, 2]."""
        return self._answer(self._drawn, tokens)

    def score(self, tokens: NDArray[np.int32]) -> Array:
        """Return the nats of all tokens but the first: int32 [B, T] → float32 [B, T - 1], e.g. [4, 9] → [4, 8]."""
        return self._answer(self.inner.nats, tokens)

    def _drawn(self, tokens: Tensor) -> Tensor:
        """Draw ids for tokens [B, T], as `multinomial` would, but without a wait for the GPU.

        Each share is divided by an exponential draw; the id of the largest quotient is drawn.
        """
        log_probabilities = self.parts.log_probabilities(self.inner.segment(tokens)[:, -1])
        results, ids = (log_probabilities / self._temperature).topk(self._top_k)
        shares = results.softmax(dim=-1)
        drawn = (shares / torch.empty_like(shares).exponential_()).argmax(dim=-1, keepdim=True)
        return ids.gather(1, drawn)[:, 0].int()

    @torch.inference_mode()
    def _answer(self, work: Work, tokens: NDArray[np.int32]) -> Array:
        inputs = torch.from_numpy(tokens)
        if inputs.shape not in self._ids:
            self._ids[inputs.shape] = torch.empty(inputs.shape, dtype=inputs.dtype, device=self._device)
            torch._dynamo.mark_static_address(self._ids[inputs.shape], guard=True)
        ids = self._ids[inputs.shape]
        ids.copy_(self._page_locked(inputs).copy_(inputs), non_blocking=True)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        inner = self.inner
        return self._on_host(inner.answer(work, ids) if isinstance(inner, CompiledKeyValue) else work(ids))

    def _on_host(self, result: Tensor) -> Array:
        held = self._page_locked(result).copy_(result, non_blocking=True)
        if result.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        array: Array = held.numpy().copy()
        return array

    def _page_locked(self, like: Tensor) -> Tensor:
        """Return page-locked host memory of a tensor's shape and dtype; every call of the same shape gets the same."""
        kind = like.shape, like.dtype
        if kind not in self._locked:
            self._locked[kind] = torch.empty(
                like.shape, dtype=like.dtype, device="cpu", pin_memory=self._device.type == "cuda"
            )
        return self._locked[kind]


def compare(found: TorchOnGpu, expected: TorchOnGpu, tokens: NDArray[np.int32]) -> dict[str, float]:
    """Fill both forms' memory with tokens, e.g. [4, 64], run steps of one token, and compare log-probabilities.

    Returns:
        The largest difference by the name of its measure, e.g. {"max_abs": 2e-5}.

    Raises:
        CheckError: the difference is over the limit, so the two do not compute the same function.
    """
    for each in (found, expected):
        each.fill(tokens)
    measure, limit = competitor_limit({found.precision, expected.precision})
    worst = 0.0
    for column in range(COMPARED):
        token = np.ascontiguousarray(tokens[:, [column % tokens.shape[1]]])
        p, q = (each.logprobs(token).astype(np.float64) for each in (expected, found))
        apart = np.abs(p - q).max() if measure == "max_abs" else (np.exp(p) * (p - q)).sum(-1).mean()
        worst = max(worst, float(apart)) if np.isfinite(apart) else np.nan
    if not worst <= limit:  # not `worst > limit`, which is False for NaN
        raise CheckError(
            f"{found.name}: differs from the released layout by {measure} {worst:.3g}, expected at most {limit:g}; "
            "it computes something else, so it is not timed"
        )
    return {measure: worst}
