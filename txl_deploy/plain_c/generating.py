"""Turn a step's graph into C: emx-onnx-cgen writes the program, and weights become arrays that it reads.

The generator would write every weight into its text. Weights that are inputs of the graph can lie in flash or in a
mapped file. Names in the graph are replaced first: a stranger's bundle may contain any names, and names appear in
comments of C.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from txl_engines.checking import import_onnx
from txl_engines.shapes import inferred, known_shapes
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import BackendError, one_line
from txl_runtime.types import Array

from txl_deploy.plain_c.step import PlainStep

LARGE = 64
"""Smallest size in bytes of a weight that is an argument of the program; smaller weights stay in the program's text."""
WEIGHTS = {np.dtype(np.float32): "float", np.dtype(np.uint8): "uint8_t"}
"""Types of weights that are arguments, and the types' names in C; weights of other types stay in the program's text."""
INDEXED = dict.fromkeys(("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"), 0)
INDEXED["TensorScatter"] = -2
"""Operators that index an axis by an input; for each operator, the axis that it indexes if no attribute names one."""
KINDS = {"float32": "float", "int32": "int32_t", "bool": "bool"}
"""Names of types in C, by the type's name in the bundle's tables."""


@dataclass(frozen=True)
class Generated:
    """A program in C.

    Attributes:
        source: the text: `static void NAME_program(inputs…, weights…, outputs…)` and the functions that it calls.
        weights: weights with a type of `WEIGHTS` and `LARGE` bytes or more, in the order of the parameters.
        multiply_adds: number of multiply-adds in the matrix products and convolutions of a step; None if unknown.
    """

    source: str
    weights: tuple[Array, ...]
    multiply_adds: int | None


def generate(bundle: Bundle, step: PlainStep, name: str) -> Generated:
    """Return the C of a step, and the weights that it takes as arguments.

    Raises:
        BackendError: the generator fails; the message quotes the generator's error.
    """
    from emx_onnx_cgen.compiler import Compiler, CompilerOptions

    onnx = import_onnx()
    model = onnx.load_model_from_string(step.graph)
    _prepare(model)
    model = inferred(model)
    onnx.external_data_helper.load_external_data_for_model(model, str(bundle.path))
    _fold(onnx, model)
    _bound(onnx, model)
    weights = []
    for tensor in list(model.graph.initializer):
        array = np.ascontiguousarray(onnx.numpy_helper.to_array(tensor))
        if array.dtype in WEIGHTS and array.nbytes >= LARGE:
            weights.append(array)
            model.graph.initializer.remove(tensor)
            model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, array.shape))
    _rename(model)
    options = CompilerOptions(model_name=f"{name}_program", large_temp_threshold_bytes=0, large_weight_threshold=0)
    try:
        source = Compiler(options).compile(model)
    except Exception as error:  # for an unexpected graph, the generator may raise any class
        raise BackendError(
            f"program {step.program.name} cannot be written as C: emx-onnx-cgen says {one_line(error)}; run this model "
            "with the library for C and C++ (docs/embedding.md)"
        ) from None
    return Generated(_alone(source, name), tuple(weights), _multiply_adds(model))


