"""Small graphs for `fresh_memory`: operators, constants in every encoding, and products of blocks that lack numbers.

The package onnx refuses to write a number beyond its type, so constants are written here byte by byte.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from txl_runtime.guard.forms import MICROSOFT

from fuzz.chains import Chain
from fuzz.choices import Choices

TYPES = {
    helper.np_dtype_to_tensor_dtype(np.dtype(name)): np.dtype(name)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "int64", "uint32", "uint64", "bool")
}
INT32_DATA, INT64_DATA, UINT64_DATA, RAW_DATA = 5, 7, 11, 9
FIELDS = {TensorProto.INT64: INT64_DATA, TensorProto.UINT64: UINT64_DATA, TensorProto.UINT32: UINT64_DATA}
"""The field that holds a type's numbers, where it is not the one of int32."""
BEYOND = (0, 0, 2**8, 2**16, 2**31, 2**32, -(2**32), -(2**32), 3 * 2**32, 2**63)
"""Added to a small number, so that a reader of fewer bits sees the small one."""
INT64_ALONE = ("Reshape", "Expand", "Tile", "Pad", "TopK", "Split", "Squeeze", "Unsqueeze", "ReduceSum")


@dataclass
class Odd:
    """A graph and what goes in.

    Attributes:
        name: its operators.
        graph: without outputs or constants, which `data` adds.
        constants: as they are in the file.
        outputs: names of what the nodes return.
        feeds: arrays by the names of inputs.
    """

    name: str
    graph: onnx.GraphProto
    constants: list[bytes]
    outputs: list[str]
    version: int = 21
    feeds: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def data(self, returned: bool) -> bytes:
        """The file, with or without the graph's outputs."""
        body = self.graph.SerializeToString() + b"".join(_piece(5, constant) for constant in self.constants)
        if returned:
            body += b"".join(_piece(12, _piece(1, name.encode())) for name in self.outputs)
        opsets = [helper.make_opsetid("", self.version), helper.make_opsetid(MICROSOFT, 1)]
        model = onnx.ModelProto(ir_version=10, opset_import=opsets)
        return model.SerializeToString() + _piece(7, body)


def make(seed: int, constants: float) -> Odd:
    """One graph of a seed; `constants` is the share of those that are about a constant's encoding.

    Raises:
        ValueError, TypeError, OverflowError: the package onnx cannot write it.
    """
    draws = random.Random(seed)
    if draws.random() < constants:
        return _constant(draws)
    return _blocks(draws) if draws.random() < 0.1 else _chain(draws)


def _chain(draws: random.Random) -> Odd:
    """One or two operators, whose constants may be written in another way."""
    chain = Chain(Choices(draws.randbytes(100)))
    for _ in range(draws.choice((1, 1, 1, 2))):
        chain.add()
    graph = helper.make_graph(chain.nodes, "g", chain._inputs, [])
    constants = []
    for tensor in chain._constants:
        array = onnx.numpy_helper.to_array(tensor)
        if tensor.data_type in TYPES and draws.random() < 0.5:
            numbers = [int(number) for number in array.ravel()]
            constants.append(_tensor(draws, tensor.name, tensor.data_type, array.shape, numbers))
        else:
            constants.append(tensor.SerializeToString())
    names = [name for node in chain.nodes for name in node.output if name]
    kinds = "+".join(node.op_type for node in chain.nodes)
    return Odd(kinds, graph, constants, names, chain._version, chain.feeds)


def _constant(draws: random.Random) -> Odd:
    """A constant that says a size, an axis or a divisor, in any type and encoding, and often beyond its type."""
    op = draws.choice(("Range", "Slice", "Gather", "Mod", "Div", "OneHot", "CumSum", "ConstantOfShape", *INT64_ALONE))
    kind = TensorProto.INT64 if op in INT64_ALONE and draws.random() < 0.8 else draws.choice(list(TYPES))
    count = {"Pad": 4, "Tile": 2}.get(op, 1)
    numbers = [draws.choice((0, 1, 2, 3, -1, -2, 4)) + draws.choice(BEYOND), *[0, 0, 1][: count - 1]]
    dims = [] if op == "Range" or (count == 1 and draws.random() < 0.2) else [count]
    around = {"Range": (("a", 0), None, ("b", 1)), "Slice": ("x", ("a", 0), None), "OneHot": ("y", None, ("a", 1))}
    names, constants = list[str](), list[bytes]()
    for one in around.get(op, (None,) if op == "ConstantOfShape" else ("y" if op in ("Mod", "Div") else "x", None)):
        if isinstance(one, str):
            names.append(one)
        elif one is None:
            constants.append(_tensor(draws, "c", kind, dims, numbers))
            names.append("c")
        else:
            few = [one[1]] if op != "OneHot" else [0, 1]
            constants.append(_written(one[0], kind, [] if op == "Range" else [len(few)], few, FIELDS.get(kind, 5)))
            names.append(one[0])
    arrays = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "y": np.array([0, 1, 1], TYPES[kind])}
    feeds = {name: array for name, array in arrays.items() if name in names}
    node = helper.make_node(op, names, ["o"])
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = helper.make_graph([node], "g", inputs, [])
    return Odd(f"constant of {op}", graph, constants, ["o"], draws.randint(18, 23), feeds)


