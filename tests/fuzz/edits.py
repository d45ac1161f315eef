"""Changes of documents that keep them well formed: of JSON, and of protocol buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from fuzz.choices import Choices

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400),
    *(0.5, -0.0, 1e308, 1e-320, [], {}, [[]], [0], [1, 1], [-1], ["B"], ["L"], ["rows"], ["B", "L"], [2**31 - 1] * 4),
    *(
        "",
        "a",
        "B",
        "L",
        "rows",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a/../b",
        "a\\b",
        "engines/x",
        "engines/../x",
        "C:x",
    ),
    *("\0", "\n", "\x1b[31m", "\ud800", "é", "𝄞", "0" * 64, "ring", "rolled", "replace", "exact", "valid", "lockstep"),
    *("independent", "rows", "segment", "float32", "float16", "bfloat16", "int32", "bool", "fp16", "int8", "tokens"),
    *("feature", "fill", "head", "valid", "targets", "logprobs", "hidden", "tail.0", "tail.1", "step", "2.0", "1.0"),
    *("1.1", "3.0", "9" * 5000, "manifest.json", "weights.safetensors", "a" * 300, "nul", "a:b", "x\u202ey"),
)


def edited(document: Any, choices: Choices, most: int = 12) -> Any:
    """A copy of a JSON document with some of its parts replaced, removed, doubled, moved or renamed."""
    found = copy.deepcopy(document)
    for _ in range(choices.number(most)):
        places = list(_places(found))
        if not places or len(places) > 1 << 14:
            break
        holder, key = choices.pick(places)
        match choices.number(9):
            case 0:
                holder[key] = copy.deepcopy(choices.pick(VALUES))
            case 1:
                other, name = choices.pick(places)
                holder[key] = copy.deepcopy(other[name])
            case 2:  # what is of another type is refused at once, so most changes are of the same
                alike = [value for value in VALUES if type(value) is type(holder[key])]
                holder[key] = copy.deepcopy(choices.pick(alike or VALUES))
            case 8:
                alike = [other[name] for other, name in places if type(other[name]) is type(holder[key])]
                holder[key] = copy.deepcopy(choices.pick(alike))
            case 9 if type(holder[key]) is int:
                holder[key] = choices.number(2**32 - 1) - 2**31 if choices.flag() else choices.number(64)
            case 3:
                del holder[key]
            case 4 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case 4:
                holder[choices.text()] = copy.deepcopy(holder[key])
            case 5 if isinstance(holder[key], list):
                plain = not any(isinstance(item, dict | list) for item in holder[key])
                holder[key] = holder[key] * (choices.pick((0, 2, 16, 1000)) if plain else 1 + choices.number(2))
                del holder[key][4096:]
            case 6 if type(holder[key]) is int:
                holder[key] += choices.number(16) - 8
            case 7:
                holder[key] = choices.text()
    return found


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document: what holds it, and its key or index."""
    waiting = [node]
    while waiting:
        holder = waiting.pop()
        items = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        for key, value in items:
            yield holder, key
            if isinstance(value, dict | list):
                waiting.append(value)


# Protocol buffers: a message is a list of [field number, wire type, value]; a value is a number, bytes or a message.
Message = list[list[Any]]
MESSAGES: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 8: "Opset", 14: "Entry", 25: "Function"},
    "Graph": {
        1: "Node",
        5: "Tensor",
        11: "Value",
        12: "Value",
        13: "Value",
        14: "Annotation",
        15: "Sparse",
        16: "Entry",
    },
    "Node": {5: "Attribute", 9: "Entry"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "Sparse", 14: "Type", 15: "Type"},
    "Tensor": {13: "Entry", 3: "Segment"},
    "Value": {2: "Type", 4: "Entry"},
    "Type": {1: "TensorType", 4: "SequenceType", 9: "SequenceType"},
    "TensorType": {2: "Shape"},
    "Shape": {1: "Dimension"},
    "Function": {7: "Node", 9: "Opset", 11: "Attribute"},
    **{name: {} for name in ("Opset", "Entry", "Annotation", "Dimension", "Segment", "SequenceType", "Sparse")},
}
"""The messages of ONNX and which of their fields are messages."""
WORDS = (b"", b"location", b"offset", b"length", b"checksum", b"weights.safetensors", b"../x", b"/etc/passwd", b"Loop")
WORDS += (b"If", b"Scan", b"ConstantOfShape", b"Constant", b"Expand", b"Tile", b"Range", b"com.microsoft", b"ai.onnx")
WORDS += (b"\xff\xfe", b"0", b"-1", b"18446744073709551616", b"body", b"value", b"MatMul", b"Identity", b"tokens")
NUMBERS = (0, 1, 2, 7, 127, 128, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def parsed(data: bytes, kind: str = "Model") -> Message:
    """A message with those of its fields that are messages themselves parsed as well."""
    fields, at, found = MESSAGES[kind], 0, []
    while at < len(data):
        tag, at = _number(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _number(data, at)
        elif wire == 2:
            length, at = _number(data, at)
            value, at = data[at : at + length], at + length
            if number in fields:
                value = parsed(value, fields[number])
        else:
            size = 8 if wire == 1 else 4
            value, at = data[at : at + size], at + size
        found.append([number, wire, value])
    return found


def written(message: Message) -> bytes:
    """The bytes of a message."""
    parts = []
    for number, wire, value in message:
        parts.append(_encoded(number << 3 | wire))
        if wire == 0:
            parts.append(_encoded(value))
        elif wire == 2:
            inner = written(value) if isinstance(value, list) else value
            parts += [_encoded(len(inner)), inner]
        else:
            parts.append(value)
    return b"".join(parts)


def edited_message(message: Message, choices: Choices, most: int = 8) -> Message:
    """A copy with some of its fields, at any depth, replaced, removed, doubled, moved or renumbered."""
    found = _copied(message)
    for _ in range(choices.number(most)):
        holders = list(_holders(found))
        if len(holders) > 4000:
            break
        holder = choices.pick(holders)
        if not holder:
            holder.append([choices.number(25), 0, choices.pick(NUMBERS)])
            continue
        place = choices.number(len(holder) - 1)
        field = holder[place]
        match choices.number(8):
            case 0 if field[1] == 0:
                field[2] = choices.pick(NUMBERS)
            case 0 | 1 if isinstance(field[2], bytes) and field[1] == 2:
                field[2] = choices.pick(WORDS) if choices.flag() else choices.some()
            case 2:
                del holder[place]
            case 3:
                holder.insert(place, *_copied([field]))
            case 4:
                other = choices.pick(holders)
                holder += _copied([choices.pick(other)]) if other and other is not holder else [[1, 2, b"x"]]
            case 5:
                field[0] = choices.number(31)
            case 6:
                holder.append([choices.number(25), 0, choices.pick(NUMBERS)])
            case 7:
                holder.append([choices.number(25), 2, choices.pick(WORDS)])
            case 8 if field[1] == 0:
                field[2] = (field[2] + choices.number(16) - 8) % 2**64
            case _:
                pass
    return found


def _copied(message: Message) -> Message:
    return [[number, wire, _copied(value) if isinstance(value, list) else value] for number, wire, value in message]


def _holders(message: Message) -> Iterator[Message]:
    waiting = [message]
    while waiting:
        holder = waiting.pop()
        yield holder
        waiting += [value for _, _, value in holder if isinstance(value, list)]


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


@lru_cache(1 << 14)
def _encoded(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)
