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


def pairs(size: int) -> bytes:
    return b"](" + b"".join(code((f"{i:05x}", None)) for i in range(size // 28)) + b"e"


def numbers(size: int, step: int = 1) -> bytes:
    return b"(" + b"".join(code(i * step) for i in range(size // 12)) + b"t"


def mapping(size: int) -> bytes:
    return b"}(" + b"".join(code(f"{i:05x}") + b"N" for i in range(size // 22)) + b"u"


def text(size: int, more: str = "") -> bytes:
    data = ("x" * (size // 2) + more).encode()
    return b"X" + struct.pack("<I", len(data)) + data


def called(dotted: str, made: bytes, size: int) -> bytes:
    """One argument, made once, and given to a function again and again."""
    function = kept(name(dotted), 8)
    return listed(function + kept(made), again(8) + again(9) + b"\x85R", size)


def ordered_dictionaries(size: int) -> bytes:
    return called("collections.OrderedDict", pairs(size), size)


def counters(size: int) -> bytes:
    return called("collections.Counter", mapping(size), size)


def sets(size: int) -> bytes:
    return called("builtins.set", b"](" + b"N" * (size // 2) + b"e", size)


def frozen_sets(size: int) -> bytes:
    return called("builtins.frozenset", b"(" + b"N" * (size // 2) + b"t", size)


def sequences(size: int) -> bytes:
    return called("ruamel.yaml.comments.CommentedSeq", b"](" + b"N" * (size // 2) + b"e", size)


def encoded(size: int) -> bytes:
    function = kept(name("_codecs.encode"), 8) + kept(code("latin1"), 7)
    return listed(function + kept(text(size)), again(8) + again(9) + again(7) + b"\x86R", size)


def shapes(size: int) -> bytes:
    return called("torch.Size", b"(" + b"K\x01" * (size // 4) + b"t", size)


def shapes_of_tensors(size: int) -> bytes:
    first = (
        kept(b"(" + b"K\x01" * (size // 4) + b"t") + kept(storage(), 7) + kept(name("torch._utils._rebuild_tensor"), 8)
    )
    return listed(first, again(8) + b"(" + again(7) + b"K\x00" + again(9) + again(9) + b"tR", size)


def attributes(size: int) -> bytes:
    thing = name("argparse.Namespace") + b")\x81"
    return listed(kept(mapping(size)) + thing, again(9) + b"b", size)


def attributes_in_tuples(size: int) -> bytes:
    thing = name("argparse.Namespace") + b")\x81"
    return listed(kept(b"(" + b"N" * (size // 2) + b"t") + thing, again(9) + b"b", size)


def colliding_integers(size: int) -> bytes:
    return b"}(" + b"".join(code(i * COLLIDING) + b"N" for i in range(size // 13)) + b"u"


def colliding_tuples(size: int) -> bytes:
    return b"}(" + b"".join(code((i * COLLIDING,)) + b"N" for i in range(size // 15)) + b"u"


def keys_in_tuples(size: int) -> bytes:
    """One long tuple as a key, again and again: each time it is hashed from its first number to its last."""
    return b"](" + kept(numbers(size)) + b"}(" + (again() + b"N") * (size // 12) + b"ue"


def equal_keys(size: int) -> bytes:
    """Two texts that are equal and not the same: a dictionary compares them at every entry."""
    return (
        b"]("
        + kept(text(size // 2))
        + kept(text(size // 2), 8)
        + b"}("
        + again(9)
        + b"N"
        + (again(8) + b"N") * (size // 12)
        + b"ue"
    )


def keys_of_mappings(size: int) -> bytes:
    """Pairs with one long tuple as a key, in a list that is made a dictionary again and again."""
    long = kept(numbers(size // 2), 7)
    pairs = b"](" + (again(7) + b"N\x86") * (size // 28) + b"e"
    return b"](" + long + called("collections.OrderedDict", pairs, size // 4) + b"e"


def joined_names(size: int) -> bytes:
    return listed(kept(text(size)) + kept(code("x"), 8), again(9) + again(8) + b"\x93", size)


def nested_files(size: int) -> bytes:
    data = legacy_bytes(body=storage(size // 8, extra=(None,)), count=size // 8, data=bytes(size // 2))
    return called("torch.storage._load_from_bytes", binary(data), size)


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
    first = kept(storage(count, kind="torch.ByteStorage"), 7) + kept(name("torch._utils._rebuild_tensor"), 8)
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


IN_CONTAINERS: dict[str, Body] = {
    function.__name__.replace("_", " "): function
    for function in (
        ordered_dictionaries,
        counters,
        sets,
        frozen_sets,
        sequences,
        encoded,
        shapes,
        shapes_of_tensors,
        attributes,
        attributes_in_tuples,
        colliding_integers,
        colliding_tuples,
        keys_in_tuples,
        equal_keys,
        keys_of_mappings,
        doubled,
        doubled_text,
        windows,
    )
}
"""Those that any file by torch.save may hold."""
IN_PICKLES: dict[str, Body] = {"joined names": joined_names, "nested files": nested_files}
"""Those that only a file by pickle.dump may hold, or names that nobody knows."""
LATER: dict[str, Body] = {"arrays": arrays, "shared modules": shared_modules, "long module names": long_module_names}
"""Those that ask for much of whoever makes something of what was read."""
