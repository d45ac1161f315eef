"""Small graphs of one to three operators in a row, drawn from choices; few of them run in an engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper
from txl_runtime.guard.forms import FORMS, MICROSOFT

from fuzz.choices import Choices

NAMES = sorted((domain, name) for domain, known in FORMS.items() for name in known)
TYPES = ("float", "int64", "int32", "bool", "float16", "double", "uint8", "int8", "uint16", "int16", "uint32", "uint64")
NUMBERS = (0, 1, 2, 3, 4, 5, 8, 16, 32, -1, -2, -3, 64, 255, -(2**31), 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, 1.0, 0.5, 2.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"), 3.0, 1e9)
SIZES = (2, 3, 4, 1, 2, 5, 8, 16, 0)
SAID = {"shape", "axes", "axis", "starts", "ends", "steps", "repeats", "pads", "K", "k", "sizes", "split", "depth"}
SAID |= {"image_shape", "block_shape", "start", "limit", "delta", "max_output_boxes_per_class"}
"""Inputs by which sizes, axes or places are said, as the standard calls them."""
ONE = {"K", "k", "depth", "start", "limit", "delta", "axis"}
"""Those of them that say one number."""
WINDOW = (3, 4, 3, 4, 5)
RANKS: dict[str, tuple[int, ...]] = dict.fromkeys(("GRU", "LSTM", "RNN", "Col2Im"), (3,))
RANKS |= {"DepthToSpace": (4,), "SpaceToDepth": (4,), "Gemm": (2,), "GridSample": (4, 5), "Resize": (2, 3, 4)}
RANKS |= dict.fromkeys(
    ("Conv", "ConvTranspose", "AveragePool", "MaxPool", "GlobalAveragePool", "GlobalMaxPool"), WINDOW
)
"""By operator, the axes that its first input has, mostly."""
EQUATIONS = ("ij,jk->ik", "bij,bjk->bik", "a,a->a", "ij->ji", "ii->i", "...i,...i->...", "a,b,c->abc", "aa,a->", "->")
WORDS: dict[str, tuple[str, ...]] = {
    "equation": (*EQUATIONS, "...->...", "ab,bc,cd->ad", "iij->j", "ij,j", "...ij->...ji", "a...,...a", ",->", "i,i"),
    "auto_pad": ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", "x"),
    "mode": ("constant", "reflect", "edge", "wrap", "linear", "nearest", "cubic", "DCR", "CRD", "bilinear", "circular"),
    "padding_mode": ("zeros", "border", "reflection"),
    "approximate": ("none", "tanh"),
    "direction": ("forward", "reverse", "bidirectional", "LEFT", "RIGHT"),
    "reduction": ("none", "add", "mul", "max", "min"),
    "coordinate_transformation_mode": (
        "half_pixel",
        "asymmetric",
        "align_corners",
        "tf_crop_and_resize",
        "pytorch_half_pixel",
        "half_pixel_symmetric",
    ),
    "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    "keep_aspect_ratio_policy": ("stretch", "not_larger"),
    "round_mode": ("up", "down", "nearest"),
}
"""The values of attributes that are text, by name."""
NUMPY = {"float": "float32", "double": "float64"}


class Chain:
    """Operators, the first input of each of which is what the one before returns.

    Attributes:
        nodes: the operators.
        feeds: what goes in.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices, self._version = choices, 0
        self._inputs, self._constants, self._type = list[onnx.ValueInfoProto](), list[TensorProto](), ""
        self.nodes = list[onnx.NodeProto]()
        self.feeds = dict[str, np.ndarray[Any, Any]]()

    def model(self) -> onnx.ModelProto:
        """The graph, without outputs."""
        graph = helper.make_graph(self.nodes, "chain", self._inputs, [], self._constants)
        opsets = [helper.make_opsetid("", self._version), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def add(self) -> None:
        """One operator more."""
        choices, number = self._choices, len(self.nodes)
        domain, name = choices.pick(NAMES)
        self._version = self._version or choices.number(5) + 18
        form = FORMS[domain][name]
        attributes = form.attributes
        schema = _schema(name, self._version, domain)
        formal = list(schema.inputs) if schema else []
        allowed = {entry.type_param_str: entry.allowed_type_strs for entry in schema.type_constraints} if schema else {}
        ranks = RANKS.get(name if choices.number(7) else "", (2, 3, 4, 1, 0, 5))
        shape = [choices.pick(SIZES) for _ in range(choices.pick(ranks))]
        types, names = dict[str, str](), list[str]()
        needed = schema.min_input if schema else 2
        for i in range(choices.pick((needed, needed, len(formal), len(formal), 1, 2, 3, 4, 5, 0))):
            spec = formal[min(i, len(formal) - 1)] if formal else None
            kind, role = (spec.type_str, spec.name) if spec else ("T", "")
            if kind not in types:
                may = [
                    text for text in TYPES if f"tensor({text})" in allowed.get(kind, ()) or kind == f"tensor({text})"
                ]
                types[kind] = self._type if number and not i else choices.pick(may or TYPES)
            if choices.number(39) == 39:
                names.append("")
            elif number and not i:
                names.append(self.nodes[-1].output[0])
            elif role in SAID:
                names.append(self._constant(_sizes(choices, types[kind], 1 if role in ONE else len(shape))))
            else:
                array = _numbers(choices, types[kind], _dims(choices, shape))
                names.append(self._constant(array) if choices.flag() else self._input(array))
        self._type = next(iter(types.values()), "float")
        count = choices.pick((1, 1, 1, schema.max_output if schema and schema.max_output < 9 else 3, 2, 3))
        node = helper.make_node(name, names, [f"o{number}.{i}" for i in range(count)], domain=domain)
        node.attribute.extend(
            _attribute(choices, key, kind, len(shape)) for key, kind in attributes.items() if choices.flag()
        )
        self.nodes.append(node)

    def _constant(self, array: np.ndarray[Any, Any]) -> str:
        self._constants.append(onnx.numpy_helper.from_array(array, f"c{len(self._constants)}"))
        return self._constants[-1].name

    def _input(self, array: np.ndarray[Any, Any]) -> str:
        name, opened = f"i{len(self._inputs)}", self._choices.number(3) == 3
        sizes = [f"{name}.{axis}" if opened else n for axis, n in enumerate(array.shape)]
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        self._inputs.append(helper.make_tensor_value_info(name, element, sizes))
        self.feeds[name] = array
        return name


@cache
def _schema(name: str, version: int, domain: str) -> Any:
    try:
        return onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:  # ONNX Runtime's own operators, and newer ones
        return None


def _dims(choices: Choices, shape: list[int]) -> list[int]:
    """The main input's sizes, some of them changed, or others."""
    match choices.number(7):
        case 0 | 1 | 2:
            return shape
        case 3:
            return shape[choices.number(len(shape)) :]
        case 4:
            return [choices.pick((n, 1, 2, 3)) for n in shape]
        case 5:
            return shape[1:2]
        case 6:
            return [choices.pick(SIZES[:4]) for _ in shape]
        case _:
            return [choices.pick(SIZES) for _ in range(choices.number(5))]


def _sizes(choices: Choices, kind: str, rank: int) -> np.ndarray[Any, Any]:
    """Draw an input that says sizes, axes or places: mostly a few small whole numbers."""
    pool = NUMBERS if choices.number(7) == 7 else (1, 2, 0, 3, 4, -1, -2, 5)
    count = choices.pick((rank, rank, 1, rank - 2, 2 * rank, 2, 0, 3))
    numbers = [choices.pick(pool) for _ in range(max(count, 0))]
    array = _array(numbers, np.dtype(NUMPY.get(kind, kind)))
    return array.reshape(()) if len(numbers) == 1 and choices.flag() else array


def _numbers(choices: Choices, kind: str, dims: Sequence[int]) -> np.ndarray[Any, Any]:
    """A few numbers, again and again; those that a type cannot hold are wrapped around."""
    dtype = np.dtype(NUMPY.get(kind, kind))
    pool: tuple[Any, ...] = FLOATS if dtype.kind == "f" else NUMBERS
    few = [choices.pick(pool) for _ in range(1 + choices.number(3))]
    count = int(np.prod(dims))
    return np.resize(_array(few, dtype), count).reshape(dims) if count else np.zeros(dims, dtype)


def _array(numbers: Sequence[Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Numbers of a type, which wraps what it cannot hold."""
    if dtype.kind == "f":
        with np.errstate(all="ignore"):
            return np.array(numbers, np.float64).astype(dtype)
    return np.array([number % 2**64 for number in numbers], np.uint64).astype(dtype)


def _attribute(choices: Choices, key: str, kind: str, rank: int) -> AttributeProto:
    match kind:
        case "t":
            array = _numbers(choices, choices.pick(TYPES), [choices.pick((1, 2, 0, 3))])
            return helper.make_attribute(key, onnx.numpy_helper.from_array(array))
        case "s":
            return helper.make_attribute(key, choices.pick(WORDS.get(key, ("", "x"))))
        case "b":
            return helper.make_attribute(key, choices.pick((1, 0, 1, 0, 1, 0, 2, -1)))
        case "f":
            return helper.make_attribute(key, choices.pick(FLOATS))
        case "F":
            return helper.make_attribute(key, [choices.pick(FLOATS) for _ in range(1 + choices.number(3))])
        case "i":
            return helper.make_attribute(key, choices.pick((1, 0, 2, -1, 3, 4, choices.pick(NUMBERS))))
        case _:
            per = 2 * (rank - 2) if key == "pads" else rank - 2
            count = choices.pick((per, per, per, 2 * (rank - 2), rank, 1, 0)) if key != "perm" else rank
            few = NUMBERS if choices.number(15) == 15 else (1, 2, 3, 0, 1, 1)
            numbers = list(range(rank))[::-1] if key == "perm" else [choices.pick(few) for _ in range(max(count, 0))]
            return helper.make_attribute(key, numbers, attr_type=AttributeProto.INTS)
