"""A model of a disk that loses power: what may be there afterwards, from the diary of what was written.

The model keeps POSIX's least promises. What `fsync` of a file returned for is kept: its bytes and its size. What
`fsync` of a folder returned for is kept: the names in it. Everything else may be kept or lost, each write and each
change of a name for itself and in any order. Changes of one name are kept in order, a rename within one folder and an
exchange are kept whole or lost whole, and bytes that were lost within a kept size read as zeros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Choose = Callable[[], bool]
"""Decides whether something that was not synchronised is kept."""


@dataclass
class _Node:
    """A file or folder: what is certain, and what has happened since, as far as nobody waited for it."""

    folder: bool
    data: bytes = b""
    names: dict[str, _Node] = field(default_factory=dict)
    pending: list[Any] = field(default_factory=list)

    def settle(self) -> None:
        """All that happened is on the disk now."""
        self.data, self.names = self.now(lambda: True)
        self.pending.clear()

    def now(self, keep: Choose) -> tuple[bytes, dict[str, _Node]]:
        """Return the content if some of what happened since is kept."""
        data, names = bytearray(self.data), dict(self.names)
        for change in self.pending:
            if not keep():
                continue
            if self.folder:
                for name, node in change.items():
                    names.pop(name, None)
                    if node is not None:
                        names[name] = node
            else:
                offset, piece = change
                if piece is None:
                    del data[offset:]
                    data.extend(bytes(offset - len(data)))
                else:
                    data.extend(bytes(max(0, offset + len(piece) - len(data))))
                    data[offset : offset + len(piece)] = piece
        return bytes(data), names


def read_diary(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a diary."""
    with path.open("rb") as stream:
        while line := stream.readline():
            record = json.loads(line)
            record["data"] = stream.read(record["size"]) if record["what"] == "write" else b""
            yield record


class Model:
    """A folder, and what has happened in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, _Node(folder=True)
        self._inodes: dict[int, _Node] = {root.stat().st_ino: self.top}
        self._read(root, self.top)

    def _read(self, folder: Path, node: _Node) -> None:
        for path in folder.iterdir():
            made = _Node(folder=path.is_dir(), data=b"" if path.is_dir() else path.read_bytes())
            node.names[path.name] = self._inodes[path.stat().st_ino] = made
            if path.is_dir():
                self._read(path, made)

    def _find(self, path: str) -> tuple[_Node, str]:
        """The folder that a path is in, as the process sees it, and the last part of the path."""
        node = self.top
        *folders, name = Path(path).relative_to(self.root).parts
        for part in folders:
            node = node.now(lambda: True)[1][part]
        return node, name

    def happen(self, record: dict[str, Any]) -> None:
        """Take in one record."""
        what, inode, path = record["what"], record["inode"], record["path"]
        if path == str(self.root):
            if what == "sync":
                self.top.settle()
            return
        if what in ("create", "mkdir"):
            folder, name = self._find(path)
            self._inodes[inode] = _Node(folder=what == "mkdir")
            folder.pending.append({name: self._inodes[inode]})
        elif what in ("open", "sync"):
            self._renamed_unseen(path, inode)
            if what == "sync":
                self._inodes[inode].settle()
        elif what == "write":
            self._inodes[inode].pending.append((record["offset"], record["data"]))
        elif what == "truncate":
            self._inodes[inode].pending.append((record["offset"], None))
        elif what == "unlink":
            folder, name = self._find(path)
            folder.pending.append({name: None})
        elif what in ("rename", "exchange"):
            folder, name = self._find(path)
            other, to = self._find(record["to"])
            if folder is other:
                names = folder.now(lambda: True)[1]
                folder.pending.append({name: names[to] if what == "exchange" else None, to: names[name]})
            else:  # between folders either half may be lost
                assert what == "rename"
                other.pending.append({to: folder.now(lambda: True)[1][name]})
                folder.pending.append({name: None})
        else:
            raise ValueError(f"the model knows no {what}")

    def _renamed_unseen(self, path: str, inode: int) -> None:
        """Some native code renames without the C library: then a file has a name that no record gave it."""
        folder, name = self._find(path)
        names = folder.now(lambda: True)[1]
        if name not in names:
            before = next(other for other, node in names.items() if node is self._inodes[inode])
            folder.pending.append({before: None, name: names[before]})

    def left(self, keep: Choose) -> dict[str, bytes | None]:
        """Files by their paths below the folder, and folders as None, after a loss of power."""
        found: dict[str, bytes | None] = {}

        def walk(node: _Node, prefix: str) -> None:
            data, names = node.now(keep)
            if not node.folder:
                found[prefix] = data
                return
            if prefix:
                found[prefix] = None
            for name, inner in names.items():
                walk(inner, f"{prefix}/{name}" if prefix else name)

        walk(self.top, "")
        return found


def put(left: dict[str, bytes | None], root: Path) -> None:
    """Write what is left into an empty folder."""
    for name, data in left.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(data)
