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
DEPTH, BITS = 256, 256
"""Levels of containers in one another, and bits of an integer, at most."""
NESTED = "torch.storage._load_from_bytes"
"""What a pickle that torch.save did not write calls for each storage, with a whole legacy file."""
HARM = "the file is damaged or was made to do harm"
DAMAGED = "the pickle is cut short or damaged; copy the file again"
PARTS = ("_content", "_val")
"""All that is written of OmegaConf's nodes: the rest says where each stands, and leads back to what it stands in."""
PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
PLAIN = ("collections.", "ruamel.yaml.")
"""Classes of plain data, whose own attributes are left out: they may lead back as well."""


class RefusedError(Exception):
    """The content is nothing that is read; the message says what was found."""


class Made:
    """An object of a made-up class: what it was called with, and what was put into it."""

    __slots__ = ("args", "pairs", "states", "values")
    called = ""

    def __new__(cls, /, *args: Any, **_: Any) -> Made:
        made = object.__new__(cls)
        made.args, made.states, made.values, made.pairs = args, [], [], []
        return made

    def __setstate__(self, state: Any) -> None:
        self.states.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def append(self, value: Any) -> None:
        self.values.append(value)

    def extend(self, values: Any) -> None:
        self.values.extend(values)

    add = append


class Outside(Made):
    """What a persistent id stands for, most of all a storage; called with the id."""

    __slots__ = ()


class Programs(pickle.Unpickler):
    """Runs the programs of a file, one after the other; `names` has the classes that they name."""

    def __init__(self, file: io.BufferedReader, names: dict[tuple[str, str], type[Made]]) -> None:
        super().__init__(file, encoding="utf-8")  # which is how Python 2 wrote text that was not plain
        self._names = names

    def find_class(self, module: str, name: str, /) -> type[Made]:
        if (module, name) not in self._names:
            dotted = f"{PYTHON_2.get(module, module)}.{name}"
            self._names[module, name] = type("Made", (Made,), {"__slots__": (), "called": dotted})
        return self._names[module, name]

    def persistent_load(self, pid: Any, /) -> Any:
        match pid:
            case ("module", type() as cls, _, _):  # torch ≤ 1.5 wrote classes so, with their source
                return cls
        return Outside(pid)


class Writer:
    """Writes contents of programs as lists for JSON.

    Attributes:
        names: the classes that the programs name.
        blob: the bytes in the content.
    """

    def __init__(self, size: int) -> None:
        self.names: dict[tuple[str, str], type[Made]] = {}
        self.blob = bytearray()
        self._most = self._room = PER_BYTE * size + FREE
        self._depth, self._nested = 0, False

    def contents(self, data: bytes, count: int) -> tuple[list[Any], str, int]:
        """What the first programs in some bytes make, what is wrong with the next one, and where that begins."""
        file, found = io.BufferedReader(io.BytesIO(data)), []  # type: ignore[var-annotated]
        try:
            for _ in range(count):
                found.append(self.node(Programs(file, self.names).load()))
        except RefusedError as error:
            return found, str(error), 0
        except MemoryError:
            raise
        except Exception:  # whatever Python raises for an instruction that has nothing to work on
            return found, DAMAGED, 0
        return found, "", file.tell()

    def node(self, value: Any) -> Any:
        """A value for JSON.

        Raises:
            RefusedError: it is no plain data, nested too deeply or shared too often.
        """
        kind = type(value)
        self._room -= 1 + (len(value) // TEXT if kind in (str, bytes, bytearray) else 0)
        if self._room < 0:
            raise RefusedError(f"the content stands for more than {self._most} values; {HARM}")
        if value is None or kind in (str, float, bool):
            return value
        if kind is int:
            if value.bit_length() > BITS:
                raise RefusedError(f"the pickle has an integer of {value.bit_length()} bits; {HARM}")
            return value
        self._depth += 1
        if self._depth > DEPTH:
            raise RefusedError(f"the content is nested more than {DEPTH} levels deep, or contains itself")
        written = self._list(value)
        self._depth -= 1
        return written

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
            case bytes() | bytearray():
                self.blob += value
                return [BYTES, len(self.blob) - len(value), len(self.blob)]
            case type():
                return [NAME, value.called]  # type: ignore[attr-defined]
            case Outside():
                return [OUTSIDE, *map(self.node, value.args)]
            case Made(args=(bytes() as data,)) if value.called == NESTED:
                return self._file(data)
            case Made():
                return self._made(value)
        raise RefusedError(f"the content has a {type(value).__name__} where plain data was expected")

    def _made(self, value: Made) -> list[Any]:
        states = [] if value.called.startswith(PLAIN) else value.states
        if value.called.startswith("omegaconf."):
            states = [{key: state[key] for key in PARTS if key in state} for state in states if type(state) is dict]
        parts = (value.args, states, value.values, chain.from_iterable(value.pairs))
        return [MADE, value.called, *([TUPLE, *map(self.node, part)] for part in parts)]

    def _file(self, data: bytes) -> list[Any]:
        """A whole file in place of a storage: its programs, and the bytes behind them."""
        if self._nested:
            raise RefusedError(f"a nested file holds another one; {HARM}")
        self._nested = True
        found, error, end = self.contents(data, 5)
        self._nested = False
        if error:
            raise RefusedError(error)
        return [FILE, self.node(data[end:]), *found]


def answer(request: bytes) -> bytes:
    """Run as many programs as the first byte says, which begin behind it: the JSON's length, the JSON and the bytes."""
    gc.disable()
    writer = Writer(len(request))
    contents, error, end = writer.contents(request[1:], request[0])
    names = [made.called for made in writer.names.values()]
    written = json.dumps({"contents": contents, "error": error, "end": end, "names": names}).encode()
    return len(written).to_bytes(8, "little") + written + writer.blob
