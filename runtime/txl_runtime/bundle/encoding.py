"""Functions that write JSON, hashes and escapes in the one form that all parts of a bundle use."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

_SURROGATES = re.compile("[\ud800-\udfff]")


def canonical_json(value: Any, drop: Sequence[str] = ()) -> bytes:
    """Return JSON with sorted keys and no spaces, so that equal values give equal bytes; leave out the keys
    in `drop`.
    """

    def without(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: without(item) for key, item in node.items() if key not in drop}
        return [without(item) for item in node] if isinstance(node, list) else node

    plain = without(msgspec.to_builtins(value))
    return msgspec.json.encode(plain, order="sorted")


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read 1 MiB at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def utf8(value: Any) -> Any:
    r"""Return plain data with texts that JSON can hold: in a file name, a byte that is not UTF-8 becomes e.g. \xff."""
    if isinstance(value, dict):
        return {utf8(name): utf8(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [utf8(inner) for inner in value]
    return _SURROGATES.sub(lambda found: escaped(found[0]), value) if isinstance(value, str) else value


def escaped(character: str) -> str:
    r"""Return a character as Python escapes it, e.g. \u2028; a file name's byte that is not UTF-8 becomes e.g. \xff."""
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else character.encode("unicode_escape").decode()
