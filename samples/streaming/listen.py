"""Lets a bundle listen to several streams at once, without torch, and prints the results.

python samples/streaming/listen.py tone.txl
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import txl_runtime
from ears import Array, Ears
from tones import FRAME, agreement, simulate
from txl_runtime import TxlError

ROUNDING = 1e-5
"""Maximum difference of logits that counts as rounding: they are up to some tens, which float32 rounds by 1e-6."""


def whole(ears: Ears, frames: Array, ahead: bool = True, past: bool = True) -> Array:
    """Return the results of one complete utterance [T, …], e.g. results [100] for frames [100, 40].

    Without `ahead`, frames ahead of a segment are silence. Without `past`, the stream is reset after every segment.
    """
    stream, padded, pieces = ears.model.stream(1), ears.flushed(frames)[None], []
    if ahead and past:
        return np.asarray(stream.feed({ears.input: padded})[ears.output][0, : len(frames)])
    for first in range(0, len(frames), ears.segment):
        window = padded[:, first : first + ears.segment + ears.ahead].copy()
        window[:, ears.segment :] *= ahead
        pieces.append(stream.run({ears.input: window})[ears.output][0])
        if not past:
            stream.reset()
    return np.concatenate(pieces)[: len(frames)]


def listen(bundle: str, utterances: int = 12, seed: int = 1) -> bool:
    """Run several streams at once, which begin and end at different times; return what `report` returns."""
    ears, random = Ears(txl_runtime.load(bundle)), np.random.default_rng(seed)
    left = list(range(utterances))
    # by stream: the index of its utterance, and the number of this utterance's frames that have arrived
    speaking: dict[int, tuple[int, int]] = {}
    sounds = [simulate(int(random.integers(120, 240)), seed=index) for index in range(utterances)]
    results: list[list[Array]] = [[] for _ in sounds]
    took = []
    while left or speaking:
        for row in range(ears.model.batch_size):
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
            results[index].append(scores[row])
            speaking[row] = (index, place + len(chunks[row]))
            if row in ended:
                del speaking[row]
    return report(ears, sounds, [np.concatenate(parts) for parts in results], np.array(took) * 1e3)


def report(ears: Ears, sounds: list[tuple[Array, Array]], heard: list[Array], took: Array) -> bool:
    """Print the streams' results, the times of the steps, and the results without the frames ahead or the past.

    Return True if the streams' results equal the results of whole utterances except for rounding: the number of streams
    that are computed together changes with every chunk, which changes the last bits.
    """
    for name, marks in (("tone ", sounds[0][1]), ("found", heard[0] > 0)):
        print(name, "".join(".#"[int(mark)] for mark in marks[:100]))
    alone = [whole(ears, frames) for frames, _ in sounds]
    apart = max(float(np.abs(one - other).max()) for one, other in zip(heard, alone, strict=True))
    print(f"{len(sounds)} utterances in {ears.model.batch_size} streams, chunks of 0 to 13 frames:", end=" ")
    print(f"{'as' if apart <= ROUNDING else 'NOT as'} from the whole utterance, at most {apart:.1e} apart")
    middle, worst = np.percentile(took, [50, 99])
    first, last = (np.median(part) for part in (took[: len(took) // 4], took[-len(took) // 4 :]))
    print(f"a chunk: {middle:.2f} ms, 99 % below {worst:.2f} ms; at first {first:.2f}, in the end {last:.2f} ms")
    print(f"a frame waits for at most {(ears.segment + ears.ahead - 1) * FRAME} ms of sound that comes after it")
    for name, result in (
        ("found", heard),
        ("silence in place of what lies ahead, unlike in training", [whole(ears, it, ahead=False) for it, _ in sounds]),
        ("without the past", [whole(ears, it, past=False) for it, _ in sounds]),
    ):
        print(f"{name}: {agreement(result, [labels for _, labels in sounds]):.0%}")
    return apart <= ROUNDING


def main() -> int:
    """Read the arguments and listen; return the exit code, 1 if results differ by more than rounding."""
    parser = argparse.ArgumentParser(description="Let a bundle listen to several streams.")
    parser.add_argument("bundle")
    try:
        return int(not listen(parser.parse_args().bundle))
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
