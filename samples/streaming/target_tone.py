"""A streaming detector in the shape of an Emformer: it hears a tone once, and then finds that tone in a noisy stream.

    python samples/streaming/target_tone.py --train tone.pt
    txl-deploy export samples/streaming/target_tone.py:build --weights tone.pt -o tone.txl \
        --segment-length 8 --batch-size 4
    python samples/streaming/target_tone.py --run tone.txl

README.md in this folder says what you see, and answers what people ask about streams.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
import txl_export
import txl_runtime
from torch import Tensor, nn
from torch.nn import functional
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

BANDS, WIDTH, HEADS, LAYERS, SEGMENT, AHEAD, LEFT, BANK = 8, 48, 4, 2, 8, 4, 8, 32
FRAME = 10  # milliseconds that one frame stands for
Array = np.ndarray[Any, Any]


def nearness() -> Tensor:
    """What attention begins with: heads that look around, behind and ahead, [heads, rows + summary, all that is seen].

    It is learned from there. Bank and summary have no place in time.
    """
    rows = torch.arange(SEGMENT + AHEAD).float()
    apart = rows[:, None] - torch.cat([torch.arange(-LEFT, 0).float(), rows])
    sides = torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.2, 3.0], [3.0, 0.2]])[:HEADS, :, None, None]
    falling = -sides[:, 0] * apart.clamp(min=0) - sides[:, 1] * (-apart).clamp(min=0)
    falling = functional.pad(falling, (0, 0, 0, 1))
    bank = torch.zeros(HEADS, SEGMENT + AHEAD + 1, BANK)
    return torch.cat([falling[..., :LEFT], bank, falling[..., LEFT:]], -1)


class Layer(nn.Module):
    """One row more than there are frames is asked for: their summary, which goes into the next layer's bank."""

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
        """From frames [B, L + ahead, D], bank [B, rows, D] and the past's keys and values to the same and a summary."""
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
        now = slice(BANK, BANK + SEGMENT)  # what lies ahead is computed again when it is there
        keys, values = (torch.cat([old, new[:, now]], 1)[:, SEGMENT:] for old, new in ((keys, key), (values, value)))
        return self.last(x + self.wide(x)), mixed[:, -1:].clamp(-10, 10), keys, values


