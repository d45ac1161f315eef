"""Pickle programs, read by an interpreter of its own: they can name code, and nothing here can run it.

Python's pickle module resolves names to real objects and calls them; torch.load(weights_only=True) restricts that, but
cannot read what torch ≤ 1.5 wrote for whole modules, and torch.load with a restricted pickle module builds real objects
from file data before anything has checked it. So the instructions are decoded with pickletools, which only parses, and
the few that checkpoints use are carried out on plain data, with `pickle_names` for whatever they refer to. Every other
instruction, name or shape of data is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pickletools import genops
from typing import Any, BinaryIO

import torch
from torch import Tensor
from txl_runtime.errors import CheckpointError, some

from txl_export.checkpoints.files.budget import OBJECT, TEXT, Budget
from txl_export.checkpoints.files.pickle_names import (
    CONFIGS,
    FUNCTIONS,
    KNOWN,
    NESTED,
    OPAQUE,
    SCRIPTED,
    STORAGE_TYPES,
    STUBS,
    Name,
    Storage,
    Stub,
    checked_key,
    integers,
    shown,
)

# A vocabulary of 800 000 words in an NVIDIA checkpoint takes 40 MB and 5 million instructions.
PROGRAM_LIMIT = 1 << 27
INSTRUCTION_LIMIT = 20_000_000
DEPTH_LIMIT = 256
OPEN_LIMIT = 4 * DEPTH_LIMIT  # at that depth so many wait: a dictionary, a key, a function, its arguments
TOO_DEEP = f"the content is nested more than {DEPTH_LIMIT} levels deep"
INTEGER_BITS = 256

# (key, dtype, number of elements) → one-dimensional tensor
StorageReader = Callable[[str, torch.dtype, int], Tensor]
# the file that a plain pickle has in place of a storage → its elements
NestedReader = Callable[[bytes, Budget], Storage]
PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


_NESTED_WORK = 64
"""Units of work for a nested file, whose four programs are few bytes."""


class _UnknownNameError(Exception):
    """A name that is neither known nor an alias."""


class Unpickler:
    """Interprets the pickle programs of one file.

    Args:
        budget: the work that the file may ask for.
        storage: gives the elements of a storage, one-dimensional, by key, dtype and number of elements; called once per
            key; raises CheckpointError where the file does not hold that. None where a program may have no tensors.
        legacy: whether classes may be persistent ids too and storages parts of others, as torch ≤ 1.5 wrote.
        aliases: further names, and the known names to read them as.
        nested: reads the files that a plain pickle has in place of storages. None where a program may have none.
        lenient: whether objects of any class may be made, called and filled in any way: they are stand-ins of that
            name, with which nothing can be done. Without, a name that is not known is refused.
        bare: whether the program may be one storage and nothing else, as such a file is.
        scripted: whether objects of classes whose code lies beside the program, in `SCRIPTED`, may be made and filled.

    Attributes:
        budget: as given.
        names: every dotted name met so far, as in the file.

    Raises:
        CheckpointError: an alias leads to a name that is not known.
    """

    def __init__(
        self,
        budget: Budget,
        storage: StorageReader | None = None,
        legacy: bool = False,
        aliases: Mapping[str, str] | None = None,
        nested: NestedReader | None = None,
        lenient: bool = False,
        bare: bool = False,
        scripted: bool = False,
    ) -> None:
        self.budget = budget
        self._nested, self._lenient, self._bare, self._scripted = nested, lenient, bare, scripted
        self._actions = _ACTIONS | _LENIENT_ACTIONS if lenient else _ACTIONS
        self._read_storage, self._legacy, self._aliases = storage, legacy, dict(aliases or {})
        if wrong := sorted(shown(target) for target in self._aliases.values() if target not in STUBS):
            raise CheckpointError(
                f"aliases lead to {', '.join(wrong)}, expected known classes such as mem_transformer.MemTransformerLM"
            )
        self.names: set[str] = set()
        self._classes: dict[str, Name] = {}
        self._storages: dict[str, tuple[torch.dtype, int, Storage]] = {}
        self._parts: dict[tuple[str, int, int], Storage] = {}

    def load(self, program: BinaryIO) -> Any:
        """Run one program from where the stream stands; the stream then stands behind it.

        Raises:
            CheckpointError: it is damaged, too large, or refers to what is not known.
        """
        start = program.tell()
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        try:
            for count, (instruction, argument, _) in enumerate(genops(program)):
                if count >= INSTRUCTION_LIMIT:
                    raise CheckpointError(f"the pickle has more than {INSTRUCTION_LIMIT} instructions")
                action = self._actions.get(instruction.name)
                if action is None:
                    raise CheckpointError(
                        f"the pickle uses the instruction {instruction.name}, which torch.save never writes; "
                        "the file is damaged or was made to do harm"
                    )
                action(self, argument)
            (content,) = self._stack
        except _UnknownNameError as unknown:
            program.seek(start)
            raise CheckpointError(self._unknown_names(str(unknown), names_in(program, self.budget.again()))) from None
        except (ValueError, OverflowError, IndexError, KeyError, struct.error):
            raise CheckpointError("the pickle is cut short or damaged; copy the file again") from None
        if not (self._bare and type(content) is Storage):
            _check_plain(content, self.budget.again())
        return content

    def _unknown_names(self, first: str, others: set[str]) -> str:
        names = sorted({shown(first)} | {shown(name) for name in others if self._canonical(name) not in KNOWN})
        return (
            f"refers to {some(names, 20)}, not known here (nothing was imported or run); if these are a fork's names "
            "for known classes, say so (--alias modules.MemTransformerLM=mem_transformer.MemTransformerLM, once each); "
            "otherwise load the file where it was trained and save model.state_dict()"
        )

    def _canonical(self, name: str) -> str:
        module, _, attribute = name.rpartition(".")
        return self._aliases.get(name, f"{PYTHON_2.get(module, module)}.{attribute}")

    # What the instructions of `_ACTIONS` do; `argument` is what pickletools decoded.

    def _push(self, argument: Any) -> None:
        self._stack.append(argument)

    def _open(self, container: Any) -> None:
        """Put an empty list or dictionary on the stack; without a mark, each of them waits to be put into the other."""
        self._stack.append(container)
        if not self._marks and len(self._stack) > OPEN_LIMIT:
            raise CheckpointError(TOO_DEEP)

    def _push_integer(self, argument: int) -> None:
        if argument.bit_length() > INTEGER_BITS:
            raise CheckpointError(f"the pickle has an integer of {argument.bit_length()} bits")
        self._stack.append(argument)

    def _push_python2_text(self, argument: str) -> None:
        self._stack.append(argument.encode("latin-1").decode())

    def _mark(self, argument: Any) -> None:
        if len(self._marks) >= OPEN_LIMIT:
            raise CheckpointError(TOO_DEEP)
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _last(self, count: int) -> list[Any]:
        return [self._stack.pop() for _ in range(count)][::-1]

    def _drop(self) -> None:
        self._stack.pop()

    def _call_with_names(self, argument: Any) -> None:
        """Arguments by name are dropped: what is made here is a stand-in without any use."""
        self._drop()
        self._reduce(argument)

    def _extend_list(self, items: list[Any]) -> None:
        if self._lenient and type(self._stack[-1]) is Stub:
            return
        if type(self._stack[-1]) is not list:
            raise CheckpointError(f"the pickle appends to a {type(self._stack[-1]).__name__}; the file is damaged")
        self._stack[-1].extend(items)

    def _update_dict(self, items: list[Any]) -> None:
        if self._lenient and type(self._stack[-1]) is Stub:
            return
        if type(self._stack[-1]) is not dict or len(items) % 2:
            raise CheckpointError(f"the pickle sets items of a {type(self._stack[-1]).__name__}; the file is damaged")
        target, budget = self._stack[-1], self.budget
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key if type(key) is str and len(key) < TEXT else checked_key(key, target, budget)] = value

    def _frozen_set(self, argument: Any) -> None:
        self._stack.append(self._since_mark())

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _memoize(self, argument: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _stack_global(self, argument: Any) -> None:
        attribute, module = self._stack.pop(), self._stack.pop()
        if type(module) is not str or type(attribute) is not str:
            raise CheckpointError("the pickle computes a name from something other than text")
        self._push_name(module, attribute)

    def _push_name(self, module: str, attribute: str) -> None:
        self.budget.charge((len(module) + len(attribute)) // TEXT)
        name = f"{module}.{attribute}"
        self.names.add(name)
        canonical = self._canonical(name)
        # A dot in the second part reaches through attributes (module torch, name serialization.os.system): never known.
        known = canonical in KNOWN or (self._scripted and canonical.startswith(SCRIPTED))
        if not self._lenient and ("." in attribute or not known):
            raise _UnknownNameError(name)
        self._stack.append(self._classes.setdefault(canonical, Name(canonical)))

    def _reduce(self, argument: Any) -> None:
        args, callee = self._stack.pop(), self._stack.pop()
        if type(args) is not tuple or not isinstance(callee, Stub if self._lenient else Name):
            raise CheckpointError("the pickle calls something that is not a name; the file is damaged")
        if callee.class_name == NESTED and self._nested and len(args) == 1 and type(args[0]) is bytes:
            self.budget.charge(_NESTED_WORK + len(args[0]))
            self._stack.append(self._nested(args[0], self.budget))
        elif (function := FUNCTIONS.get(callee.class_name)) is not None:
            self._stack.append(function(args, self.budget))
        elif callee.class_name not in STORAGE_TYPES:
            self._stack.append(Stub(callee.class_name, {}, args, None, self.budget))
        else:
            raise CheckpointError(f"the pickle calls {callee.class_name}; the file is damaged")

    def _build(self, argument: Any) -> None:
        """Keep a stub's attributes; those of plain data (a state dict's _metadata, a config's lines) are dropped."""
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) in (dict, list, float) and type(state) in (dict, tuple):
            return
        if type(target) is not Stub:
            raise CheckpointError(f"the pickle sets attributes of a {type(target).__name__}; the file is damaged")
        if target.class_name in OPAQUE or (target.class_name.startswith(SCRIPTED) and type(state) is not dict):
            target.built = state
            return
        if (self._lenient or target.class_name not in KNOWN) and type(state) is not dict:
            return
        if target.class_name in CONFIGS and type(state) is dict:
            state = {name: state[name] for name in ("_content", "_val") if name in state}
        parts = state if type(state) is tuple else (state,)  # a tuple holds __dict__ and slots
        self.budget.charge(len(parts) + sum(len(part) for part in parts if type(part) is dict))
        for part in parts:
            if part is not None and (type(part) is not dict or not all(type(name) is str for name in part)):
                raise CheckpointError(f"the attributes of a {target.class_name} are not a dictionary of names")
            target.state.update(part or {})

    def _persistent(self, argument: Any) -> None:
        match self._stack.pop():
            case ("module", Name() as name, _, _) if self._legacy:
                self._stack.append(name)
            case ("storage", Name(class_name=kind), str(key), _, int(count)) if kind in STORAGE_TYPES:
                self._stack.append(self._storage(key, STORAGE_TYPES[kind], count))
            case ("storage", Name(class_name=kind), str(key), _, int(count), view) if (
                kind in STORAGE_TYPES and self._legacy
            ):
                root = self._storage(key, STORAGE_TYPES[kind], count)
                self._stack.append(root if view is None else self._part(key, root, view))
            case ("storage", Name(class_name=kind), *_) if kind.endswith("Storage") and kind not in STORAGE_TYPES:
                raise CheckpointError(
                    f"a storage is a {shown(kind)}; sparse, quantised and complex tensors are not read here"
                )
            case _:
                raise CheckpointError(
                    "the pickle refers to something outside it that is not a storage of a known type; "
                    "sparse, quantised and complex tensors are not read here"
                )

    def _storage(self, key: str, dtype: torch.dtype, count: int) -> Storage:
        if self._read_storage is None or type(count) is not int or count < 0:
            raise CheckpointError(
                f"storage {shown(key)} has {count} elements, expected a number ≥ 0; the file is damaged"
            )
        self.budget.charge(len(key) // TEXT)
        if key not in self._storages:
            self._storages[key] = (dtype, count, Storage(self._read_storage(key, dtype, count)))
        known_dtype, known_count, storage = self._storages[key]
        if (known_dtype, known_count) != (dtype, count):
            raise CheckpointError(
                f"storage {shown(key)} is {known_count} × {known_dtype} and {count} × {dtype} at once; "
                "save a state dict whose tensors do not share memory under two types"
            )
        return storage

    def _part(self, key: str, root: Storage, view: Any) -> Storage:
        """A storage that is a part of another, as (its own key, first element, number of elements)."""
        _, first, count = view if type(view) is tuple else ()
        first, count = integers((first, count), "the storage")
        if first + count > root.elements.numel():
            raise CheckpointError(f"a part of storage {shown(key)} lies outside it; the file is damaged")
        if (place := (key, first, count)) not in self._parts:
            self.budget.charge(OBJECT)
            self._parts[place] = Storage(root.elements[first : first + count])
        return self._parts[place]


_ACTIONS: dict[str, Callable[[Unpickler, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINFLOAT"), Unpickler._push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), Unpickler._push),
    "BYTEARRAY8": lambda machine, data: machine._push(bytes(data)),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4"), Unpickler._push_integer),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), Unpickler._push_python2_text),
    "NONE": lambda machine, _: machine._push(None),
    "NEWTRUE": lambda machine, _: machine._push(True),
    "NEWFALSE": lambda machine, _: machine._push(False),
    "EMPTY_DICT": lambda machine, _: machine._open({}),
    "EMPTY_LIST": lambda machine, _: machine._open([]),
    "EMPTY_SET": lambda machine, _: machine._open([]),
    "EMPTY_TUPLE": lambda machine, _: machine._push(()),
    "MARK": Unpickler._mark,
    "TUPLE": lambda machine, _: machine._push(tuple(machine._since_mark())),
    "TUPLE1": lambda machine, _: machine._push(tuple(machine._last(1))),
    "TUPLE2": lambda machine, _: machine._push(tuple(machine._last(2))),
    "TUPLE3": lambda machine, _: machine._push(tuple(machine._last(3))),
    "APPEND": lambda machine, _: machine._extend_list(machine._last(1)),
    "APPENDS": lambda machine, _: machine._extend_list(machine._since_mark()),
    "ADDITEMS": lambda machine, _: machine._extend_list(machine._since_mark()),
    "FROZENSET": Unpickler._frozen_set,
    "SETITEM": lambda machine, _: machine._update_dict(machine._last(2)),
    "SETITEMS": lambda machine, _: machine._update_dict(machine._since_mark()),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, index: machine._push(machine._memo[index])),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), Unpickler._put),
    "MEMOIZE": Unpickler._memoize,
    "GLOBAL": lambda machine, name: machine._push_name(*name.split(" ", 1)),
    "STACK_GLOBAL": Unpickler._stack_global,
    # For a stub, creating an object and calling its class are the same.
    "REDUCE": Unpickler._reduce,
    "NEWOBJ": Unpickler._reduce,
    "BUILD": Unpickler._build,
    "BINPERSID": Unpickler._persistent,
}


