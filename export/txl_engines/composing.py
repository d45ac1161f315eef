"""Composes the graphs of whole programs, from which engines are built, from the graphs of a bundle.

A program of kind "step" returns everything that its model returns, so its graph is used as it is; only an open B is
fixed. If a bundle has layers and softmax in separate graphs, they are joined for one segment length:

    logprobs   float32 [B, L, V]: of all positions
    last       float32 [B, V]: of each sequence's last valid position; the row of an idle sequence is undefined
    next       temperature float32 [B] → like last, and outputs that are enough for most draws (below)
    score      targets int32 [B, L] → nll float32 [B, L]; padding may have any targets

The layers of a ring come from a graph whose segment length is open and is fixed here. The layers of rolled memory are
cut out of the whole program that the CPU runs. The softmax is the bundle's head and tails. A score reads one column of
the head and one column of each tail, those of the target's word or cluster, and then selects among these columns. So no
value is as wide as a vocabulary of several clusters, and there is no control flow.

A `next` also returns, for each part of the softmax (the head's words, and each tail):

    <part>.ids, <part>.values   int32 and float32 [B, K], the best words and their log-probabilities within the part
    sums                        float32 [B, parts], the sum of exp((value - best of the part) / temperature)
    clusters                    float32 [B, tails], log-probabilities of the further clusters, if there are any

So a greedy draw, a draw from the k best or a draw from a nucleus fetches some kilobytes instead of the row. The sum is
relative to the part's best value: it is at least 1 and at most the number of words at any temperature, and loses no
digits if the quotient is large. Temperature 0 is replaced by a number so small that only the best word is left in the
sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.open_batch import BATCH, sequences, smaller, with_sequences
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import STATE_DTYPES, Program, TensorSpec
from txl_runtime.errors import BundleError, UsageError
from txl_runtime.guard.graph_check import check_graph as refuse_unfit

from txl_engines.checking import ADVICE, check_graph, decode_graph
from txl_engines.closing import closed
from txl_engines.shapes import fix_sizes
from txl_engines.weaving import Weaver

HIDDEN = "hidden"
"""Name of the value in the layers' graph that the softmax reads."""
BEST = 257
"""Number of words of each part that a `next` returns: 256, and one more, whose value shows whether the 256th is
tied."""
SHORT_ROW = 1024
"""Number of entries up to which fetching a whole row of log-probabilities costs about as much as fetching only the best
words."""
COLDEST = 1e-30
"""Lowest temperature: float32 differences divided by it stay finite, and exp of each is 0, except for a difference of
0."""


def whole_programs(manifest: Manifest, update: str) -> tuple[Program, ...]:
    """Return the programs that engines are built from.

    For a bundle of steps these are the steps; for other bundles, logprobs for every L, and last and score for the
    longest L. L = 1 has no `last`: its only position is the last one, so it would equal `logprobs`. A large vocabulary
    has `next` in place of `last`, for the longest L and for L = 1. Each program exists for every B in the manifest; the
    names for a smaller B end with it, e.g. "-b1".

    Raises:
        UsageError: a step reads a state with an open number of rows.
    """
    own = (program for program in manifest.programs if program.update == update and program.kind == "step")
    steps = tuple(msgspec.structs.replace(program, open_batch=False) for program in own)  # engines have a fixed B
    if steps:
        _check_sizes(steps)
        return steps
    lengths = manifest.segment_lengths
    wanted = [("logprobs", length) for length in lengths]
    if any(program.kind == "head" for program in manifest.programs):  # a bundle may have no head
        if manifest.vocab_size > SHORT_ROW:
            wanted += [("next", length) for length in lengths if length in (1, lengths[0])]
        elif lengths[0] > 1:
            wanted += [("last", lengths[0])]
        wanted += [("score", lengths[0])]
    programs = [_whole_program(manifest, kind, length, update) for kind, length in wanted]
    for size in manifest.batch_sizes:
        small = smaller(manifest, size)
        programs += [_named(_whole_program(small, kind, length, update), f"-b{size}") for kind, length in wanted]
    return tuple(programs)


