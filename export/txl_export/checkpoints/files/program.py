"""The reader of pickles that runs in a bounded process (`txl_runtime.sandbox`), with Python's standard library alone.

For each name in a pickle there is an empty class made up under that name, so all that a pickle can call is `Made`,
which keeps the arguments. `answer` writes the result as JSON, e.g. [1, 2, [3, "a", 0.5]] for [2, {"a": 0.5}]: a list is
a kind and its parts, any other value stands for itself. Bytes follow after the JSON. A shared object is written every
time it is met, so the answer is as long as a walk through the content, and `PER_BYTE` bounds both.
"""

from __future__ import annotations

import gc
import io
import json
import pickle  # noqa: TID251 - its unpickler finds no class here but those that `Programs` makes up
from itertools import chain
from typing import Any

LIST, TUPLE, DICT, BYTES, NAME, MADE, OUTSIDE, FILE = range(1, 9)
PER_BYTE, FREE, TEXT = 4, 1 << 16, 16
"""Most values in a content, 4 per byte of its program plus 65,536; 16 characters of text, or 16 bytes, count as one."""
DEPTH, BITS, NAME_LIMIT = 256, 256, 512
"""Most levels of nested containers, bits of an integer, and characters of a dotted name."""
HARM = "the file is damaged or was made to do harm"
PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
PLAIN, NODE = ("collections.", "ruamel.yaml."), {"_content", "_val"}
"""Classes written without attributes, and the attributes written of OmegaConf's nodes: others may form cycles."""


class RefusedError(Exception):
    """A content that is not read here; the message says what was found."""


class Made:
    """An object of a made-up class that keeps the arguments of its call and everything put into it later."""

    __slots__ = ("args", "pairs", "states", "values")
    called = ""
    args: tuple[Any, ...]
    pairs: list[Any]
    states: list[Any]
    values: list[Any]

    def __new__(cls, /, *args: Any, **_: Any) -> Any:
        match args:
            case (type() as outer, str(inner)) if cls.called == "builtins.getattr":  # a class inside another
                return made_up(f"{outer.called}.{inner}")  # type: ignore[attr-defined]
        made = object.__new__(cls)
        made.args, made.states, made.values, made.pairs = args, [], [], []
        return made

    def __setstate__(self, state: Any) -> None:
        self.states.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs += key, value

    def extend(self, values: Any) -> None:
        """Keep the values that a program appends."""
        self.values += values


def made_up(dotted: str) -> type[Made]:
    """Return an empty class for a dotted name."""
    if len(dotted) > NAME_LIMIT:
        raise RefusedError(f"a name has {len(dotted)} characters; {HARM}")
    return type("Made", (Made,), {"__slots__": (), "called": dotted})


class Programs(pickle.Unpickler):
    """An unpickler that runs the programs of a file in turn; `names` collects the classes that they name."""

    def __init__(self, file: Any, names: dict[tuple[str, str], type[Made]]) -> None:
        super().__init__(file, encoding="utf-8")  # of Python 2's str, which ASCII alone would not decode
        self._names = names

    def find_class(self, module: str, name: str, /) -> type[Made]:
        if (module, name) not in self._names:
            self._names[module, name] = made_up(f"{PYTHON_2.get(module, module)}.{name}")
        return self._names[module, name]

    def persistent_load(self, pid: Any, /) -> Any:
        """Return a class, or a `Made` for the persistent id of a storage."""
        match pid:
            case ("module", type() as cls, _, _):  # torch ≤ 1.5 wrote a class with its source
                return cls
        return Made(pid)


