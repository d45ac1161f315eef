"""Graphs through both checks, Python's and that in C++, which have to say the same."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from fuzz import odd_nodes
from fuzz.choices import Choices
from fuzz.edits import edited_message, parsed, written
from fuzz.targets.operators import Chain
from google.protobuf.message import DecodeError
from graph_mutants import mutant
from onnx import TensorProto, helper
from random_arithmetic import Arithmetic
from random_nodes import MADE, single
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.guard.graph_check import Budget, Walk, _most, check_positions
from txl_runtime.guard.protobuf import RefusedError

from conformance.run import FOLDER

Sizes = Mapping[str, tuple[int, ...]]


@dataclass
class Asked:
    """A graph, of what kind of program it is, the largest sizes of its inputs, and its bundle's weight file."""

    graph: bytes
    most: Sizes
    kind: str = "step"
    weights: str = "weights"
    weight_bytes: int = 0


class CheckInC:
    """The check in C++, in one process for many graphs; use it in a `with`.

    Args:
        program: `txl-graphs`.
    """

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> CheckInC:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, asked: Asked) -> dict[str, Any]:
        """The bytes that a step takes, as "taken", or the sentence with which the graph is "refused"."""
        assert self._process.stdin
        assert self._process.stdout
        request = {"kind": asked.kind, "weights": asked.weights, "weight_bytes": asked.weight_bytes}
        request |= {"inputs": asked.most, "bytes": len(asked.graph)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n" + asked.graph)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the check in C++ ended with {self._process.wait(10)}"
        found: dict[str, Any] = json.loads(line)
        return found


def difference(asked: Asked, c: CheckInC) -> tuple[str, bool]:
    """In what the two differ, or nothing; and whether Python's accepts the graph.

    Both have to accept it, and then to find the same number of bytes; or to refuse it, with the same budget where it
    would be accepted with one.
    """
    found, budget, needed = c.ask(asked), Budget(asked.weight_bytes), 0
    told = found.get("refused", "accepted")
    try:
        walk = Walk(asked.graph, asked.kind, asked.most, asked.weights, budget)
        check_positions(walk, asked.graph, asked.kind, 1, asked.weights, budget)
    except RefusedError as refused:
        needed = refused.args[2] if len(refused.args) > 2 else 0
        other = re.search(r"options\.budget = (\d+)", told)
        alike = told != "accepted" and _near(float(other[1]) if other else 0, min(needed, 9e18))
        return "" if alike else f"Python says {refused.args}, C++ {told}", False
    alike = _near(found.get("taken", -1), budget.taken)
    return "" if alike else f"Python says {budget.taken} bytes, C++ {found.get('taken')}: {told}", True


def _near(one: float, other: float) -> bool:
    """C++ counts bytes in floating point."""
    return abs(one - other) <= 1e-9 * abs(other)


def made(kind: str, seed: int) -> Asked | None:
    """A random graph of one of `KINDS`; None where the package onnx cannot write or read it."""
    draw = random.Random(seed)
    try:
        return KINDS[kind](seed, draw)
    except (ValueError, TypeError, OverflowError, IndexError, DecodeError):
        return None


def _chained(seed: int, draw: random.Random) -> Asked:
    """One to three operators of the list of forms; many bytes are 0, which is the first choice everywhere."""
    zeros, drawn = draw.choice((0, 0.3, 0.6)), draw.randbytes(400)
    chain = Chain(Choices(drawn[:1] + bytes(0 if draw.random() < zeros else byte for byte in drawn[1:])))
    for _ in range(draw.choice((1, 1, 2, 3))):
        chain.add()
    return _declared(chain.model(), chain.most, draw)


def _computed(seed: int, draw: random.Random) -> Asked:
    """Whole numbers and sizes; a size of an input may be very large."""
    graph = Arithmetic(seed)
    larger = draw.choice((1, 1, 1000, 2**20, 2**40))
    model = graph.model()
    for value in model.graph.input:
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if size.dim_value > 1 and draw.random() < 0.5:
                size.dim_value *= larger
                sizes = [*graph.most[value.name]]
                sizes[axis] = size.dim_value
                graph.most[value.name] = tuple(sizes)
    return _declared(model, graph.most, draw)


def _alone(seed: int, draw: random.Random) -> Asked:
    """One operator whose inputs mostly fit."""
    case = single(draw.choice(list(MADE)), seed)
    return _declared(case.model(), case.most, draw)


def _odd(seed: int, draw: random.Random) -> Asked:
    """Constants in every encoding."""
    odd = odd_nodes.make(seed, 0.7)
    return Asked(odd.data(returned=False), odd.most)


def _mutated(seed: int, draw: random.Random) -> Asked:
    """A graph of a real bundle, with bits or fields changed."""
    manifest, program, data, _ = draw.choice(_real())
    return _of_bundle(manifest, program, mutant(data, draw))


def _edited(seed: int, draw: random.Random) -> Asked:
    """The same, with fields removed, doubled, moved or replaced."""
    manifest, program, _, message = draw.choice(_real())
    return _of_bundle(manifest, program, written(edited_message(message, Choices(draw.randbytes(300)))))


KINDS = {
    "chained": _chained,
    "computed": _computed,
    "alone": _alone,
    "odd": _odd,
    "mutated": _mutated,
    "edited": _edited,
}


def _declared(model: onnx.ModelProto, most: Sizes, draw: random.Random) -> Asked:
    """With outputs of about the sizes that Python's check finds, so that what is exact, and how large, is compared."""
    kind = draw.choice(("step", "step", "step", "logprobs"))
    try:
        values = Walk(model.SerializeToString(), kind, most, "weights", Budget(0)).values
    except RefusedError:
        return Asked(model.SerializeToString(), most, kind)
    for name in (name for node in model.graph.node for name in node.output):
        if name and draw.random() < 0.4 and max(values[name].dims, default=0) < 2**62:
            sizes = [max(0, size + draw.choice((*[0] * 8, -1, 1))) for size in values[name].dims]
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes))
    return Asked(model.SerializeToString(), most, kind)


