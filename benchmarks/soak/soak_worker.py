"""Do random operations on one stream, while a thread reloads a second bundle that `soak.py` replaces.

    python benchmarks/soak/soak_worker.py OPTIONS

`soak.py` starts this process; OPTIONS is a JSON document of `Options`. The process imports the runtime but not PyTorch,
as an application would. Before every reload it prints a line, by which it asks `soak.py` for a new version of the
second bundle. At the end it writes all measurements to `worker.json`. At some moments it writes the stream's state to
`held-….npz`, with all tokens of each sequence that still affect the state, so that a reference can repeat them.
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
"""The operations, which are methods `do_…` of `Play`, and their relative frequency."""
WINDOWS = 200
"""The number of times that the process's memory, files and threads are measured."""
KEPT = 3
"""The number of snapshots that are kept for later restores."""
PATIENCE = 300.0
"""The seconds within which a load has to see a requested replacement."""


class Options(msgspec.Struct, frozen=True):
    """The options that `soak.py` passes.

    Attributes:
        bundle: the bundle of the stream.
        beside: the second bundle, which is replaced and reloaded.
        folder: the folder for results and for snapshots in files.
        steps, seconds: the run ends after this number of operations or of seconds, whichever comes first.
        looks: the number of times that the stream's state is written to a file.
        interval: the seconds between two reloads.
        seed: of all random choices.
        threads: of the engine.
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
    """The past of one sequence since its last reset: its last segments, and the number of all its tokens.

    Segments that are too old to affect the state are forgotten.
    """

    def __init__(self, segments: list[Segment] | None = None, total: int = 0) -> None:
        self.segments, self.total = segments or [], total

    def copy(self) -> Row:
        """Return a copy of this past."""
        return Row(list(self.segments), self.total)

    def fed(self, tokens: Ids, longest: int, reach: int) -> None:
        """Add tokens that were fed, e.g. [17] with a longest segment of 8 as segments of 8, 8 and 1.

        Args:
            tokens: the tokens [n].
            longest: the length of the longest segment.
            reach: the number of last tokens that affect the state.
        """
        for first in range(0, len(tokens), longest):
            self.segments.append(tuple(tokens[first : first + longest].tolist()))
        self.total += len(tokens)
        if len(self.segments) > 2 * reach:  # then some can be forgotten: each segment has a token or more
            self.trim(reach)

    def trim(self, reach: int) -> None:
        """Forget the segments that end before the last `reach` tokens."""
        kept = 0
        for place in range(len(self.segments) - 1, -1, -1):
            kept += len(self.segments[place])
            if kept >= reach:
                del self.segments[:place]
                return


@dataclass
class Play:
    """A stream, random operations on it, and the past of each of its sequences."""

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
        """Do the operation of this name, with random arguments, and count it."""
        self.done[name] += 1
        getattr(self, f"do_{name}")()

    def number(self, first: int, last: int) -> int:
        """Draw a whole number from `first` to `last`, both included."""
        return int(self.draws.integers(first, last + 1))

    def tokens(self, columns: int) -> Ids:
        """Draw random tokens for all sequences, int32 [b, columns], e.g. [2, 8]."""
        return self.draws.integers(0, self.model.manifest.vocab_size, (len(self.rows), columns), np.int32)

    def lengths(self, columns: int, least: int = 0) -> Ids:
        """Draw for each sequence the number of tokens that count, from `least` to `columns`: int32 [b], e.g. [8, 3].

        In 7 of 10 cases all tokens of all sequences count.
        """
        if self.draws.random() < 0.7:
            return np.full(len(self.rows), columns, np.int32)
        return self.draws.integers(least, columns + 1, len(self.rows), np.int32)

    def fed(self, tokens: Ids, counts: Ids) -> None:
        """Add tokens that were fed to the past of each sequence, e.g. [2, 8] with counts [8, 3]."""
        for row, words, count in zip(self.rows, tokens, counts.tolist(), strict=True):
            row.fed(words[:count], self.longest, self.reach)

    # --- operations that run segments -----------------------------------------------------------------------------

    def do_decode(self) -> None:
        """Feed at most one token to each sequence, and store the time."""
        tokens, counts = self.tokens(1), self.lengths(1)
        started = time.perf_counter()
        self.stream.step(tokens, counts)
        self.decode.append(time.perf_counter() - started)
        self.fed(tokens, counts)

    def do_prefill(self) -> None:
        """Run one segment of random length."""
        tokens = self.tokens(self.number(1, self.longest))
        counts = self.lengths(tokens.shape[1])
        self.stream.step(tokens, counts)
        self.fed(tokens, counts)

    def do_feed(self) -> None:
        """Feed up to three segments; half of the calls ask only for the last position's result."""
        tokens = self.tokens(self.number(1, 3 * self.longest))
        counts = self.lengths(tokens.shape[1])
        self.stream.feed(tokens, counts, last=self.draws.random() < 0.5)
        self.fed(tokens, counts)

    def do_score(self) -> None:
        """Score up to two segments of tokens, all but the last of which are fed."""
        tokens = self.tokens(self.number(2, 2 * self.longest))
        self.stream.score(tokens)
        self.fed(tokens[:, :-1], np.full(len(tokens), tokens.shape[1] - 1, np.int32))

    def do_generate(self) -> None:
        """Feed a prompt and generate tokens; all drawn tokens but the last one are fed."""
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
        """Run a segment that does not change the stream's state."""
        tokens = self.tokens(self.number(1, self.longest))
        self.stream.run({"tokens": tokens}, self.lengths(tokens.shape[1]), commit=False)

    # --- operations on states -------------------------------------------------------------------------------------

    def do_select(self) -> None:
        """Reorder, drop and double sequences at random."""
        which = self.draws.integers(0, len(self.rows), self.number(1, self.model.batch_size))
        self.stream.select(which)
        self.rows = [self.rows[row].copy() for row in which]

    def do_move(self) -> None:
        """Copy the state of one sequence to a second one."""
        source, target = (self.number(0, len(self.rows) - 1) for _ in range(2))
        self.stream.put(target, self.stream.take(source))
        self.rows[target] = self.rows[source].copy()

    def do_snapshot(self) -> None:
        """Keep a snapshot of the stream, and drop the oldest one if there are `KEPT` already."""
        self.snapshots = [*self.snapshots[1 - KEPT :], (self.stream.snapshot(), [row.copy() for row in self.rows])]

    def do_restore(self) -> None:
        """Restore one of the kept snapshots, if there are any."""
        if self.snapshots:
            self.go_back(*self.snapshots[self.number(0, len(self.snapshots) - 1)])

    def do_file(self) -> None:
        """Store a snapshot in one of four files; if the file exists, half of the calls restore it instead."""
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
        """Restore a snapshot, in a new stream if the number of sequences differs, and the pasts that belong to it."""
        if state.batch_size != len(self.rows):
            self.stream = self.model.stream(state.batch_size)
        self.stream.restore(state)
        self.rows = [row.copy() for row in rows]

    def do_look(self) -> None:
        """Read the stream's whole state as arrays."""
        self.stream.state()

    def do_reset(self) -> None:
        """Reset each sequence with probability 1/2; in one of five calls replace the stream by a new one instead."""
        if self.draws.random() < 0.2:
            self.stream = self.model.stream()
            self.rows = [Row() for _ in range(self.stream.batch_size)]
            return
        which = self.draws.random(len(self.rows)) < 0.5
        self.stream.reset(which)
        self.rows = [Row() if again else row for row, again in zip(self.rows, which, strict=True)]

    # --- the state that a reference repeats -----------------------------------------------------------------------

    def write_down(self, path: Path) -> None:
        """Write a file with the stream's state, its log-probabilities for random tokens, and the sequences' pasts."""
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
    """A thread that reloads a bundle after each replacement, and compares the models' answers with the known ones.

    Attributes:
        ended: set to end the thread.
        counts: the number of loads, of replacements and of refused loads.
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
        """Reload the bundle again and again until `ended` is set."""
        try:
            self._reload()
        except Exception as error:  # noted for the results, because a thread's traceback would be lost
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _reload(self) -> None:
        known: list[str] = []
        old = self._load()
        known.append(self._answer(old))
        while not self.ended.wait(self._interval):
            before, patience = self._answer(old), time.monotonic() + PATIENCE
            # this line asks `soak.py` to replace the bundle
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
        """Return a hash of all bits of a model's answer to fixed tokens."""
        tokens = np.arange(3 * model.segment_lengths[0], dtype=np.int32) % model.manifest.vocab_size
        result = model.stream(1).feed(tokens[None])
        return hashlib.sha256(result.tobytes()).hexdigest()


class _Mallinfo(ctypes.Structure):
    """The struct that glibc's function mallinfo2 returns."""

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
    """Return glibc's function mallinfo2; None if the C library has no such function."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    ask.restype = _Mallinfo
    return ask


_mallinfo = _known_mallinfo()  # looked up once: each `ctypes.CDLL` leaves classes, which count as growth


def measured(folder: Path) -> dict[str, float | None]:
    """Return this process's memory, mappings, descriptors, threads and files by name; None for unknown figures."""
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
    """Run all operations with the options of the JSON document `argument`, and write the results."""
    options = msgspec.json.decode(argument.encode(), type=Options)
    folder = Path(options.folder)
    scratch = folder / "scratch"  # this is TMPDIR too, so that temporary files that remain are counted
    scratch.mkdir()
    os.environ["TMPDIR"] = str(scratch)
    draws = np.random.default_rng(options.seed)
    play = Play(txl_runtime.load(options.bundle, backend="cpu", threads=options.threads), scratch, draws)
    beside = Beside(options)
    beside.start()
    names, shares = list(OPERATIONS), np.array(list(OPERATIONS.values()))
    samples = folder / "samples.jsonl"  # in a file, since a list would grow the memory that is measured
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