def _named(program: Program, more: str) -> Program:
    file = program.file.removesuffix(".onnx")
    return msgspec.structs.replace(program, name=f"{program.name}{more}", file=f"{file}{more}.onnx")


def _check_sizes(programs: Sequence[Program]) -> None:
    for program in programs:
        for spec in program.inputs:
            if "rows" in spec.shape:
                raise UsageError(
                    f"program {program.name} takes {spec.name} of any number of rows, expected fixed sizes: no engine "
                    "takes sizes that change; export again with --growth stages and one segment length, or count rows "
                    "in a state (docs/own-models-reference.md)"
                )


def _whole_program(manifest: Manifest, kind: str, length: int, update: str) -> Program:
    """Return the program of a kind: the bundle's own, or a program of the bundle's layers and that kind's results."""
    layers = _layers(manifest, length, update)
    if layers.kind == kind:
        return layers
    logprobs = manifest.logprobs
    if logprobs is None:
        raise BundleError(f"{layers.name} has no log-probabilities to end with, expected an output of them; {ADVICE}")
    batch, vocabulary = manifest.batch_size, int(logprobs.shape[-1])
    tokens, *others = layers.inputs
    row = TensorSpec(name=logprobs.name, dtype="float32", shape=(batch, vocabulary))
    more, results = {
        "logprobs": ((), (msgspec.structs.replace(row, shape=(batch, length, vocabulary)),)),
        "last": ((), (row,)),
        "next": (
            (TensorSpec(name="temperature", dtype="float32", shape=(batch,)),),
            (row, *_parts(manifest.clusters, batch)),
        ),
        "score": (
            (msgspec.structs.replace(tokens, name="targets"),),
            (TensorSpec(name="nll", dtype="float32", shape=(batch, length)),),
        ),
    }[kind]
    return Program(
        name=f"{kind}{layers.name.removeprefix(layers.kind)}",
        kind=kind,
        segment_length=length,
        update=update,
        file=f"{kind}{layers.file.removeprefix(layers.kind)}",
        inputs=(tokens, *more, *others),
        outputs=(*results, *layers.outputs[1:]),
    )


def _parts(clusters: Sequence[tuple[int, int]], batch: int) -> tuple[TensorSpec, ...]:
    """Return the outputs of a `next` for the parts of the softmax, e.g. "head.ids" int32 [B, K] for K best words."""
    specs, tails = [], len(clusters) - 1
    for part, (first, last) in zip(_part_names(tails), clusters, strict=True):
        shape = (batch, min(BEST, last - first))
        specs += [TensorSpec(name=f"{part}.ids", dtype="int32", shape=shape)]
        specs += [TensorSpec(name=f"{part}.values", dtype="float32", shape=shape)]
    specs += [TensorSpec(name="sums", dtype="float32", shape=(batch, tails + 1))]
    return (*specs, *([TensorSpec(name="clusters", dtype="float32", shape=(batch, tails))] if tails else []))


def _part_names(tails: int) -> tuple[str, ...]:
    """Return the names of the softmax's parts, which are the bundle's programs, e.g. ("head", "tail.1")."""
    return ("head", *(f"tail.{cluster}" for cluster in range(1, tails + 1)))


def _layers(manifest: Manifest, length: int, update: str) -> Program:
    """Return the bundle's own program for segments of a length."""
    return next(p for p in manifest.programs if (p.update, p.segment_length) == (update, length))


def _read(bundle: Bundle, program: Program) -> bytes:
    """Read a graph of the bundle with the checks that loading the bundle makes."""
    data = bundle.read(program.file)
    refuse_unfit(data, str(bundle.file(program.file)), program, bundle.manifest, ADVICE)
    return data


