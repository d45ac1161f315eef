"""A Transformer-XL that its owner changed: gated residuals, rotary positions, a memory with its own fill counter.

    python samples/own/changed_transformer_xl.py --train xl.pt
    txl-deploy export samples/own/changed_transformer_xl.py:build --weights xl.pt --vocabulary bytes.json -o xl.txl
    txl-deploy generate xl.txl --prompt "def main(" --max-new-tokens 200

The model reads bytes of the standard library's sources. `--train` also writes the vocabulary, bytes.json, beside the
weights.

The memory always has MEMORY rows. The number of filled rows is a second state, and a mask hides the empty rows: so the
graph is the same from the first step on, and a sequence may start at any step. The module takes `valid`, the number of
bytes of each sequence that count, so that sequences of different length can be fed together.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import torch
import txl_export
from torch import Tensor, nn
from torch.nn import functional
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

LAYERS, WIDTH, HEADS, MEMORY, SEGMENT, BYTES = 2, 128, 4, 96, 128, 256


class Gate(nn.Module):
    """The gates of a GRU, which replace the residual sum (arXiv 1910.06764)."""

    def __init__(self) -> None:
        super().__init__()
        self.update, self.residual = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.candidate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.caution = nn.Parameter(torch.full((WIDTH,), 1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the gated sum of x and y, [B, L, D] each, e.g. [2, 5, 32]."""
        (reset, mix, new), (old_reset, old_mix) = self.update(y).chunk(3, -1), self.residual(x).chunk(2, -1)
        share = torch.sigmoid(mix + old_mix - self.caution)
        return (1 - share) * x + share * torch.tanh(new + self.candidate(torch.sigmoid(reset + old_reset) * x))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of x [B, H, K, d_head] by angles that grow with the position (arXiv 2104.09864).

    For example, x [2, 4, 21, 8] and positions 0 … 20.
    """
    half = x.shape[-1] // 2
    angles = positions[:, None] * torch.exp(torch.arange(half, dtype=x.dtype) * (-math.log(10_000) / half))
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Layer(nn.Module):
    """Attention over memory and segment, then a feed-forward network; a gate mixes each result with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.key_value, self.mixed = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gates = nn.ModuleList(Gate() for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """Run the layer on x [B, L, D] and its memory, of which each position sees the rows where `visible` is True.

        For example, [2, 5, 32] → [2, 5, 32] with a memory [2, 16, 32].
        """
        rows = self.norms[0](torch.cat([memory, x], 1))
        places = torch.arange(rows.shape[1], dtype=x.dtype)
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.key_value(rows).chunk(2, -1)]
        query = self.query(rows[:, MEMORY:]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        score = rotate(query, places[MEMORY:]) @ rotate(heads[0], places).mT / math.sqrt(WIDTH // HEADS)
        weights = torch.where(visible, score, -1e4).softmax(-1)
        x = self.gates[0](x, self.mixed((weights @ heads[1]).transpose(1, 2).flatten(2)))
        moved: Tensor = self.gates[1](x, self.outer(functional.gelu(self.inner(self.norms[1](x)))))
        return moved


class GatedXL(nn.Module):
    """The language model: it takes bytes and memory, and returns scores of the next byte and the new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(BYTES, WIDTH), nn.Linear(WIDTH, BYTES)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, memory: Tensor, fill: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run tokens [B, L], memory [layers, B, M, D], fill and valid [B]; return logits [B, L, 256], memory and
        fill.
        """
        x, below = self.embedding(tokens), []
        places = torch.arange(MEMORY + tokens.shape[1])
        written = places >= MEMORY - fill[:, None, None, None]
        visible = written & (places <= places[MEMORY:, None])  # bool [B, 1, L, M + L]
        for layer, rows in zip(self.layers, memory, strict=True):
            below.append(x)
            x = layer(x, rows, visible)
        # Each sequence's memory advances by its `valid` rows, so that it keeps no padding.
        places_kept = (valid[:, None] + torch.arange(MEMORY)).long()[None, :, :, None].expand_as(memory)
        memory = torch.cat([memory, torch.stack(below)], 2).gather(2, places_kept)
        return self.head(x), memory, torch.clamp(fill + valid, max=MEMORY)


def build(weights: str | None) -> StepSpec:
    """Return the model with names and shapes of inputs, states and outputs; `txl-deploy export` calls this function."""
    model = GatedXL()
    if weights:
        model.load_state_dict(txl_export.read_weights(weights))
    return StepSpec(
        model,
        inputs=[InputSpec("tokens", ("B", "L"), tokens=BYTES)],
        states=[StateSpec("memory", (LAYERS, "B", MEMORY, WIDTH)), StateSpec("fill", ("B",), dtype="int32")],
        outputs=[OutputSpec("next", ("B", "L", BYTES), role="logits")],
        lengths=True,
    )


def train(seconds: float, streams: int = 8) -> GatedXL:
    """Train for `seconds` on the sources of the standard library; return the model."""
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // streams * streams].view(streams, -1).long()
    )
    model, started, position = GatedXL(), time.monotonic(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    valid = torch.full((streams,), SEGMENT, dtype=torch.int32)
    while time.monotonic() - started < seconds:
        # generation starts from an empty memory, so training must include such starts
        if position % (32 * SEGMENT) == 0:
            memory, fill = torch.zeros(LAYERS, streams, MEMORY, WIDTH), torch.zeros(streams, dtype=torch.int32)
        window = data[:, position : position + SEGMENT + 1]
        logits, memory, fill = model(window[:, :-1], memory.detach(), fill, valid)
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        position += SEGMENT
    print(f"{position * streams:,} bytes read, the last at {loss.item() / math.log(2):.2f} bits each")
    return model


def main() -> None:
    """Train, and write the weights and bytes.json."""
    parser = argparse.ArgumentParser(description="Train a changed Transformer-XL on the standard library.")
    parser.add_argument("--train", metavar="WEIGHTS", type=Path, required=True, help="write the weights to this file")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to train for (default: %(default)s)")
    arguments = parser.parse_args()
    torch.save(train(arguments.seconds).state_dict(), arguments.train)
    arguments.train.with_name("bytes.json").write_text(json.dumps({"kind": "bytes"}))


if __name__ == "__main__":
    main()
