"""Makes the vectors of the conformance list anew: what Python's own driver answers about the bundles that are there.

    python tests/conformance/make.py [--only NAME]… [FOLDER]

The bundles are random and small, with weights so large that every fault shows; they are kept as they are, and a further
one is exported into `bundles` and named in `index.json`. Tokens are kept only where they would be the same if every
log-probability were another by `DISTURBED`: what is drawn must not depend on how an engine orders its sums.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("", "export", "runtime", "tests", "tests/helpers")]

from plain_draws import by_the_whole  # noqa: E402
from safetensors.numpy import load  # noqa: E402

from conformance.driver import Driver, packed, packed_bytes, unpacked, unpacked_bytes  # noqa: E402

DISTURBED = {"fp16": 4e-3}
"""By precision; 1e-3 of any other."""
SHOWS = {
    "clusters": ["clusters"],
    "int8": ["int8"],
    "half": ["half"],
    "policy-16": ["open"],
    "lookahead": ["lookahead"],
    "stages": ["grows"],
    "growing": ["grows", "old"],
    "lockstep": ["lockstep"],
    "axes": ["axes"],
    "release-0.8": ["old", "clusters"],
}
"""The promises that every vector of a bundle shows."""


def settled(data: bytes) -> bytes:
    """A safetensors file with its header in one order, which the library leaves open."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


