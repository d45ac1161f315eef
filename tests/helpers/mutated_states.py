"""Files of saved states with one thing wrong, drawn at random: metadata, header, offsets, types, values, bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

ODD_NUMBERS = (-1, 0, 1, 7, 2**31, 2**62, 2**63, 2**70, 10**30, 0.5, None, "4", [], True)
DTYPES = ("BF16", "F8_E4M3", "F8_E5M2", "F4", "F64", "F16", "I64", "I8", "U64", "BOOL", "C64", "", "f32", None, 7)
NAMES = ("fill", "head", "layers.00.key", "layers.99.key", "", "\0", "\ud800", "__metadata__", "x" * 5000, "../x")


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors' bytes of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Any, data: bytes, length: int | None = None) -> bytes:
    """A file of them, whose first number may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return int(len(text) if length is None else length).to_bytes(8, "little") + text + data


def mutated(data: bytes, draws: np.random.Generator) -> bytes:
    """A file with one thing wrong, or several."""
    header, body = split(data)
    length = None
    for _ in range(int(draws.integers(1, 3))):
        header, body, length = _changed(header, body, length, draws)
    return joined(header, body, length)


def _changed(header: Any, body: bytes, length: int | None, draws: np.random.Generator) -> tuple[Any, bytes, int | None]:
    def one(values: Any) -> Any:
        values = list(values)
        return values[int(draws.integers(len(values)))]

    entries = header if isinstance(header, dict) else {}
    names = [name for name, entry in entries.items() if isinstance(entry, dict) and "shape" in entry]
    kind = int(draws.integers(16)) if names else 0
    if kind == 0:  # bytes anywhere
        raw = bytearray(joined(header, body, length))
        for _ in range(int(draws.integers(1, 9))):
            raw[int(draws.integers(len(raw)))] = int(draws.integers(256))
        size = min(int.from_bytes(raw[:8], "little"), len(raw) - 8)
        return bytes(raw[8 : 8 + size]), bytes(raw[8 + size :]), int.from_bytes(raw[:8], "little")
    name = one(names)
    entry = dict(header[name])
    changed = {**header, name: entry}
    if kind == 1:
        entry["dtype"] = one(DTYPES)
    elif kind == 2:
        shape = list(entry["shape"] if isinstance(entry["shape"], list) else []) or [1]
        shape[int(draws.integers(len(shape)))] = one(ODD_NUMBERS)
        entry["shape"] = shape
    elif kind == 3:
        entry["shape"] = one([[], [0], [1] * 70, [3, 5], None, "x", {}, [0, 2**61, 2**61]])
    elif kind == 4:
        offsets = list(entry["data_offsets"] or (0, 0))
        offsets[int(draws.integers(2))] = one((*ODD_NUMBERS, int(draws.integers(len(body) + 9))))
        entry["data_offsets"] = offsets
    elif kind == 5:
        changed.pop(name)
    elif kind == 6:
        changed[one(NAMES)] = one([entry, {}, None, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}])
    elif kind == 7:  # another name for it
        changed = {one(NAMES) if key == name else key: value for key, value in header.items()}
    elif kind == 8:
        known = header.get("__metadata__")
        facts = dict(known) if isinstance(known, dict) else {}
        facts[one(("format", "model_id", "batch_size", "x"))] = one(
            ("", "1", "0", "-1", "999999", "9" * 400, None, 3, [])
        )
        changed["__metadata__"] = facts
    elif kind == 9:
        changed["__metadata__"] = one((None, [], "x", {}, {"format": "txl-deploy.state/2", "batch_size": "3"}))
    elif kind == 10:
        body = body[: int(draws.integers(len(body) + 1))]
    elif kind == 11:
        body += bytes(int(draws.integers(1, 64)))
    elif kind == 12:
        return header, body, int(one((0, 1, 2**20, 2**27, 2**63, 2**64 - 1, len(body))))
    elif kind == 13:  # odd values: huge counts, NaN
        raw, (first, last) = bytearray(body), entry["data_offsets"]
        for place in range(len(raw))[first:last] if isinstance(first, int) and isinstance(last, int) else ():
            raw[place] = one((0, 1, 2, 127, 128, 255))
        body = bytes(raw)
    elif kind == 14:
        return one((b"", b"{", b"[]", b"null", b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe{}", b'{"\xff":{}}')), body, None
    else:  # a name twice
        text = json.dumps(header)
        again = json.dumps({name: entry})[1:-1]
        return (text[:-1] + ", " + again + "}").encode("utf-8", "surrogatepass"), body, None
    return changed, body, length
