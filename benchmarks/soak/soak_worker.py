"""The process that is soaked: random operations on one stream, and beside it a bundle that is replaced and reloaded.

    python benchmarks/soak/soak_worker.py OPTIONS

`soak.py` starts it; OPTIONS are those of `Options`, in JSON. It imports the runtime and nothing of PyTorch, as an
application would. Before every reload it asks whoever started it for another version of the bundle, by a line on
standard output. What it measured is the file `worker.json`; what its stream held now and then is `held-….npz`, with
every sequence's tokens that can still matter, for a reference to repeat.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import threading
import time
import zipfile  # noqa: F401 - of NumPy's savez; its libraries are mapped now, so that they count as no growth
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import txl_runtime
from numpy.typing import NDArray
from txl_runtime import Stream, StreamState
from txl_runtime.errors import TxlError
from txl_runtime.model import Model

from benchmarks.shared.tables import log

Ids = NDArray[np.int32]
Segment = tuple[int, ...]

OPERATIONS = {
    "decode": 0.8,
    "prefill": 0.04,
    "feed": 0.01,
    "score": 0.01,
    "generate": 0.01,
    "uncommitted": 0.03,
    "select": 0.015,
    "move": 0.02,
    "snapshot": 0.01,
    "restore": 0.01,
    "file": 0.005,
    "look": 0.005,
    "reset": 0.004,
}
"""Operations and their relative frequency; a decode step has one token per sequence."""
WINDOWS = 200
"""Number of times that the process is measured."""
KEPT = 3
"""Number of snapshots that are kept for later restores."""
PATIENCE = 300.0
"""Seconds until a replaced bundle must be visible."""


class Options(msgspec.Struct, frozen=True):
    """The options that `soak.py` passes.

    Attributes:
        bundle: the bundle whose stream is soaked.
        beside: the bundle that is replaced and reloaded.
        folder: the folder for results and for snapshots as files.
        steps, seconds: operations to do, or seconds to do them in, whichever ends first.
        looks: the number of times that the stream's state is written down.
        interval: seconds between two reloads.
    """

    bundle: str
    beside: str
    folder: str
    steps: int
    seconds: float | None
    looks: int
    interval: float
    seed: int
    threads: int


class Row:
    """The last segments of a sequence since its last reset, as many as can matter, and its number of tokens."""

    def __init__(self, segments: list[Segment] | None = None, total: int = 0) -> None:
        self.segments, self.total = segments or [], total

    def copy(self) -> Row:
        """Return a copy of this past, e.g. of segments [8], [8], [1], from which a stream can continue."""
        return Row(list(self.segments), self.total)

    def fed(self, tokens: Ids, longest: int, reach: int) -> None:
        """Note tokens that were fed, e.g. [17], in segments of length 8, 8 and 1."""
        for first in range(0, len(tokens), longest):
            self.segments.append(tuple(tokens[first : first + longest].tolist()))
        self.total += len(tokens)
        if len(self.segments) > 2 * reach:  # each segment has at least one token
            self.trim(reach)

    def trim(self, reach: int) -> None:
        """Forget segments before the last `reach` tokens."""
        kept = 0
        for place in range(len(self.segments) - 1, -1, -1):
            kept += len(self.segments[place])
            if kept >= reach:
                del self.segments[:place]
                return


@dataclass
class Play:
    """One stream, the operations on it, and notes of what it must hold."""

    model: Model
    folder: Path
    draws: np.random.Generator
    decode: list[float] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    snapshots: list[tuple[StreamState, list[Row]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        manifest = self.model.manifest
        self.longest = manifest.segment_lengths[0]
        self.layers = manifest.config.n_layer
        self.reach = self.layers * (manifest.memory_length + self.longest)
        self.stream: Stream = self.model.stream()
        self.rows = [Row() for _ in range(self.stream.batch_size)]

    def one(self, name: str) -> None:
        """Do one random operation."""
        self.done[name] += 1
        getattr(self, f"do_{name}")()

    def number(self, first: int, last: int) -> int:
        """Draw a number from first … last."""
        return int(self.draws.integers(first, last + 1))

    def tokens(self, columns: int) -> Ids:
        """Draw random tokens, [b, columns], e.g. [2, 8]."""
        return self.draws.integers(0, self.model.manifest.vocab_size, (len(self.rows), columns), np.int32)

    def lengths(self, columns: int, least: int = 0) -> Ids:
        """Draw the number of tokens that count in each sequence: all, in 7 of 10 cases. For example, [8, 3]."""
        if self.draws.random() < 0.7:
            return np.full(len(self.rows), columns, np.int32)
        return self.draws.integers(least, columns + 1, len(self.rows), np.int32)

    def fed(self, tokens: Ids, counts: Ids) -> None:
        """Note the tokens that were fed, e.g. [2, 8] with counts [8, 3]."""
        for row, words, count in zip(self.rows, tokens, counts.tolist(), strict=True):
            row.fed(words[:count], self.longest, self.reach)

    # --- segments -------------------------------------------------------------------------------------------------

    def do_decode(self) -> None:
        """Feed one token per sequence, and time it."""
        tokens, counts = self.tokens(1), self.lengths(1)
        started = time.perf_counter()
        self.stream.step(tokens, counts)
        self.decode.append(time.perf_counter() - started)
        self.fed(tokens, counts)

    def do_prefill(self) -> None:
        """Run one segment of any length."""
        tokens = self.tokens(self.number(1, self.longest))
        counts = self.lengths(tokens.shape[1])
        self.stream.step(tokens, counts)
        self.fed(tokens, counts)

    def do_feed(self) -> None:
        """Feed several segments; in some calls only the last position's result is returned."""
        tokens = self.tokens(self.number(1, 3 * self.longest))
        counts = self.lengths(tokens.shape[1])
        self.stream.feed(tokens, counts, last=self.draws.random() < 0.5)
        self.fed(tokens, counts)

    def do_score(self) -> None:
        """Score several segments of tokens."""
        tokens = self.tokens(self.number(2, 2 * self.longest))
        self.stream.score(tokens)
        self.fed(tokens[:, :-1], np.full(len(tokens), tokens.shape[1] - 1, np.int32))

    def do_generate(self) -> None:
        """Feed a prompt and generate tokens; the last one is not fed."""
        tokens = self.tokens(self.number(1, 4))
        counts = self.lengths(tokens.shape[1], least=1)
        ways: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {}]
        options = ways[self.number(0, 3)]
        drawn = list(
            self.stream.generate(tokens, self.number(1, 4), seed=self.number(0, 999), lengths=counts, **options)
        )
        self.fed(tokens, counts)
        for token in drawn[:-1]:
            self.fed(token[:, None], np.ones(len(token), np.int32))

    def do_uncommitted(self) -> None:
        """Run a segment without committing it."""
        tokens = self.tokens(self.number(1, self.longest))
        self.stream.run({"tokens": tokens}, self.lengths(tokens.shape[1]), commit=False)

    # --- states ---------------------------------------------------------------------------------------------------

    def do_select(self) -> None:
        """Reorder, drop and double sequences."""
        which = self.draws.integers(0, len(self.rows), self.number(1, self.model.batch_size))
        self.stream.select(which)
        self.rows = [self.rows[row].copy() for row in which]

    def do_move(self) -> None:
        """Put one sequence's state into a second sequence's place."""
        source, target = (self.number(0, len(self.rows) - 1) for _ in range(2))
        self.stream.put(target, self.stream.take(source))
        self.rows[target] = self.rows[source].copy()

    def do_snapshot(self) -> None:
        """Keep a snapshot, and drop the oldest."""
        self.snapshots = [*self.snapshots[1 - KEPT :], (self.stream.snapshot(), [row.copy() for row in self.rows])]

    def do_restore(self) -> None:
        """Restore one of the snapshots."""
        if self.snapshots:
            self.go_back(*self.snapshots[self.number(0, len(self.snapshots) - 1)])

    def do_file(self) -> None:
        """Store a snapshot as a file; some calls continue from a file."""
        path = self.folder / f"state-{self.number(0, 3)}.safetensors"
        if path.exists() and self.draws.random() < 0.5:
            past = path.with_suffix(".json")
            rows = [
                Row([tuple(segment) for segment in segments], total) for segments, total in json.loads(past.read_text())
            ]
            self.go_back(StreamState.load(path), rows)
            return
        self.stream.snapshot().save(path)
        path.with_suffix(".json").write_text(json.dumps([(row.segments, row.total) for row in self.rows]))

    def go_back(self, state: StreamState, rows: list[Row]) -> None:
        """Continue from a snapshot and its rows, e.g. 2 rows."""
        if state.batch_size != len(self.rows):
            self.stream = self.model.stream(state.batch_size)
        self.stream.restore(state)
        self.rows = [row.copy() for row in rows]

    def do_look(self) -> None:
        """Read the whole state as arrays."""
        self.stream.state()

    def do_reset(self) -> None:
        """Reset some sequences, or replace the stream by a new one with all sequences."""
        if self.draws.random() < 0.2:
            self.stream = self.model.stream()
            self.rows = [Row() for _ in range(self.stream.batch_size)]
            return
        which = self.draws.random(len(self.rows)) < 0.5
        self.stream.reset(which)
        self.rows = [Row() if again else row for row, again in zip(self.rows, which, strict=True)]

    # --- what it must hold ----------------------------------------------------------------------------------------

    def write_down(self, path: Path) -> None:
        """Write the stream's state, its answer to some tokens, and the tokens that every sequence was fed."""
        tokens = self.tokens(self.longest)
        result = self.stream.run({"tokens": tokens}, commit=False)
        (logprobs,) = result.values()
        past: dict[str, Any] = {"fill": self.stream.fill, "tokens": tokens, "logprobs": logprobs}
        past |= {f"memory.{name}": rows for name, rows in self.stream.memory().items()}
        for index, row in enumerate(self.rows):
            row.trim(self.reach)
            past[f"past.{index}"] = np.array([word for segment in row.segments for word in segment], np.int32)
            past[f"cuts.{index}"] = np.array([len(segment) for segment in row.segments], np.int32)
            past[f"total.{index}"] = np.array(row.total)
        np.savez(path, **past)


