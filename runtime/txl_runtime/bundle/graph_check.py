"""A graph, checked before an engine sees it: what it may hold, and how much memory and work it can ask for.

An ONNX file is nested protocol buffers. Operators and attributes are those of a closed list (`operators`), parameters
lie in the bundle's weight file, and how large every value can be follows from the graph's inputs (`graph_sizes`). Time
is linear in the file's size and in the number of values, and so is memory. What else may be wrong, the engine says.
"""

from __future__ import annotations

import marshal
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from txl_runtime.bundle import graph_sizes  # noqa: F401 - enters its rules
from txl_runtime.bundle.graph_values import RULES, SMALL, Node, Value, sized
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.operators import IR_VERSIONS, MICROSOFT, OPERATORS, OPSETS, PLAIN
from txl_runtime.bundle.protobuf import RefusedError, Table, fields, signed, table, varints
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BundleError

MODEL = table("1v 2b 3b 4b 5v 6b 7b", "8b 14b")
GRAPH = table("2b 10b", "1b 5b 11b 12b 13b")
NODE = table("3b 4b 6b 7b", "1b 2b 5b")
ATTRIBUTE = table("1b 2f 3v 4b 5b 13b 20v", "7b 7f 8b 8v")
TENSOR = table("2v 8b 9b 12b 14v", "1b 1v 4b 4f 5b 5v 7b 7v 10b 10d 11b 11v 13b")
VALUE, TYPE, TENSOR_TYPE, SHAPE = table("1b 2b 3b"), table("1b 6b"), table("1v 2b"), table("", "1b")
SIZE, PAIR, OPSET = table("1v 2b 3b"), table("1b 2b"), table("1b 2v")
KINDS = {"b": (2, 3), "f": (1, 2), "i": (2, 3), "s": (3, 4), "t": (4, 5), "F": (6, 7), "I": (7, 8)}
"""Of an attribute's type: ONNX's number, and the field that holds it."""
ITEMS = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
"""Bytes of one number of each type that a tensor may have, by ONNX's numbers."""
FIELDS = {1: 4, 11: 10, 7: 7, 12: 11, 13: 11}
"""The field that holds a tensor's numbers where they are no raw bytes, of types whose numbers are not in field 5."""
NODES = 2**17
VALUES, VALUES_EACH, WORK, WORK_EACH = 2**27, 64, 2**34, 2**12
"""All values of a step together have at most VALUES numbers and VALUES_EACH for each byte of weights and each number
that goes in; sums have at most WORK terms, and WORK_EACH likewise for each position of the largest input."""


def check_graph(
    data: bytes, where: str, program: Program, manifest: Manifest, advice: str = "export the model again"
) -> None:
    """Check a program's graph.

    Args:
        data: the file.
        where: its path, for the message.
        program: whose graph it is.
        manifest: of its bundle, which says how large inputs can be, and what file the parameters lie in.
        advice: what to do about a graph that is refused.

    Raises:
        BundleError: it may not be given to an engine.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for user in (program, *(other for other in manifest.programs if other.file == program.file)):
        for name, dims in _most(user, manifest).items():
            sizes[name] = tuple(map(max, dims, sizes.get(name, dims)))
    weights = manifest.files[manifest.weights].size if manifest.weights in manifest.files else 0
    try:
        Walk(data, program.kind, sizes, manifest.weights, weights)
    except RefusedError as refused:
        found, expected = refused.args
        raise BundleError(f"{where}: has {found}, expected {expected}; {advice}") from None


def _most(program: Program, manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The sizes of a program's inputs, the largest where they are open: a state's rows, or all rows of a segment."""
    states = {state.input: state.shape for state in manifest.states_of(program.update)}
    rows = max(2, manifest.batch_size * max(manifest.segment_lengths))
    return {
        spec.name: tuple(
            size if isinstance(size, int) else states.get(spec.name, (rows,) * len(spec.shape))[axis]
            for axis, size in enumerate(spec.shape)
        )
        for spec in program.inputs
    }


_fields: Callable[[bytes, Table, str], list[tuple[int, Any]]] = (
    fields  # a tag says whether a value is a number or bytes
)


class Names(dict[bytes, str]):
    """Text by its bytes, each of which is read once."""

    def __missing__(self, value: bytes) -> str:
        try:
            self[value] = found = value.decode()
        except UnicodeDecodeError:
            raise RefusedError(f"the name {value[:40]!a}, which is no UTF-8", "text") from None
        return found


