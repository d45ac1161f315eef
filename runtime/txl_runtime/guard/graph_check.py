"""A graph, checked before an engine sees it: what it may hold, and how much memory and work it can ask for.

An ONNX file is nested protocol buffers. Operators and attributes are those of a closed list (`forms`), parameters
lie in the bundle's weight file, and how large every value can be follows from the graph's inputs (`plain_sizes`). Time
is linear in the file's size and in the number of values, and so is memory. What else may be wrong, the engine says.
"""

from __future__ import annotations

import marshal
import os
import struct
from collections.abc import Callable, Container, Mapping
from typing import Any

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BundleError, UsageError
from txl_runtime.guard import module_sizes, plain_sizes  # noqa: F401 - they enter their rules
from txl_runtime.guard.forms import FORMS, IR_VERSIONS, MICROSOFT, OPSETS, PLAIN, Form
from txl_runtime.guard.lives import Lives
from txl_runtime.guard.protobuf import RefusedError, Table, fields, signed, table, varints
from txl_runtime.guard.values import ITEMS, RULES, SLOW, SMALL, Node, Value, sized

MODEL = table("1v 2b 3b 4b 5v 6b 7b", "8b 14b")
GRAPH = table("2b 10b", "1b 5b 11b 12b 13b")
NODE = table("3b 4b 6b 7b", "1b 2b 5b")
ATTRIBUTE = table("1b 2f 3v 4b 5b 13b 20v", "7b 7f 8b 8v")
TENSOR = table("2v 8b 9b 12b 14v", "1b 1v 4b 4f 5b 5v 7b 7v 10b 10d 11b 11v 13b")
VALUE, TYPE, TENSOR_TYPE, SHAPE = table("1b 2b 3b"), table("1b 6b"), table("1v 2b"), table("", "1b")
SIZE, PAIR, OPSET = table("1v 2b 3b"), table("1b 2b"), table("1b 2v")
KINDS = {"b": (2, 3), "f": (1, 2), "i": (2, 3), "s": (3, 4), "t": (4, 5), "F": (6, 7), "I": (7, 8)}
"""Of an attribute's type: ONNX's number, and the field that holds it."""
FIELDS = {1: 4, 11: 10, 7: 7, 12: 11, 13: 11}
"""The field that holds a tensor's numbers where they are no raw bytes, of types whose numbers are not in field 5."""
RANGES = {2: (0, 2**8), 3: (-(2**7), 2**7), 4: (0, 2**16), 5: (-(2**15), 2**15), 6: (-(2**31), 2**31), 9: (0, 2)}
RANGES |= {10: (0, 2**16), 16: (0, 2**16), 7: (-(2**63), 2**63), 12: (0, 2**32), 13: (-(2**63), 2**63)}
"""From where to where the numbers of a type go that are written as whole ones of 64 bits; the rest is cut off by one
reader and not by another. All 64 bits are a number of types 7 and 13."""
WIDE = frozenset(("ArgMax", "ArgMin", "NonZero", "Shape", "Size", "TopK"))
"""What returns numbers of 8 bytes."""
SOURCE = {"CastLike": 1, "OneHot": 2, "Where": 1}
"""Which input has the type of what is returned, where it is not the first."""
NODES, SIDES, OPENING = 2**14, 2**10, 2**24
"""Nodes, and a node's inputs or results; nodes times the values that there are at once and those of different sizes,
which is what ONNX Runtime's opening takes time for."""
BASE, EACH = 2**29, 64
"""Bytes that a step may take without a budget: BASE, and EACH for each byte of weights."""
WORK, WORK_EACH = 2**34, 2**7
"""Products that a step may sum: WORK, and WORK_EACH for each byte that it may take beside BASE."""