def _prepare(model: Any) -> None:
    """Rewrite the parts of a graph that the generator misreads."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if (
            node.op_type in ("GRU", "RNN") and "direction" in attributes
        ):  # the generator misreads the explicit default "forward"
            if attributes["direction"].s == b"forward":
                node.attribute.remove(attributes["direction"])
        elif node.op_type == "MatMulNBits":  # the generator would mix up scales and zero points of different blocks
            for name in filter(None, node.input[2:4]):
                blocks = -(-attributes["K"].i // attributes["block_size"].i)
                size = blocks if name == node.input[2] else -(-blocks * attributes["bits"].i // 8)
                tensors[name].dims[:] = [attributes["N"].i, size]
    for value in [value for value in model.graph.value_info if value.name in tensors]:
        model.graph.value_info.remove(value)


def _fold(onnx: Any, model: Any) -> None:
    """Replace nodes that depend only on weights by their results, which the program would compute in every step.

    Nodes that only repeat a weight stay, because computing their result is faster than reading it.
    """
    from onnx.reference import ReferenceEvaluator

    graph, held = model.graph, {tensor.name: tensor for tensor in model.graph.initializer}
    known, constant = {"", *held}, []
    for node in graph.node:
        if node.op_type not in ("Expand", "Tile", "ConstantOfShape") and known.issuperset(node.input):
            constant.append(node)
            known.update(node.output)
    if constant:
        for node in constant:
            graph.node.remove(node)
        read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        results = [name for node in constant for name in node.output if name in read]
        used = [held[name] for name in {name for node in constant for name in node.input} & held.keys()]
        outputs = [onnx.ValueInfoProto(name=name) for name in results]
        alone = onnx.helper.make_graph(constant, "constants", [], outputs, used)
        folded = onnx.helper.make_model(alone, opset_imports=model.opset_import, ir_version=model.ir_version)
        values = ReferenceEvaluator(folded).run(None, {})
        tensors = [tensor for tensor in graph.initializer if tensor.name in read]
        del graph.initializer[:]
        graph.initializer.extend(tensors)
        graph.initializer.extend(map(onnx.numpy_helper.from_array, values, results))


def _bound(onnx: Any, model: Any) -> None:
    """Add nodes that clip indices to their range: ONNX Runtime refuses an index out of range, C would read any memory.

    Raises:
        BackendError: a constant index is out of range, so no step of this graph can run.
    """
    graph, constants = model.graph, {tensor.name: tensor for tensor in model.graph.initializer}
    shapes = known_shapes(graph) | {name: tensor.dims for name, tensor in constants.items()}
    nodes, make = [], onnx.helper.make_node
    for node in graph.node:
        place, attributes = 2 if node.op_type == "TensorScatter" else 1, {each.name: each for each in node.attribute}
        around = (
            "mode" in attributes and attributes["mode"].s == b"circular"
        )  # with a circular buffer, any index is valid
        if node.op_type in INDEXED and not around and "".join(node.input[place : place + 1]):
            whole, indices = shapes[node.input[0]], node.input[place]
            axis = next(
                (attributes[name].i for name in ("axis", "batch_dims") if name in attributes), INDEXED[node.op_type]
            )
            sizes = np.array(whole[axis:][: shapes[indices][-1]] if node.op_type.endswith("ND") else [whole[axis]])
            if place == 2:
                sizes -= shapes[node.input[1]][axis] - 1
            low, high = -sizes if place == 1 else 0 * sizes, sizes - 1
            if indices in constants:
                fixed, low, high = np.broadcast_arrays(onnx.numpy_helper.to_array(constants[indices]), low, high)
                if (wrong := (fixed < low) | (fixed > high)).any():
                    raise BackendError(
                        f"{node.op_type} has the constant index {fixed[wrong][0]}, expected {low[wrong][0]} … "
                        f"{high[wrong][0]}: such a step cannot run; export the model again"
                    )
            else:
                names = [f"{node.output[0]}.{part}" for part in ("low", "high", "wide", "raised", "lowered")]
                graph.initializer.extend(map(onnx.numpy_helper.from_array, (low, high), names))
                nodes += [
                    make("Cast", [indices], names[2:3], to=onnx.TensorProto.INT64),
                    make("Max", [names[2], names[0]], names[3:4]),
                    make("Min", [names[3], names[1]], names[4:]),
                ]
                node.input[place] = names[4]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _rename(model: Any) -> None:
    """Replace the names of tensors by v1, v2, … and of nodes by n0, n1, …, and drop all other texts."""
    graph, names = model.graph, {"": ""}

    def other(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}")

    for entry in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
        entry.name = other(entry.name)
        entry.ClearField("doc_string")
    for number, node in enumerate(graph.node):
        node.name, node.doc_string = f"n{number}", ""
        node.input[:], node.output[:] = [other(each) for each in node.input], [other(each) for each in node.output]
    graph.name = "step"
    for field in ("metadata_props", "doc_string", "producer_name", "producer_version", "domain"):
        model.ClearField(field)
    for field in ("doc_string", "metadata_props"):
        graph.ClearField(field)


_LOG_SUM_EXP = re.compile(
    r"acc = 0\.0f;((?:(?!acc).)*)acc \+= ref_scalar_f32_exp\((\S+)\);((?:(?!acc).)*)ref_scalar_f32_log\(acc\)",
    re.DOTALL,
)
"""Pattern of generated C: the logarithm of a sum of exponentials, which overflows for inputs above 88."""


_TO_WHOLE = re.compile(r"(\(const (?:float|double|_Float16) input0\b[^{]*{[^}]*?= )\((u?int\d+_t)\)(input0[^;]*);")
"""Pattern of generated C: a function that casts floats to integers, from its parameters to the cast."""


def _cast(match: re.Match[str]) -> str:
    """Return a cast of floats to integers with the results of ONNX Runtime on x86.

    In C, casts of NaN and of values that the type cannot hold are undefined. ONNX Runtime casts these values to the
    least integer of 32 or 64 bits; smaller types get its low bits.
    """
    before, kind, x = match.groups()
    bits = 64 if kind in ("int64_t", "uint64_t", "uint32_t") else 32
    most = f"{2.0 ** (bits - 1):.1f}f"
    whole = f"({x} >= -{most} && {x} < {most} ? (int{bits}_t){x} : INT{bits}_MIN)"
    if kind == "uint64_t":
        whole = f"({x} >= {most} ? {x} < {2.0**64:.1f}f ? (uint64_t){x} : 0 : (uint64_t){whole})"
    return f"{before}({kind}){whole};"


def apart(source: str, length: int) -> str:
    """Add `length` to the names of a program's functions and tables, so that several programs fit into one file.

    The name of the program itself, which ends in _program, stays.
    """
    defined = re.findall(r"^(?:static|EMX_NODE_FN)\b[^;{=(\[]*?(\w+)(?=[\[(])", source, re.MULTILINE)
    names = "|".join(name for name in set(defined) if not name.endswith("_program"))
    return re.sub(rf"\b(?:{names})\b", rf"\g<0>_l{length}", source) if names else source


def _alone(source: str, name: str) -> str:
    """Return the program as static functions, without compiler warnings, and with little need of stack.

    Minimum, maximum and ReLU of NaN are NaN, as in the engine; in the generator's own code, they ignore NaN.
    """
    source = re.sub(r"rounded = \w+_maximum\(rounded, (.*)\);", r"rounded = rounded > \1 ? rounded : \1;", source)
    source = _TO_WHOLE.sub(_cast, source)
    source = source.replace("[restrict ", "[EMX_RESTRICT ")  # Microsoft's compiler has no `restrict` in [ ]
    source = source.replace("a > 0.0f ? a : 0.0f", "a < 0.0f ? 0.0f : a")
    source = source.replace("fmaxf(a, b)", "a < b || isnan(b) ? b : a")
    source = source.replace("fminf(a, b)", "a > b || isnan(b) ? b : a")
    source = re.sub(r"if \((\S+) ([<>]) acc\) acc = \1;", r"if (\1 \2 acc || isnan((float)\1)) acc = \1;", source)
    added = r"(acc > \2 ? acc : \2) + (acc == \2 ? 0.69314718f : log1pf(expf(-fabsf(acc - \2))))"
    source = _LOG_SUM_EXP.sub(rf"acc = -INFINITY;\1acc = {added};\3acc", source)
    source = re.sub(r"^_Bool \w+_load\(const char \*path\) {\n.*?^}\n", "", source, flags=re.MULTILINE | re.DOTALL)
    source = re.sub(r"^extern const [^;]*;\n", "", source, flags=re.MULTILINE)
    source = re.sub(r"^const EMX_UNUSED ", "static const EMX_UNUSED ", source, flags=re.MULTILINE)
    source = re.sub(r"^static inline ", "static inline EMX_UNUSED ", source, flags=re.MULTILINE)
    before, head, body = source.partition(f"\nvoid {name}_program(")
    signature, start, rest = body.partition("{\n")
    named = re.findall(r"(\w+)\[(?:EMX_RESTRICT )?\d+\](?:\[\d+\])*(?=[,)])", signature)
    unread = [name for name in named if not re.search(rf"\b{name}\b", rest)]
    # the casts avoid warnings of unused parameters: in a model without state, nothing reads the counts
    rest = "".join(f"    (void){name};\n" for name in unread) + rest
    return f"{before}\nstatic {head[1:]}{_in_slots(signature + start + rest)}"


def _in_slots(body: str) -> str:
    """Let temporary arrays share memory if the last use of one array comes before the first use of the next array.

    Arrays that share memory have the same type, so that no compiler may assume that they do not overlap.
    """
    declared = re.compile(r"^    (\w+) (tmp\w+)((?:\[\d+\])+);\n", re.MULTILINE)
    matches = {match[2]: match for match in declared.finditer(body)}
    rest = declared.sub("", body)
    lives: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(rest.splitlines()):
        for used in re.findall(r"\btmp\w+", line):
            lives[used] = lives.get(used, (number, 0))[0], number
    slots: list[list[str]] = []
    sizes = {each: math.prod(map(int, re.findall(r"\d+", match[3]))) for each, match in matches.items()}
    for each in sorted(matches, key=lambda one: -sizes[one]):
        for slot in slots:
            apart = all(lives[each][1] < lives[other][0] or lives[other][1] < lives[each][0] for other in slot)
            if apart and matches[slot[0]][1] == matches[each][1]:
                slot.append(each)
                break
        else:
            slots.append([each])
    places = {each: f"slot{number}.{each}" for number, slot in enumerate(slots) for each in slot}
    rest = re.sub(r"\btmp\w+", lambda match: places.get(match[0], match[0]), rest)
    unions = [
        f"    union {{\n{''.join('    ' + matches[each][0] for each in slot)}    }} slot{number};\n"
        for number, slot in enumerate(slots)
    ]
    start = rest.index("{\n") + 2
    return rest[:start] + "".join(unions) + rest[start:]


def _multiply_adds(model: Any) -> int | None:
    """Count the multiply-adds of one run of a graph with fixed sizes; None if a shape is unknown."""
    graph = inferred(model).graph
    shapes = known_shapes(graph) | {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    total = 0
    try:
        for node in graph.node:
            sizes = [shapes[each] for each in (*node.input[:2], node.output[0]) if node.op_type in _PRODUCTS]
            if sizes:
                total += _PRODUCTS[node.op_type](node, *sizes)
    except (KeyError, IndexError):
        return None
    return total


def _of_einsum(node: Any, *sizes: tuple[int, ...]) -> int:
    letters: dict[str, int] = {}
    terms = node.attribute[0].s.decode().replace(" ", "").split("->")[0].split(",")
    for term, shape in zip(terms, sizes, strict=False):
        letters.update(zip(term, shape, strict=False))
    return math.prod(letters.values())


def _of_gemm(node: Any, left: tuple[int, ...], _: tuple[int, ...], out: tuple[int, ...]) -> int:
    turned = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    return math.prod(out) * left[0 if turned else 1]


def _of_recurrence(_: Any, left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> int:
    return left[0] * left[1] * math.prod(right[:-1]) * (left[-1] + out[-1])


_PRODUCTS: dict[str, Callable[..., int]] = {
    "MatMul": lambda node, left, right, out: math.prod(out) * left[-1],
    "Gemm": _of_gemm,
    "Conv": lambda node, left, right, out: math.prod(out) * math.prod(right[1:]),
    "ConvTranspose": lambda node, left, right, out: math.prod(left) * math.prod(right[1:]),
    "Einsum": _of_einsum,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _of_recurrence),
    "MatMulNBits": lambda node, left, right, out: math.prod(out) * left[-1],
}
"""By operator, a function (node, shapes of its first two inputs, shape of its output) → number of multiply-adds."""
