"""Build TensorRT-RTX engines of several forms of memory and attention, and count kernels and copied bytes of a step.

The engines are built without a GPU, from the programs that `build` composes; the builder lists their kernels. A form is
a rewritten graph, with a different layout of the ring's buffers or different operators for the products. A copy is a
kernel that reads a state, but neither computes an attention or a matrix product nor updates the state in place. A copy
moves the bytes of the states that it reads, and of its outputs that have a state's size. Only a GPU could say how fast
a kernel is.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper
from txl_engines.attention_operator import Attention, find_attentions
from txl_engines.checking import read_graph
from txl_engines.compiler import Compiler
from txl_engines.composing import compose, whole_programs
from txl_engines.layers import Kernel, read_kernels
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.device.engines.library import load_library

from benchmarks.shared.models import TINY, random_bundle, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log

MODELS = {
    "4 layers of 6 heads of 32, M 128, B 4": (shape(4, 192, 6, 32, 768, 256), 128, 4),
    "12 layers of 8 heads of 64, M 640, B 1": (shape(12, 512, 8, 64, 2048, 204), 640, 1),
    "2 layers of 4 heads of 41, M 160, B 2": (shape(2, 164, 4, 41, 656, 256), 160, 2),
}
LENGTHS = (64, 1)
PRECISIONS = ("fp16", "bf16", "fp32")


class Graph:
    """A composed program whose nodes can be replaced. New nodes take the place of the replaced ones in the order."""

    def __init__(self, data: bytes) -> None:
        self.model = onnx.load_model_from_string(data)
        values = (*self.model.graph.input, *self.model.graph.output)
        self.sizes = {v.name: [size.dim_value for size in v.type.tensor_type.shape.dim] for v in values}
        self.batch, self.length = self.sizes["tokens"]
        self._count = 0

    def new(self, operator: str, *inputs: str, out: str = "", **attributes: Any) -> onnx.NodeProto:
        """Return a new node of one output, `out` or a new name, which is not in the graph yet."""
        self._count += 1
        return helper.make_node(operator, inputs, [out or f"tried.{self._count}"], **attributes)

    def constant(self, *values: int) -> str:
        """Add a constant of these whole numbers to the graph, and return its name."""
        self._count += 1
        array = np.array(values, np.int64)
        self.model.graph.initializer.append(numpy_helper.from_array(array, f"tried.{self._count}"))
        return f"tried.{self._count}"

    def replace(self, gone: Sequence[onnx.NodeProto], made: Sequence[onnx.NodeProto]) -> None:
        """Remove the nodes `gone`, and insert the nodes `made` at the place of the last removed node."""
        names = [node.output[0] for node in gone]
        nodes = list(self.model.graph.node)
        place = max(index for index, node in enumerate(nodes) if node.output[0] in names)
        kept = [node for node in nodes[:place] if node.output[0] not in names]
        result = [onnx.NodeProto.FromString(n.SerializeToString()) for n in (*kept, *made, *nodes[place + 1 :])]
        del self.model.graph.node[:]
        self.model.graph.node.extend(result)

    def resize(self, name: str, *sizes: int) -> None:
        """Declare a new shape for an input or output."""
        for value in (*self.model.graph.input, *self.model.graph.output):
            if value.name == name:
                del value.type.tensor_type.shape.dim[:]
                for size in sizes:
                    value.type.tensor_type.shape.dim.add().dim_value = size

    def attentions(self) -> list[Attention]:
        """Return the attention of each layer that the graph has now."""
        return list(find_attentions(self.model.graph))

    def scatters(self) -> list[onnx.NodeProto]:
        """Return the TensorScatter nodes, which update states in place, that the graph has now."""
        return [node for node in self.model.graph.node if node.op_type == "TensorScatter"]


def as_one(graph: Graph) -> None:
    """Replace the MatMul, Softmax and MatMul of each attention by one node of ONNX's operator Attention."""
    for each in graph.attentions():
        mask = graph.new("Where", each.visible, each.bias, each.unseen)
        inputs = (each.query, each.key, each.value, mask.output[0])
        graph.replace(each.nodes, [mask, graph.new("Attention", *inputs, out=each.out, scale=1.0)])


def as_heads(graph: Graph) -> None:
    """Replace each attention by one node Attention of one position: the segment's positions become heads, which share
    keys.
    """
    for each in graph.attentions():
        mask = graph.new("Where", each.visible, each.bias, each.unseen)
        _, heads, _, width = _sizes(graph, each)
        wide, back = graph.constant(graph.batch, -1, 1, width), graph.constant(graph.batch, heads, graph.length, width)
        query = graph.new("Reshape", each.query, wide)
        slots = graph.sizes[each.key][2]
        hidden = graph.new("Reshape", mask.output[0], graph.constant(graph.batch, -1, 1, slots))
        inputs = (query.output[0], each.key, each.value, hidden.output[0])
        mixed = graph.new("Attention", *inputs, scale=1.0)
        result = [mask, query, hidden, mixed, graph.new("Reshape", mixed.output[0], back, out=each.out)]
        graph.replace(each.nodes, result)


