"""Text in and out for the reader of bundles, and the replay of stored vectors; "§" are sections of bundle-format.md."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

import numpy as np
from reader import Array, Bundle, Counts, Stream, Table, need
from safetensors.numpy import load


def _text(stream: Stream, tokens: Array, counts: Counts) -> tuple[str, Array, Array]:
    """Return the name of the token input, and tokens [b, T] and their counts as arrays."""
    (name, row), *others = stream.bundle.given.items()
    need(row["role"] == "tokens" and not others and stream.bundle.logprobs, "This is no model of tokens alone.")
    tokens = np.asarray(tokens, np.int32)
    need(tokens.ndim == 2 and len(tokens) == stream.b, f"The tokens are not [{stream.b}, T].")
    ends = np.full(stream.b, tokens.shape[1]) if counts is None else np.asarray(counts)
    fits = ends.shape == (stream.b,) and ((ends >= 0) & (ends <= tokens.shape[1])).all()
    need(fits, f"The counts are not {stream.b} of 0 ... T.")
    return name, tokens, ends


def score(stream: Stream, tokens: Array, counts: Counts = None) -> Array:
    """Return -log p, [b, T - 1], of each token but the first, given all tokens before it.

    The result is 0 at positions that do not count.
    """
    name, tokens, ends = _text(stream, tokens, counts)
    inside = np.arange(1, tokens.shape[1]) < ends[:, None]
    targets = np.where(inside, tokens[:, 1:], 0)
    need(((targets >= 0) & (targets < stream.bundle.given[name]["vocab"])).all(), "A target is not 0 ... V - 1.")
    logprobs = stream.feed({name: tokens[:, :-1]}, np.maximum(ends - 1, 0))[stream.bundle.logprobs]
    return np.where(inside, -np.take_along_axis(logprobs, targets[..., None], axis=2)[..., 0], np.float32(0))


def generate(
    stream: Stream,
    tokens: Array,
    count: int,
    counts: Counts = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Feed prompts and draw `count` tokens after each; return the tokens and their log-probabilities, [count, b].

    For example, tokens [2, 5] and count 10 give [10, 2] twice.
    """
    name, tokens, ends = _text(stream, tokens, counts)
    need((ends > 0).all() and count > 0, "Every sequence needs a prompt to draw after, and a token to draw.")
    need(temperature >= 0 and (top_k is None or top_k > 0), "A temperature or top_k is too small.")
    need(top_p is None or 0 < top_p <= 1, "top_p is not a share.")
    seeds = [np.random.SeedSequence(seed, spawn_key=(i,)) for i in range(stream.b)]
    numbers = [np.random.Generator(np.random.PCG64(one)) for one in seeds]  # § 7 describes this generator
    drawn, logprobs = np.zeros((count, stream.b), np.int32), np.zeros((count, stream.b), np.float32)
    for n in range(count):
        rows = stream.feed({name: tokens}, ends, last=True)[stream.bundle.logprobs]
        drawn[n] = [draw(rows[i], numbers[i], temperature, top_k, top_p) for i in range(stream.b)]
        logprobs[n] = rows[np.arange(stream.b), drawn[n]]
        tokens, ends = drawn[n][:, None], np.ones(stream.b, int)
    return drawn, logprobs


def draw(
    logprobs: Array, numbers: np.random.Generator, temperature: float, top_k: int | None, top_p: float | None
) -> int:
    """Draw a token from the log-probabilities of one row, in float64 (§ 7).

    For example, 1 for the log-probabilities of [0.1, 0.9] with `top_k` 1.
    """
    p = np.asarray(logprobs, np.float64)
    need(not np.isnan(p).any(), "There are NaN among the log-probabilities.", "backend")
    if temperature == 0:
        return int(p.argmax())
    ids, weights = np.arange(len(p)), np.exp((p - p.max()) / temperature)
    if top_k is not None or top_p is not None:
        ids = np.argsort(-p, kind="stable")[:top_k]
    sums = np.cumsum(weights[ids])
    if top_p is not None:
        sums = sums[np.append(0.0, sums[:-1]) < top_p * sums[-1]]
    return int(ids[min(np.searchsorted(sums, numbers.random() * sums[-1], side="right"), len(sums) - 1)])


def vocabulary_of(bundle: Bundle) -> Table:
    """Return a bundle's vocabulary, the table that `encode` and `decode` need."""
    need(bundle.manifest["vocabulary"], "This bundle has no vocabulary.")
    vocabulary: Table = json.loads((bundle.folder / bundle.manifest["vocabulary"]).read_bytes())
    return vocabulary


def encode(vocabulary: Table, text: bytes) -> list[int]:
    """Return the token ids of a text (§ 8)."""
    if vocabulary["kind"] == "bytes":
        return list(text)
    known, delimiter = {word: i for i, word in enumerate(vocabulary["symbols"])}, vocabulary.get("delimiter")
    start, end = ([] if vocabulary.get(key) is None else [vocabulary[key]] for key in ("line_start", "line_end"))
    *lines, rest = re.split("\r\n|\n|\r", text.decode())
    ids: list[int] = []
    for n, line in enumerate([*lines, rest] if rest else lines):
        line = line.strip().lower() if vocabulary.get("lower_case") else line.strip()
        words = list(line) if delimiter == "" else line.split(delimiter) if line else []
        found = [known.get(word, vocabulary.get("unknown")) for word in words]
        need(None not in found, f"{line!r} has a word that is not in the vocabulary, which has no id for others.")
        ids += start + found + (end if n < len(lines) else [])
    return ids


