"""Prove that a refactoring calls CUDA's driver as before: record the calls of two checkouts, then compare the records.

    python benchmarks/compare/driver_calls.py record OLD.json --source ../old-checkout --bundles FOLDER
    python benchmarks/compare/driver_calls.py record NEW.json --bundles FOLDER
    python benchmarks/compare/driver_calls.py compare OLD.json NEW.json

The driver is the stand-in of the tests, so no GPU is needed. The script runs every operation of a loop and of a stream
on Transformer-XLs and on steps of every sort. A record has every driver call of each operation, in order, with its
sizes, and a digest of the operation's result. An address is written as a block and an offset: "states 1 + 512" is 512
bytes into the second block from which programs read states. A block is named by its use: "inputs" and "results" of
programs, "staged" and "arrived" for host memory that copies read and write, "aside" for device memory that no program
uses. Calls that release something stand last in their operation, in alphabetical order, since the interpreter decides
when they happen.

Both checkouts use the bundles of FOLDER; missing ones are made. The stand-in is that of each checkout.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from bit_equality import environment_of, runtime_of
from driver_notes import Line, Notes

if TYPE_CHECKING:
    from txl_runtime import Model
    from txl_runtime.streaming.programs import Want
    from txl_runtime.types import Ids

B = 3
TINY = {"n_layer": 1, "vocab_size": 13, "d_model": 8, "d_embed": 8, "d_head": 4, "d_inner": 8}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {
        "config": TINY | {"pre_lnorm": True, "attention_bias": True, "memory_start": "zeros", "memory_length": 3},
        "segment_length": (3, 2),
    },
    "clusters": {
        "config": {"n_layer": 1, "vocab_size": 1100, "cutoffs": (300, 900), "div_val": 2, "memory_length": 5},
    },
    "half": {"precision": "fp16"},
    "two B": {"batch_size": (1, B)},
    "one row": {"config": TINY | {"memory_length": 1}, "segment_length": (4, 1)},
    "hidden": {"memory": "hidden"},
    "no memory": {"config": TINY | {"memory_length": 0}},
}
"""The exported Transformer-XLs by name: changes to the config of `small_config`, and options of `export`."""
ROLLED_ALONE = ("hidden", "no memory")
STEPS = ("recurrent", "growing", "counting", "together", "stateless")
CASES = [
    (name, rule) for name in TRANSFORMERS for rule in ("ring", "rolled") if rule == "rolled" or name not in ROLLED_ALONE
]
CASES += [(name, "replace") for name in STEPS]

FAILURES: dict[str, Any] = {
    "cuMemAlloc": 2,
    "cuMemHostAlloc": 2,
    "engine": KeyboardInterrupt(),
    "cuEventRecord": 719,
    "cuEventSynchronize": KeyboardInterrupt(),
    "cuCtxPush": 719,
    "cuGraphLaunch": 719,
    "cuMemcpy": 719,
    "cuMemset": 719,
}
"""Functions of the driver that are made to fail, by the start of their name: the status to return, or the error."""
GIVE_BACK = ("cuMemFree", "cuEventDestroy", "cuGraphExecDestroy", "cuStreamDestroy")
"""Functions of the driver that release memory or a handle, by the start of their name."""
Record = dict[str, list[tuple[str, list[str]]]]
"""The operations of each case, in order: title, and the driver calls that the operation made, one line each."""


def main() -> int:
    """Read the command line; record or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write what a checkout calls")
    recording.add_argument("out", type=Path)
    recording.add_argument("--source", type=Path, default=Path(__file__).parents[2], help="by default this checkout")
    recording.add_argument("--bundles", type=Path, metavar="FOLDER", help="of an earlier record, made if missing")
    recording.add_argument("--only", nargs="*", metavar="NAME", help="of the bundles, by default all")
    comparing = commands.add_parser("compare", help="print what differs; the exit code says whether anything does")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument(
        "--lost-marks",
        action="store_true",
        help="take an event's record for nothing where another follows before anybody waits for it",
    )
    options = parser.parse_args()
    if options.command == "compare":
        old, new = (json.loads(path.read_text()) for path in (options.old, options.new))
        return compare(old, new, without_lost_marks if options.lost_marks else list)
    if not options.child:
        source = options.source.resolve()
        environment = environment_of(source) | {"OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] += "".join(os.pathsep + str(source / "tests" / folder) for folder in ("", "helpers"))
        return subprocess.run(
            [sys.executable, __file__, "--child", *sys.argv[1:]], env=environment, check=False
        ).returncode
    runtime_of(options.source)
    with tempfile.TemporaryDirectory() as folder:
        bundles = options.bundles or Path(folder)
        bundles.mkdir(parents=True, exist_ok=True)
        result = record(bundles, [case for case in CASES if not options.only or case[0] in options.only])
    options.out.write_text(json.dumps(result, indent=0) + "\n")
    return 0


def compare(old: Record, new: Record, look: Callable[[Sequence[str]], list[str]] = list) -> int:
    """Print each difference once, with the number of operations that have it and the first of these; return 1 for any.

    `look` changes the calls of both sides before they are compared, e.g. `without_lost_marks`.
    """
    results: dict[str, list[str]] = {}
    operations = calls = 0
    for case in sorted(old.keys() | new.keys()):
        before, after = (dict(side.get(case, [])) for side in (old, new))
        for title in dict.fromkeys([*before, *after]):
            theirs, ours = (look(side.get(title, ["no such operation"])) for side in (before, after))
            operations, calls = operations + 1, calls + len(theirs)
            if theirs != ours:
                lines = difflib.unified_diff(theirs, ours, n=1, lineterm="")
                text = "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
                results.setdefault(text, []).append(f"{case}: {title}")
    for text, places in results.items():
        print(f"{len(places)} operations differ so, the first is {places[0]}\n{text}\n")
    print(f"{operations} operations, {calls} lines; {sum(map(len, results.values()))} operations differ")
    return int(bool(results))


def record(bundles: Path, cases: Sequence[tuple[str, str]]) -> Record:
    """Run all sequences of operations of `WAYS` on each case, and return the operations with their driver calls."""
    results: Record = {}
    gc.disable()  # memory is released when its last reference goes, and not at the collector's next run
    for name, rule in cases:
        path = bundle(bundles, name)
        for title, steps in WAYS.items():
            print(f"{name}, {rule}: {title}", file=sys.stderr, flush=True)
            results[f"{name}, {rule}: {title}"] = Play(path, rule).play(steps)
    gc.enable()
    return results


def bundle(folder: Path, name: str) -> Path:
    """Return the path of the bundle with this name in a folder; make the bundle if it does not exist."""
    path = folder / f"{name.replace(' ', '-')}.txl"
    if path.exists():
        return path
    if name in TRANSFORMERS:
        from support import random_state, small_config
        from txl_export import export

        options: dict[str, Any] = {"batch_size": B, "segment_length": (4, 1), "verify": False} | TRANSFORMERS[name]
        config = small_config(**options.pop("config", {}))
        export(random_state(config), path, config=config, **options)
        return path
    from step_models import MODELS

    result: Any = MODELS.get(name) or {"together": together, "stateless": stateless}[name]
    written: Path = result().write(path)
    return written


def together() -> Any:
    """Make a bundle whose sequences run in lockstep with an input `valid`, and whose states have four shapes."""
    from step_models import Graph, StepModel
    from txl_runtime.bundle.tables import Input, Output, StateTensor

    def state(name: str, shape: tuple[int, ...], axis: int | None, dtype: Any, **more: Any) -> StateTensor:
        more |= {"name": name, "input": f"state.{name}.in", "output": f"state.{name}.out", "update": "replace"}
        return StateTensor(shape=shape, batch_axis=axis, dtype=dtype, **more)

    model = StepModel(
        inputs=(
            Input(name="x", dtype="float32", shape=("L", "B", 4), role="feature", lookahead=1),
            Input(name="flag", dtype="bool", shape=("B",), role="feature"),
            Input(name="valid", dtype="int32", shape=("B",), role="valid"),
        ),
        outputs=(
            Output(name="y", dtype="float32", shape=("L", "B", 4)),
            Output(name="total", dtype="int32", shape=("B",)),
        ),
        states=(
            state("deep", (2, 2, B, 3), 2, "float16", initial="initial.deep"),
            state("flat", (B, 5), 0, "float32"),
            state("last", (2, B), 1, "bool"),
            state("shared", (3,), None, "int32", initial=2.0),
        ),
        streams="lockstep",
        tensors={"initial.deep": np.linspace(-1, 1, 12, dtype=np.float16).reshape(2, 2, 3)},
    )
    for length in (3, 1):
        graph = Graph()
        moved = graph.add("Slice", ["x", *(graph.constant([n], np.int64) for n in (1, length + 1, 0))])
        mean = graph.add("ReduceMean", ["state.flat.in", graph.constant([1], np.int64)], keepdims=1)
        graph.add("Add", [moved, mean], "y")
        half = graph.add("Cast", [mean], to=10)
        half = graph.add("Reshape", [half, graph.constant([1, 1, B, 1], np.int64)])
        half = graph.add("Add", ["state.deep.in", half])
        graph.add("Mul", [half, graph.constant(0.5, np.float16)], "state.deep.out")
        count = graph.add("Cast", ["valid"], to=1)
        count = graph.add("Unsqueeze", [count, graph.constant([1], np.int64)])
        graph.add("Add", ["state.flat.in", count], "state.flat.out")
        flag = graph.add("Unsqueeze", ["flag", graph.constant([0], np.int64)])
        graph.add("Xor", ["state.last.in", flag], "state.last.out")
        graph.add("Add", ["state.shared.in", graph.constant([1], np.int32)], "state.shared.out")
        first = graph.add("Slice", ["state.shared.in", *(graph.constant([n], np.int64) for n in (0, 1))])
        graph.add("Add", ["valid", first], "total")
        model.add(f"step-{length}", length, graph)
    return model


def stateless() -> Any:
    """Make a bundle whose step has no state."""
    from step_models import Graph, StepModel
    from txl_runtime.bundle.tables import Input, Output

    model = StepModel(
        inputs=(
            Input(name="x", dtype="float32", shape=("B", "L", 2), role="feature"),
            Input(name="valid", dtype="int32", shape=("B",), role="valid"),
        ),
        outputs=(Output(name="y", dtype="float32", shape=("B", "L", 2)),),
        states=(),
    )
    graph = Graph()
    count = graph.add("Cast", ["valid"], to=1)
    graph.add("Add", ["x", graph.add("Reshape", [count, graph.constant([B, 1, 1], np.int64)])], "y")
    model.add("step-2", 2, graph)
    return model


# --- operations on a model ----------------------------------------------------------------------------------------


class Play:
    """A model on a stand-in device, which records the driver calls of each operation that is run on the model.

    Args:
        path: the bundle's path.
        rule: the update rule of the programs to run.
    """

    model: Model

    def __init__(self, path: Path, rule: str) -> None:
        self._path, self._rule = path, rule
        self.draws, self._said = np.random.default_rng(0), Counter[str]()
        self.notes = Notes()
        self._operations: list[tuple[str, list[Line]]] = []

    def play(self, steps: Callable[[Play], None]) -> list[tuple[str, list[str]]]:
        """Run a sequence of operations, release the model, and return the driver calls of each operation.

        Args:
            steps: a function of `WAYS`, which opens the model and runs the operations.
        """
        try:
            steps(self)
        except Exception as error:  # an operation used the result of an earlier operation, which had failed
            self._operations.append(("the end, before everything was done", [[repr(error)]]))
        del self.model
        self.do("all is given back", lambda: gc.collect() and None)
        done = [(title, given_back_last(self.notes.told(lines))) for title, lines in self._operations]
        return [*done, ("what a GPU would do wrong", self.notes.driver.violations)]

    def open(self, **options: Any) -> None:
        """Open the model on the stand-in driver; `options` are passed to `open_stand_in`."""
        from stand_ins.engine import open_stand_in
        from txl_runtime import Model
        from txl_runtime.bundle.reading import open_bundle
        from txl_runtime.device import choosing

        choice: Any = choosing
        driver, before = self.notes.driver, choice.open_device
        choice.open_device = lambda name, found, rule: open_stand_in(found, rule, name, driver=driver, **options)
        self.model = Model(open_bundle(self._path), "rtx", update=self._rule)
        choice.open_device = before
        self.notes.know(self.model)

    def do(self, title: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run one operation, record its driver calls, and return its result; None if it raised an error."""
        self._said[title] += 1
        inputs: Any = None
        try:
            inputs = work(*arguments, **options)
            end = f"gives {digest(inputs)}"
        except (Exception, KeyboardInterrupt) as error:
            end = f"raises {type(error).__name__}: {error}"
        text = title if self._said[title] == 1 else f"{title}, time {self._said[title]}"
        self._operations.append((text, [*self.notes.taken(), [end]]))
        return inputs

    def loop(self) -> Any:
        """Open a loop of the model as a recorded operation, and return the loop."""
        return self.do("a loop is opened", self.model.open_loop)

    # --- lengths, inputs and segments ---

    @property
    def lengths(self) -> list[int]:
        """Return the segment lengths to try, longest first, e.g. [4, 3, 1].

        The list has the lengths of the programs and, if a model runs any length, also 1 and one less than the longest.
        """
        known = self.model.manifest.segment_lengths
        more = {known[0] - 1, 1} - {0} if self.model.manifest.lengths == "valid" else set[int]()
        return sorted({*known} | more, reverse=True)

    @property
    def wants(self) -> tuple[Want, ...]:
        """Return the kinds of results that a caller may ask of the model, e.g. ("rows",)."""
        return ("rows",) if self.model.manifest.logprobs is None else ("rows", "last", "next", "nll")

    def length(self) -> int:
        """Draw one of the segment lengths."""
        return int(self.draws.choice(self.lengths))

    def inputs(self, b: int, length: int) -> dict[str, Any]:
        """Draw random arrays for a segment of b sequences, by input name."""
        results: dict[str, Any] = {}
        for entry in self.model.manifest.inputs:
            sizes = entry.sizes(b, length)
            if entry.role == "tokens":
                results[entry.name] = self.draws.integers(0, entry.vocab or 1, sizes).astype(np.int32)
            elif entry.role == "feature":
                results[entry.name] = self.draws.normal(size=sizes).astype(np.dtype(entry.dtype))
        return results

    def counts(self, b: int, length: int) -> Ids:
        """Draw for each sequence the number of positions that count, int32 [b], e.g. [4, 0, 3] of b = 3, length 4.

        At least one of them is not 0. Models in lockstep get `length` throughout, and models of exact lengths get 0 or
        `length`.
        """
        manifest = self.model.manifest
        if manifest.streams == "lockstep":
            return np.full(b, length, np.int32)
        exact = manifest.lengths == "exact"
        counts = length * self.draws.integers(0, 2, b) if exact else self.draws.integers(0, length + 1, b)
        counts[-1] += not counts.any()
        return (length * counts.clip(0, 1) if exact else counts).astype(np.int32)

    def run(
        self, loop: Any, b: int = B, length: int = 0, want: Want = "rows", counts: Any = None, commit: bool = True
    ) -> Any:
        """Put a segment with random inputs into the device's queue, and return its result, which is not read yet."""
        length = length or self.lengths[0]
        inputs = self.inputs(b, length)
        if want == "nll":
            inputs["targets"] = self.inputs(b, length)[next(iter(inputs))]
        elif want == "next":
            inputs["temperature"] = np.full(b, 0.7, np.float32)
        counts = np.full(b, length, np.int32) if counts is None else np.asarray(counts, np.int32)
        return loop.run(inputs, counts, want, commit)

    def unread(self, loop: Any) -> None:
        """Run a segment with random inputs, and do not read its result."""
        self.run(loop)

    def read(self, result: Any, want: Want = "rows") -> Any:
        """Read a segment's result of the kind `want`; for "rows", read all outputs too."""
        if self.model.manifest.logprobs is None:
            return result.outputs()
        if want == "next":
            return result.parts() is None, result.last().copy()
        found = getattr(result, want)().copy()
        return (found, result.outputs()) if want == "rows" else found

    def segment(self, loop: Any, b: int = B, length: int = 0, want: Want = "rows", **more: Any) -> Any:
        """Run a segment with random inputs, and read its result."""
        return self.read(self.run(loop, b, length, want, **more), want)


def loops(play: Play) -> None:
    """Run every operation of a loop: segments, moves of states and sequences, and results that are read late."""
    play.open()
    loop = play.loop()
    for want in play.wants:
        for length in play.lengths:
            for _ in range(4):
                play.do(f"{want} of {length}", play.segment, loop, B, length, want)
    states_moved(play, loop)
    segments_of_every_sort(play, loop)
    sequences_moved(play, loop)
    results_left(play, loop)


def states_moved(play: Play, loop: Any) -> None:
    """Take sequence 1's state after each of five segments; put some into sequence 0 when all others have no memory."""
    every, kept = np.arange(B), []
    play.do("all begin anew", loop.clear, every)
    for _ in range(5):
        play.do("a segment before take", play.segment, loop)
        kept.append(play.do("take", loop.take, 1))
    for number in (1, 0, 4, 3):
        play.do("put", loop.put, 0, kept[number])
        play.do("a segment after put", play.segment, loop)
        play.do("all begin anew", loop.clear, every)


def segments_of_every_sort(play: Play, loop: Any) -> None:
    """Run segments of fewer sequences, with idle sequences, without commit, and 24 more, which go around a ring."""
    for b in (2, 1, B):
        if "fill" in play.model.manifest.counters:  # a model with memory rows must drop the sequences that do not run
            play.do(f"{b} sequences remain", loop.reorder, np.arange(b))
        for want in play.wants:
            length = play.length()
            counts = play.counts(b, length)
            play.do(f"{want} of {b} sequences, some idle", play.segment, loop, b, length, want, counts=counts)
    for commit in (False, False, True, False, True):
        play.do(f"commit={commit}", play.segment, loop, commit=commit)
    for _ in range(24):
        length = play.length()
        play.do("a segment of a long run", play.segment, loop, B, length, counts=play.counts(B, length))


def sequences_moved(play: Play, loop: Any) -> None:
    """Clear sequences, read their states, reorder them, and limit their memory rows."""
    lockstep = play.model.manifest.streams == "lockstep"
    for rows in ([], [1], [0, 2], [0, 1, 2], [2, 2]):
        if not lockstep or len(rows) in (0, B):
            play.do(f"clear {rows}", loop.clear, np.array(rows, np.int64))
            play.do("a segment after clear", play.segment, loop)
    for row in range(B):
        play.do(f"take {row}", loop.take, row)
    for state in play.model.manifest.states_of(play.model.update)[:2]:
        play.do(f"take {state.name}", loop.take, 2, [state.name])
    for rows in ([2, 0, 1], [0, 1, 2], [1, 1, 0], [0, 1], [1, 0], [2, 2, 2], [0], [1]):
        if not lockstep or len(rows) == B:
            play.do(f"prepare {rows}", loop.prepare_reorder, np.array(rows))
            play.do(f"reorder {rows}", loop.reorder, np.array(rows))
            play.do("a segment after reorder", play.segment, loop)
    for most in (2, 0, 1):
        play.do(f"limit {most}", loop.limit, np.array([1]), most)
        play.do("a segment after limit", play.segment, loop)
    play.do("how far they have come", lambda: (loop.fill.copy(), loop.heads.copy()))


def results_left(play: Play, loop: Any) -> None:
    """Read results of segments after later work, twice, or never."""
    for _ in range(3):
        play.do("a segment that nobody reads", play.unread, loop)
    want = play.wants[-1]
    result = play.do("a segment that is read late", play.run, loop, want=want)
    other = play.do("a second loop is opened", play.model.open_loop)
    play.do("a segment of the second loop", play.segment, other)
    play.do("what was read late", play.read, result, want)
    play.do("what was read twice", play.read, result, want)
    play.do("the state of the second loop", lambda: [other.take(row) for row in range(B)])


def singly(play: Play) -> None:
    """Run segments with engines whose work cannot be recorded into a graph."""
    play.open(recordable=False)
    loop = play.loop()
    for number in range(6):
        length = play.lengths[number % len(play.lengths)]
        play.do("a segment", play.segment, loop, B, length, counts=play.counts(B, length))
    play.do("a segment that nobody reads", play.unread, loop)


def failures(play: Play) -> None:
    """Let each function of `FAILURES` fail once during each operation of a loop, and run a segment after that."""
    play.open()
    driver, every = play.notes.driver, np.arange(B)
    loop = play.loop()
    driver.tell("cuStreamEndCapture", 900, times=6, done=True)
    for _ in range(10):
        play.do("a segment whose record fails", play.segment, loop)
        if play.model.update == "replace":  # a growing state would need a new program for each segment
            play.do("it begins anew", loop.clear, every)
    driver.forgive()
    for name, outcome in FAILURES.items():
        # A loop that fails to open after it has queued work leaves work that nobody waits for, a fault to the stand-in.
        # These functions fail before a new loop queues work.
        if name in ("cuMemAlloc", "cuMemHostAlloc", "cuCtxPush"):
            fail(play, name, outcome, loop, "a loop is opened", play.model.open_loop)
        fail(play, name, outcome, loop, "a segment", play.segment, loop)
        fail(play, name, outcome, loop, "reorder", loop.reorder, every[::-1])
        fail(play, name, outcome, loop, "take", loop.take, 0)
        fail(play, name, outcome, loop, "clear", loop.clear, every)
        loop = play.loop()
        for _ in range(3):
            play.do("a segment of a fresh loop", play.segment, loop)


def fail(play: Play, name: str, outcome: Any, loop: Any, title: str, work: Callable[..., Any], *arguments: Any) -> None:
    """Let one function of the driver fail during an operation, and run a segment after that.

    Args:
        play: the model.
        name: the start of the function's name.
        outcome: the status that the function returns, or the error that it raises.
        loop: the loop of the segment that follows.
        title: the title of the operation.
        work: the operation.
        arguments: the arguments of `work`.
    """
    play.notes.driver.tell(name, outcome)
    play.do(f"{title}, {name} fails", work, *arguments)
    play.notes.driver.forgive()
    play.do(f"a segment after {title}, {name} fails", play.segment, loop)


def large(play: Play) -> None:
    """Read results that are larger than the staging buffers, and therefore arrive in pieces."""
    from txl_runtime.device import staging

    module: Any = staging
    before = {name: getattr(module, name) for name in ("LARGEST", "PIECE", "SMALLEST")}
    for name, size in zip(before, (300, 100, 64), strict=True):
        setattr(module, name, size)
    play.open()
    loop = play.loop()
    for want in play.wants * 3:
        for length in play.lengths:
            play.do(f"{want} of {length}", play.segment, loop, B, length, want)
    for name, size in before.items():
        setattr(module, name, size)


def streams(play: Play) -> None:
    """Run every operation of a stream, with different numbers of sequences."""
    play.open()
    manifest, length = play.model.manifest, play.lengths[0]
    lockstep = manifest.streams == "lockstep"
    for b in (B,) if lockstep else (1, 2, B):
        stream = play.do(f"a stream of {b} is opened", play.model.stream, b)
        for _ in range(3):
            play.do("run", stream.run, play.inputs(b, length))
        play.do("run, not committed", stream.run, play.inputs(b, length), commit=False)
        play.do("feed arrays", stream.feed, play.inputs(b, 3 * length))
        play.do("feed arrays for the last", stream.feed, play.inputs(b, 3 * length), last=True)
        state = play.do("snapshot", stream.snapshot)
        if manifest.logprobs is not None:
            tokens = play.draws.integers(0, manifest.vocab_size, (b, 9))
            play.do("step", stream.step, tokens[:, :3])
            play.do("feed", stream.feed, tokens)
            play.do("feed for the last", stream.feed, tokens, last=True)
            play.do("score", stream.score, tokens)
            for options in ({"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {}):
                drawn = stream.generate(tokens, 3, **{"seed": 1} | options)
                play.do(f"generate, {options}", list, drawn)
        play.do("restore", stream.restore, state)
        play.do("state", stream.state)
        if not lockstep:
            row = play.do("take", stream.take, 0)
            play.do("put", stream.put, b - 1, row)
            play.do("reset one", stream.reset, [0])
            play.do("select", stream.select, [*range(b)][::-1])
            play.do("select one", stream.select, [0])
        play.do("reset", stream.reset)
        play.do("run at the end", stream.run, play.inputs(stream.batch_size, length))


def idle(play: Play) -> None:
    """Run segments in which no position counts between segments in which all count."""
    play.open()
    loop = play.loop()
    for _ in range(2):
        for _ in range(3):
            play.do("a segment", play.segment, loop)
        play.do("nothing counts", play.segment, loop, counts=np.zeros(B))
    play.do("nothing counts, not committed", play.segment, loop, counts=np.zeros(B), commit=False)


def finite(play: Play) -> None:
    """Run segments with `require_finite`, which checks that all values are finite."""
    play.open()
    stream = play.do("a stream is opened", play.model.stream)
    for _ in range(4):
        play.do("run, all finite", stream.run, play.inputs(B, play.lengths[0]), require_finite=True)
    play.do("state", stream.state)


WAYS: dict[str, Callable[[Play], None]] = {
    "loops": loops,
    "singly": singly,
    "failures": failures,
    "large results": large,
    "streams": streams,
    "idle": idle,
    "finite": finite,
}
"""The sequences of operations by title; each is run on a newly opened model."""


def given_back_last(lines: Sequence[str]) -> list[str]:
    """Return an operation's calls with all releases sorted at the end, without the context changes around them."""
    kept: list[str] = []
    moved: list[str] = []
    rest = iter(lines)
    for line in rest:
        if not line.startswith(GIVE_BACK):
            kept.append(line)
            continue
        moved.append(line)
        _, before = kept.pop(), kept.pop()  # the change of the capture mode, and the call before that change
        next(rest)
        if before.startswith("cuCtxPush"):
            kept.pop()
            next(rest)
    return [*kept, *sorted(moved)]


def without_lost_marks(lines: Sequence[str]) -> list[str]:
    """Return the calls without each record of an event that is recorded again before anybody waits for the event."""
    kept: list[str] = []
    later: set[str] = set()
    for line in reversed(lines):
        event = line.partition("(")[2].partition(",")[0].rstrip(")")
        if line.startswith("cuEventSynchronize"):
            later.discard(event)
        elif line.startswith("cuEventRecord") and "fails" not in line:
            if event in later:
                continue
            later.add(event)
        if not line.startswith("cuCtx"):
            kept.append(line)
    return kept[::-1]


def digest(given: Any) -> str:
    """Return 16 hexadecimal digits of a hash of a result of any type; equal results have equal digits."""
    digest = hashlib.sha256()
    for piece in _pieces(given):
        digest.update(piece)
    return digest.hexdigest()[:16]


def _pieces(inputs: Any) -> Iterator[bytes]:
    if isinstance(inputs, np.ndarray):
        yield f"{inputs.dtype} {inputs.shape}".encode()
        yield inputs.tobytes()
    elif isinstance(inputs, Mapping):
        for name, value in inputs.items():
            yield str(name).encode()
            yield from _pieces(value)
    elif isinstance(inputs, (list, tuple)):
        for value in inputs:
            yield from _pieces(value)
    elif isinstance(inputs, (bool, int, str)):
        yield repr(inputs).encode()
    elif hasattr(inputs, "tensors"):
        yield from _pieces((inputs.fill, inputs.head, inputs.tensors))


if __name__ == "__main__":
    sys.exit(main())