def as_sums(graph: Graph) -> None:
    """Replace the matrix products of each attention by elementwise products and sums; only for one position."""
    for each in graph.attentions():
        turned, product, *_, mix = each.nodes
        times = graph.new("Mul", each.query, each.key)
        total = graph.new("ReduceSum", times.output[0], graph.constant(-1), keepdims=0)
        content = graph.new("Unsqueeze", total.output[0], graph.constant(2), out=product.output[0])
        graph.replace([turned, product], [times, total, content])
        across = graph.new("Transpose", mix.input[0], perm=[0, 1, 3, 2])
        weighed = graph.new("Mul", across.output[0], each.value)
        result = graph.new("ReduceSum", weighed.output[0], graph.constant(2), keepdims=1, out=each.out)
        graph.replace([mix], [across, weighed, result])


def as_einsum(graph: Graph) -> None:
    """Replace the transposes and matrix products of each attention by Einsum."""
    for each in graph.attentions():
        turned, product, *_, mix = each.nodes
        content = graph.new("Einsum", each.query, each.key, out=product.output[0], equation="bhld,bhcd->bhlc")
        graph.replace([turned, product], [content])
        mixed = graph.new("Einsum", mix.input[0], each.value, out=each.out, equation="bhlc,bhcd->bhld")
        graph.replace([mix], [mixed])


def by_head(graph: Graph) -> None:
    """Give the ring's buffers the shape [B·H, 1, slots, d_head], where each head has a write position of its own."""
    for scatter in graph.scatters():
        past, update, write = scatter.input
        batch, heads, slots, width = graph.sizes[past]
        rows = graph.new("Reshape", update, graph.constant(batch * heads, 1, -1, width))
        each = graph.new("Gather", write, graph.constant(*np.repeat(np.arange(batch), heads)), axis=0)
        after = graph.new("TensorScatter", past, rows.output[0], each.output[0], out=scatter.output[0], axis=2)
        back = graph.new("Reshape", after.output[0], graph.constant(batch, heads, slots, width))
        _reread(graph, scatter, [rows, each, after, back])
        for name in (past, scatter.output[0]):
            graph.resize(name, batch * heads, 1, slots, width)


def by_row(graph: Graph) -> None:
    """Give the ring's buffers the shape [B, 1, slots, H·d_head], with rows as the projection returns them."""
    for scatter in graph.scatters():
        past, update, write = scatter.input
        batch, heads, slots, width = graph.sizes[past]
        turned = graph.new("Transpose", update, perm=[0, 2, 1, 3])
        rows = graph.new("Reshape", turned.output[0], graph.constant(batch, 1, -1, heads * width))
        after = graph.new("TensorScatter", past, rows.output[0], write, out=scatter.output[0], axis=2)
        apart = graph.new("Reshape", after.output[0], graph.constant(batch, slots, heads, width))
        back = graph.new("Transpose", apart.output[0], perm=[0, 2, 1, 3])
        _reread(graph, scatter, [turned, rows, after, apart, back])
        for name in (past, scatter.output[0]):
            graph.resize(name, batch, 1, slots, heads * width)


def _reread(graph: Graph, scatter: onnx.NodeProto, result: list[onnx.NodeProto]) -> None:
    """Replace a TensorScatter by new nodes; nodes that read its result read the last new node's instead."""
    old = scatter.output[0]
    for node in graph.model.graph.node:
        node.input[:] = [result[-1].output[0] if name == old else name for name in node.input]
    graph.replace([scatter], result)


def _sizes(graph: Graph, each: Attention) -> list[int]:
    return graph.sizes[each.key]


class Form(NamedTuple):
    """A form of memory and attention.

    Attributes:
        title: the form's name in the table.
        update: the update rule of the program to start from.
        changes: the functions that rewrite the graph.
        bare: True removes the products with 1 that the parser puts before an attention's queries and keys.
        lengths: the segment lengths for which the form can be built.
    """

    title: str
    update: str
    changes: tuple[Callable[[Graph], None], ...] = ()
    bare: bool = True
    lengths: tuple[int, ...] = LENGTHS