def compose(bundle: Bundle, program: Program) -> bytes:
    """Compose the graph of one of the `whole_programs` as an ONNX file; its weights stay in the bundle's weight file.

    Raises:
        BundleError: a graph of the bundle does not match the manifest.
        BackendError: onnx is not installed.
    """
    held = {other.name: other for other in bundle.manifest.programs}
    source = held.get(program.name) or _layers(bundle.manifest, program.segment_length, program.update)
    data = _read(bundle, source)
    if program.name in held and not source.open_batch:
        return data
    path, batch = bundle.file(source.file), sequences(program, bundle.manifest)
    opened = decode_graph(data, path)
    model = fix_sizes(opened, {"segment": program.segment_length, BATCH: batch})
    check_graph(model, path, with_sequences(source, bundle.manifest, batch))
    if program.kind == "step":
        return closed(model, opened.graph.value_info, program)
    if program.kind == source.kind:
        return Weaver(model, path, {spec.name for spec in program.outputs}).finish(program)
    read = next(other.inputs[0].shape[-1] for other in bundle.manifest.programs if other.kind == "head")
    if program.update == "rolled" and read != bundle.manifest.config.d_model:
        raise UsageError(
            f"{bundle.path}: was exported with --features, which engines of rolled memory do not return; export it "
            "again without"
        )
    if not any(HIDDEN in node.output for node in model.graph.node):
        raise BundleError(f"{path}: no value is called {HIDDEN}, expected what the softmax takes; {ADVICE}")
    states = {spec.name for spec in source.outputs[1:]}
    weaver = Weaver(model, path, {HIDDEN, *states})
    _Softmax(bundle, program, weaver).add()
    return weaver.finish(program)


