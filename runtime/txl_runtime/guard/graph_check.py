"""The check of a graph's structure before an engine reads it.

An ONNX file consists of nested protocol buffers. The check requires that operators and attributes are on a closed list
(`forms`), that parameters are in the bundle's weight file, and that constants have only one encoding, with numbers in
the range of their type. Sizes must follow from shapes and constants: `Expand(x, Shape(y))` is allowed, `Expand(x, y)`
is not. So all steps of the same sizes take the same memory, and `load(trial=True)` can try one such step. Time and
memory of the check are linear in the file's size. All other faults are left to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BundleError
from txl_runtime.guard.forms import FORMS, IR_VERSIONS, MICROSOFT, OPSETS, PLAIN, Form
from txl_runtime.guard.protobuf import RefusedError, Table, fields, signed, table, varints

MODEL = table("1v 2b 3b 4b 5v 6b 7b", "8b 14b")
GRAPH = table("2b 10b", "1b 5b 11b 12b 13b")
NODE = table("3b 4b 6b 7b", "1b 2b 5b")
ATTRIBUTE = table("1b 2f 3v 4b 5b 13b 20v", "7b 7f 8b 8v")
TENSOR = table("2v 8b 9b 12b 14v", "1b 1v 4b 4f 5b 5v 7b 7v 10b 10d 11b 11v 13b")
VALUE, TYPE, TENSOR_TYPE, SHAPE = table("1b 2b 3b"), table("1b 6b"), table("1v 2b"), table("", "1b")
SIZE, PAIR, OPSET = table("1v 2b 3b"), table("1b 2b"), table("1b 2v")
"""Fields that each message of an ONNX file may have, by ONNX's field numbers; all other fields are refused."""
KINDS = {"b": (2, 3), "f": (1, 2), "i": (2, 3), "s": (3, 4), "t": (4, 5), "F": (6, 7), "I": (7, 8)}
"""Pairs (ONNX's number of an attribute type, number of the field that holds the value), by the type's letter."""
FIELDS = {1: 4, 11: 10, 7: 7, 12: 11, 13: 11}
"""Number of the field that holds a tensor's numbers if they are not raw, by ONNX's type number; 5 for other types."""
RANGES = {2: (0, 2**8), 3: (-(2**7), 2**7), 4: (0, 2**16), 5: (-(2**15), 2**15), 6: (-(2**31), 2**31), 9: (0, 2)}
RANGES |= {10: (0, 2**16), 16: (0, 2**16), 7: (-(2**63), 2**63), 12: (0, 2**32), 13: (-(2**63), 2**63)}
"""Range of a tensor's numbers by ONNX's type number, [first, last). The file stores them in 64 bits, and readers
truncate larger numbers in different ways. Types 7 and 13 use all 64 bits.
"""
DTYPES = {2: "u1", 3: "i1", 4: "u2", 5: "i2", 6: "i4", 7: "i8", 12: "u4", 13: "u8"}
"""NumPy's names of the integer types, by ONNX's type numbers."""
VIEWS = {1: "f4", 10: "f2", **DTYPES}
"""NumPy's names of the types of parameters that are passed to an engine, by ONNX's type numbers; bfloat16 has none."""
ITEMS = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
"""Bytes of one number, by ONNX's type numbers; tensors may have only these types."""
NODES, SIDES, AXES = 2**14, 2**10, 16
"""Maximum number of nodes and of constants in a graph; of inputs or results of a node; of axes of a constant."""
SAME = frozenset(("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators whose result has the same numbers as their first input."""


class FedSizeError(RefusedError):
    """A size depends on the model's input data, so a trial cannot show how large it becomes."""


class Value(NamedTuple):
    """Facts about a value in a graph.

    Attributes:
        fixed: whether the numbers follow from shapes and constants.
        constant: ONNX's type number, if the value is a constant in the file; else 0.
        dims: the sizes, if the value is a constant, or a Cast, DequantizeLinear or Identity of a constant.
        numbers: the numbers, if the value is an integer constant in the graph, or a `SAME` operator's result of such a
            constant; else None.
    """

    fixed: bool
    constant: int = 0
    dims: tuple[int, ...] = ()
    numbers: NDArray[Any] | None = None


def check_graph(
    data: bytes, where: str, program: Program, manifest: Manifest, advice: str = "export the model again"
) -> Walk:
    """Check that a program's graph obeys the rules in the module's description.

    Args:
        data: the content of the graph's file.
        where: the file's path, for messages.
        manifest: manifest of the bundle, which names the file of parameters.

    Returns:
        The `Walk`, which has the graph's nodes and values.

    Raises:
        BundleError: the graph breaks a rule.
    """
    try:
        walk = Walk(data, program.kind, manifest.weights, manifest.weight_bytes)
        _check_opset(imported_opset(data), program, manifest)
        return walk
    except RefusedError as refused:
        found, expected = refused.args
        raise BundleError(f"{where}: has {found}, expected {expected}; {advice}") from None


def imported_opset(data: bytes) -> dict[str, int]:
    """Return the operator-set versions that a graph imports, by domain, e.g. {"ai.onnx": 18}, as in `Program.opset`.

    Raises:
        RefusedError: the file is no graph.
    """
    entries = (value for number, value in _fields(data, MODEL, "the model") if number == 8)
    imports = (dict(_fields(entry, OPSET, "an opset")) for entry in entries)
    return {Names()[entry.get(1, b"")] or "ai.onnx": entry.get(2, 0) for entry in imports}


def _check_opset(imports: dict[str, int], program: Program, manifest: Manifest) -> None:
    """Compare the operator-set versions that the graph imports with the rows of all programs that use the file."""
    for user in (program, *(other for other in manifest.programs if other.file == program.file)):
        if user.opset not in ({}, imports):
            expected = f"{ascii(user.opset)[:80]}, which the manifest says of {user.name[:60]!a}"
            raise RefusedError(f"operators of {imports}", expected)


_fields: Callable[[bytes, Table, str], list[tuple[int, Any]]] = (
    fields  # values are typed as Any, because a field's table decides whether its value is a number or bytes
)


class Names(dict[bytes, str]):
    """A cache of texts, by the bytes from which they are decoded."""

    def __missing__(self, value: bytes) -> str:
        try:
            self[value] = name = value.decode()
        except UnicodeDecodeError:
            raise RefusedError(f"the name {value[:40]!a}, which is no UTF-8", "text") from None
        return name


class Walk:
    """One pass over a graph's file, which checks it and collects facts.

    Attributes:
        values: facts about every value, by name.
        declared: sizes that the file declares for inputs, outputs and values in between, by name, unchecked: numbers,
            names, or "" for an open size.
        model, body: (number, value) of each field of the file, and of each field of its graph, in order.
        nodes: (operator, names of inputs, names of outputs) of every node, in order.
        outside: offset of each parameter in the weight file, in bytes, by name.
        returned: names of the graph's outputs.

    Args:
        kind: the program's kind; only a program "step" may have all operators.
        weights, weight_bytes: name and size of the file of parameters.
    """

    def __init__(self, data: bytes, kind: str, weights: str, weight_bytes: int) -> None:
        self._kind, self._weights, self._weight_bytes = kind, weights, weight_bytes
        self._types: dict[bytes, tuple[int | str, ...]] = {}
        self._attributes: dict[bytes, tuple[str, int, Any]] = {}
        self._pairs: dict[bytes, tuple[str, str]] = {}
        self._names = Names()
        self._operators = dict[str, dict[str, Form]]()
        self.values: dict[str, Value] = {}
        self.nodes: list[tuple[str, list[str], list[str]]] = []
        self.outside: dict[str, int] = {}
        self.model, body = _fields(data, MODEL, "the model"), b""
        for number, value in self.model:
            if number == 1 and value not in IR_VERSIONS:
                raise RefusedError(f"version {value} of the format", f"{IR_VERSIONS[0]} to {IR_VERSIONS[-1]}")
            if number == 7:
                body = value
            elif number == 8:
                self._opset(dict(_fields(value, OPSET, "an opset")))
            elif number == 14:
                _fields(value, PAIR, "a note")
        if "" not in self._operators:
            raise RefusedError("no version of ONNX's operators", f"{OPSETS[0]} to {OPSETS[-1]}")
        self._walk(body)

    @property
    def read(self) -> frozenset[str]:
        """Names of the values that some node reads; unused inputs are not among them."""
        return frozenset(name for _, read, _ in self.nodes for name in read)

    def parameters(self, content: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Return the graph's parameters as views of the weight file's content, uint8 [bytes].

        Two kinds of parameters are left out: parameters whose type NumPy lacks, which the engine reads itself, and
        parameters that lie beyond the end of the content. For example, a float32 parameter [2, 3] is a view of 24
        bytes.
        """
        arrays: dict[str, NDArray[Any]] = {}
        for name, first in self.outside.items():
            _, kind, dims, _ = self.values[name]
            last = first + math.prod(dims) * ITEMS[kind]
            if kind in VIEWS and last <= len(content):
                arrays[name] = content[first:last].view(f"<{VIEWS[kind]}").reshape(dims)
        return arrays

    def _opset(self, entry: dict[int, Any]) -> None:
        domain, version = self._names[entry.get(1, b"")], entry.get(2, 0)
        known = OPSETS if domain == "" else range(1, 2)
        if domain not in FORMS or version not in known or domain in self._operators:
            raise RefusedError(
                f"operators of {domain[:40]!a} in version {version}, or twice",
                f"ONNX's own in {OPSETS[0]} to {OPSETS[-1]}, and {MICROSOFT} in 1",
            )
        self._operators[domain] = FORMS[domain]

    def _walk(self, body: bytes) -> None:
        parts: dict[int, list[Any]] = {number: [] for number in (1, 2, 5, 10, 11, 12, 13)}
        self.body = _fields(body, GRAPH, "the graph")
        for number, value in self.body:
            parts[number].append(value)
        if max(len(parts[1]), len(parts[5])) > NODES:
            raise RefusedError(f"{len(parts[1])} nodes and {len(parts[5])} constants", f"at most {NODES}")
        for tensor in parts[5]:
            self._define(*self._tensor(tensor))
        inputs, between, returned = (dict(map(self._value, parts[number])) for number in (11, 13, 12))
        for name in inputs:
            self._define(name, Value(fixed=False))
        if [len(inputs), len(between), len(returned)] != [len(parts[number]) for number in (11, 13, 12)]:
            raise RefusedError("a value that is declared twice", "each once")
        self.declared = between | returned | inputs
        self.returned = returned.keys()
        for entry in parts[1]:
            self._node(entry)
        if missing := returned.keys() - self.values.keys():
            raise RefusedError(f"an output {min(missing)[:60]!a} that no node computes", "all of them computed")

    def _define(self, name: str, value: Value) -> None:
        if name in self.values or not name:
            raise RefusedError(f"two values called {name[:60]!a}, or one without a name", "a name for each")
        self.values[name] = value

    def _value(self, entry: bytes) -> tuple[str, tuple[int | str, ...]]:
        """Return the name and sizes of a declared value; a size is a number, a name, or "" if it is open."""
        parts: dict[int, Any] = dict(_fields(entry, VALUE, "a value"))
        kind = parts.get(2, b"")
        if kind not in self._types:
            self._types[kind] = self._type(kind)
        return self._names[parts.get(1, b"")], self._types[kind]

    def _type(self, kind: bytes) -> tuple[int | str, ...]:
        tensor: dict[int, Any] = dict(_fields(dict(_fields(kind, TYPE, "a type")).get(1, b""), TENSOR_TYPE, "a type"))
        sizes: list[int | str] = []
        for _, entry in _fields(tensor.get(2, b""), SHAPE, "a shape"):
            size: dict[int, Any] = dict(_fields(entry, SIZE, "a size"))
            if 1 in size and 2 in size:
                raise RefusedError("a size with a number and a name", "one of them")
            sizes.append(signed(size[1]) if 1 in size else self._names[size.get(2, b"")])
            if isinstance(sizes[-1], int) and sizes[-1] < 0:
                raise RefusedError(f"a size of {sizes[-1]}", "0 or more")
        if tensor.get(1) not in ITEMS or 2 not in tensor:
            raise RefusedError(f"a value of type {tensor.get(1)}, or without axes", "a tensor of numbers")
        return tuple(sizes)

    def _node(self, entry: bytes) -> None:
        names, values, read = self._names, self.values, list[str]()
        inputs, outputs, attributes, op, domain = list[Value | None](), list[str](), list[bytes](), "", ""
        for number, value in _fields(entry, NODE, "a node"):
            if number == 5:
                attributes.append(value)
                continue
            text = names[value]
            if number == 1:
                if text and text not in values:
                    raise RefusedError(f"a node that reads {text[:60]!a} before it is there", "nodes in their order")
                inputs.append(values[text] if text else None)
                read.append(text)
            elif number == 2:
                outputs.append(text)
            elif number == 4:
                op = text
            elif number == 7:
                domain = text
        if max(len(inputs), len(outputs)) > SIDES:
            raise RefusedError(f"a node of {len(inputs)} inputs and {len(outputs)} results", f"at most {SIDES}")
        name = f"{domain}.{op}" if domain else op
        self.nodes.append((name, read, outputs))
        form = self._operators.get(domain, {}).get(op)
        if form is None or (self._kind != "step" and op not in PLAIN):
            raise RefusedError(f"the operator {name[:60]!a}", "one of the operators that graphs may have")
        attribute_values = self._values_of(op, form, attributes)
        try:
            if problem := form.problem([value is not None for value in inputs], len(outputs), attribute_values):
                raise RefusedError(*problem)
            result = _returned(op, form, inputs, attribute_values)
        except RefusedError as refused:
            raise type(refused)(f"{refused.args[0]} at {op} {ascii(outputs[:1])[:60]}", refused.args[1]) from None
        for output in outputs:
            if output:
                self._define(output, result)

    def _values_of(self, op: str, form: Form, attributes: Sequence[bytes]) -> dict[str, Any]:
        """Return the values of a node's attributes, by name, after checking them."""
        allowed, values = form.attributes, dict[str, Any]()
        for entry in attributes:
            if entry not in self._attributes:
                self._attributes[entry] = self._attribute(entry)
            name, type_, value = self._attributes[entry]
            if name in values or name not in allowed or KINDS[allowed[name]][0] != type_:
                raise RefusedError(f"the attribute {name[:60]!a} of {op}", "those that are its own, each once")
            if allowed[name] == "b" and value not in (0, 1):  # some operators treat 2 as true, and some do not
                raise RefusedError(f"{value} as {name} of {op}", "0 or 1")
            if type_ in (2, 7) and op not in ("Constant", "Shape"):  # an engine may truncate larger numbers to 32 bits
                numbers = value if type_ == 7 else [value]
                if min(numbers, default=0) < -(2**31) or max(numbers, default=0) >= 2**31:
                    raise RefusedError(f"{str(value)[:60]} as {name} of {op}", "numbers of 32 bits")
            values[name] = value
        return values

    def _attribute(self, entry: bytes) -> tuple[str, int, Any]:
        """Return (name, ONNX's type number, value) of an attribute; refuse more than one value."""
        name, type_, fields = "", 0, list[tuple[int, Any]]()
        for number, value in _fields(entry, ATTRIBUTE, "an attribute"):
            if number == 1:
                name = self._names[value]
            elif number == 20:
                type_ = value
            elif number != 13:
                fields.append((number, value))
        field = next((field for kind, field in KINDS.values() if kind == type_), 0)
        several = type_ in (6, 7)
        if any(number != field for number, _ in fields) or (len(fields) != 1 and not several):
            raise RefusedError(f"the attribute {name[:60]!a} of type {type_}", "a value of its type")
        if type_ == 7:
            whole = [varints(value) if isinstance(value, bytes) else [signed(value)] for _, value in fields]
            return name, type_, [number for numbers in whole for number in numbers]
        if type_ == 6:
            if any(len(value) % 4 for _, value in fields):
                raise RefusedError(f"the attribute {name[:60]!a} with a part of a number", "whole ones")
            return name, type_, [0.0] * (sum(len(value) for _, value in fields) // 4)
        value = fields[0][1]
        if type_ == 2:
            return name, type_, signed(value)
        return name, type_, self._tensor(value)[1] if type_ == 4 else value

    def _tensor(self, entry: bytes) -> tuple[str, Value]:
        """Return the name and facts of a constant, which must be completely in the graph or in the weight file."""
        name, kind, dims, places, outside, raw, parts = "", 0, list[int](), list[Any](), 0, None, list[Any]()
        for number, value in _fields(entry, TENSOR, "a constant"):
            if number == 8:
                name = self._names[value]
            elif number == 1:
                dims += varints(value) if isinstance(value, bytes) else [signed(value)]
            elif number == 2:
                kind = value
            elif number == 9:
                raw = value
            elif number == 13:
                places.append(value)
            elif number == 14:
                outside = value
            elif number in (4, 5, 7, 10, 11):
                parts.append((number, value))
        if kind not in ITEMS:
            raise RefusedError(f"a constant of type {kind}", "numbers")
        # A size of 0 counts as 1 here: an engine may first compute the product of the other sizes, which may overflow.
        if min(dims, default=0) < 0 or len(dims) > AXES or math.prod(n or 1 for n in dims) > 2**48:
            raise RefusedError(f"a constant of {ascii(dims)[:60]}", f"at most {AXES} sizes of 0 or more")
        length = math.prod(dims) * ITEMS[kind]
        if outside == 1 and kind == 9:
            raise RefusedError(f"the constant {name[:60]!a} of truth values in {self._weights}", "it in the graph")
        if outside == 1 and raw is None and not parts:
            first, numbers = self._outside(places, length), None
            whole = first is not None
            if first is not None:
                self.outside[name] = first
        elif outside or places or (raw is not None and parts):
            whole, numbers = False, None
        else:
            whole, numbers = self._inside(name, kind, length, raw, parts)
        if not whole:
            raise RefusedError(
                f"the constant {name[:60]!a}, whose numbers are not where or as many as they should be",
                f"{length} bytes of it, in the graph or in {self._weights}",
            )
        return name, Value(True, constant=kind, dims=tuple(dims), numbers=numbers)

    def _inside(
        self, name: str, kind: int, length: int, raw: bytes | None, parts: list[Any]
    ) -> tuple[bool, NDArray[Any] | None]:
        """Return (True if the graph holds exactly the constant's numbers, the numbers of an integer type or None)."""
        if raw is not None:
            # a bool of value 2 is undefined in C++: it may act as true and as false
            if kind == 9 and raw.strip(b"\0\1"):
                raise RefusedError(f"the constant {name[:60]!a} with other truth values than 0 and 1", "those")
            whole = len(raw) == length
            return whole, np.frombuffer(raw, f"<{DTYPES[kind]}") if whole and kind in DTYPES else None
        if any(number != FIELDS.get(kind, 5) for number, _ in parts):
            return False, None
        if kind in (1, 11):
            sizes = [len(value) for _, value in parts]
            return sum(sizes) == length and not any(size % ITEMS[kind] for size in sizes), None
        several = [varints(value) if isinstance(value, bytes) else [signed(value)] for _, value in parts]
        listed = [number for part in several for number in part]
        low, high = RANGES[kind]
        if any(not low <= number < high for number in listed):
            raise RefusedError(f"the constant {name[:60]!a} with numbers beyond its type", f"{low} to {high - 1}")
        whole = len(listed) * ITEMS[kind] == length
        return whole, np.array(listed, np.int64) if kind in DTYPES else None

    def _outside(self, places: list[bytes], length: int) -> int | None:
        """Return the offset of a constant in the weight file, in bytes; None if its range is not in that file."""
        facts = dict[str, str]()
        for entry in places:
            if entry not in self._pairs:
                pair: dict[int, Any] = dict(_fields(entry, PAIR, "a place"))
                self._pairs[entry] = self._names[pair.get(1, b"")], self._names[pair.get(2, b"")]
            key, text = self._pairs[entry]
            if key in facts:
                return None
            facts[key] = text
        plain = all(
            facts[key].isascii() and facts[key].isdigit() and len(facts[key]) < 20 for key in facts if key != "location"
        )
        if facts.keys() != {"location", "offset", "length"} or not plain or facts["location"] != self._weights:
            return None
        first = int(facts["offset"])
        return first if int(facts["length"]) == length and first + length <= self._weight_bytes else None


def _returned(op: str, form: Form, inputs: Sequence[Value | None], attributes: Mapping[str, Any]) -> Value:
    """Return the facts about a node's results; all results of a node have the same facts.

    Raises:
        FedSizeError: a size depends on the model's input data.
        RefusedError: the node would crash ONNX Runtime, or make it read beyond its arrays.
    """
    there = [value for value in inputs if value is not None]
    if op == "Constant":
        return _constant(attributes)
    for place in form.sizes:
        value = inputs[place] if place < len(inputs) else None
        if value is not None and not value.fixed:
            raise FedSizeError("a size that is computed from data", "one that follows from constants and sizes")
    if op in ("Div", "Mod"):
        _check_divisor(there[1])
    if op == "MatMulNBits":
        _check_blocks(there, attributes)
    if op in ("Conv", "ConvTranspose") and len(there) > 2:
        _check_bias(op, there[1].dims, there[2].dims, attributes)
    # if the weights of a MatMulInteger are computed and an Add follows, ONNX Runtime up to 1.25 reads beyond the bias
    if op == "MatMulInteger" and not there[1].constant:
        raise RefusedError("weights that are computed", "a constant")
    if op == "NonZero" and not there[0].fixed:  # the size of the result is the number of values other than 0
        raise FedSizeError("a NonZero of data", "one of constants and sizes")
    fixed = all(value.fixed for value in there) or op in ("Shape", "Size")
    if op in ("Cast", "DequantizeLinear", "Identity"):
        return Value(fixed, dims=there[0].dims, numbers=there[0].numbers if op in SAME else None)
    return Value(fixed, numbers=there[0].numbers if op in SAME else None)


def _constant(attributes: Mapping[str, Any]) -> Value:
    if len(attributes) != 1:
        raise RefusedError("a constant of several values or none", "one")
    ((name, value),) = attributes.items()
    if isinstance(value, Value):
        return value
    whole = name.startswith("value_int")
    listed = value if isinstance(value, list) else [value]
    dims = (len(listed),) if isinstance(value, list) else ()
    return Value(True, constant=7 if whole else 1, dims=dims, numbers=np.array(listed, np.int64) if whole else None)


def _check_divisor(value: Value) -> None:
    """Refuse the integer divisors 0 and -1, which crash ONNX Runtime: -2^31 / -1 does not fit into 32 bits."""
    if value.constant in DTYPES and value.numbers is None:
        raise RefusedError("whole numbers that are divided by some in the weight file", "a constant in the graph")
    if value.numbers is not None and np.isin(value.numbers.astype(np.int64), (0, -1)).any():
        raise RefusedError("whole numbers that are divided by 0 or -1", "a number above 0")


def _check_bias(op: str, weight: tuple[int, ...], bias: tuple[int, ...], attributes: Mapping[str, Any]) -> None:
    """Refuse a bias that does not have one number per channel: ONNX Runtime up to 1.25 reads beyond a shorter bias."""
    channels = weight[1:2] if op == "ConvTranspose" else weight[:1]
    if not channels or bias != (channels[0] * (int(attributes.get("group", 1)) if op == "ConvTranspose" else 1),):
        raise RefusedError(f"a bias of {bias} for weights of {weight}", "constants, with a number for each channel")


def _check_blocks(values: Sequence[Value], attributes: Mapping[str, Any]) -> None:
    """Check that weights in blocks have the exporter's sizes: with other sizes ONNX Runtime reads beyond the arrays.

    E.g. a matrix 64 × 8 (K × N) of 4 bits in blocks of 32 has 256 bytes, 16 scales and 8 bytes of zero points.
    """
    inner, columns, bits, block = (int(attributes[name]) for name in ("K", "N", "bits", "block_size"))
    blocks = -(-inner // block)
    held = [(1, columns * blocks * (block * bits // 8)), (4, columns * blocks), (1, columns * -(-blocks * bits // 8))]
    sizes = [(ITEMS[value.constant] if value.constant else 0, math.prod(value.dims)) for value in values[1:]]
    if min(inner, columns) < 1 or sizes != held[: len(sizes)]:
        raise RefusedError(f"weights of {sizes} (bytes, numbers) for {inner} to {columns}", f"{held}, constants")
