"""Small pickle programs that ask for much: each copies, hashes, joins or reads again what it has written once.

Every function gives the instructions for a file of about `size` bytes; half of them write something, the others make
something of it again and again.
"""

import struct
from collections.abc import Callable

from pickle_programs import binary, code, legacy_bytes, name, storage, tensor

Body = Callable[[int], bytes]
COLLIDING = (1 << 61) - 1
"""Multiples of it have the same hash."""


def kept(value: bytes, place: int = 9) -> bytes:
    """Instructions that push a value and keep it for `again`."""
    return value + b"r" + struct.pack("<I", place)


def again(place: int = 9) -> bytes:
    """Instructions that push a kept value."""
    return b"j" + struct.pack("<I", place)


def listed(first: bytes, repeated: bytes, size: int) -> bytes:
    """A list of what `first` pushes and of as many `repeated` as fit."""
    return b"](" + first + repeated * max(2, (size - len(first)) // len(repeated)) + b"e"


def text(size: int) -> bytes:
    data = b"x" * (size // 2)
    return b"X" + struct.pack("<I", len(data)) + data


def ordered_dictionaries(size: int) -> bytes:
    pairs = b"](" + b"".join(code((f"{i:05x}", None)) for i in range(size // 28)) + b"e"
    function = kept(name("collections.OrderedDict"), 8)
    return listed(function + kept(pairs), again(8) + again(9) + b"\x85R", size)


def encoded(size: int) -> bytes:
    function = kept(name("_codecs.encode"), 8) + kept(code("latin1"), 7)
    return listed(function + kept(text(size)), again(8) + again(9) + again(7) + b"\x86R", size)


def attributes(size: int) -> bytes:
    mapping = b"}(" + b"".join(code(f"{i:05x}") + b"N" for i in range(size // 22)) + b"u"
    return listed(kept(mapping) + name("argparse.Namespace") + b")\x81", again(9) + b"b", size)


def colliding_integers(size: int) -> bytes:
    return b"}(" + b"".join(code(i * COLLIDING) + b"N" for i in range(size // 13)) + b"u"


def colliding_pairs(size: int) -> bytes:
    pairs = b"](" + b"".join(code(((i * COLLIDING,), None)) for i in range(size // 18)) + b"e"
    return name("collections.OrderedDict") + pairs + b"\x85R"


def nested_files(size: int) -> bytes:
    data = legacy_bytes(body=storage(size // 8, extra=(None,)), count=size // 8, data=bytes(size // 2))
    function = kept(name("torch.storage._load_from_bytes"), 8)
    return listed(function + kept(binary(data)), again(8) + again(9) + b"\x85R", size)


def arrays(size: int) -> bytes:
    kind = name("numpy.dtype") + code(("u1", False, True)) + b"R" + code((3, "|", None, None, None, -1, -1, 0)) + b"b"
    first = kept(kind, 7) + kept(binary(bytes(size // 2)), 6) + kept(name("numpy._core.numeric._frombuffer"), 8)
    shape = kept(code((size // 2,)), 5) + kept(code("C"), 4)
    return listed(first + shape, again(8) + b"(" + again(6) + again(7) + again(5) + again(4) + b"tR", size)


def doubled(size: int) -> bytes:
    return b"]" + b"q\x01h\x01\x86" * min(200, size // 5)


def doubled_text(size: int) -> bytes:
    """A long text, many times in a list, which is many times in a list: nothing to hold, much to write."""
    inner = listed(kept(text(size // 2)), again(), size * 3 // 4)
    return listed(kept(inner, 8), again(8), size)


def windows(size: int) -> bytes:
    """Views of one storage, each of half of it: whoever converts them has many times the file."""
    count = size // 2
    first = kept(storage(count, kind="torch.ByteStorage"), 7) + b"0" + kept(name("torch._utils._rebuild_tensor"), 8)
    first += kept(code((count // 2,))) + kept(code((1,)), 6)
    every = (again(8) + b"(" + again(7) + code(i) + again() + again(6) + b"tR" for i in range(min(count, size) // 40))
    return b"](" + first + b"".join(every) + b"e"


def shared_modules(size: int) -> bytes:
    """A module that has the same module twice, which has the same module twice …"""
    inner = _module(b"}", _entries(weight=tensor()))
    for level in range(min(30, size // 120)):
        inner = _module(_entries(first=kept(inner, 100 + level), second=again(100 + level)), b"}")
    return inner


def long_module_names(size: int) -> bytes:
    """One long name for the part of the part of a module: the names of its tensors are many times the file."""
    inner = _module(b"}", _entries(**{f"w{i}": tensor() for i in range(size // 1000)}))
    for level in range(40):
        inner = _module(b"}" + (again() if level < 39 else kept(text(size // 2))) + inner + b"s", b"}")
    return inner


def _entries(**values: bytes) -> bytes:
    return b"}(" + b"".join(code(key) + value for key, value in values.items()) + b"u"


def _module(modules: bytes, parameters: bytes) -> bytes:
    made = name("torch.nn.modules.container.ModuleList") + b")\x81"
    return made + _entries(_modules=modules, _parameters=parameters, _buffers=b"}") + b"b"


AMPLIFIERS: dict[str, tuple[Body, str]] = {
    "ordered dictionaries": (ordered_dictionaries, "stands for more than"),
    "bytes as protocol 2 has them": (encoded, "stands for more than"),
    "attributes": (attributes, "stands for more than"),
    "keys that are integers of one hash": (colliding_integers, "more than 64 keys of one hash"),
    "pairs whose keys have one hash": (colliding_pairs, "more than 64 keys of one hash"),
    "files in place of storages": (nested_files, "stands for more than"),
    "arrays": (arrays, "stands for more than"),
    "what is there twice, twice, twice": (doubled, "stands for more than"),
    "text that is there twice": (doubled_text, "stands for more than"),
    "views": (windows, "more than 16 times the elements of their storage"),
    "modules that are shared": (shared_modules, "stands for more than"),
    "long names of parts": (long_module_names, "expected a name of at most 4096"),
    "a long name of a class": (lambda size: text(size) + code("x") + b"\x93", "a name has"),
}
"""Each with a part of what the refusal says."""