class Budget:
    """What a step of a bundle may take, all of its programs together.

    Attributes:
        weights: bytes of the weight file.
        most: bytes; unless they are given, those that the environment says, or else BASE and EACH.
        held: the arrays that a step is given and that it returns, by name and sizes: programs share what is alike.
        taken: bytes of these, and of what there is at once within each graph.
    """

    def __init__(self, weights: int, most: int | None = None) -> None:
        asked = os.environ.get("TXL_DEPLOY_BUDGET", "")
        if (
            most is None
            and asked
            and not (asked.isascii() and asked.isdecimal() and asked.strip("0") and len(asked) < 20)
        ):
            raise UsageError(f"TXL_DEPLOY_BUDGET is {asked[:40]!a}, expected the bytes that a step may take; unset it")
        self.weights, self.most = weights, most or int(asked or BASE + EACH * weights)
        self.held, self.taken = set[tuple[str, tuple[int, ...]]](), 0

    @property
    def work(self) -> int:
        """Products that each graph may sum."""
        return WORK + WORK_EACH * max(self.most - BASE, 0)

    def take(self, size: int, work: int) -> None:
        """Enter what more a step takes.

        Raises:
            DearError: it is more than it may.
        """
        self.taken += size
        needed = max(self.taken, BASE + -(-(work - WORK) // WORK_EACH) if work > self.work else 0)
        if needed > self.most:
            raise DearError(
                f"steps of {self.taken} bytes and {work} products", f"at most {self.most} and {self.work}", needed
            )


class DearError(RefusedError):
    """A step takes more than it may; the third part is the budget with which it may."""


def check_graph(
    data: bytes,
    where: str,
    program: Program,
    manifest: Manifest,
    advice: str = "export the model again",
    budget: Budget | None = None,
) -> Walk:
    """Check a program's graph.

    Args:
        data: the file.
        where: its path, for the message.
        program: whose graph it is.
        manifest: of its bundle, which says how large inputs can be, and what file the parameters lie in.
        advice: what to do about a graph that is refused.
        budget: what its bundle's steps may take; this graph's part is entered.

    Returns:
        What was found in it.

    Raises:
        BundleError: it may not be given to an engine.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for user in (program, *(other for other in manifest.programs if other.file == program.file)):
        for name, dims in _most(user, manifest).items():
            sizes[name] = tuple(map(max, dims, sizes.get(name, dims)))
    budget = budget or Budget(manifest.weight_bytes)
    try:
        walk = Walk(data, program.kind, sizes, manifest.weights, budget)
        _check_opset(imported_opset(data), program, manifest)
        rows = any("rows" in spec.shape for spec in program.inputs)
        check_positions(walk, data, program.kind, 0 if rows else 1, manifest.weights, budget)
        return walk
    except RefusedError as refused:
        found, expected, *needed = refused.args
        if needed:
            advice = f"if you trust it, load it with budget={needed[0]}, or with TXL_DEPLOY_BUDGET={needed[0]} set"
        raise BundleError(f"{where}: has {found}, expected {expected}; {advice}") from None


def check_positions(walk: Walk, data: bytes, kind: str, least: int, weights: str, budget: Budget) -> None:
    """Refuse what ends ONNX Runtime's process: a normalization over no positions, such as one of [2, 8, 0].

    Args:
        walk: of the file, which has passed.
        data, kind, weights, budget: see `Walk`.
        least: what is open may be as small: with one sequence, an honest graph has all its other sizes.
    """
    if not any(op == "InstanceNormalization" for op, _, _ in walk.nodes):
        return
    small = Walk(data, kind, walk.sizes, weights, Budget(budget.weights, budget.most), least)
    for op, read, _ in small.nodes:
        value = small.values.get(read[0]) if op == "InstanceNormalization" else None
        if value is not None and (not value.exact or 0 in value.dims[2:]):
            raise RefusedError(f"{op} of {read[0][:60]!a}, which may have no positions", "some positions always")


def imported_opset(data: bytes) -> dict[str, int]:
    """The versions of operators that a graph imports, by domain, as `Program.opset` says them.

    Raises:
        RefusedError: the file is no graph.
    """
    entries = (value for number, value in _fields(data, MODEL, "the model") if number == 8)
    found = (dict(_fields(entry, OPSET, "an opset")) for entry in entries)
    return {Names()[entry.get(1, b"")] or "ai.onnx": entry.get(2, 0) for entry in found}


def _check_opset(found: dict[str, int], program: Program, manifest: Manifest) -> None:
    """Hold what the graph imports against what its programs say of it."""
    for user in (program, *(other for other in manifest.programs if other.file == program.file)):
        if user.opset not in ({}, found):
            expected = f"{ascii(user.opset)[:80]}, which the manifest says of {user.name[:60]!a}"
            raise RefusedError(f"operators of {found}", expected)


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
    """One pass over a file. What its inputs leave open is at most `sizes`, or with `least` is exactly that.

    Attributes:
        values: what is known of every value, by name.
        model, body: the fields of the file and of the graph in it, by their numbers, in their order.
        nodes: of every node its operator, and the names of what it reads and what it returns.
        returned: the names of the graph's outputs.
    """

    def __init__(
        self,
        data: bytes,
        kind: str,
        sizes: Mapping[str, tuple[int, ...]],
        weights: str,
        budget: Budget,
        least: int | None = None,
    ) -> None:
        self._least, self.sizes = least, sizes
        self._kind, self._weights, self._budget = kind, weights, budget
        self._types: dict[bytes, tuple[int, tuple[int | str, ...]]] = {}
        self._attributes: dict[bytes, tuple[str, int, Any]] = {}
        self._pairs: dict[bytes, tuple[str, str]] = {}
        self._alike: dict[tuple[Any, ...], tuple[list[Value], int, int, bool]] = {}
        self._made: dict[str, int] = {}
        self._images, self._shapes = False, set[bytes]()
        self._lives, self._size, self._known = Lives(), len(data), 0
        self._same: dict[bytes, Value] = {}
        self._names = Names()
        self._operators = dict[str, dict[str, Form]]()
        self.values: dict[str, Value] = {}
        self.nodes: list[tuple[str, list[str], list[str]]] = []
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
            name, value = self._tensor(tensor)
            self._define(name, self._one(value))
        for entry in parts[11]:
            name, kind = self._value(entry)
            value = self._one(self._input(name, kind[1], ITEMS[kind[0]]))
            self._define(name, value)
            self._hold(name, value)
        declared = dict(map(self._value, parts[13]))
        returned = dict(map(self._value, parts[12]))
        if len(returned) != len(parts[12]) or len(declared) != len(parts[13]):
            raise RefusedError("a value that is declared twice", "each once")
        declared.update(returned)
        self.returned = returned.keys()
        budget = self._budget
        work = fixed = fixed_work = 0
        for entry in parts[1]:
            size, work_here, always = self._node(entry, declared, returned)
            work += work_here
            if always:
                fixed, fixed_work = fixed + size, fixed_work + work_here
            if fixed > budget.most // 8 or fixed_work > budget.work // 16:
                raise DearError(
                    f"values of {fixed} bytes, by {fixed_work} products, that are always the same",
                    f"at most {budget.most // 8} and {budget.work // 16}",
                    max(8 * fixed, BASE + -(-(16 * fixed_work - WORK) // WORK_EACH)),
                )
        if missing := returned.keys() - self.values.keys():
            raise RefusedError(f"an output {min(missing)[:60]!a} that no node computes", "all of them computed")
        for name in returned:
            self._hold(name, self.values[name])
        size, many = self._lives.most()
        if len(parts[1]) * (many + len(self._shapes)) > OPENING:
            raise RefusedError(
                f"{len(parts[1])} nodes, {many} values at once and {len(self._shapes)} sizes", "fewer of them"
            )
        budget.take(fixed + size, work)

    def _hold(self, name: str, value: Value) -> None:
        """An array that the runtime keeps for a program, as large as it gets."""
        if (name, value.dims) not in self._budget.held:
            self._budget.held.add((name, value.dims))
            self._budget.taken += value.item * value.most  # told with the rest, so that the message has all of it

    def _define(self, name: str, value: Value) -> None:
        if name in self.values or not name:
            raise RefusedError(f"two values called {name[:60]!a}, or one without a name", "a name for each")
        self.values[name] = value

    def _one(self, value: Value) -> Value:
        """One object for all values of which the same is known.

        The keys of the table are bytes, whose hashes nobody can foresee. A file could choose numbers that all have the
        same hash, and the table would take very long.
        """
        return self._same.setdefault(marshal.dumps(tuple(value), 2), value)

    def _result(self, value: Value, **known: Any) -> Value:
        """What is known of a node's result; how many numbers may be known beside constants follows from the file."""
        self._known += len(value.content or ())
        if self._known > 1024 + self._size // 8:
            known["content"] = None
        self._shapes.add(marshal.dumps(value.dims, 2))  # bytes, for the same reason
        if self._known > 2**16 + self._size:
            raise RefusedError("sizes that are computed of more numbers than the file has bytes", "a few of each")
        return self._one(value._replace(**known))

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
            if isinstance(sizes[-1], int) and sizes[-1] < 0:
                raise RefusedError(f"a size of {sizes[-1]}", "0 or more")
        if tensor.get(1) not in ITEMS or 2 not in tensor:
            raise RefusedError(f"a value of type {tensor.get(1)}, or without axes", "a tensor of numbers")
        return tensor[1], tuple(sizes)

    def _input(self, name: str, declared: tuple[int | str, ...], item: int) -> Value:
        most = self.sizes.get(name)
        if most is None or len(most) != len(declared):
            raise RefusedError(f"{name[:60]} of {len(declared)} axes among its inputs", "those of the manifest")
        least = self._least
        exact = least is not None or all(isinstance(size, int) for size in declared)
        most = most if least is None else (least,) * len(most)
        dims = [size if isinstance(size, int) else most[i] for i, size in enumerate(declared)]
        return sized(dims, exact)._replace(item=item)

    def _node(
        self, entry: bytes, declared: Mapping[str, tuple[int, tuple[int | str, ...]]], returned: Container[str]
    ) -> tuple[int, int, bool]:
        """Enter what a node returns; how many bytes, how much work, and whether it is always the same."""
        names, values, made, reads, read = self._names, self.values, self._made, set[int](), list[str]()
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
                if text in made:
                    reads.add(made[text])
            elif number == 2:
                outputs.append(text)
            elif number == 4:
                op = text
            elif number == 7:
                domain = text
        if max(len(inputs), len(outputs)) > SIDES:
            raise RefusedError(f"a node of {len(inputs)} inputs and {len(outputs)} results", f"at most {SIDES}")
        self.nodes.append((f"{domain}.{op}" if domain else op, read, outputs))
        # A model's layers are alike: what has been found of one node is true of all that differ in names alone. Behind
        # the first image, engines may lay values out in another way.
        key = (self._images, domain, op, len(outputs), *attributes, *map(id, inputs))
        if key not in self._alike:
            self._alike[key] = self._returned(domain, op, attributes, inputs, outputs)
        results, size, work, always = self._alike[key]
        kept = size - sum(
            found.most * found.item for name, found in zip(outputs, results, strict=True) if name in returned
        )
        # What is always the same is there all the time. Sizes may be asked of another value that has the same.
        node = -1 if always else self._lives.add(sorted(reads), kept, len(outputs))
        for name, found in zip(outputs, results, strict=True):
            if name:
                self._define(name, found)
                if not always and op not in ("Shape", "Size"):
                    self._made[name] = node
                if name in declared and declared[name][1] != found.dims:
                    self._agree(name, found, declared[name][1])
        return size, work, always

    def _returned(
        self, domain: str, op: str, attributes: list[bytes], inputs: list[Value | None], outputs: list[str]
    ) -> tuple[list[Value], int, int, bool]:
        """What a node returns, what bytes and work it takes, and whether it is always the same."""
        form = self._operators.get(domain, {}).get(op)
        if form is None or (self._kind != "step" and op not in PLAIN):
            name = f"{domain}.{op}" if domain else op
            raise RefusedError(f"the operator {name[:60]!a}", "one of the operators that graphs may have")
        rule, allowed = RULES[form.rule], form.attributes
        given = dict[str, Any]()
        for entry in attributes:
            if entry not in self._attributes:
                self._attributes[entry] = self._attribute(entry)
            name, type_, value = self._attributes[entry]
            if name in given or name not in allowed or KINDS[allowed[name]][0] != type_:
                raise RefusedError(f"the attribute {name[:60]!a} of {op}", "those that are its own, each once")
            if allowed[name] == "b" and value not in (0, 1):  # what else means yes differs among engines' operators
                raise RefusedError(f"{value} as {name} of {op}", "0 or 1")
            if type_ in (2, 7) and op not in ("Constant", "Shape"):  # what else an engine may cut off
                numbers = value if type_ == 7 else [value]
                if min(numbers, default=0) < -(2**31) or max(numbers, default=0) >= 2**31:
                    raise RefusedError(f"{str(value)[:60]} as {name} of {op}", "numbers of 32 bits")
            given[name] = value
        if problem := form.problem([value is not None for value in inputs], len(outputs), given):
            raise RefusedError(f"{problem[0]} at {op} {ascii(outputs[:1])[:60]}", problem[1])
        node = Node(op, inputs, given, len(outputs))
        try:
            found = rule(node)
        except RefusedError as refused:
            raise RefusedError(f"{refused.args[0]} at {op} {ascii(outputs[:1])[:60]}", refused.args[1]) from None
        except (ArithmeticError, LookupError, TypeError, ValueError):
            raise RefusedError(f"{op} {ascii(outputs[:1])[:60]} of values that it cannot take", "some it can") from None
        results = found if isinstance(found, list) else [found] * len(outputs)
        always = all(value is None or value.fixed for value in inputs) or (op in ("Shape", "Size") and node.exact)
        item = _item(node)
        results = [self._result(value, fixed=always, loose=node.loose, item=item) for value in results[: len(outputs)]]
        self._images = self._images or form.rule in ("conv", "pool")
        numbers = node.memory + sum(self._laid_out(value) for value in results)
        work = node.work + SLOW * (numbers + sum(value.most for value in inputs if value is not None))
        return results, numbers * item, work, always

    def _laid_out(self, value: Value) -> int:
        """Numbers of a value as an engine lays it out: channels of images in blocks of 16."""
        blocks = len(value.dims) == 4 and self._images and value.dims[1]
        return value.most * -(-blocks // 16) * 16 // blocks if blocks else value.most

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
            if any(len(value) % 4 for _, value in found):
                raise RefusedError(f"the attribute {name[:60]!a} with a part of a number", "whole ones")
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
                if kind == 9 and raw.strip(b"\0\1"):  # of which an engine's code makes either, or both
                    raise RefusedError(f"the constant {name[:60]!a} with other truth values than 0 and 1", "those")
                if kind in (6, 7) and found.most <= SMALL:
                    step = ITEMS[kind]
                    raws = [raw[i : i + step] for i in range(0, len(raw), step)]
                    content = tuple((n, n) for n in (int.from_bytes(part, "little", signed=True) for part in raws))
            elif all(number == FIELDS.get(kind, 5) for number, _ in numbers):
                if kind in (1, 11):
                    whole = sum(len(value) for _, value in numbers) == length
                    whole = whole and not any(len(value) % ITEMS[kind] for _, value in numbers)
                else:
                    several = [varints(value) if isinstance(value, bytes) else [signed(value)] for _, value in numbers]
                    listed = [number for part in several for number in part]
                    low, high = RANGES[kind]
                    if any(not low <= number < high for number in listed):
                        raise RefusedError(
                            f"the constant {name[:60]!a} with numbers beyond its type", f"{low} to {high - 1}"
                        )
                    whole = len(listed) == found.most
                    content = tuple((n, n) for n in listed) if kind in (6, 7) and found.most <= SMALL else None
        if not whole:
            raise RefusedError(
                f"the constant {name[:60]!a}, whose numbers are not where or as many as they should be",
                f"{length} bytes of it, in the graph or in {self._weights}",
            )
        return name, found._replace(content=content, fixed=True, scales=scales, item=ITEMS[kind])

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
        return int(found["length"]) == length and int(found["offset"]) + length <= self._budget.weights


def _item(node: Node) -> int:
    """Bytes of one number of what a node returns."""
    to: Any = node.attributes.get("to", node.attributes.get("dtype"))
    value = node.attributes.get("value")
    if node.op in WIDE or "value_int" in node.attributes or "value_ints" in node.attributes:
        return 8
    if node.op == "MaxPool" and node.results > 1:  # the second are places
        return 8
    if to is not None or isinstance(value, Value):
        return max(4, value.item if isinstance(value, Value) else ITEMS[to])
    return 4 if node.op in ("Constant", "ConstantOfShape") else max(4, node.value(SOURCE.get(node.op, 0)).item)