class Beside(threading.Thread):
    """A reader of a bundle that is replaced: it loads the new one, compares its answer with the known one, and drops
    the old one.

    Attributes:
        counts: the number of each event.
        wrong: errors in words.
        seconds: the seconds of every load.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(daemon=True)
        self._path, self._interval, self._threads = options.beside, options.interval, options.threads
        self.ended, self.counts, self.wrong, self.seconds = (
            threading.Event(),
            Counter[str](),
            list[str](),
            list[float](),
        )

    def run(self) -> None:
        """Reload the bundle until the end of the run."""
        try:
            self._reload()
        except Exception as error:  # reported at the end, because a thread's traceback would be lost
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _reload(self) -> None:
        known: list[str] = []
        old = self._load()
        known.append(self._answer(old))
        while not self.ended.wait(self._interval):
            before, patience = self._answer(old), time.monotonic() + PATIENCE
            # asks for the bundle's second version
            print(json.dumps({"replace": self.counts["replacements"]}), flush=True)
            while True:
                try:
                    new = self._load()
                except TxlError as error:
                    self.counts["refused"] += 1
                    self.wrong += [] if "replaced" in str(error) else [str(error)]
                    continue
                answer = self._answer(new)
                self.counts["loads"] += 1
                if answer not in known:
                    if len(known) == 2:
                        self.wrong.append(f"a model answered as neither version after {self.counts['loads']} loads")
                    known.append(answer)
                if answer != before:
                    break
                if time.monotonic() > patience:
                    self.wrong.append(f"the bundle was not replaced within {PATIENCE:.0f} seconds")
                    return
            if self._answer(old) != before:
                self.wrong.append("an open model changed when its bundle was replaced")
            self.counts["replacements"] += 1
            old = new

    def _load(self) -> Model:
        started = time.perf_counter()
        model = txl_runtime.load(self._path, backend="cpu", threads=self._threads)
        self.seconds.append(time.perf_counter() - started)
        return model

    @staticmethod
    def _answer(model: Model) -> str:
        """Return the hash of a model's answer to one feed, all bits of it."""
        tokens = np.arange(3 * model.segment_lengths[0], dtype=np.int32) % model.manifest.vocab_size
        result = model.stream(1).feed(tokens[None])
        return hashlib.sha256(result.tobytes()).hexdigest()