def decode(vocabulary: Table, ids: Sequence[int]) -> bytes:
    """Return the text of token ids (§ 8)."""
    if vocabulary["kind"] == "bytes":
        return bytes(ids)
    symbols, space = vocabulary["symbols"], " " if vocabulary.get("delimiter") is None else vocabulary["delimiter"]
    words = ((symbols[i] if i < len(symbols) else f"<{i}>") + space for i in ids)
    end = vocabulary.get("line_end")
    return "".join("\n" if i == end else word for i, word in zip(ids, words, strict=True)).encode()


def self_test(bundle: Bundle, rule: str | None = None) -> dict[str, tuple[float, float]]:
    """Replay the stored vectors (§ 9); return for each tensor the largest difference and the allowed one."""
    need(bundle.manifest["selftest"], "This bundle has no stored vectors.")
    path = bundle.folder / bundle.manifest["selftest"]
    v = dict(np.load(path)) if path.suffix == ".npz" else load(path.read_bytes())
    name, (steps, B) = bundle.logprobs, v["counts"].shape
    if "tokens" in v:  # the vectors are a Transformer-XL's, and are converted to the general form
        v[f"input/{next(iter(bundle.given))}"] = v["tokens"]
        place = v["positions"][..., None] * bundle.outputs[name]["shape"][-1] + v["columns"]
        v |= {f"place/{name}": place.reshape(steps, B, -1), f"output/{name}": v["logprobs"].reshape(steps, B, -1)}
    reached = np.zeros(2) if bundle.manifest["precision"] == "fp32" else v["reached"]
    most = [1e-4, 1e-4]
    for key, values in v.items():
        if values.dtype.kind == "f" and key.startswith(("output/", "state/", "memory/")):
            sizes, side = np.abs(values), not key.startswith("output/")
            sizes = sizes[sizes < 1000] if key == f"output/{name}" else np.fmin(sizes, 1)
            most[side] = max(most[side], sizes.max(initial=0))
    need(bool(((reached >= 0) & (reached <= most)).all()), "What these vectors reached is no difference.")
    limits = (1e-4 + 2 * reached).tolist()
    errors: dict[str, tuple[float, float]] = {}

    def compare(name: str, got: Array, want: Array, limit: float, scale: float | None = None) -> None:
        """Keep the largest difference of a tensor, relative to its largest value or to a scale."""
        worst = np.abs(got.astype(np.float64) - want).max() / (scale or max(1.0, np.abs(want).max()))
        errors[name] = max(errors.get(name, (0.0, 0.0))[0], float(worst)), limit if want.dtype.kind == "f" else 0.0

    stream = Stream(bundle, B, rule)
    for step, length in enumerate(v["length"]):
        stream.reset(np.flatnonzero(v["reset"][step]).tolist() if "reset" in v else [])
        first = {n: tuple(map(slice, bundle.shape(row, length, B))) for n, row in bundle.given.items()}
        inputs = {n: v[f"input/{n}"][step][places] for n, places in first.items()}
        for n, value in stream.run(inputs, v["counts"][step]).items():
            want = v[f"output/{n}"]
            got = np.take_along_axis(value.reshape(B, -1), np.broadcast_to(v[f"place/{n}"], want.shape)[step], axis=1)
            compare(n, got, want[step], limits[0], 1.0 if n == name else None)
    for n, value in stream.state().items():
        n = n.removeprefix("whole/")
        if f"memory/{n}" in v:
            oldest = value[np.arange(B), value.shape[1] - stream.fill]
            compare(n, np.stack([oldest, value[:, -1]], axis=1), v[f"memory/{n}"], limits[1])
        elif f"state/{n}" in v:
            axis = next(s["batch_axis"] for s in stream.states if s["name"] == n)
            parts = np.stack([value] * B) if axis is None else np.moveaxis(value, axis, 0)
            need(list(parts.shape[1:]) == v[f"state_shape/{n}"].tolist(), f"State {n!r} has not the stored shape.")
            place = np.broadcast_to(v[f"state_place/{n}"], v[f"state/{n}"].shape)
            compare(n, np.take_along_axis(parts.reshape(B, -1), place, axis=1), v[f"state/{n}"], limits[1])
    return errors


if __name__ == "__main__":
    for opened in map(Bundle, sys.argv[1:]):
        for one in opened.rules if opened.manifest["selftest"] else ():
            result = self_test(opened, one)
            print(
                opened.folder,
                one,
                "passes" if all(d <= limit for d, limit in result.values()) else "FAILS",
                ", ".join(f"{name} {difference:.1e}" for name, (difference, _) in result.items()),
            )