FORMS = (
    Form("rolled, products", "rolled"),
    Form("rolled, one operator", "rolled", (as_one,)),
    Form("ring, products", "ring"),
    Form("ring, one operator, scaled by 1", "ring", (as_one,), bare=False),
    Form("ring, one operator", "ring", (as_one,)),
    Form("ring, one operator, positions as heads", "ring", (as_heads,), lengths=(64,)),
    Form("ring, einsum", "ring", (as_einsum,)),
    Form("ring, sums", "ring", (as_sums,), lengths=(1,)),
    Form("ring [B·H, 1, C, d], products", "ring", (by_head,)),
    Form("ring [B, 1, C, H·d], products", "ring", (by_row,)),
)


class Built(NamedTuple):
    """A program's engine: its size in bytes, and its kernels."""

    size: int
    kernels: tuple[Kernel, ...]


def build(graph: Graph, folder: Path, bare: bool) -> Built | str:
    """Build an engine of a graph for SM 86; if that fails, return the library's first message."""
    library = load_library("rtx")
    facts = library.facts
    library.facts = dataclasses.replace(facts, reads_in_place=bare)
    library.journal.errors.clear()
    try:
        compiler = Compiler(library)
        parsed = compiler.parse(graph.model.SerializeToString(), str(folder / "tried.onnx"))
        plan = None if parsed.errors else compiler.build(parsed, (86,), on_step=lambda: None)
    finally:
        library.facts = facts
    if plan is None:
        return parsed.errors[0].text if parsed.errors else library.journal.errors[0]
    return Built(memoryview(plan).nbytes, tuple(read_kernels(library.journal.layers)))


def moved(kernels: Sequence[Kernel], states: set[str], least: int) -> tuple[int, int]:
    """Return the number of kernels that copy states, and the bytes that they move.

    Args:
        kernels: the kernels of an engine.
        states: the names of the states.
        least: the number of values from which an output counts.
    """
    count = total = 0
    for kernel in kernels:
        computes = kernel.attends or kernel.kind == "gemm"
        updates = bool(kernel.reads(states) & kernel.writes(states)) and not kernel.copies(states)
        if kernel.reads(states) and not computes and not updates:
            large = [t for t in kernel.outputs if math.prod(t.shape) >= least]
            if large:
                count += 1
                total += sum(t.bytes for t in (*large, *(t for t in kernel.inputs if t.name in states)))
    return count, total


def measure(bundle: Bundle, form: Form, length: int) -> tuple[object, ...]:
    """Build one form of a bundle's program with one segment length, and return a row of the table."""
    programs = whole_programs(bundle.manifest, form.update)
    program = next(p for p in programs if (p.kind, p.segment_length) == ("logprobs", length))
    checked = read_graph(compose(bundle, program), program, bundle.path, 24)
    graph = Graph(checked.data)
    layers = len(graph.attentions())
    for change in form.changes:
        change(graph)
    if form.update == "rolled" and form.changes:
        graph.model.opset_import[0].version = 24
    built = build(graph, bundle.path, form.bare)
    if isinstance(built, str):
        log(f"  {form.title}, L {length}: {built}")
        return length, form.title, "does not build", None, None, None, None, None
    memory = {spec.name: spec.fixed for spec in (*program.inputs, *program.outputs) if "memory." in spec.name}
    batch, heads, _, width = next(iter(memory.values()))
    config = bundle.manifest.config
    assert config is not None
    copying, total = moved(built.kernels, set(memory), batch * heads * bundle.manifest.memory_length * width)
    fused = sum(kernel.attends for kernel in built.kernels)
    number = len(built.kernels)
    return length, form.title, number, number / layers, f"{fused} of {layers}", copying, total / 1e6, built.size / 1e6


def main() -> None:
    """Read the command line, build every form, and print a table for each model and precision."""
    options = parser(__doc__, seconds=None)
    options.add_argument("--precision", action="append", choices=PRECISIONS, help="one of them (default all)")
    arguments = options.parse_args()
    models = {"tiny": (TINY, 16, 2)} if arguments.quick else MODELS
    tables: list[Table] = []
    with tempfile.TemporaryDirectory() as folder:
        for title, (values, rows, batch) in models.items():
            for precision in arguments.precision or (PRECISIONS[:1] if arguments.quick else PRECISIONS):
                path = Path(folder) / f"{len(tables)}.txl"
                result = random_bundle(path, values, LENGTHS, rows, batch_size=batch, precision=precision)
                bundle = open_bundle(result, verify_files=False)
                columns = ("L", "form", "kernels", "per layer", "fused", "kernels that copy", "MB a step", "engine MB")
                table = Table(columns, title=f"{title}, {precision}")
                for length in LENGTHS[::-1]:
                    for form in FORMS:
                        if length in form.lengths:
                            table.add(*measure(bundle, form, length))
                tables.append(table)
                print(table.markdown(), file=sys.stderr, flush=True)
    finish("rtx_layouts", arguments, tables, [dataclasses.asdict(table) for table in tables])


if __name__ == "__main__":
    main()