class _Mallinfo(ctypes.Structure):
    """The struct that mallinfo2 returns."""

    _names_ = (
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
        "keepcost",
    )
    _fields_ = [(name, ctypes.c_size_t) for name in _names_]


def _known_mallinfo() -> Callable[[], Any] | None:
    """Return glibc's mallinfo2; None if the C library is a different one."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    ask.restype = _Mallinfo
    return ask


_mallinfo = _known_mallinfo()  # looked up once, because every library object of ctypes leaves classes behind


def measured(folder: Path) -> dict[str, float | None]:
    """Return the process's use of memory, descriptors and threads; None for what the system does not tell."""
    results: dict[str, float | None] = dict.fromkeys(
        ("resident", "allocated", "mappings", "mapped", "descriptors", "threads")
    )
    try:
        results["resident"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        maps = Path("/proc/self/maps").read_bytes()
        results["mappings"], results["mapped"] = maps.count(b"\n"), maps.count(b" /")
        results["descriptors"] = len(list(Path("/proc/self/fd").iterdir())) - 1
        results["threads"] = len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        pass
    if _mallinfo is not None:
        info = _mallinfo()
        results["allocated"] = info.uordblks + info.hblkhd
    results["python"] = sys.getallocatedblocks()
    results["files"] = sum(1 for _ in folder.rglob("*"))
    return results


def main(argument: str) -> None:
    """Run all operations, and write the results."""
    options = msgspec.json.decode(argument.encode(), type=Options)
    folder = Path(options.folder)
    scratch = folder / "scratch"  # also the process's temporary folder, so that leftovers are noticed
    scratch.mkdir()
    os.environ["TMPDIR"] = str(scratch)
    draws = np.random.default_rng(options.seed)
    play = Play(txl_runtime.load(options.bundle, backend="cpu", threads=options.threads), scratch, draws)
    beside = Beside(options)
    beside.start()
    names, shares = list(OPERATIONS), np.array(list(OPERATIONS.values()))
    samples = folder / "samples.jsonl"  # on the disk, because memory is what is measured
    window, checkpoint = max(options.steps // WINDOWS, 1), max(options.steps // options.looks, 1)
    started = time.monotonic()
    for first in range(0, options.steps, window):
        for index in draws.choice(len(names), min(window, options.steps - first), p=shares / shares.sum()).tolist():
            play.one(names[index])
        step, seconds = sum(play.done.values()), time.monotonic() - started
        times = np.array(play.decode) * 1e3
        play.decode.clear()
        p50, p99 = np.percentile(times, (50, 99)).tolist()
        latency = {"p50": p50, "p99": p99, "max": float(times.max())}
        sample = {"step": step, "seconds": seconds, **latency, **measured(scratch)}
        with samples.open("a") as lines:
            lines.write(json.dumps(sample) + "\n")
        last = step >= options.steps or (options.seconds is not None and seconds > options.seconds)
        if last or step % checkpoint < window:
            play.write_down(folder / f"held-{step:09d}.npz")
            log(f"step {step:,}, {seconds:,.0f} s, {dict(beside.counts)}")
        if last:
            break
    beside.ended.set()
    beside.join(PATIENCE)
    document = {
        "samples": [json.loads(line) for line in samples.read_text().splitlines()],
        "operations": dict(play.done),
        "reloads": {**beside.counts, "wrong": beside.wrong, "seconds": beside.seconds},
        "seconds": time.monotonic() - started,
    }
    (folder / "worker.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main(sys.argv[1])