class Writer:
    """A writer of contents as lists for JSON; `names` collects the classes that they name, `blob` their bytes."""

    def __init__(self, size: int) -> None:
        self.names: dict[tuple[str, str], type[Made]] = {}
        self.blob, self._files, self._depth = bytearray(), dict[int, int](), 0
        self._most = self._room = PER_BYTE * size + FREE

    def contents(self, data: bytes, count: int) -> tuple[list[Any], str, int]:
        """Run `count` programs; return their contents, the error of the next or "", and the offset after the last."""
        file, found = io.BufferedReader(io.BytesIO(data)), list[Any]()
        try:
            for _ in range(count):
                found.append(self.node(Programs(file, self.names).load()))
        except RefusedError as error:
            return found, str(error), 0
        except MemoryError:
            raise
        except Exception:  # Python raises many kinds for an instruction without operands
            return found, "the pickle is cut short or damaged; copy the file again", 0
        return found, "", file.tell()

    def node(self, value: Any) -> Any:
        """Return a value as JSON can hold it, e.g. [1, 2, 3] for the list [2, 3].

        Raises:
            RefusedError: it is no plain data, nested too deeply, or shared too often.
        """
        kind = type(value)
        self._take(1 + (len(value) // TEXT if kind is str else 0))
        if value is None or kind in (str, float, bool) or (kind is int and value.bit_length() <= BITS):
            return value
        self._depth += 1
        if self._depth > DEPTH:
            raise RefusedError(f"the content is nested more than {DEPTH} levels deep, or contains itself")
        written = self._list(value)
        self._depth -= 1
        return written

    def _take(self, values: int) -> None:
        self._room -= values
        if self._room < 0:
            raise RefusedError(f"the content stands for more than {self._most} values; {HARM}")

    def _list(self, value: Any) -> list[Any]:
        match value:
            case list():
                return [LIST, *map(self.node, value)]
            case tuple():
                return [TUPLE, *map(self.node, value)]
            case set() | frozenset():
                return [LIST, *map(self.node, sorted(value, key=repr))]
            case dict():
                return [DICT, *map(self.node, chain.from_iterable(value.items()))]
            case bytes() | bytearray() | Made(called="_codecs.encode"):
                return self._bytes(_bytes(value))
            case type():
                self._take(len(value.called) // TEXT)  # type: ignore[attr-defined]
                return [NAME, value.called]  # type: ignore[attr-defined]
            case Made(called=""):  # a persistent id, mostly of a storage
                return [OUTSIDE, *map(self.node, value.args)]
            case Made(called="torch.storage._load_from_bytes", args=(data,)):
                # pickle.dump writes a file for each storage: its number, the bytes after its programs, their contents
                if id(value) in self._files:
                    return [FILE, self._files[id(value)]]
                number = self._files[id(value)] = len(self._files)
                found, error, end = self.contents(data := _bytes(data), 5)
                if error:
                    raise RefusedError(error)
                return [FILE, number, self._bytes(data[end:]), *found]
            case Made():
                self._take(4 + len(value.called) // TEXT)  # a stand-in takes more memory than other values
                states = [] if value.called.startswith(PLAIN) else value.states
                if value.called.startswith("omegaconf."):
                    states = [{key: state.get(key) for key in NODE & state.keys()} for state in states if state]
                parts = (value.args, states, value.values, value.pairs)
                return [MADE, value.called, *([*map(self.node, part)] for part in parts)]
        raise RefusedError(f"the content has a {type(value).__name__} that is no plain data; {HARM}")

    def _bytes(self, data: bytes) -> list[int]:
        self._take(len(data) // TEXT)
        self.blob += data
        return [BYTES, len(self.blob) - len(data), len(self.blob)]


def _bytes(value: Any) -> bytes:
    match value:
        case bytes() | bytearray():
            return bytes(value)
        case Made(called="_codecs.encode", args=(str() as text, "latin1" | "latin-1")):  # as protocol 2 writes them
            return text.encode("latin-1")
    raise RefusedError(f"bytes are written in an encoding other than latin1; {HARM}")


def answer(request: bytes) -> bytes:
    """Run request[0] programs in request[1:]; return the JSON's length in 8 bytes, the JSON, and the bytes after it."""
    writer = Writer(len(request))
    contents, error, end = writer.contents(request[1:], request[0])
    names = [made.called for made in writer.names.values()]
    written = json.dumps({"contents": contents, "error": error, "end": end, "names": names}).encode()
    return len(written).to_bytes(8, "little") + written + writer.blob


if __name__ == "bounded":
    gc.disable()  # it would walk through millions of values again and again
