"""JSON, hashes and files, each written in one way."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


def canonical_json(value: Any, drop: Sequence[str] = ()) -> bytes:
    """JSON with sorted keys and no spaces, so that equal values give equal bytes; `drop` leaves out keys anywhere."""

    def without(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: without(item) for key, item in node.items() if key not in drop}
        return [without(item) for item in node] if isinstance(node, list) else node

    plain = without(msgspec.to_builtins(value))
    return msgspec.json.encode(plain, order="sorted")


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or not at all, whoever else reads or writes it at the same time.

    Raises:
        OSError: the place cannot be written to; nothing is left there.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