def opened(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and texts of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    facts: dict[str, str] = json.loads(data[8:end])["__metadata__"]
    return load(data), facts


def closed(tensors: dict[str, Any], facts: dict[str, str]) -> str:
    """Tensors as bytes of a safetensors file, one behind the other as they are here."""
    header: dict[str, Any] = {"__metadata__": facts}
    data = b""
    for name, array in tensors.items():
        kind = {"float32": "F32", "int32": "I32", "bool": "BOOL", "float16": "F16"}[array.dtype.name]
        begin, data = len(data), data + array.tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return packed_bytes(len(text).to_bytes(8, "little") + text + data)


class Composer:
    """Asks Python's driver, and keeps every request with its reply."""

    def __init__(self, path: Path, shows: list[str]) -> None:
        self.path, self.base, self.driver = path, shows, Driver()
        self.good("load", path=str(path), update=None)
        self.manifest = m = self.driver.model.manifest
        self.draws = np.random.default_rng(zlib.crc32(path.name.encode()))
        self.most_b, self.lengths, self.longest = m.batch_size, m.segment_lengths, m.segment_lengths[0]
        self.fluent = m.tokens is not None and m.logprobs is not None and m.can.feed_freely
        self.apart, self.counted, self.exact = m.can.run_apart, m.can.count_rows, m.lengths == "exact"
        self.ids = (m.vocab_size or 1) - (path.name == "table")  # after the last one of which nothing can be drawn
        self.again = bool({"old", "int8", "half", "clusters"} & set(shows))  # what others show holds here too
        self.vectors: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.b, self.elsewhere = 0, ""

    def good(self, do: str, **request: Any) -> dict[str, Any]:
        """Ask without keeping it."""
        reply = self.driver.answer({"do": do, **request})
        assert "ok" in reply, (do, reply)
        return reply

    def begin(self, shows: str, update: str, b: int, memory_length: int | None = None) -> None:
        """Begin a vector with a fresh stream."""
        if self.driver.model.update != update:
            self.good("load", path=str(self.path), update=update)
        self.good("open", b=b, memory_length=memory_length)
        self.b, self.steps, self.memory_length = b, [], memory_length
        vector = {"shows": [*shows.split(), *self.base], "update": update, "b": b, "memory_length": memory_length}
        self.vectors.append({**vector, "steps": self.steps})

    def ask(self, do: str, refused: bool | None = False, **request: Any) -> dict[str, Any]:
        """Ask and keep it."""
        reply = self.driver.answer(self.own_bytes({"do": do, **request}))
        assert refused in (None, "refused" in reply), (self.path.name, do, reply)
        if do in ("save", "take") and "ok" in reply:
            reply["ok"]["bytes"] = self.saved = packed_bytes(settled(unpacked_bytes(reply["ok"]["bytes"])))
        self.steps.append({"request": {"do": do, **request}, "reply": reply})
        return reply

    def own_bytes(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request as a runner sends it: bytes that are null are what was saved last."""
        return request | {"bytes": self.saved} if "bytes" in request and request["bytes"] is None else request

    # --- what is asked ---

    def number(self, first: int, last: int) -> int:
        return int(self.draws.integers(first, last + 1))

    def counts(self, length: int, kind: str = "some") -> list[int] | None:
        """Draw the positions that count: all, one of each sequence at least, or with "idle" one of any sequence."""
        if kind == "all" or not self.apart or (self.exact and kind == "some"):
            return None
        while True:
            found = self.draws.integers(kind == "some", length + 1, self.b)
            found = np.where(found * 2 > length, length, 0) if self.exact else found
            if found.any():
                return [int(number) for number in found]

    def arrays(self, length: int, counts: list[int] | None = None, garbage: bool = False) -> dict[str, Any]:
        """Inputs by name; what does not count is no token id and no usual number where there is to be garbage."""
        found = {}
        for entry in self.manifest.given:
            sizes = entry.sizes(self.b, length)
            if entry.role == "tokens":
                array = self.draws.integers(0, self.ids, sizes).astype(np.int32)
            else:
                array = self.draws.normal(size=sizes) * 1.5
                array = array > 1 if entry.dtype == "bool" else array.astype(entry.dtype)
            if garbage and counts is not None and entry.shape[:2] == ("B", "L"):
                for row, count in enumerate(counts):
                    if count == 0 or not entry.lookahead:
                        array[row, count:] = -7 if entry.role == "tokens" else 1e4
            found[entry.name] = packed(array)
        return found

    def run(self, kind: str = "some", length: int = 0, garbage: bool = False, commit: bool = True) -> set[str]:
        """A segment; what it shows."""
        length = length or (int(self.draws.choice(self.lengths)) if self.exact else self.number(1, self.longest))
        counts = self.counts(length, kind)
        self.ask("run", inputs=self.arrays(length, counts, garbage), counts=counts, commit=commit)
        return (
            {"idle", "padding"} if 0 in (counts or ()) else {"padding"} if min(counts or [length]) < length else set()
        )

    def feed(self, length: int, last: bool = False, kind: str = "some") -> None:
        """Any number of positions."""
        counts = None if self.exact else self.counts(length, kind)
        self.ask("feed", inputs=self.arrays(length, counts), counts=counts, last=last)

    def tokens(self, length: int) -> dict[str, Any]:
        return packed(self.draws.integers(0, self.ids, (self.b, length)).astype(np.int32))

    def score(self, length: int = 9) -> None:
        """Ask for the cost of tokens."""
        self.ask("score", tokens=self.tokens(length), counts=self.counts(length, "idle") if self.number(0, 1) else None)

    def generate(self, count: int = 6, same: bool = False, **options: Any) -> None:
        """Tokens that do not depend on the last bits; another prompt and seed otherwise."""
        options = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
        before = self.driver.stream.snapshot()
        for seed in range(500):
            tokens, counts = self.tokens(5), [self.number(1, 5) for _ in range(self.b)]
            if same:  # then what differs are the draws alone
                ids = unpacked(tokens)
                tokens, counts = packed(np.repeat(ids[:1], self.b, axis=0)), [5] * self.b
            request = {"tokens": tokens, "counts": counts, "count": count, "seed": seed, **options}
            drawn = unpacked(self.good("generate", **request)["ok"]["tokens"])
            self.driver.stream.restore(before)
            if self.steady(before, unpacked(tokens), counts, drawn, request) and not (
                same and (drawn[:, 0] == drawn[:, 1]).all()
            ):
                self.ask("generate", **request)
                return
        raise AssertionError(f"{self.path.name}: no draws that stay the same with {options}")

    def steady(self, before: Any, tokens: Any, counts: list[int], drawn: Any, options: dict[str, Any]) -> bool:
        """Return whether every drawn token is that of disturbed log-probabilities; plainly, from all of them."""
        stream = self.driver.model.stream(self.b, self.memory_length)
        stream.restore(before)
        heat, cut = options["temperature"], (options["top_k"], options["top_p"])
        seeds = (np.random.SeedSequence(options["seed"], spawn_key=(row,)) for row in range(self.b))
        draws = [np.random.default_rng(seed) for seed in seeds]
        last = stream.feed(tokens, counts, last=True)
        for place, some in enumerate(drawn):
            if place:
                last = stream.step(drawn[place - 1][:, None])[:, 0]
            for row, token in enumerate(some.tolist()):
                uniform = draws[row].random() if heat else 0.0
                for values in self.disturbed(last[row].astype(np.float64), token):
                    if by_the_whole(values, uniform, heat, *cut) != token:
                        return False
        return True

    def disturbed(self, values: Any, token: int) -> Iterator[Any]:
        """Log-probabilities as they are, then as other engines may have them: as bad as possible for this token."""
        by = DISTURBED.get(self.manifest.precision, 1e-3)
        ranks = np.empty(len(values))
        ranks[np.argsort(-values, kind="stable")] = np.arange(len(values))
        yield values
        for order, place in ((np.arange(len(values)), token), (ranks, ranks[token])):
            for first in (place, place + 1):
                for sign in (by, -by):
                    yield values + np.where(order < first, sign, -sign)
        for sign in (by, -by):
            yield values + np.where(np.arange(len(values)) == token, sign, -sign)
        for _ in range(4):
            yield values + self.draws.uniform(-by, by, len(values))

    def state(self) -> None:
        """Ask for the state."""
        self.ask("state")

    def select(self, *rows: int) -> None:
        """Other sequences in other places."""
        self.ask("select", rows=list(rows))
        self.b = len(rows)

    def warm(self, segments: int = 0) -> None:
        """Some segments, so that sequences differ and have come differently far."""
        for _ in range(segments or (2 if self.again else 3)):
            self.run()

    def compose(self) -> None:
        """Every vector of the bundle."""
        updates = [rule for rule in self.manifest.updates if rule != "none"]
        if self.path.name == "untrue":
            self.begin("selftest", updates[0], 1)
            assert not self.ask("selftest")["ok"]["passed"]
            return
        for rule in updates:
            if rule == updates[0] or self.path.name == "ring":  # elsewhere the other rule is tried at random alone
                self.of_segments(rule)
            self.random(rule)
            if self.fluent and rule == updates[0]:
                self.of_table(rule) if self.path.name == "table" else self.of_tokens(rule)
                self.of_texts(rule)
        if any(name.startswith("selftest.") for name in self.manifest.files):
            self.begin("selftest", updates[0], 1)
            self.ask("selftest")
        if not self.again:
            self.of_edges(updates[0])

    def of_segments(self, rule: str) -> None:
        """Vectors of every model."""
        b, long = self.most_b, self.longest
        self.begin("initial", rule, b)
        self.state(), self.run("all", long), self.state()
        self.begin("cut last", rule, b)
        ahead = 2 * long + (0 if self.exact and 1 not in self.lengths else 1)
        self.feed(ahead), self.feed(ahead, last=True), self.state()
        self.begin("commit", rule, b)
        for commit in (True, False):
            self.run("all", commit=commit)
        self.state(), self.run("all", commit=False), self.run("all"), self.state()
        if b > 1 and not self.manifest.joint:
            self.begin("padding", rule, b - 1)
            self.warm(), self.state()
            self.select(b - 2, *range(b - 1)), self.warm(2), self.state()
        self.of_states(rule)
        if self.apart and b > 1:
            self.begin("idle padding", rule, b)
            for _ in range(4):
                self.run("idle", garbage=True), self.state()
        if self.counted:
            self.begin("fill", rule, b)
            for _ in range(3 if self.again else 5):
                self.run(), self.state()
            if not self.again:
                self.begin("limit fill", rule, b, max(1, self.manifest.memory_length // 2))
                self.warm(4), self.state(), self.ask("reset", rows=[0]), self.state(), self.warm(2), self.state()
        if rule == "ring":
            self.begin("spill fill", rule, b)
            for _ in range(3 if self.again else 6):
                self.run("all", 1 if self.again else long), self.run(), self.run()
            self.state(), self.feed(4 * long, last=self.again), self.state()
        self.refusals(rule)

    def of_states(self, rule: str) -> None:
        """Sequences that are reset, reordered, stored."""
        b, one = self.most_b, self.apart or self.most_b == 1
        self.begin("reset initial" if self.apart else "reset initial lockstep", rule, b)
        self.warm()
        if self.apart:
            self.ask("reset", rows=[b - 1]), self.state(), self.run("all"), self.state()
        self.ask("reset", rows=None), self.state(), self.run("all"), self.state()
        if b > 1 and not self.manifest.joint:
            self.begin("select", rule, b)
            self.warm(), self.select(*range(1, b), 0), self.state(), self.run("all"), self.state()
            self.select(b - 1), self.run("all"), self.state()
            self.select(*[0] * b), self.run("all"), self.state()
        self.begin("snapshot", rule, b)
        self.warm(), self.ask("save")
        kept = self.elsewhere or self.saved  # the one of the other rule, where there are two
        self.elsewhere = self.saved
        self.run("all"), self.state(), self.ask("restore", bytes=None), self.state(), self.run("all"), self.state()
        self.begin("snapshot", rule, b)
        self.run("all"), self.ask("restore", bytes=kept), self.state(), self.run(), self.run("all"), self.ask("save")
        if one:
            self.begin("rows", rule, b)
            self.warm(), self.ask("take", row=b - 1)
            kept = self.saved
            self.run("all"), self.ask("put", row=0, bytes=None), self.state(), self.run("all"), self.state()
            self.begin("rows", rule, b)
            self.run("all"), self.ask("put", row=b // 2, bytes=kept), self.state()
            self.run("all"), self.ask("take", row=b // 2)

    def refusals(self, rule: str) -> None:
        """Requests that have to be refused, after which everything is as it was."""
        self.begin("refusals", rule, max(1, self.most_b - 1))
        self.run("all")
        good, long = self.arrays(self.longest), self.longest
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("run", {"inputs": self.arrays(long + 1), "counts": None}),
            ("run", {"inputs": {}, "counts": None}),
            ("run", {"inputs": {**good, "another": packed(np.zeros(1, np.float32))}, "counts": None}),
            ("run", {"inputs": good, "counts": [long + 1] * self.b}),
            ("run", {"inputs": good, "counts": [long] * (self.b + 1)}),
            ("reset", {"rows": [self.b]}),
            ("select", {"rows": [self.b]}),
            ("select", {"rows": [0] * (self.most_b + 1)}),
            ("take", {"row": self.b}),
            ("restore", {"bytes": packed(np.arange(40, dtype=np.int32))["data"]}),
        ]
        if self.manifest.tokens is not None and set(good) == {self.manifest.tokens.name}:
            high = packed(np.full((self.b, 1), self.manifest.vocab_size, np.int32))
            wrong.append(("run", {"inputs": {self.manifest.tokens.name: high}, "counts": None}))
        self.refused(wrong)

    def refused(self, wrong: list[tuple[str, dict[str, Any]]]) -> None:
        """Requests none of which may change anything."""
        for do, request in wrong:
            self.ask(do, refused=True, **request, **({"commit": True} if do == "run" else {}))
        self.state(), self.run("all"), self.state()

    def of_edges(self, rule: str) -> None:
        """Counts, limits and snapshots as small, as large or as odd as they may be."""
        if self.counted:
            self.limits(rule)
        if rule != "ring":  # what follows has nothing to do with where rows stand
            self.of_cuts(rule)
            self.refused_later(rule)

    def of_cuts(self, rule: str) -> None:
        """Sequences that are idle in all of a feed, or end where a segment does; steps in which nothing counts."""
        b, long = self.most_b, self.longest
        cuts = [0, 2 * long, *([2 * long + 1, long] if 1 in self.lengths else [long])]
        for last in (False, True):
            self.begin("cut last idle" if self.apart else "cut last lockstep", rule, b)
            counts = [cuts[(row + last) % len(cuts)] for row in range(b)] if self.apart else None
            self.ask("feed", inputs=self.arrays(max(cuts)), counts=counts, last=last), self.state()
            self.ask("feed", inputs=self.arrays(2 * long), counts=None, last=last), self.state()
            nothing = {"inputs": self.arrays(long), "counts": [0] * b}
            self.ask("run", **nothing, commit=True), self.ask("feed", **nothing, last=last), self.state()
        self.begin("reset", rule, b)
        self.run("all"), self.ask("reset", rows=[]), self.state()

    def limits(self, rule: str) -> None:
        """Streams that keep few rows or none."""
        b, most = self.most_b, self.manifest.memory_length
        self.begin("fill", rule, b)
        self.feed(most + 1, last=True, kind="all"), self.ask("save")
        full = self.saved
        self.begin("limit fill snapshot", rule, b, most // 2 - 1)
        self.ask("restore", bytes=full), self.state(), self.run("all", 1), self.run("all", 1), self.ask("save")
        self.select(*range(b)[::-1]), self.run("all", 1), self.state()
        if self.apart or b == 1:
            self.begin("rows", rule, b)
            self.feed(most + 1, kind="all"), self.ask("take", row=0)
            one = self.saved
            self.begin("limit rows fill", rule, b, most // 2 - 1)
            self.run("all"), self.ask("put", row=0, bytes=one), self.state()
            self.run("all", 1), self.state(), self.run("all"), self.state()
        self.begin("limit fill", rule, b, 0)
        self.run("all"), self.state(), self.ask("reset", rows=[0]), self.run("all", 1), self.state()
        tensors, facts = opened(unpacked_bytes(full))
        self.begin("snapshot", rule, b)
        without = {name: tensors[name] for name in sorted(tensors, reverse=True) if name != "head"}
        self.ask("restore", bytes=closed(without, {"another": "word", **facts})), self.state(), self.run("all")
        if "head" in tensors:
            heads = np.array([2**31 - 1, -1, 1000][:b], np.int32)
            self.ask("restore", bytes=closed({**tensors, "head": heads}, facts)), self.run("all"), self.ask("save")

    def refused_later(self, rule: str) -> None:
        """Requests that have to be refused though their first part, or most of it, is right."""
        b, long = self.most_b, self.longest
        self.begin("refusals", rule, b)
        self.run("all"), self.ask("save")
        full = self.saved
        tensors, facts = opened(unpacked_bytes(full))
        self.run("all")
        good = self.arrays(long)
        name, entry = next((entry.name, entry) for entry in self.manifest.given)
        other = np.float32 if entry.role == "tokens" else np.bool_
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("open", {"b": b + 1, "memory_length": None}),
            ("open", {"b": 0, "memory_length": None}),
            ("open", {"b": b, "memory_length": (self.manifest.memory_length if self.counted else 0) + 1}),
            ("select", {"rows": []}),
            ("select", {"rows": [-1]}),
            ("reset", {"rows": [-1]}),
            ("run", {"inputs": good, "counts": [-1] * b}),
            ("run", {"inputs": {**good, name: packed(unpacked(good[name]).astype(other))}, "counts": None}),
            ("restore", {"bytes": closed(tensors, {**facts, "model_id": "0" * 64})}),
            ("restore", {"bytes": closed(tensors, {**facts, "format": "txl-deploy.state/9"})}),
            ("restore", {"bytes": closed({**tensors, "another": np.zeros(b, np.float32)}, facts)}),
            ("restore", {"bytes": closed({each: tensors[each] for each in sorted(tensors)[:-1]}, facts)}),
        ]
        if self.counted:
            for fill in (self.manifest.memory_length + 1, -1):
                fills = np.array([fill, *tensors["fill"][1:]], np.int32)
                wrong.append(("restore", {"bytes": closed({**tensors, "fill": fills}, facts)}))
        if self.apart and b > 1:
            self.ask("take", row=0)
            wrong += [("restore", {"bytes": None}), ("put", {"row": 0, "bytes": full})]
        if self.exact and long > 1:
            wrong.append(("run", {"inputs": good, "counts": [long - 1] * b}))
        if not self.apart and b > 1:
            wrong += [("run", {"inputs": good, "counts": [0, *[long] * (b - 1)]})]
            wrong += [("reset", {"rows": [0]}), ("take", {"row": 0})]
        if self.fluent:
            ids = unpacked(self.tokens(2 * long + 1)).copy()
            ids[0, -1] = -1
            late, prompt = packed(ids), {"tokens": self.tokens(2), "counts": None, "count": 2, "seed": 0}
            fair = {"temperature": 1.0, "top_k": None, "top_p": None}
            odd: list[dict[str, Any]] = [{"tokens": late}, {"counts": [0] * b}, {"temperature": -1.0}, {"top_k": 0}]
            odd += [{"count": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
            wrong += [("feed", {"inputs": {name: late}, "counts": None, "last": True})]
            wrong += [("score", {"tokens": late, "counts": None})]
            wrong += [("generate", {**prompt, **fair, **each}) for each in odd]
        self.refused(wrong)

    def of_table(self, rule: str) -> None:
        """Draws that depend on the last bit of a log-probability if an engine computes it."""
        fair = {"temperature": 1.0, "top_k": None, "top_p": None}

        def draw(shows: str, *prompts: int, seed: int = 3, count: int = 1, **options: Any) -> None:
            self.begin(shows, rule, len(prompts))
            tokens = packed(np.array(prompts, np.int32)[:, None])
            for _ in range(2):  # a second call begins its random numbers anew
                self.ask("generate", tokens=tokens, counts=None, count=count, seed=seed, **{**fair, **options})
            self.state()

        draw("greedy", 0, 1, 2, temperature=0.0, count=3)
        for seed in (0, 5, 2**32 - 1, 2**32 + 5, 2**63 + 5, 2**64 + 5, 2**70 + 5, 2**128 + 5, 2**200 + 5):
            draw("draws", 0, 0, 0, seed=seed)
        for seed in range(4):
            draw("draws top_k", 0, 1, 2, seed=seed, top_k=3)
            draw("draws top_p", 0, 3, 2, seed=seed, top_p=0.5)
            draw("draws top_p", 2, 3, 2, seed=seed, top_p=1.0)
            draw("draws top_k top_p", 2, 2, 2, seed=seed, top_k=3, top_p=0.5)
            draw("draws temperature", 4, 4, 4, seed=seed, temperature=0.01)
        draw("draws top_k", 0, 1, 2, top_k=50)
        draw("draws temperature", 0, 1, 3, temperature=1e-4)
        draw("draws temperature", 0, 0, 1, temperature=1e-60)  # among words that tie; in float32 it would be 0
        draw("draws temperature", 0, 1, 3, temperature=50.0)
        self.begin("draws greedy", rule, 1)
        for heat in (0.0, 1.0):
            request = {"tokens": packed(np.array([[3, 8]], np.int32)), "counts": None, "count": 1, "seed": 0}
            reply = self.ask("generate", refused=True, **request, **{**fair, "temperature": heat})
            assert reply["kind"] == "backend", reply

    def of_tokens(self, rule: str) -> None:
        """Vectors of a model that reads token ids and returns log-probabilities."""
        b = self.most_b
        self.begin("score", rule, b)
        self.score(), self.state(), self.score(2), self.score(), self.state()
        self.begin("greedy", rule, b)
        self.generate(8, temperature=0.0), self.state(), self.generate(8, temperature=0.0)
        for shows, options in (
            ("draws", {}),
            ("draws temperature", {"temperature": 0.6}),
            ("draws temperature", {"temperature": 1.7}),
            ("draws top_k", {"top_k": 4}),
            ("draws top_p", {"top_p": 0.5}),
            ("draws top_p", {"top_p": 0.9}),
            ("draws top_p temperature", {"top_p": 0.7, "temperature": 2.5}),
            ("draws top_k top_p temperature", {"top_k": 5, "top_p": 0.8, "temperature": 1.5}),
        )[:: 3 if "old" in self.base else 1]:  # how an old bundle draws is how any other does
            self.begin(shows, rule, b)
            self.generate(5, **options), self.generate(5, **options), self.state()
        if b > 1:
            self.begin("draws apart", rule, b)
            self.generate(4, same=True)

    def of_texts(self, rule: str) -> None:
        """Texts and back; each plain one only with what ASCII has."""
        vocabulary = self.driver.model.vocabulary
        if vocabulary is not None:
            plain = (b"", b"the tide comes in,\nand goes out.\n", b"  a  b \n\n", b"one line")
            # what follows needs Unicode's tables
            wide = ("NA\u00cfVE \u4e2d\u3000\u0130".encode(), b"The Tide\r\nComes\x0bIn\r", b"\xff\x00 ab")
            if self.path.name == "table":
                plain = (b"the  tide\t the\n\n \na, tide", b"the\x0ctide\r\n\r\rthe\n", b"the tides", b"")
                wide = ("\u3000the\xa0\xfc\u2028tide\x85the\n".encode(), b"\xef\xbb\xbfthe", b"Tide\x1cTide\x1fthe\n")
            if self.path.name == "hidden":
                plain = (b"a, b,  a, , b c\n", b", \n,\na,b\n\n", b" a , b ,c", b"b c, x\ry")
                wide = ("\u3000a, \xfc".encode(), b"\xff, a")
            for texts in (plain, wide):
                self.begin("text", rule, 1)
                if self.manifest.vocab_size > 30:
                    self.ask("decode", tokens=packed(np.array([0, 40, 1, 40], np.int32)))
                for text in texts:
                    reply = self.ask("encode", None, bytes=packed_bytes(text))  # words are of UTF-8 alone
                    if "ok" in reply:
                        self.ask("decode", tokens=reply["ok"]["tokens"])

    def random(self, rule: str, turns: int = 13) -> None:
        """Anything in any order."""
        self.begin("", rule, self.number(1, self.most_b) if not self.manifest.joint else self.most_b)
        vector, saved, taken = self.vectors[-1], "", ""
        names = ["run", "run", "run", "uncommitted", "feed", "select", "save", "restore", "reset", "state"]
        names += ["take", "put"] if self.apart or self.b == 1 else []
        names += ["score", "generate"] if self.fluent else []
        shown = {"uncommitted": "commit", "feed": "cut", "take": "rows", "put": "rows"}
        shown |= {"save": "snapshot", "restore": "snapshot"}
        saved_b, done = 0, set[str]()
        for _ in range(turns):
            name = str(self.draws.choice(names))
            if name == "run":
                done |= self.run("idle")
                continue
            if name == "uncommitted":
                self.run(commit=False)
            elif name == "feed":
                self.feed(self.longest * self.number(1, 2), last=self.number(0, 1) > 0)
            elif name == "select" and not self.manifest.joint:
                self.select(*self.draws.integers(0, self.b, self.number(1, self.most_b)).tolist())
                alone = self.apart or self.b == 1
                names = names if alone else [each for each in names if each not in ("take", "put")]
            elif name == "save":
                self.ask("save")
                saved, saved_b = self.saved, self.b
            elif name == "restore" and saved and saved_b == self.b:
                self.ask("restore", bytes=saved)
            elif name == "reset":
                self.ask("reset", rows=[self.number(0, self.b - 1)] if self.apart else None)
            elif name == "take":
                self.ask("take", row=self.number(0, self.b - 1))
                taken = self.saved
            elif name == "put" and taken:
                self.ask("put", row=self.number(0, self.b - 1), bytes=taken)
            elif name == "score":
                self.score(6)
            elif name == "generate":
                self.generate(3, temperature=float(self.draws.choice([0.0, 0.8])))
                done |= {"draws", "greedy"}
                continue
            elif name != "state":
                continue
            done.add(shown.get(name, name))
        self.state()
        known = done - {"state"} | ({"spill"} if rule == "ring" else set()) | ({"fill"} if self.counted else set())
        vector["shows"] = [*sorted(known), *self.base]


def main() -> None:
    """Write the vectors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "conformance")
    parser.add_argument("--only", action="append", help="a bundle; the vectors of all others stay (repeatable)")
    given = parser.parse_args()
    for name in given.only or json.loads((given.folder / "index.json").read_bytes())["bundles"]:
        composer = Composer(given.folder / "bundles" / name, SHOWS.get(name, []))
        composer.compose()
        lines = [json.dumps(vector, separators=(",", ":")) + "\n" for vector in composer.vectors]
        (given.folder / "vectors" / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}: {len(lines)} vectors")


if __name__ == "__main__":
    main()
