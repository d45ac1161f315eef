"""A streaming detector like an Emformer: it hears a tone once, and afterwards finds that tone in a noisy stream.

    python samples/streaming/target_tone.py tone.pt
    txl-deploy export samples/streaming/target_tone.py:build --weights tone.pt -o tone.txl \
        --segment-length 8 --batch-size 4
    python samples/streaming/listen.py tone.txl

This file has the model and its training. README.md in this folder answers questions about streams.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import txl_export
from tones import BANDS, agreement, simulate
from torch import Tensor, nn
from torch.nn import functional
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

WIDTH, HEADS, LAYERS, SEGMENT, AHEAD, LEFT, BANK = 48, 4, 2, 8, 4, 8, 32
UPDATES = 400


def nearness() -> Tensor:
    """Return the initial bias of attention, [heads, rows + summary, keys], which training changes.

    One head begins without a bias, one prefers near frames, one prefers frames behind and one frames ahead. For
    example, the bias of a key 2 frames behind is -0.4 in the head that prefers frames behind. Keys of the bank and the
    query of the summary have no place in time, so their bias is 0.
    """
    rows = torch.arange(SEGMENT + AHEAD).float()
    apart = rows[:, None] - torch.cat([torch.arange(-LEFT, 0).float(), rows])
    sides = torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.2, 3.0], [3.0, 0.2]])[:HEADS, :, None, None]
    falling = -sides[:, 0] * apart.clamp(min=0) - sides[:, 1] * (-apart).clamp(min=0)
    falling = functional.pad(falling, (0, 0, 0, 1))
    bank = torch.zeros(HEADS, SEGMENT + AHEAD + 1, BANK)
    return torch.cat([falling[..., :LEFT], bank, falling[..., LEFT:]], -1)


class Layer(nn.Module):
    """A layer with attention. One additional query returns a summary of the segment's frames for the next bank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.mixed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.places = nn.Parameter(nearness())
        self.wide = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(
        self, x: Tensor, bank: Tensor, keys: Tensor, values: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run frames [B, L + ahead, D] with bank [B, rows, D] and past keys and values [B, left, D].

        Keys where `hidden` is True are not seen. Return new frames, e.g. [4, 12, 48], a summary [B, 1, D], and the keys
        and values for the next segment.
        """
        frames = self.norm(x)
        asked = torch.cat([frames, frames[:, :SEGMENT].mean(1, keepdim=True)], 1)
        key, value = self.key_value(torch.cat([bank, frames], 1)).chunk(2, -1)
        q, k, v = (
            rows.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for rows in (self.query(asked), torch.cat([keys, key], 1), torch.cat([values, value], 1))
        )
        score = torch.where(hidden, -1e4, q @ k.mT * (WIDTH // HEADS) ** -0.5 + self.places)
        mixed = self.mixed((score.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + mixed[:, :-1]
        now = slice(BANK, BANK + SEGMENT)  # frames ahead are not kept: they are computed again in their own segment
        keys, values = (torch.cat([old, new[:, now]], 1)[:, SEGMENT:] for old, new in ((keys, key), (values, value)))
        return self.last(x + self.wide(x)), mixed[:, -1:].clamp(-10, 10), keys, values


class Detector(nn.Module):
    """A model that takes a segment and the frames ahead of it, and returns a score per frame and the new states."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.head = nn.Linear(BANDS, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(
        self, frames: Tensor, bank: Tensor, keys: Tensor, values: Tensor, segments: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Run frames [B, L + ahead, 8], states of all layers, and the number of earlier segments [B].

        Return scores [B, L], the new states, and the new number of segments.
        """
        x = self.inward(frames)
        # Each sequence has its own counter of segments, so sequences may begin at different times. A key is hidden
        # until the number of frames that it `needs` has run; the newest keys stand last.
        needs = [*range(LEFT, 0, -1), *(SEGMENT * row for row in range(BANK, 0, -1)), *[0] * (SEGMENT + AHEAD)]
        hidden = (segments * SEGMENT)[:, None] < torch.tensor(needs)
        summary, states = x[:, :SEGMENT].mean(1, keepdim=True), []
        for layer, old, key, value in zip(self.layers, bank, keys, values, strict=True):
            banked = torch.cat([old[:, 1:], summary], 1)
            x, summary, key, value = layer(x, old, key, value, hidden[:, None, None])
            states.append((banked, key, value))
        bank, keys, values = (torch.stack(rows) for rows in zip(*states, strict=True))
        return self.head(x[:, :SEGMENT])[..., 0], bank, keys, values, torch.clamp(segments + 1, max=BANK + LEFT)


def initial(batch: int) -> list[Tensor]:
    """Return the states before the first segment, e.g. [LAYERS, 4, BANK, WIDTH] for a batch of 4."""
    rows = [torch.zeros(LAYERS, batch, size, WIDTH) for size in (BANK, LEFT, LEFT)]
    return [*rows, torch.zeros(batch, dtype=torch.int32)]


def build(weights: str | None) -> StepSpec:
    """Return the model with names and shapes, and frames to compare on; `txl-deploy export` calls this function."""
    model = Detector()
    if weights:
        model.load_state_dict(txl_export.read_weights(weights))
    states = [StateSpec(name, (LAYERS, "B", size, WIDTH)) for name, size in (("bank", BANK), ("keys", LEFT))]
    states += [StateSpec("values", (LAYERS, "B", LEFT, WIDTH)), StateSpec("segments", ("B",), dtype="int32")]
    return StepSpec(
        model,
        inputs=[InputSpec("frames", ("B", "L", BANDS), lookahead=AHEAD)],
        states=states,
        outputs=[OutputSpec("scores", ("B", "L"))],
        samples={"frames": np.stack([simulate(40 * SEGMENT + AHEAD, seed)[0] for seed in range(8)])},
    )


def walk(model: Detector, frames: Tensor) -> Tensor:
    """Run frames [B, T + ahead, 8] segment by segment; return their scores [B, T]."""
    states, pieces = initial(len(frames)), []
    for first in range(0, frames.shape[1] - AHEAD, SEGMENT):
        scores, *states = model(frames[:, first : first + SEGMENT + AHEAD], *states)
        pieces.append(scores)
    return torch.cat(pieces, 1)


def streams(number: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Simulate `number` streams of `length` segments; return frames, and labels: True where the wanted tone sounds.

    For example, 4 streams of 3 segments give frames [4, 3 · SEGMENT + AHEAD, …] and labels [4, 3 · SEGMENT].
    """
    pairs = [simulate(length * SEGMENT + AHEAD, seed + row) for row in range(number)]
    frames, labels = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*pairs, strict=True))
    return frames, labels[:, :-AHEAD]


def train(updates: int = UPDATES, number: int = 16, length: int = 12) -> Detector:
    """Train a detector on simulated streams; gradients flow through `length` segments."""
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for update in range(updates):
        frames, labels = streams(number, length, 1000 + update * number)
        loss = functional.binary_cross_entropy_with_logits(walk(model, frames), labels.float())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def found_by(model: Detector) -> float:
    """Return the F1 of the detector on simulated streams that training has not seen."""
    frames, labels = streams(32, 25, 0)
    return agreement([walk(model, frames).numpy()], [labels.numpy()])


def main() -> None:
    """Train a detector, write its weights, and print its F1."""
    parser = argparse.ArgumentParser(description="Train a streaming detector of one tone.")
    parser.add_argument("weights", help="file to write")
    parser.add_argument("--updates", type=int, default=UPDATES, help="default: %(default)s")
    arguments = parser.parse_args()
    started = time.monotonic()
    model = train(arguments.updates)
    torch.save(model.state_dict(), arguments.weights)
    took = time.monotonic() - started
    print(f"found: {found_by(model):.0%} (F1) after {arguments.updates} updates in {took:.0f} s")


if __name__ == "__main__":
    main()