def _blocks(draws: random.Random) -> Odd:
    """A product with weights of few bits, whose numbers, scales, zeros or places may be too few or of another kind."""
    k, n = draws.choice((16, 32, 33, 64, 100, 128)), draws.choice((1, 4, 8, 16, 17, 32))
    bits, size = draws.choice((4, 8, 4, 8, 2, 1, 3, 16)), draws.choice((16, 32, 64, 128, 8, 24))
    blocks, rows = -(-k // size), draws.choice((1, 2, 3))
    values = np.random.default_rng(draws.randrange(2**32))
    real = np.dtype(draws.choice(("float32", "float32", "float16")))

    def short(*dims: int) -> list[int]:
        return [max(each + draws.choice((-2, -1, 0, 0, 0, 1)), 0) if draws.random() < 0.15 else each for each in dims]

    arrays = {
        "b": values.integers(0, 256, short(n, blocks, max(size * bits // 8, 1)), np.uint8),
        "scales": values.standard_normal(short(*draws.choice(((n * blocks,), (n, blocks))))).astype(real),
    }
    if draws.random() < 0.6:
        packed = -(-blocks * bits // 8)
        arrays["zeros"] = values.integers(0, 256, short(*draws.choice(((n * packed,), (n, packed)))), np.uint8)
    names = ["a", *arrays]
    if draws.random() < 0.3:
        names += [""] * (4 - len(names)) + ["places"]
        over = draws.choice((0, 0, 0, 2))
        arrays["places"] = values.integers(-over, blocks + over, short(draws.choice((k, blocks * size))), np.int32)
    attributes = {"K": k, "N": n, "bits": bits, "block_size": size}
    for key in attributes:
        attributes[key] += draws.choice((1, -1)) if draws.random() < 0.04 else 0
    if draws.random() < 0.3:
        attributes["accuracy_level"] = draws.randrange(6)
    node = helper.make_node("MatMulNBits", names, ["o"], domain=MICROSOFT, **attributes)
    feeds = {"a": values.standard_normal((rows, k)).astype(real)}
    given = helper.make_tensor_value_info("a", helper.np_dtype_to_tensor_dtype(real), [rows, k])
    constants = [onnx.numpy_helper.from_array(array, name).SerializeToString() for name, array in arrays.items()]
    return Odd("MatMulNBits", helper.make_graph([node], "g", [given], []), constants, ["o"], 21, feeds)


def _tensor(draws: random.Random, name: str, kind: int, dims: Sequence[int], numbers: Sequence[int]) -> bytes:
    """A constant in one of its encodings, mostly the one of its type."""
    own = FIELDS.get(kind, INT32_DATA)
    where = own if draws.random() < 0.8 else draws.choice((INT32_DATA, INT64_DATA, UINT64_DATA, RAW_DATA))
    if draws.random() < 0.3:
        numbers = [number + draws.choice(BEYOND) for number in numbers]
    if draws.random() < 0.05:
        numbers = [*numbers[:-1]] if draws.random() < 0.5 else [*numbers, 1]
    return _written(name, kind, dims, numbers, where, draws.random() < 0.5)


def _written(
    name: str, kind: int, dims: Sequence[int], numbers: Sequence[int], where: int, packed: bool = False
) -> bytes:
    found = b"".join(b"\x08" + _varint(size) for size in dims) + b"\x10" + _varint(kind) + _piece(8, name.encode())
    if where == RAW_DATA:
        size = TYPES[kind].itemsize
        return found + _piece(where, b"".join((n % 2 ** (8 * size)).to_bytes(size, "little") for n in numbers))
    if packed:
        return found + _piece(where, b"".join(map(_varint, numbers)))
    return found + b"".join(bytes([where << 3]) + _varint(number) for number in numbers)


def _piece(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    number, found = number % 2**64, b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])
