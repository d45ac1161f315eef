"""The reader of pickles, as it runs in a bounded process (`txl_runtime.sandbox`), on Python's own library alone.

Whatever a pickle names is an empty class made up under that name, so all that it can call is `Made`, which keeps what
it was called with. `answer` writes what a program has made as JSON, e.g. [1, 2, [3, "a", 0.5]] for [2, {"a": 0.5}]: a
list is a kind and its parts, any other value stands for itself. Bytes follow behind the JSON. What is shared is written
each time that it is met, so the answer is as long as a walk through the content, and `PER_BYTE` bounds both.
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
"""Values for each byte of a program, and for every program; so many characters of text, or bytes, count as a value."""
DEPTH, BITS, NAME_LIMIT = 256, 256, 512
"""Levels of containers in one another, bits of an integer, and characters of a dotted name, at most."""
HARM = "the file is damaged or was made to do harm"
PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
PLAIN, NODE = ("collections.", "ruamel.yaml."), {"_content", "_val"}
"""Classes of plain data, and what is written of OmegaConf's nodes: other attributes of both may lead back to them."""


class RefusedError(Exception):
    """The content is nothing that is read; the message says what was found."""


class Made:
    """An object of a made-up class: what it was called with, and what was put into it."""

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
        """Keep what a program appends; it never adds to an object as to a set."""
        self.values += values


def made_up(dotted: str) -> type[Made]:
    """An empty class under a name."""
    if len(dotted) > NAME_LIMIT:
        raise RefusedError(f"a name has {len(dotted)} characters; {HARM}")
    return type("Made", (Made,), {"__slots__": (), "called": dotted})


class Programs(pickle.Unpickler):
    """Runs the programs of a file, one after the other; `names` has the classes that they name."""

    def __init__(self, file: Any, names: dict[tuple[str, str], type[Made]]) -> None:
        super().__init__(file, encoding="utf-8")  # which is how Python 2 wrote text that was not plain
        self._names = names

    def find_class(self, module: str, name: str, /) -> type[Made]:
        if (module, name) not in self._names:
            self._names[module, name] = made_up(f"{PYTHON_2.get(module, module)}.{name}")
        return self._names[module, name]

    def persistent_load(self, pid: Any, /) -> Any:
        """A class, or what stands for a storage."""
        match pid:
            case ("module", type() as cls, _, _):  # torch ≤ 1.5 wrote classes so, with their source
                return cls
        return Made(pid)


class Writer:
    """Writes contents of programs as lists for JSON; `names` has what they name, `blob` the bytes in them."""

    def __init__(self, size: int) -> None:
        self.names: dict[tuple[str, str], type[Made]] = {}
        self.blob, self._files, self._depth = bytearray(), dict[int, int](), 0
        self._most = self._room = PER_BYTE * size + FREE

    def contents(self, data: bytes, count: int) -> tuple[list[Any], str, int]:
        """Run programs in some bytes: their contents, the fault of the next one, and where the last one ends."""
        file, found = io.BufferedReader(io.BytesIO(data)), list[Any]()
        try:
            for _ in range(count):
                found.append(self.node(Programs(file, self.names).load()))
        except RefusedError as error:
            return found, str(error), 0
        except MemoryError:
            raise
        except Exception:  # whatever Python raises for an instruction that has nothing to work on
            return found, "the pickle is cut short or damaged; copy the file again", 0
        return found, "", file.tell()

    def node(self, value: Any) -> Any:
        """A value for JSON.

        Raises:
            RefusedError: it is no plain data, nested too deeply or shared too often.
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
            case Made(called=""):  # which stands for a persistent id, most of all of a storage
                return [OUTSIDE, *map(self.node, value.args)]
            case Made(called="torch.storage._load_from_bytes", args=(data,)):
                # pickle.dump has a file in place of each storage: its number, its programs, and the bytes behind them
                if id(value) in self._files:
                    return [FILE, self._files[id(value)]]
                number = self._files[id(value)] = len(self._files)
                found, error, end = self.contents(data := _bytes(data), 5)
                if error:
                    raise RefusedError(error)
                return [FILE, number, self._bytes(data[end:]), *found]
            case Made():
                self._take(4 + len(value.called) // TEXT)  # a stand-in is larger than any other value
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
    """Run as many programs as the first byte says, which begin behind it: the JSON's length, the JSON and the bytes."""
    writer = Writer(len(request))
    contents, error, end = writer.contents(request[1:], request[0])
    names = [made.called for made in writer.names.values()]
    written = json.dumps({"contents": contents, "error": error, "end": end, "names": names}).encode()
    return len(written).to_bytes(8, "little") + written + writer.blob


if __name__ == "bounded":
    gc.disable()  # which would look through millions of values again and again
