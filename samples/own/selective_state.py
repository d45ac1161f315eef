"""A selective state-space model like Mamba-2. Its state is a convolution's last inputs, and one matrix per head.

    python samples/own/selective_state.py --train ssm.pt
    txl-deploy export samples/own/selective_state.py:build --weights ssm.pt --vocabulary bytes.json -o ssm.txl \
        --segment-length 32 --segment-length 1
    txl-deploy score ssm.txl samples/own/selective_state.py

The model reads bytes of the standard library's sources. `--train` also writes the vocabulary, bytes.json, beside the
weights.

A segment of 32 bytes is computed as products of matrices, a single byte as one step of a recurrence. The same code
does both, and the state does not grow with the text. The module has no `valid`, so every segment has to be full: `feed`
cuts any text into segments of 32 bytes and of 1.
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

LAYERS, WIDTH, HEADS, PER_HEAD, STATE, REACH, SEGMENT, BYTES = 2, 128, 4, 64, 16, 3, 32, 256
INNER, MIXED = HEADS * PER_HEAD, HEADS * PER_HEAD + 2 * STATE


class SelectiveState(nn.Module):
    """One layer (arXiv 2405.21060): the input decides what its state forgets, and what is added to its state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.outward = nn.LayerNorm(WIDTH), nn.Linear(INNER, WIDTH)
        self.inward = nn.Linear(WIDTH, INNER + MIXED + HEADS)
        self.convolution = nn.Conv1d(MIXED, MIXED, REACH + 1, groups=MIXED)
        self.decay = nn.Parameter(torch.linspace(-3.0, 1.0, HEADS))
        self.direct = nn.Parameter(torch.ones(HEADS, 1))

    def forward(self, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run x [B, L, D] with window [B, reach, mixed] and state [B, heads, per head, N].

        Return x, window and state after the layer, in the same shapes. For example, x is [2, 1, 32].
        """
        gate, mixed, step = torch.split(self.inward(self.norm(x)), [INNER, MIXED, HEADS], -1)
        seen = torch.cat([window, mixed], 1)
        mixed = functional.silu(self.convolution(seen.mT).mT)
        values, keys, queries = torch.split(mixed, [INNER, STATE, STATE], -1)
        values = values.view(*x.shape[:2], HEADS, PER_HEAD).transpose(1, 2)  # values [B, heads, L, per head]
        step = functional.softplus(step).mT  # step sizes [B, heads, L]
        # At position t, the share exp(log_decay[t]) of the old state is left, and of the part that position s wrote the
        # share exp(log_decay[t] - log_decay[s]), which is `left`.
        log_decay = torch.cumsum(-step * self.decay.exp()[:, None], -1)
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        left = torch.where(past, log_decay[..., :, None] - log_decay[..., None, :], -1e4).exp()  # left [B, heads, L, L]
        written = step[..., None] * values
        inside = (left * (queries @ keys.mT)[:, None]) @ written
        before = log_decay.exp()[..., None] * (queries[:, None] @ state.mT)
        state = log_decay[..., -1:, None].exp() * state + (left[..., -1, :, None] * written).mT @ keys[:, None]
        mixed = (inside + before + self.direct[..., None] * values).transpose(1, 2).flatten(2)
        return x + self.outward(mixed * functional.silu(gate)), seen[:, -REACH:], state


class SelectiveModel(nn.Module):
    """The language model: it takes bytes and two states, and returns scores of the next byte and two new states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(BYTES, WIDTH), nn.Linear(WIDTH, BYTES)
        self.layers = nn.ModuleList(SelectiveState() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, windows: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run tokens [B, L] and states, whose first axis is the layers; return logits [B, L, 256] and new states."""
        x, after = self.embedding(tokens), []
        for layer, window, state in zip(self.layers, windows, states, strict=True):
            x, window, state = layer(x, window, state)
            after.append((window, state))
        windows, states = (torch.stack(tensors) for tensors in zip(*after, strict=True))
        return self.head(functional.layer_norm(x, (WIDTH,))), windows, states


def build(weights: str | None) -> StepSpec:
    """Return the model with names and shapes of inputs, states and outputs; `txl-deploy export` calls this function."""
    model = SelectiveModel()
    if weights:
        model.load_state_dict(txl_export.read_weights(weights))
    return StepSpec(
        model,
        inputs=[InputSpec("tokens", ("B", "L"), tokens=BYTES)],
        states=[
            StateSpec("window", (LAYERS, "B", REACH, MIXED)),
            StateSpec("state", (LAYERS, "B", HEADS, PER_HEAD, STATE)),
        ],
        outputs=[OutputSpec("next", ("B", "L", BYTES), role="logits")],
    )


def train(seconds: float, streams: int = 8) -> SelectiveModel:
    """Train for `seconds` on the sources of the standard library; return the model."""
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // streams * streams].view(streams, -1).long()
    )
    model, started, position = SelectiveModel(), time.monotonic(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    while not position or time.monotonic() - started < seconds:
        if position % (64 * SEGMENT) == 0:
            states = torch.zeros(LAYERS, streams, REACH, MIXED), torch.zeros(LAYERS, streams, HEADS, PER_HEAD, STATE)
        # a window is longer than a segment, so that the model learns to keep what later segments need
        window = data[:, position : position + 4 * SEGMENT + 1]
        logits, *after = model(window[:, :-1], *states)
        states = after[0].detach(), after[1].detach()
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        position += 4 * SEGMENT
    print(f"{position * streams:,} bytes read, the last at {loss.item() / math.log(2):.2f} bits each")
    return model


def main() -> None:
    """Train, and write the weights and bytes.json."""
    parser = argparse.ArgumentParser(description="Train a selective state-space model on the standard library.")
    parser.add_argument("--train", metavar="WEIGHTS", type=Path, required=True, help="write the weights to this file")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to train for (default: %(default)s)")
    arguments = parser.parse_args()
    torch.save(train(arguments.seconds).state_dict(), arguments.train)
    arguments.train.with_name("bytes.json").write_text(json.dumps({"kind": "bytes"}))


if __name__ == "__main__":
    main()