_LENIENT_ACTIONS: dict[str, Callable[[Unpickler, Any], None]] = {
    "POP": lambda machine, _: machine._drop(),
    "NEWOBJ_EX": Unpickler._call_with_names,
}
"""What pickles of whole objects have beside these."""


def _check_plain(content: Any, budget: Budget) -> None:
    """Refuse what is not plain data, contains itself, is nested too deeply or is far larger than it looks.

    A few bytes can hold a list with the same list twice, which has the same list twice, and so on, and whoever walks
    that would never finish: what is shared counts as often as a walker meets it, and text as often as it is copied.

    Raises:
        CheckpointError: with what was found.
    """
    sizes: dict[int, int] = {}  # of what has been walked through, by id; 0 while it is being walked through
    path: list[tuple[Any, list[Any]]] = [(None, [content])]
    while path:
        parent, waiting = path[-1]
        if not waiting:
            path.pop()
            if parent is not None:
                sizes[id(parent)] = total = 1 + sum(
                    1 + len(child) // TEXT if type(child) in (str, bytes) else sizes.get(id(child), 1)
                    for child in children(parent)
                )
                if total > budget.left:
                    raise CheckpointError(
                        f"the content stands for more than {budget.left} objects, expected no more in a file of "
                        f"{budget.size} bytes; the file is damaged or was made to do harm"
                    )
            continue
        value = waiting.pop()
        kind = type(value)
        if kind in (str, int, float, bool, bytes, type(None), Tensor):
            continue
        if kind not in (dict, list, tuple, Stub, Name):
            raise CheckpointError(f"the content has a {kind.__name__} where plain data was expected")
        size = sizes.get(id(value))
        if size == 0:
            raise CheckpointError("the content contains itself; save model.state_dict() instead")
        if size is None:
            if len(path) > DEPTH_LIMIT:
                raise CheckpointError(TOO_DEEP)
            sizes[id(value)] = 0
            path.append((value, children(value)))


