"""Whole programs for engines: those of a bundle that are whole, and those that its graphs are composed to.

A program of kind "step" returns all that its model returns, so an engine is built of it as it is. Where a bundle has
layers and softmax apart, layers for one segment length are followed by the softmax:

    logprobs   float32 [B, L, V]: of all positions
    last       float32 [B, V]: of each sequence's last valid position; what an idle sequence gets means nothing
    score      targets int32 [B, L] → nll float32 [B, L]; targets of padding may be anything

The layers of a ring come from a graph whose segment length is open and is fixed here. The layers of rolled memory are
cut out of the whole program that the CPU runs. The softmax is the bundle's head and tails. A score takes one column of
the head and of each tail, the one of the target's word or cluster, and then selects among them. So no value is as wide
as a vocabulary of several clusters, and there is no control flow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import STATE_DTYPES, Program, TensorSpec
from txl_runtime.errors import BundleError, UsageError

from txl_engines.checking import ADVICE, check_graph, import_onnx, load_graph
from txl_engines.shapes import fix_sizes

HIDDEN = "hidden"
"""The name of the value that the softmax takes."""


def whole_programs(manifest: Manifest, update: str) -> tuple[Program, ...]:
    """The programs that engines are built of.

    These are the steps of a bundle that has steps; of others, log-probabilities for every L, and last and score for the
    longest L. With L = 1 there is no `last`: the last position is the only one, so it would be `logprobs` again.

    Raises:
        UsageError: a step takes a state whose rows are of any number.
    """
    steps = tuple(program for program in manifest.programs if program.update == update and program.kind == "step")
    if steps:
        _check_sizes(steps)
        return steps
    lengths = manifest.segment_lengths
    wanted = [("logprobs", length) for length in lengths]
    if any(program.kind == "head" for program in manifest.programs):  # bundles of format 1.0 may have no head
        wanted += [(kind, lengths[0]) for kind in ("last", "score") if kind == "score" or lengths[0] > 1]
    return tuple(_whole_program(manifest, kind, length, update) for kind, length in wanted)


def _check_sizes(programs: Sequence[Program]) -> None:
    for program in programs:
        for spec in program.inputs:
            if "rows" in spec.shape:
                raise UsageError(
                    f"program {program.name} takes {spec.name} of any number of rows, expected fixed sizes: no engine "
                    "takes sizes that change; export again with --growth stages and one segment length, or count rows "
                    "in a state (docs/own-models.md)"
                )


def _whole_program(manifest: Manifest, kind: str, length: int, update: str) -> Program:
    """The program of a kind; where the bundle has none, what the one of its layers becomes with that kind's result."""
    layers = _layers(manifest, length, update)
    if layers.kind == kind:
        return layers
    logprobs = manifest.logprobs
    if logprobs is None:
        raise BundleError(f"{layers.name} has no log-probabilities to end with, expected an output of them; {ADVICE}")
    batch, vocabulary = manifest.batch_size, int(logprobs.shape[-1])
    result = {
        "logprobs": TensorSpec(name=logprobs.name, dtype="float32", shape=(batch, length, vocabulary)),
        "last": TensorSpec(name=logprobs.name, dtype="float32", shape=(batch, vocabulary)),
        "score": TensorSpec(name="nll", dtype="float32", shape=(batch, length)),
    }[kind]
    tokens, *others = layers.inputs
    targets = (msgspec.structs.replace(tokens, name="targets"),) if kind == "score" else ()
    return Program(
        name=f"{kind}{layers.name.removeprefix(layers.kind)}",
        kind=kind,
        segment_length=length,
        update=update,
        file=f"{kind}{layers.file.removeprefix(layers.kind)}",
        inputs=(tokens, *targets, *others),
        outputs=(result, *layers.outputs[1:]),
    )


def _layers(manifest: Manifest, length: int, update: str) -> Program:
    """The bundle's own program of segments of a length."""
    return next(p for p in manifest.programs if (p.update, p.segment_length) == (update, length))