class _Softmax:
    """Adds the softmax to a program's layers."""

    def __init__(self, bundle: Bundle, program: Program, weaver: Weaver) -> None:
        self._bundle, self._program, self._weaver = bundle, program, weaver
        self._batch, self._length = program.inputs[0].fixed
        self._half = bundle.manifest.precision in STATE_DTYPES
        self._clusters = bundle.manifest.clusters

    def add(self) -> None:
        """Add the softmax, with the program's outputs, to the graph."""
        weaver, batch, length = self._weaver, self._batch, self._length
        hidden = HIDDEN
        if self._half and self._program.update == "rolled":
            hidden = weaver.add("Cast", HIDDEN, to=weaver.onnx.TensorProto.FLOAT)
        rows = weaver.reshape(hidden, batch * length, self._width())
        if self._program.kind == "score":
            weaver.reshape(self._nll(rows), batch, length, out="nll")
        elif self._program.kind in ("last", "next"):
            parts = self._parts(self._last(rows) if length > 1 else rows)
            self._logprobs(parts, out="logprobs")
            if self._program.kind == "next":
                self._best(parts)
        else:
            weaver.reshape(self._logprobs(self._parts(rows)), batch, length, self._clusters[-1][1], out="logprobs")

    def _last(self, rows: str) -> str:
        """Select each sequence's last valid row: [B·L, D] → [B, D]."""
        weaver = self._weaver
        # Row of sequence b's last valid position: b·L + valid[b] - 1.
        last = weaver.add("Max", weaver.add("Sub", "valid", weaver.int32(1)), weaver.int32(0))
        firsts = np.arange(self._batch, dtype=np.int32) * self._length
        return weaver.add("Gather", rows, weaver.add("Add", last, weaver.constant(firsts)), axis=0)

    def _parts(self, rows: str) -> list[str]:
        """Compute head and tails: [n, D] → [n, words] each; the head's last columns belong to the further clusters."""
        return [self._part(kind, rows) for kind in _part_names(len(self._clusters) - 1)]

    def _logprobs(self, parts: Sequence[str], out: str = "") -> str:
        """Join the parts to log-probabilities of the whole vocabulary, [n, V]."""
        weaver, (head, *tails), words = self._weaver, parts, self._clusters[0][1]
        if not tails:
            return weaver.add("Identity", head, out=out) if out else head
        columns = [weaver.columns(head, 0, words)]
        for place, tail in enumerate(tails, start=words):
            columns.append(weaver.add("Add", tail, weaver.columns(head, place, place + 1)))
        return weaver.add("Concat", *columns, axis=1, out=out)

    def _best(self, parts: Sequence[str]) -> None:
        """Add the outputs of a `next`: best words of each part, sums at a temperature, and the further clusters."""
        weaver, tails, (_, words) = self._weaver, len(self._clusters) - 1, self._clusters[0]
        warm = weaver.add("Max", "temperature", weaver.constant(np.array(COLDEST, np.float32)))
        warm, sums = weaver.reshape(warm, self._batch, 1), []
        values = [weaver.columns(parts[0], 0, words) if tails else parts[0], *parts[1:]]
        for part, values_of_part, (first, last) in zip(_part_names(tails), values, self._clusters, strict=True):
            count = weaver.constant(np.array([min(BEST, last - first)], np.int64))
            best, place = weaver.best(values_of_part, count, out=f"{part}.values")
            ids = weaver.add("Cast", place, to=weaver.onnx.TensorProto.INT32, out="" if first else f"{part}.ids")
            if first:
                weaver.add("Add", ids, weaver.int32(first), out=f"{part}.ids")
            below = weaver.add("Div", weaver.add("Sub", values_of_part, weaver.columns(best, 0, 1)), warm)
            axis = weaver.constant(np.array([1], np.int64))
            sums.append(weaver.add("ReduceSum", weaver.add("Exp", below), axis, out="" if tails else "sums"))
        if tails:
            weaver.add("Concat", *sums, axis=1, out="sums")
            weaver.columns(parts[0], words, words + tails, out="clusters")

    def _nll(self, rows: str) -> str:
        """Compute negative log-likelihoods of the targets: [n, D] → [n, 1]."""
        weaver, (_, words), last = self._weaver, self._clusters[0], self._clusters[-1][1] - 1
        targets = weaver.reshape("targets", self._batch * self._length, 1)
        targets = weaver.add("Max", weaver.add("Min", targets, weaver.int32(last)), weaver.int32(0))
        inside = {}
        column = targets  # of the head: the word's own, or that of the last cluster that begins at or before the word
        for cluster, (first, _) in list(enumerate(self._clusters))[1:]:
            begun = weaver.add("GreaterOrEqual", targets, weaver.int32(first))
            column = weaver.add("Where", begun, weaver.int32(words + cluster - 1), column)
            inside[cluster] = begun
        logprob = weaver.add("GatherElements", self._part("head", rows), column, axis=1)
        for cluster, begun in inside.items():
            first, end = self._clusters[cluster]
            word = weaver.add("Max", weaver.add("Sub", targets, weaver.int32(first)), weaver.int32(0))
            word = weaver.add("Min", word, weaver.int32(end - first - 1))
            within = weaver.add("GatherElements", self._part(f"tail.{cluster}", rows), word, axis=1)
            mine = begun
            if cluster + 1 in inside:
                mine = weaver.add("And", begun, weaver.add("Not", inside[cluster + 1]))
            logprob = weaver.add("Where", mine, weaver.add("Add", logprob, within), logprob)
        return weaver.add("Neg", logprob)

    def _width(self) -> int:
        """Return the width of the rows that the softmax reads, D."""
        return int(self._find("head").inputs[0].shape[-1])

    def _find(self, kind: str) -> Program:
        """Return the bundle's program of a part of the softmax."""
        return next(program for program in self._bundle.manifest.programs if program.kind == kind)

    def _part(self, kind: str, rows: str) -> str:
        """Append the bundle's program of a kind with `rows` as input; return the name of its result."""
        program = self._find(kind)
        path = self._bundle.file(program.file)
        model = decode_graph(_read(self._bundle, program), path)
        check_graph(model, path, program)
        return self._weaver.attach(model, kind, {HIDDEN: rows}, path)
