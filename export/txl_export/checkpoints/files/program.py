"""Reads pickles in a bounded process (`txl_runtime.sandbox`) that imports only Python's standard library.

No class that a pickle names is imported. For each name there is an empty subclass of `PickledObject`, which records how
the pickle calls it. `answer` writes the result as JSON: a container is a list of its kind and its parts, any other
value stands for itself, e.g. [1, 2, [3, "a", 0.5]] for [2, {"a": 0.5}]. Bytes follow after the JSON. An object that is
shared is written at each place, so `PER_BYTE` limits the length of the answer and the work on it.
"""

from __future__ import annotations

import gc
import io
import json
import pickle  # noqa: TID251 - `Programs` replaces its lookup of classes, so nothing is imported
from itertools import chain
from typing import Any

LIST, TUPLE, DICT, BYTES, NAME, MADE, OUTSIDE, FILE = range(1, 9)
PER_BYTE, FREE, TEXT = 4, 1 << 16, 16
"""Maximum number of values in the answer: `PER_BYTE` per byte of the pickle, plus `FREE`. `TEXT` characters, or bytes,
count as one value."""
DEPTH, BITS, NAME_LIMIT = 256, 256, 512
"""Limits of levels of nested containers, of bits of an integer, and of characters of a dotted name."""
HARM = "the file is damaged or was made to do harm"
PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
PLAIN, NODE = ("collections.", "ruamel.yaml."), {"_content", "_val"}
"""Two limits that keep cycles out of the answer: attributes of classes whose names begin like `PLAIN` are left out, and
OmegaConf's nodes keep only the attributes in `NODE`."""


class RefusedError(Exception):
    """The pickle's content is refused; the message says what was found."""


class PickledObject:
    """The base of made-up classes; an object keeps the arguments of its call and all that the pickle adds later."""

    __slots__ = ("args", "pairs", "states", "values")
    called = ""
    args: tuple[Any, ...]
    pairs: list[Any]
    states: list[Any]
    values: list[Any]

    def __new__(cls, /, *args: Any, **_: Any) -> Any:
        match args:
            # a pickle refers to a class inside a class by getattr(Outer, "Inner")
            case (type() as outer, str(inner)) if cls.called == "builtins.getattr":
                return made_up(f"{outer.called}.{inner}")  # type: ignore[attr-defined]
        instance = object.__new__(cls)
        instance.args, instance.states, instance.values, instance.pairs = args, [], [], []
        return instance

    def __setstate__(self, state: Any) -> None:
        self.states.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs += key, value

    def extend(self, values: Any) -> None:
        """Keep the values that the pickle appends, as it does to a list."""
        self.values += values


def made_up(dotted: str) -> type[PickledObject]:
    """Make an empty class for a dotted name, and return it; it stands for the class of that name."""
    if len(dotted) > NAME_LIMIT:
        raise RefusedError(f"a name has {len(dotted)} characters; {HARM}")
    return type("PickledObject", (PickledObject,), {"__slots__": (), "called": dotted})


class Programs(pickle.Unpickler):
    """An unpickler that reads the pickles of a file in turn; it adds each class that they name to `names`."""

    def __init__(self, file: Any, names: dict[tuple[str, str], type[PickledObject]]) -> None:
        super().__init__(file, encoding="utf-8")  # ASCII, the default, fails at other bytes in Python 2's str
        self._names = names

    def find_class(self, module: str, name: str, /) -> type[PickledObject]:
        if (module, name) not in self._names:
            self._names[module, name] = made_up(f"{PYTHON_2.get(module, module)}.{name}")
        return self._names[module, name]

    def persistent_load(self, pid: Any, /) -> Any:
        """Return the class that a persistent id of torch ≤ 1.5 names, else a `PickledObject` that holds the id."""
        match pid:
            case ("module", type() as cls, _, _):  # torch ≤ 1.5 wrote a class together with its source code
                return cls
        return PickledObject(pid)


class Writer:
    """Converts pickled contents to lists for JSON; `names` collects the classes that they name, `blob` their bytes."""

    def __init__(self, size: int) -> None:
        self.names: dict[tuple[str, str], type[PickledObject]] = {}
        self.blob, self._files, self._depth = bytearray(), dict[int, int](), 0
        self._most = self._room = PER_BYTE * size + FREE

    def contents(self, data: bytes, count: int) -> tuple[list[Any], str, int]:
        """Read `count` pickles from the beginning of `data`.

        Returns:
            Their contents, the error of the first pickle that is refused, or "", and the offset after the last pickle.
        """
        file, contents = io.BufferedReader(io.BytesIO(data)), list[Any]()
        try:
            for _ in range(count):
                contents.append(self.node(Programs(file, self.names).load()))
        except RefusedError as error:
            return contents, str(error), 0
        except MemoryError:
            raise
        except Exception:  # Python raises many types of errors, e.g. IndexError, for a damaged pickle
            return contents, "the pickle is cut short or damaged; copy the file again", 0
        return contents, "", file.tell()

    def node(self, value: Any) -> Any:
        """Return a value as JSON can hold it, e.g. [1, 2, 3] for the list [2, 3].

        Raises:
            RefusedError: the value is no plain data, is nested too deeply, or repeats shared parts too often.
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
            case bytes() | bytearray() | PickledObject(called="_codecs.encode"):
                return self._bytes(_bytes(value))
            case type():
                self._take(len(value.called) // TEXT)  # type: ignore[attr-defined]
                return [NAME, value.called]  # type: ignore[attr-defined]
            case PickledObject(called=""):  # a persistent id, usually of a storage
                return [OUTSIDE, *map(self.node, value.args)]
            case PickledObject(called="torch.storage._load_from_bytes", args=(data,)):
                # pickle.dump writes a legacy torch file for each storage; the answer holds [FILE, number, bytes after
                # the five pickles, contents …]
                if id(value) in self._files:
                    return [FILE, self._files[id(value)]]
                number = self._files[id(value)] = len(self._files)
                contents, error, end = self.contents(data := _bytes(data), 5)
                if error:
                    raise RefusedError(error)
                return [FILE, number, self._bytes(data[end:]), *contents]
            case PickledObject():
                # an object counts as 4 values, because its stand-in takes more memory than a value
                self._take(4 + len(value.called) // TEXT)
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
        case PickledObject(
            called="_codecs.encode", args=(str() as text, "latin1" | "latin-1")
        ):  # protocol 2 writes bytes as text in latin1
            return text.encode("latin-1")
    raise RefusedError(f"bytes are written in an encoding other than latin1; {HARM}")


def answer(request: bytes) -> bytes:
    """Read pickles: request[0] is their number, and request[1:] are their bytes.

    Returns:
        The length of the JSON in 8 bytes, the JSON, and the bytes that it refers to.
    """
    writer = Writer(len(request))
    contents, error, end = writer.contents(request[1:], request[0])
    names = [stub.called for stub in writer.names.values()]
    written = json.dumps({"contents": contents, "error": error, "end": end, "names": names}).encode()
    return len(written).to_bytes(8, "little") + written + writer.blob


if __name__ == "bounded":
    gc.disable()  # the collector would walk through millions of live values again and again