def compose(bundle: Bundle, program: Program) -> bytes:
    """The graph of one of the `whole_programs`, as an ONNX file's bytes; its weights lie in the bundle's weight file.

    Raises:
        BundleError: a graph of the bundle is not what the manifest says.
        BackendError: onnx is not installed.
    """
    held = {other.name: other for other in bundle.manifest.programs}
    if program.name in held:
        return bundle.file(held[program.name].file).read_bytes()
    source = _layers(bundle.manifest, program.segment_length, program.update)
    path = bundle.file(source.file)
    model = fix_sizes(load_graph(path), {"segment": program.segment_length})
    check_graph(model, path, source)
    if not any(HIDDEN in node.output for node in model.graph.node):
        raise BundleError(f"{path}: no value is called {HIDDEN}, expected what the softmax takes; {ADVICE}")
    weaver = _Weaver(model, path, {HIDDEN, *(spec.name for spec in program.outputs[1:])})
    _Softmax(bundle, program, weaver).add()
    return weaver.finish(program)


class _Softmax:
    """The part of a program that follows its layers."""

    def __init__(self, bundle: Bundle, program: Program, weaver: _Weaver) -> None:
        self._bundle, self._program, self._weaver = bundle, program, weaver
        self._batch, self._length = program.inputs[0].fixed
        self._half = bundle.manifest.precision in STATE_DTYPES
        self._clusters = bundle.manifest.clusters

    def add(self) -> None:
        """Add it to the graph."""
        weaver, batch, length = self._weaver, self._batch, self._length
        hidden = HIDDEN
        if self._half and self._program.update == "rolled":
            hidden = weaver.add("Cast", HIDDEN, to=weaver.onnx.TensorProto.FLOAT)
        rows = weaver.reshape(hidden, batch * length, self._width())
        if self._program.kind == "score":
            weaver.reshape(self._nll(rows), batch, length, out="nll")
        elif self._program.kind == "last":
            # In [B·L, D], sequence b's last valid row is its first one, b·L, plus its number of valid rows less one.
            last = weaver.add("Max", weaver.add("Sub", "valid", weaver.int32(1)), weaver.int32(0))
            index = weaver.add("Add", last, weaver.constant(np.arange(batch, dtype=np.int32) * length))
            self._logprobs(weaver.add("Gather", rows, index, axis=0), out="logprobs")
        else:
            weaver.reshape(self._logprobs(rows), batch, length, self._clusters[-1][1], out="logprobs")

    def _logprobs(self, rows: str, out: str = "") -> str:
        """[n, D] → log-probabilities of the vocabulary [n, V]."""
        weaver, words = self._weaver, self._clusters[0][1]
        head = self._part("head", rows)
        if len(self._clusters) == 1:
            return weaver.add("Identity", head, out=out) if out else head
        parts = [weaver.columns(head, 0, words)]
        for cluster in range(1, len(self._clusters)):
            into = weaver.columns(head, words + cluster - 1, words + cluster)  # [n, 1]
            parts.append(weaver.add("Add", self._part(f"tail.{cluster}", rows), into))
        return weaver.add("Concat", *parts, axis=1, out=out)

    def _nll(self, rows: str) -> str:
        """[n, D] → negative log-likelihoods of the targets [n, 1]."""
        weaver, (_, words), last = self._weaver, self._clusters[0], self._clusters[-1][1] - 1
        targets = weaver.reshape("targets", self._batch * self._length, 1)
        targets = weaver.add("Max", weaver.add("Min", targets, weaver.int32(last)), weaver.int32(0))
        inside = {}
        column = targets  # of the head: the word's, or that of the last cluster that begins at or before the word
        for cluster, (first, _) in list(enumerate(self._clusters))[1:]:
            begun = weaver.add("GreaterOrEqual", targets, weaver.int32(first))
            column = weaver.add("Where", begun, weaver.int32(words + cluster - 1), column)
            inside[cluster] = begun
        found = weaver.add("GatherElements", self._part("head", rows), column, axis=1)
        for cluster, begun in inside.items():
            first, end = self._clusters[cluster]
            word = weaver.add("Max", weaver.add("Sub", targets, weaver.int32(first)), weaver.int32(0))
            word = weaver.add("Min", word, weaver.int32(end - first - 1))
            given = weaver.add("GatherElements", self._part(f"tail.{cluster}", rows), word, axis=1)
            mine = begun
            if cluster + 1 in inside:
                mine = weaver.add("And", begun, weaver.add("Not", inside[cluster + 1]))
            found = weaver.add("Where", mine, weaver.add("Add", found, given), found)
        return weaver.add("Neg", found)

    def _width(self) -> int:
        """D, of the rows that the softmax takes."""
        return int(self._find("head").inputs[0].shape[-1])

    def _find(self, kind: str) -> Program:
        """The bundle's program of a part of the softmax."""
        return next(program for program in self._bundle.manifest.programs if program.kind == kind)

    def _part(self, kind: str, rows: str) -> str:
        """The result of the bundle's program of a kind, given rows."""
        found = self._find(kind)
        path = self._bundle.file(found.file)
        model = load_graph(path)
        check_graph(model, path, found)
        return self._weaver.attach(model, kind, {HIDDEN: rows}, path)