def _of_bundle(manifest: Manifest, program: Program, graph: bytes) -> Asked:
    most = _most(program, manifest)
    return Asked(graph, most, program.kind, manifest.weights, manifest.weight_bytes)


@cache
def _real() -> tuple[tuple[Manifest, Program, bytes, Any], ...]:
    """The graphs of the conformance list's bundles."""
    found: dict[tuple[str, str], tuple[Manifest, Program, bytes, Any]] = {}
    for path in sorted((FOLDER / "bundles").glob("*/manifest.json")):
        manifest = decode_manifest(path.read_bytes(), str(path))
        for program in manifest.programs:
            data = (path.parent / program.file).read_bytes()
            found[str(path), program.file] = manifest, program, data, parsed(data)
    return tuple(found.values())


def special() -> Iterator[tuple[str, Asked]]:
    """Graphs at a limit, and of what the two once did not say the same, by what is special about them."""
    relu, pad = helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Pad", ["c", "p", "", "a"], ["y"])
    images = [relu, helper.make_node("MaxPool", ["x"], ["m"], kernel_shape=[1, 1])]
    constants = [_constant("c", 2), _constant("a", [0]), _constant("p", [1, 1]), _constant("e", [])]
    yield (
        "one node before the first image and behind it",
        _graph([*images, helper.make_node("Relu", ["x"], ["z"])], {"x": (1, 3, 8, 8)}, ("y", "m", "z")),
    )
    yield "an axis of a number without axes", _graph([pad], {}, constants=constants)
    for other in "ca":
        sums = [helper.make_node("Add", ["e", other], ["s"]), helper.make_node("ConstantOfShape", ["s"], ["y"])]
        yield f"no numbers and some, {other}", _graph(sums, {}, constants=constants)
    window = helper.make_node("ConvTranspose", ["x", "w"], ["y"], pads=[1])
    yield "windows over no axes", _graph([window], {"x": (4,), "w": (2,)})
    yield "a negative size of what no node computes", _graph([relu], {"x": (2,)}, inner={"other": (-1,)})
    for sizes in ((1, 2**40, 1), (0, 2**40, 1), (1, 2**17, 1)):
        nodes = [helper.make_node("Where", ["x", "v", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
        yield f"much that is made of little: {sizes}", _graph(nodes, {"x": sizes, "v": (1, 1, 2**30), "w": (1,)})
    shapes = [helper.make_node("Shape", ["x"], [f"s{i}"]) for i in range(2000)]
    reshaped = helper.make_node("Reshape", ["x", "s1999"], ["y"])
    yield "many nodes that ask the same sizes", _graph([*shapes, reshaped], {"x": (2,) * 9})
    shapes = [helper.make_node("Shape", ["x"], [f"s{i}"], start=i % 5 - 5) for i in range(300)]
    joins = [helper.make_node("Concat", ["s0"] * 5 + [f"s{i}"], [f"c{i}"], axis=0) for i in range(300)]
    expanded = helper.make_node("Expand", ["x", "s4"], ["y"])
    yield "more numbers than are kept", _graph([*shapes, *joins, expanded], {"x": (1,) * 5})
    for count in (2**14, 2**14 + 1):
        chain = [helper.make_node("Relu", [f"v{i - 1}" if i else "x"], [f"v{i}"]) for i in range(count)]
        yield f"{count} nodes", _graph(chain, {"x": (2,)})
    for count in (2**10, 2**10 + 1):
        yield f"{count} inputs", _graph([helper.make_node("Sum", ["x"] * count, ["y"])], {"x": (2,)})
    names = [f"w{i}" for i in range(4200)]
    wide = [helper.make_node("Relu", ["x"], [name]) for name in names]
    yield "many values at once", _graph([*wide, relu], {"x": (2,)}, names)


def _constant(name: str, numbers: int | list[int]) -> TensorProto:
    return onnx.numpy_helper.from_array(np.array(numbers, np.int64), name)


def _graph(
    nodes: Sequence[onnx.NodeProto],
    most: Sizes,
    names: Sequence[str] = (),
    inner: Sizes | None = None,
    constants: Sequence[TensorProto] = (),
) -> Asked:
    """A graph that returns some values, whose sizes it leaves open, and declares others."""
    inputs, values = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name, sizes in (table or {}).items()]
        for table in (most, inner)
    )
    rank = len(next(iter(most.values()), ()))
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["open"] * rank) for name in names]
    graph = helper.make_graph(nodes, "special", inputs, outputs, constants, value_info=values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return Asked(model.SerializeToString(), most)
