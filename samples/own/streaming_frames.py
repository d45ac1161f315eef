"""A streaming labeller of feature frames: it sees a few frames ahead and keeps a bank of one summary per segment.

    python samples/own/streaming_frames.py --train frames.pt
    txl-deploy export samples/own/streaming_frames.py:build --weights frames.pt -o frames.txl \
        --segment-length 8 --batch-size 4
    python samples/own/streaming_frames.py --run frames.txl

The simulated frames contain events of two kinds that begin with the same frames. Only the end of an event tells its
kind, so the labels of its first frames need the frames ahead. A mark between events says which kind is labelled 1 until
the next mark: the bank remembers it. `--run` also prints the shares without the frames ahead, and without the bank.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import txl_export
import txl_runtime
from torch import Tensor, nn
from torch.nn import functional
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

FEATURES, WIDTH, HEADS, LAYERS, SEGMENT, AHEAD, BANK, LABELS = 8, 64, 4, 2, 8, 4, 8, 3


class Layer(nn.Module):
    """Attention of frames to bank and frames. The mean of the segment's frames is also a query: it gives a summary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.query, self.key_value, self.mixed = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bank: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Run x [B, L + ahead, D] and bank [B, rows, D]; return the new x and a summary [B, 1, D]."""
        frames = self.norm(x)
        asked = torch.cat([frames, frames[:, :SEGMENT].mean(1, keepdim=True)], 1)
        key, value = self.key_value(torch.cat([bank, frames], 1)).chunk(2, -1)
        query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.query(asked), key, value))
        score = torch.where(visible, query @ key.mT * (WIDTH // HEADS) ** -0.5, -1e4)
        mixed = self.mixed((score.softmax(-1) @ value).transpose(1, 2).flatten(2))
        x = x + mixed[:, :-1]
        return x + self.outer(functional.relu(self.inner(self.norm(x)))), mixed[:, -1:]


class Labeller(nn.Module):
    """The model: it takes frames and a bank; it returns scores of the segment's labels, and a bank with a new row."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, LABELS)
        self.near = nn.Conv1d(WIDTH, WIDTH, 2 * AHEAD + 1, padding=AHEAD)
        self.places = nn.Parameter(torch.randn(BANK + SEGMENT + AHEAD, WIDTH) * 0.3)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, frames: Tensor, bank: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run frames [B, L + ahead, 8], bank [layers, B, rows, D] and the number of filled rows [B].

        Return scores of labels [B, L, 3], the new bank and the new number of filled rows.
        """
        x = self.inward(frames)
        x = x + functional.relu(self.near(x.mT).mT) + self.places[BANK:]
        filled = torch.arange(BANK) >= BANK - rows[:, None]
        visible = torch.cat([filled, torch.ones_like(frames[:, :, 0], dtype=torch.bool)], 1)[:, None, None]
        summaries = []
        for layer, old in zip(self.layers, bank, strict=True):
            x, summary = layer(x, old + self.places[:BANK], visible)
            summaries.append(summary)
        bank = torch.cat([bank, torch.stack(summaries)], 2)[:, :, 1:]  # drops the oldest row
        return self.head(x[:, :SEGMENT]), bank, torch.clamp(rows + 1, max=BANK)


def build(weights: str | None) -> StepSpec:
    """Return the model with names and shapes, and frames to compare on; `txl-deploy export` calls this function."""
    model = Labeller()
    if weights:
        model.load_state_dict(txl_export.read_weights(weights))
    return StepSpec(
        model,
        inputs=[InputSpec("frames", ("B", "L", FEATURES), lookahead=AHEAD)],
        states=[StateSpec("bank", (LAYERS, "B", BANK, WIDTH)), StateSpec("rows", ("B",), dtype="int32")],
        outputs=[OutputSpec("labels", ("B", "L", LABELS))],
        samples={"frames": simulate(8, 20 * SEGMENT + AHEAD, seed=3)[0]},
    )


def simulate(number: int, length: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return frames [number, length, 8] and their labels [number, length]: 0, or an event's kind, 1 or 2."""
    random = np.random.default_rng(seed)
    onset, *ends = np.random.default_rng(0).normal(size=(3, FEATURES)) * 1.5
    frames = random.normal(size=(number, length, FEATURES)) * 0.5
    labels = np.zeros((number, length), np.int64)
    for row in range(number):
        place, swapped = 0, 0
        while place < length - 6:
            if place == 0 or random.random() < 0.08:  # a mark, which is valid until the next mark
                swapped = int(random.integers(2))
                frames[row, place : place + 2] += (2 * swapped - 1) * (onset[::-1] + 1)
                place += 2
            elif random.random() < 0.5:
                kind = int(random.integers(2))
                frames[row, place : place + 2] += onset
                frames[row, place + 2 : place + 4] += ends[kind]
                labels[row, place : place + 4] = 1 + (kind ^ swapped)
                place += 4
            place += int(random.integers(1, 6))
    return frames.astype(np.float32), labels


def train(seconds: float, number: int = 16, segments: int = 12) -> Labeller:
    """Train for `seconds` on simulated frames and labels; gradients flow through `segments` segments."""
    torch.manual_seed(0)
    model, started, seed = Labeller(), time.monotonic(), 100
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    while time.monotonic() - started < seconds:
        seed += 1
        frames, labels = (torch.from_numpy(array) for array in simulate(number, segments * SEGMENT + AHEAD, seed))
        bank, rows = torch.zeros(LAYERS, number, BANK, WIDTH), torch.zeros(number, dtype=torch.int32)
        results = []
        for first in range(0, segments * SEGMENT, SEGMENT):
            result, bank, rows = model(frames[:, first : first + SEGMENT + AHEAD], bank, rows)
            results.append(result)
        loss = functional.cross_entropy(torch.cat(results, 1).flatten(0, 1), labels[:, :-AHEAD].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def label(bundle: str, ahead: bool = True, bank: bool = True) -> float:
    """Label a stream while its frames arrive, without torch; return the share of correct labels in events.

    Without `ahead`, the frames ahead are zeros. Without `bank`, the states are reset after every segment.
    """
    stream = txl_runtime.load(bundle).stream()
    frames, labels = simulate(stream.batch_size, 100 * SEGMENT + AHEAD, seed=1)
    predicted = np.zeros_like(labels)
    for first in range(0, labels.shape[1] - AHEAD, SEGMENT):
        window = frames[:, first : first + SEGMENT + AHEAD].copy()
        window[:, SEGMENT:] *= ahead
        predicted[:, first : first + SEGMENT] = stream.run({"frames": window})["labels"].argmax(-1)
        if not bank:
            stream.reset()
    return float((predicted == labels)[labels > 0].mean())


def main() -> None:
    """Train a model, or let a bundle label a stream, or both."""
    parser = argparse.ArgumentParser(description="A streaming labeller of frames.")
    parser.add_argument("--train", metavar="WEIGHTS", help="train, and write the weights to this file")
    parser.add_argument("--run", metavar="BUNDLE", help="let this bundle label a stream")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to train for (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.train:
        torch.save(train(arguments.seconds).state_dict(), arguments.train)
    if arguments.run:
        right, blind, forgetful = (
            label(arguments.run),
            label(arguments.run, ahead=False),
            label(arguments.run, bank=False),
        )
        print(f"right: {right:.0%}, without frames ahead: {blind:.0%}, without the bank: {forgetful:.0%}")


if __name__ == "__main__":
    main()