class _Weaver:
    """A graph that is cut down to what some of its values are computed by, and then added to."""

    def __init__(self, model: Any, path: Path, wanted: Collection[str]) -> None:
        self.onnx = import_onnx()
        self._model, self._graph, self._path = model, model.graph, path
        self._constants: dict[tuple[str, bytes], str] = {}
        self._cut(wanted)

    def add(self, operator: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its result."""
        name = out or f"whole.{len(self._graph.node)}"
        self._graph.node.append(
            self.onnx.helper.make_node(operator, inputs, [name], name=f"whole.{operator}.{name}", **attributes)
        )
        return name

    def constant(self, array: NDArray[Any]) -> str:
        """The name of a constant; equal constants share one."""
        key = f"{array.dtype}{array.shape}", array.tobytes()
        if key not in self._constants:
            name = self._constants[key] = f"whole.constant.{len(self._constants)}"
            self._graph.initializer.append(self.onnx.numpy_helper.from_array(array, name))
        return self._constants[key]

    def int32(self, value: int) -> str:
        """The name of a scalar constant."""
        return self.constant(np.array(value, np.int32))

    def reshape(self, value: str, *shape: int, out: str = "") -> str:
        """The value in another shape."""
        return self.add("Reshape", value, self.constant(np.array(shape, np.int64)), out=out)

    def columns(self, value: str, first: int, last: int) -> str:
        """Columns [first, last) of [n, …]."""
        places = (self.constant(np.array([place], np.int64)) for place in (first, last, 1))
        return self.add("Slice", value, *places)

    def attach(self, model: Any, prefix: str, feeds: Mapping[str, str], path: Path) -> str:
        """Append another graph, and return the name of its only output. Weights keep their names and so are shared."""
        names = dict(feeds)
        weights = {tensor.name: tensor for tensor in self._graph.initializer if tensor.external_data}
        for tensor in model.graph.initializer:
            names[tensor.name] = tensor.name if tensor.external_data else f"{prefix}/{tensor.name}"
            if tensor.external_data and tensor.name in weights:
                if tensor != weights[tensor.name]:
                    raise BundleError(
                        f"{path}: {tensor.name} is another tensor than in {self._path.name}, expected the same one; "
                        "export the model again"
                    )
                continue
            self._graph.initializer.add().CopyFrom(tensor)
            self._graph.initializer[-1].name = names[tensor.name]
        for node in model.graph.node:
            names |= {name: f"{prefix}/{name}" for name in node.output if name}
            copy = self._graph.node.add()
            copy.CopyFrom(node)
            copy.name = f"{prefix}/{node.name}"
            copy.input[:] = [names.get(name, name) for name in node.input]
            copy.output[:] = [names.get(name, name) for name in node.output]
        return names[model.graph.output[0].name]

    def finish(self, program: Program) -> bytes:
        """The graph's bytes, with a program's inputs and outputs and without anything that these do not need."""
        graph = self._graph
        self._cut({spec.name for spec in program.outputs})
        graph.input.extend(self._declare(spec) for spec in program.inputs)
        graph.output.extend(self._declare(spec) for spec in program.outputs)
        graph.name = program.name
        told = {"txl-deploy.program": msgspec.json.encode(program).decode()}
        self.onnx.helper.set_model_props(self._model, told)
        data: bytes = self._model.SerializeToString(deterministic=True)
        return data

    def _cut(self, wanted: Collection[str]) -> None:
        """Remove everything that the wanted values are not computed by."""
        graph, needed, kept = self._graph, set(wanted), []
        for node in reversed(graph.node):
            if needed.intersection(node.output):
                needed.update(node.input)
                kept.append(deepcopy(node))
        initializers = [deepcopy(tensor) for tensor in graph.initializer if tensor.name in needed]
        for field in ("node", "initializer", "input", "output", "value_info"):
            graph.ClearField(field)
        graph.node.extend(reversed(kept))
        graph.initializer.extend(initializers)

    def _declare(self, spec: TensorSpec) -> Any:
        kinds = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "int32": "INT32"}
        kind = self.onnx.TensorProto.DataType.Value(kinds[spec.dtype])
        return self.onnx.helper.make_tensor_value_info(spec.name, kind, spec.fixed)