def children(value: Any) -> list[Any]:
    """What lies in a container or a stand-in."""
    if isinstance(value, Stub):
        return [value.state, *value.args, value.built]
    if type(value) is dict:
        return [*value.values(), *value]
    return list(value)


def names_in(program: BinaryIO, budget: Budget) -> set[str]:
    """The dotted names one pickle program refers to, found without building anything.

    Names that the program puts together in an unusual way show as "?". Where the program is damaged, the names up to
    that place, and up to where it asks for more work than the budget allows; the stream then stands there.
    """
    names: set[str] = set()
    texts: list[str | None] = []  # what each instruction pushed, as far as it is text
    memo: dict[int, str | None] = {}
    argument: Any
    try:
        for instruction, argument, _ in genops(program):
            name = instruction.name
            if name in ("GLOBAL", "INST"):
                names.add(".".join(argument.split(" ", 1)))
            elif name == "STACK_GLOBAL":
                module, attribute = ([None, None, *texts])[-2:]
                budget.charge((len(module or "") + len(attribute or "")) // TEXT)
                names.add(f"{module or '?'}.{attribute or '?'}")
            if name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
                memo[len(memo) if name == "MEMOIZE" else argument] = texts[-1] if texts else None
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                texts.append(memo.get(argument))
            elif name not in ("PROTO", "FRAME", "MARK"):
                texts.append(argument if "UNICODE" in name or "STRING" in name else None)
            del texts[:-2]
    except (ValueError, OverflowError, struct.error, CheckpointError):
        pass
    return names