class Detector(nn.Module):
    """A segment of frames and what lies ahead in; whether each frame belongs to the tone, and the new states out."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.head = nn.Linear(BANDS, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(
        self, frames: Tensor, bank: Tensor, keys: Tensor, values: Tensor, segments: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """From frames [B, L + ahead, 8], states of all layers and segments so far [B] to scores [B, L]."""
        x = self.inward(frames)
        # Each sequence has its own counter, so they may begin at different times. The newest rows stand last.
        needs = [*range(LEFT, 0, -1), *(SEGMENT * row for row in range(BANK, 0, -1)), *[0] * (SEGMENT + AHEAD)]
        hidden = (segments * SEGMENT)[:, None] < torch.tensor(needs)
        summary, kept = x[:, :SEGMENT].mean(1, keepdim=True), []
        for layer, old, key, value in zip(self.layers, bank, keys, values, strict=True):
            banked = torch.cat([old[:, 1:], summary], 1)
            x, summary, key, value = layer(x, old, key, value, hidden[:, None, None])
            kept.append((banked, key, value))
        bank, keys, values = (torch.stack(rows) for rows in zip(*kept, strict=True))
        return self.head(x[:, :SEGMENT])[..., 0], bank, keys, values, torch.clamp(segments + 1, max=BANK + LEFT)


def initial(batch: int) -> list[Tensor]:
    """The states before the first segment."""
    rows = [torch.zeros(LAYERS, batch, size, WIDTH) for size in (BANK, LEFT, LEFT)]
    return [*rows, torch.zeros(batch, dtype=torch.int32)]


def build(weights: str | None) -> StepSpec:
    """What `txl-deploy export` calls: the step, with names and shapes, and real frames to compare on."""
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


def simulate(length: int, seed: int) -> tuple[Array, Array]:
    """Frames [length, 8] as a filter bank gives them, and which belong to the tone that is heard first.

    Tones last 6 frames or more, clicks 3 at most: only what follows tells them apart.
    """
    random = np.random.default_rng(seed)
    frames, labels = random.normal(size=(length, BANDS)) * 0.3, np.zeros(length, np.bool_)
    wanted, place = int(random.integers(BANDS)), 10
    frames[1:8, wanted] += 3
    while place < length - 12:
        band = wanted if random.random() < 0.5 else int(random.integers(BANDS))
        lasts = int(random.integers(6, 10) if random.random() < 0.5 else random.integers(1, 4))
        frames[place : place + lasts, band] += 2
        labels[place : place + lasts] = band == wanted and lasts >= 6
        place += lasts + int(random.integers(2, 7))
    return frames.astype(np.float32), labels


def train(seconds: float, number: int = 16, length: int = 12) -> Detector:
    """Learn from simulated streams, through several segments at once."""
    torch.manual_seed(0)
    model, started, seed = Detector(), time.monotonic(), 1000
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    while time.monotonic() - started < seconds:
        seed += number
        pairs = [simulate(length * SEGMENT + AHEAD, seed + row) for row in range(number)]
        frames, labels = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*pairs, strict=True))
        states, found = initial(number), []
        for first in range(0, length * SEGMENT, SEGMENT):
            scores, *states = model(frames[:, first : first + SEGMENT + AHEAD], *states)
            found.append(scores)
        loss = functional.binary_cross_entropy_with_logits(torch.cat(found, 1), labels[:, :-AHEAD].float())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


class Ears:
    """Several streams that begin and end when they like, in chunks of any size.

    Each has a buffer of the frames that are still needed. As soon as one holds a segment and what lies ahead of it,
    that segment runs, together with those of all other streams that hold one; the rest of the batch is idle.
    """

    def __init__(self, model: txl_runtime.Model) -> None:
        self.stream = model.stream()
        self.waiting = [np.zeros((0, BANDS), np.float32) for _ in range(model.batch_size)]
        self.owed = [0] * model.batch_size  # frames that came and have no score yet

    def hear(self, chunks: Mapping[int, Array], ended: Collection[int] = ()) -> dict[int, Array]:
        """Scores of all frames for which enough has been heard.

        Args:
            chunks: by stream, [T, 8] with any T.
            ended: streams whose last chunk this is. Silence stands for what would lie ahead, all their frames get their
                scores, and the stream begins anew with the next chunk.
        """
        for row, chunk in chunks.items():
            self.waiting[row] = np.concatenate([self.waiting[row], chunk])
            self.owed[row] += len(chunk)
        for row in ended:
            silence = -self.owed[row] % SEGMENT + AHEAD
            missing = self.owed[row] + silence - len(self.waiting[row])
            self.waiting[row] = np.concatenate([self.waiting[row], np.zeros((missing, BANDS), np.float32)])
        found: dict[int, list[Array]] = {row: [] for row in {*chunks, *ended}}
        while ready := [row for row, frames in enumerate(self.waiting) if len(frames) >= SEGMENT + AHEAD]:
            windows = np.zeros((len(self.waiting), SEGMENT + AHEAD, BANDS), np.float32)
            lengths = np.zeros(len(self.waiting), np.int32)
            for row in ready:
                windows[row], lengths[row] = self.waiting[row][: SEGMENT + AHEAD], SEGMENT
            scores = self.stream.run({"frames": windows}, lengths)["scores"]
            for row in ready:
                found[row].append(scores[row, : self.owed[row]])
                self.waiting[row] = self.waiting[row][SEGMENT:]
                self.owed[row] -= min(SEGMENT, self.owed[row])
        for row in ended:
            self.stream.reset([row])
            self.waiting[row] = self.waiting[row][:0]
        return {row: np.concatenate([np.zeros(0, np.float32), *parts]) for row, parts in found.items()}


def whole(model: txl_runtime.Model, frames: Array, ahead: bool = True, past: bool = True) -> Array:
    """Scores of one utterance that is there from the beginning to the end; if asked, blind or forgetful."""
    length = len(frames)
    padded = np.concatenate([frames, np.zeros((-length % SEGMENT + AHEAD, BANDS), np.float32)])
    stream, found = model.stream(1), []
    if ahead and past:
        return np.asarray(stream.feed({"frames": padded[None]})["scores"][0, :length])
    for first in range(0, len(padded) - AHEAD, SEGMENT):
        window = padded[None, first : first + SEGMENT + AHEAD].copy()
        window[:, SEGMENT:] *= ahead
        found.append(stream.run({"frames": window})["scores"][0])
        if not past:
            stream.reset()
    return np.concatenate(found)[:length]


def listen(bundle: str, utterances: int = 12, seed: int = 1) -> None:
    """Several streams at once, without torch: chunks of odd sizes, beginnings and ends at different times."""
    model, random = txl_runtime.load(bundle), np.random.default_rng(seed)
    ears, left = Ears(model), list(range(utterances))
    speaking: dict[int, tuple[int, int]] = {}  # by stream: which utterance, and how much of it came
    sounds = [simulate(int(random.integers(120, 240)), seed=index) for index in range(utterances)]
    heard: list[list[Array]] = [[] for _ in sounds]
    took = []
    while left or speaking:
        for row in range(model.batch_size):
            if row not in speaking and left and random.random() < 0.2:
                speaking[row] = (left.pop(0), 0)
        chunks, ended = {}, []
        for row, (index, place) in speaking.items():
            size = int(random.integers(0, 14))
            chunks[row] = sounds[index][0][place : place + size]
            if place + size >= len(sounds[index][0]):
                ended.append(row)
        started = time.perf_counter()
        scores = ears.hear(chunks, ended)
        took.append(time.perf_counter() - started)
        for row, (index, place) in list(speaking.items()):
            heard[index].append(scores[row])
            speaking[row] = (index, place + len(chunks[row]))
            if row in ended:
                del speaking[row]
    report(model, sounds, [np.concatenate(parts) for parts in heard], np.array(took) * 1e3)


def report(model: txl_runtime.Model, sounds: list[tuple[Array, Array]], heard: list[Array], took: Array) -> None:
    """What was found in the streams, how long it took, and what is lost without what lies ahead or behind."""
    for name, marks in (("tone ", sounds[0][1]), ("found", heard[0] > 0)):
        print(name, "".join(".#"[int(mark)] for mark in marks[:100]))
    alone = [whole(model, frames) for frames, _ in sounds]
    same = all((one == other).all() for one, other in zip(heard, alone, strict=True))
    print(f"{len(sounds)} utterances in {model.batch_size} streams, chunks of 0 to 13 frames:", end=" ")
    print("every bit as from the whole utterance" if same else "NOT as from the whole utterance")
    middle, worst = np.percentile(took, [50, 99])
    first, last = (np.median(part) for part in (took[: len(took) // 4], took[-len(took) // 4 :]))
    print(f"a chunk: {middle:.2f} ms, 99 % below {worst:.2f} ms; at first {first:.2f}, in the end {last:.2f} ms")
    print(f"a frame waits for at most {(SEGMENT + AHEAD - 1) * FRAME} ms of sound that comes after it")
    for name, found in (
        ("found", heard),
        ("without what lies ahead", [whole(model, frames, ahead=False) for frames, _ in sounds]),
        ("without the past", [whole(model, frames, past=False) for frames, _ in sounds]),
    ):
        print(f"{name}: {agreement(found, [labels for _, labels in sounds]):.0%}")


def agreement(scores: list[Array], labels: list[Array]) -> float:
    """Twice the frames that both call the tone's, divided by those that either does and those that both do (F1)."""
    found, wanted = np.concatenate(scores) > 0, np.concatenate(labels)
    return float(2 * (found & wanted).sum() / (found.sum() + wanted.sum()))


def main() -> None:
    """Train, or listen."""
    parser = argparse.ArgumentParser(description="A streaming detector of one tone.")
    parser.add_argument("--train", metavar="WEIGHTS", help="train, and write the weights to this file")
    parser.add_argument("--run", metavar="BUNDLE", help="let this bundle listen to several streams")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to train for (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.train:
        torch.save(train(arguments.seconds).state_dict(), arguments.train)
    if arguments.run:
        listen(arguments.run)


if __name__ == "__main__":
    main()