class Walk:
    """One pass over a file; `values` says of every value, by name, what is known of it."""

    def __init__(self, data: bytes, kind: str, sizes: Mapping[str, tuple[int, ...]], weights: str, size: int) -> None:
        self._kind, self._sizes, self._weights, self._weight_bytes = kind, sizes, weights, size
        self._types: dict[bytes, tuple[int, tuple[int | str, ...]]] = {}
        self._attributes: dict[bytes, tuple[str, int, Any]] = {}
        self._pairs: dict[bytes, tuple[str, str]] = {}
        self._alike: dict[tuple[Any, ...], tuple[list[Value], int, int, bool]] = {}
        self._same: dict[bytes, Value] = {}
        self._names = Names()
        self._operators = dict[str, dict[str, tuple[str, dict[str, str]]]]()
        self.values: dict[str, Value] = {}
        if kind == "step":
            from txl_runtime.bundle import module_sizes  # noqa: F401 - enters its rules
        body = b""
        for number, value in _fields(data, MODEL, "the model"):
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

    def _opset(self, entry: dict[int, Any]) -> None:
        domain, version = self._names[entry.get(1, b"")], entry.get(2, 0)
        known = OPSETS if domain == "" else range(1, 2)
        if domain not in OPERATORS or version not in known or domain in self._operators:
            raise RefusedError(
                f"operators of {domain[:40]!a} in version {version}, or twice",
                f"ONNX's own in {OPSETS[0]} to {OPSETS[-1]}, and {MICROSOFT} in 1",
            )
        self._operators[domain] = OPERATORS[domain]

    def _walk(self, body: bytes) -> None:
        parts: dict[int, list[Any]] = {number: [] for number in (1, 2, 5, 10, 11, 12, 13)}
        for number, value in _fields(body, GRAPH, "the graph"):
            parts[number].append(value)
        for tensor in parts[5]:
            name, value = self._tensor(tensor)
            self._define(name, self._one(value))
        moved, longest = self._weight_bytes, 1
        for entry in parts[11]:
            name, kind = self._value(entry)
            value = self._one(self._input(name, kind[1]))
            self._define(name, value)
            moved, longest = moved + value.most, max(longest, math.prod(value.dims[:2]))
        declared = dict(map(self._value, parts[13]))
        returned = dict(map(self._value, parts[12]))
        if len(returned) != len(parts[12]) or len(declared) != len(parts[13]):
            raise RefusedError("a value that is declared twice", "each once")
        declared.update(returned)
        total = work = fixed = fixed_work = 0
        most = VALUES + VALUES_EACH * moved
        most_work = WORK + WORK_EACH * moved * longest
        if len(parts[1]) > NODES:
            raise RefusedError(f"{len(parts[1])} nodes", f"at most {NODES}")
        for entry in parts[1]:
            total_here, work_here, always = self._node(entry, declared)
            total, work = total + total_here, work + work_here
            if always:
                fixed, fixed_work = fixed + total_here, fixed_work + work_here
            if total > most or fixed > VALUES // 8 + 4 * self._weight_bytes:
                raise RefusedError(f"values of {total} numbers", f"at most {most}, of which few are always the same")
            if work > most_work or fixed_work > WORK // 16 + 4 * self._weight_bytes:
                raise RefusedError(f"sums of {work} terms", f"at most {most_work}, of which few are always the same")
        if missing := returned.keys() - self.values.keys():
            raise RefusedError(f"an output {min(missing)[:60]!a} that no node computes", "all of them computed")

    def _define(self, name: str, value: Value) -> None:
        if name in self.values or not name:
            raise RefusedError(f"two values called {name[:60]!a}, or one without a name", "a name for each")
        self.values[name] = value

    def _one(self, value: Value) -> Value:
        """The same object for values of which the same is known. Bytes are the keys: numbers that a file has can be
        chosen so that a table of them takes long.
        """
        return self._same.setdefault(marshal.dumps(tuple(value), 2), value)

    def _value(self, entry: bytes) -> tuple[str, tuple[int, tuple[int | str, ...]]]:
        """Name, type and sizes of a declared value; a size is a number, a name, or "" where it is left open."""
        parts: dict[int, Any] = dict(_fields(entry, VALUE, "a value"))
        kind = parts.get(2, b"")
        if kind not in self._types:
            self._types[kind] = self._type(kind)
        return self._names[parts.get(1, b"")], self._types[kind]

    def _type(self, kind: bytes) -> tuple[int, tuple[int | str, ...]]:
        tensor: dict[int, Any] = dict(_fields(dict(_fields(kind, TYPE, "a type")).get(1, b""), TENSOR_TYPE, "a type"))
        sizes: list[int | str] = []
        for _, entry in _fields(tensor.get(2, b""), SHAPE, "a shape"):
            size: dict[int, Any] = dict(_fields(entry, SIZE, "a size"))
            if 1 in size and 2 in size:
                raise RefusedError("a size with a number and a name", "one of them")
            sizes.append(signed(size[1]) if 1 in size else self._names[size.get(2, b"")])
        if tensor.get(1) not in ITEMS or 2 not in tensor:
            raise RefusedError(f"a value of type {tensor.get(1)}, or without axes", "a tensor of numbers")
        return tensor[1], tuple(sizes)

    def _input(self, name: str, declared: tuple[int | str, ...]) -> Value:
        most = self._sizes.get(name)
        if most is None or len(most) != len(declared):
            raise RefusedError(f"{name[:60]} of {len(declared)} axes among its inputs", "those of the manifest")
        exact = all(isinstance(size, int) for size in declared)
        return sized([size if isinstance(size, int) else most[i] for i, size in enumerate(declared)], exact)

    def _node(self, entry: bytes, declared: Mapping[str, tuple[int, tuple[int | str, ...]]]) -> tuple[int, int, bool]:
        """Enter what a node returns; how many numbers, how much work, and whether it is always the same."""
        names, values = self._names, self.values
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
            elif number == 2:
                outputs.append(text)
            elif number == 4:
                op = text
            elif number == 7:
                domain = text
        # A model's layers are alike: what has been found of one node is true of all that differ in names alone.
        key = (domain, op, len(outputs), *attributes, *map(id, inputs))
        if key not in self._alike:
            self._alike[key] = self._returned(domain, op, attributes, inputs, outputs)
        results, total, work, always = self._alike[key]
        for name, found in zip(outputs, results, strict=True):
            if name:
                self._define(name, found)
                total += found.most
                if name in declared and declared[name][1] != found.dims:
                    self._agree(name, found, declared[name][1])
        return total, work + total, always

    def _returned(
        self, domain: str, op: str, attributes: list[bytes], inputs: list[Value | None], outputs: list[str]
    ) -> tuple[list[Value], int, int, bool]:
        """What a node returns, what memory and work it takes beside that, and whether it is always the same."""
        known = self._operators.get(domain, {}).get(op)
        if known is None or (self._kind != "step" and op not in PLAIN):
            name = f"{domain}.{op}" if domain else op
            raise RefusedError(f"the operator {name[:60]!a}", "one of the operators that graphs may have")
        rule, allowed = RULES[known[0]], known[1]
        given = dict[str, Any]()
        for entry in attributes:
            if entry not in self._attributes:
                self._attributes[entry] = self._attribute(entry)
            name, type_, value = self._attributes[entry]
            if name in given or name not in allowed or KINDS[allowed[name]][0] != type_:
                raise RefusedError(f"the attribute {name[:60]!a} of {op}", "those that are its own, each once")
            if allowed[name] == "b" and value not in (0, 1):  # what else means yes differs among engines' operators
                raise RefusedError(f"{value} as {name} of {op}", "0 or 1")
            given[name] = value
        node = Node(op, inputs, given, len(outputs))
        try:
            found = rule(node)
        except RefusedError as refused:
            raise RefusedError(f"{refused.args[0]} at {op} {ascii(outputs[:1])[:60]}", refused.args[1]) from None
        except (ArithmeticError, LookupError, TypeError, ValueError):
            raise RefusedError(f"{op} {ascii(outputs[:1])[:60]} of values that it cannot take", "some it can") from None
        results = found if isinstance(found, list) else [found] * len(outputs)
        if len(results) < len(outputs):
            raise RefusedError(f"{op} with {len(outputs)} results", f"at most {len(results)}")
        always = all(value is None or value.fixed for value in inputs) or (op in ("Shape", "Size") and node.exact)
        results = [self._one(value._replace(fixed=always, loose=node.loose)) for value in results[: len(outputs)]]
        work = node.work + sum(value.most for value in inputs if value is not None)
        return results, node.memory, work, always

    def _agree(self, name: str, value: Value, declared: tuple[int | str, ...]) -> None:
        """A declared size has to be the one that was found, or at most the bound."""
        fits = len(declared) == len(value.dims) and all(
            not isinstance(size, int) or size == found or (not value.exact and 0 <= size <= found)
            for size, found in zip(declared, value.dims, strict=False)
        )
        if not fits:
            found = f"{list(value.dims)}{'' if value.exact else ' at most'}"
            raise RefusedError(f"{name[:60]!a} declared as {ascii(list(declared))[:60]}", found)

    def _attribute(self, entry: bytes) -> tuple[str, int, Any]:
        """Name, ONNX's number of the type, and the value, which has to be there alone."""
        name, type_, found = "", 0, list[tuple[int, Any]]()
        for number, value in _fields(entry, ATTRIBUTE, "an attribute"):
            if number == 1:
                name = self._names[value]
            elif number == 20:
                type_ = value
            elif number != 13:
                found.append((number, value))
        field = next((field for kind, field in KINDS.values() if kind == type_), 0)
        several = type_ in (6, 7)
        if any(number != field for number, _ in found) or (len(found) != 1 and not several):
            raise RefusedError(f"the attribute {name[:60]!a} of type {type_}", "a value of its type")
        if type_ == 7:
            whole = [varints(value) if isinstance(value, bytes) else [signed(value)] for _, value in found]
            return name, type_, [number for numbers in whole for number in numbers]
        if type_ == 6:
            return name, type_, [0.0] * (sum(len(value) for _, value in found) // 4)
        value = found[0][1]
        if type_ == 2:
            return name, type_, signed(value)
        return name, type_, self._tensor(value)[1] if type_ == 4 else value

    def _tensor(self, entry: bytes) -> tuple[str, Value]:
        """Name and sizes of a constant, which lies in the graph whole, or in the weight file."""
        name, kind, dims, places, outside, raw, numbers = "", 0, list[int](), list[Any](), 0, None, list[Any]()
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
                numbers.append((number, value))
        if kind not in ITEMS:
            raise RefusedError(f"a constant of type {kind}", "numbers")
        found = sized(dims)
        length = found.most * ITEMS[kind]
        whole = outside == 1 and raw is None and not numbers and self._outside(places, length)
        content: tuple[tuple[int, int], ...] | None = None
        scales = (
            struct.unpack(f"<{found.most}f", raw)
            if kind == 1 and found.most <= 16 and raw and len(raw) == length
            else ()
        )
        if not whole and not (outside or places or (raw is not None and numbers)):
            if raw is not None:
                whole = len(raw) == length
                if kind in (6, 7) and found.most <= SMALL:
                    step = ITEMS[kind]
                    raws = [raw[i : i + step] for i in range(0, len(raw), step)]
                    content = tuple((n, n) for n in (int.from_bytes(part, "little", signed=True) for part in raws))
            elif all(number == FIELDS.get(kind, 5) for number, _ in numbers):
                if kind in (1, 11):
                    whole = sum(len(value) for _, value in numbers) == length
                else:
                    several = [varints(value) if isinstance(value, bytes) else [signed(value)] for _, value in numbers]
                    listed = [number for part in several for number in part]
                    whole = len(listed) == found.most
                    content = tuple((n, n) for n in listed) if kind in (6, 7) and found.most <= SMALL else None
        if not whole:
            raise RefusedError(
                f"the constant {name[:60]!a}, whose numbers are not where or as many as they should be",
                f"{length} bytes of it, in the graph or in {self._weights}",
            )
        return name, found._replace(content=content, fixed=True, scales=scales)

    def _outside(self, places: list[bytes], length: int) -> bool:
        """Whether a constant is a range of the weight file."""
        found = dict[str, str]()
        for entry in places:
            if entry not in self._pairs:
                pair: dict[int, Any] = dict(_fields(entry, PAIR, "a place"))
                self._pairs[entry] = self._names[pair.get(1, b"")], self._names[pair.get(2, b"")]
            key, text = self._pairs[entry]
            if key in found:
                return False
            found[key] = text
        plain = all(
            found[key].isascii() and found[key].isdigit() and len(found[key]) < 20 for key in found if key != "location"
        )
        if found.keys() != {"location", "offset", "length"} or not plain or found["location"] != self._weights:
            return False
        return int(found["length"]) == length and int(found["offset"]) + length <= self._weight_bytes
