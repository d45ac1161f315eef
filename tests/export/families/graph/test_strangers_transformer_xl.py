"""A Transformer-XL that somebody exported by a script of their own: hidden memories in, hidden memories out."""

from __future__ import annotations

import warnings

import numpy as np
import onnxruntime
import pytest
import torch
import txl_export
import txl_runtime
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, MEMORY, WORDS = 2, 16, 2, 6, 40


class Layer(nn.Module):
    """Attention by content and distance, the shift by padding and reshaping as the released code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.far, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.content, self.distance = (nn.Parameter(torch.randn(HEADS, WIDTH // HEADS)) for _ in range(2))
        self.wide, self.narrow = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor, table: Tensor) -> Tensor:
        """[L, B, width] and [M, B, width] → [L, B, width]."""
        length, rows, size = x.shape[0], x.shape[0] + memory.shape[0], WIDTH // HEADS
        q, k, v = (part.reshape(rows, -1, HEADS, size) for part in self.qkv(torch.cat([memory, x])).chunk(3, -1))
        q, far = q[-length:], self.far(table).reshape(rows, HEADS, size)
        scores = torch.einsum("ibnd,jbnd->ijbn", q + self.content, k)
        by_distance = torch.einsum("ibnd,jnd->ijbn", q + self.distance, far)
        padded = torch.cat([by_distance.new_zeros(length, 1, *by_distance.shape[2:]), by_distance], 1)
        scores = scores + padded.reshape(rows + 1, length, *by_distance.shape[2:])[1:].reshape(by_distance.shape)
        hidden = torch.ones(length, rows).triu(1 + rows - length).bool()[:, :, None, None]
        weights = (scores * size**-0.5).masked_fill(hidden, -1e9).softmax(1)
        x = self.norms[0](x + self.out(torch.einsum("ijbn,jbnd->ibnd", weights, v).reshape(x.shape)))
        return self.norms[1](x + self.narrow(torch.relu(self.wide(x))))


class Stranger(nn.Module):
    """Ids [L, B] and memories [layers, M, B, width] → logits and the next memories."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, data: Tensor, mems: Tensor) -> tuple[Tensor, Tensor]:
        """One segment."""
        x, kept = self.embed(data), []
        rows = torch.arange(data.shape[0] + MEMORY - 1, -1, -1.0)[:, None]
        angles = rows / 10000 ** (torch.arange(0, WIDTH, 2.0) / WIDTH)
        table = torch.cat([angles.sin(), angles.cos()], 1)
        for layer, memory in zip(self.layers, mems.unbind(0), strict=True):
            kept.append(torch.cat([memory, x])[-MEMORY:])
            x = layer(x, memory, table)
        return x @ self.embed.weight.T, torch.stack(kept)


@pytest.mark.parametrize("length", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_its_memories_are_carried_on_and_its_logits_become_log_probabilities(length, tmp_path):
    torch.manual_seed(0)
    model, path = Stranger().eval(), tmp_path / "stranger.onnx"
    given = (torch.randint(0, WORDS, (length, 2)), torch.zeros(LAYERS, MEMORY, 2, WIDTH))
    axes = {"data": {1: "bsz"}, "mems": {2: "bsz"}, "logits": {1: "bsz"}, "new_mems": {2: "bsz"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, given, path, input_names=["data", "mems"], output_names=["logits", "new_mems"],
            dynamic_axes=axes, opset_version=14, dynamo=False,
        )  # fmt: skip
    manifest = txl_export.export(path, tmp_path / "b", batch_size=3).manifest
    assert [(state.name, state.batch_axis) for state in manifest.states] == [("mems", 2)]
    assert [(entry.shape, entry.vocab) for entry in manifest.given] == [(("L", "B"), WORDS)]
    assert (manifest.vocab_size, manifest.segment_lengths) == (WORDS, (length,))
    session, stream = onnxruntime.InferenceSession(path), txl_runtime.load(tmp_path / "b", "cpu").stream()
    mems, draws = np.zeros((LAYERS, MEMORY, 3, WIDTH), np.float32), np.random.default_rng(0)
    for _ in range(20):
        data = draws.integers(0, WORDS, (length, 3)).astype(np.int32)
        logits, mems = session.run(None, {"data": data.astype(np.int64), "mems": mems})
        wanted = torch.from_numpy(logits).log_softmax(-1).numpy()
        np.testing.assert_allclose(stream.run({"data": data})["logits"], wanted, atol=2e-5)
