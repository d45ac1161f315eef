"""Makes plain data and tensors from the answer of `program`; names in the answer only select entries of tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from txl_runtime.errors import CheckpointError
from txl_runtime.sandbox.process import Bounded, Bounds, EndedError

from txl_export.checkpoints.files import program
from txl_export.checkpoints.files.pickle_names import STORAGE_TYPES, Name, Stub, shown
from txl_export.checkpoints.files.program import HARM

MEMORY, EACH, SECONDS, PER_SECOND = 1 << 28, 64, 10, 1 << 22
"""Limits of the process that reads pickles: memory of 256 MiB plus 64 bytes per byte of pickle, and processor time of
10 seconds plus one second per 4 MiB of pickle."""
AXES, LONGEST = 16, 1 << 40
"""Maximum number of axes of a tensor, and largest product of its nonzero sizes: torch multiplies the sizes of empty
tensors, too, and would overflow."""
VIEWS, ALIKE = 16, 64
"""Limits against small files that cost much. All views of a storage together have at most 16 times its elements,
because a caller may copy each view. A dictionary has at most 64 keys that share a hash with an earlier key, because
Python compares such keys one by one."""
NUMPY = {"f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "b1": torch.bool, "i1": torch.int8}
NUMPY |= {"i2": torch.int16, "i4": torch.int32, "i8": torch.int64, "u1": torch.uint8}
"""torch's type for each NumPy type code that has one, e.g. torch.float16 for "f2"."""


class ProgramAnswer(Struct, frozen=True):
    """The answer of `program`: contents, error or "", the offset after the last pickle, names, and bytes."""

    contents: list[Any]
    error: str = ""
    end: int = 0
    names: list[str] = []
    blob: bytes = b""


def run(data: bytes, count: int) -> ProgramAnswer:
    """Read the first `count` pickles in `data`, in a process that is ended if it exceeds its limits.

    Raises:
        CheckpointError: the process ended without an answer.
    """
    answer = _asked(bytes([count]) + data)
    behind = 8 + int.from_bytes(answer[:8], "little")
    return ProgramAnswer(**json.loads(answer[8:behind]), blob=answer[behind:])


def _asked(request: bytes) -> bytes:
    seconds, memory = SECONDS + len(request) // PER_SECOND, MEMORY + EACH * len(request)
    try:
        with Bounded(program.__file__, Bounds(memory, seconds, 10.0 * seconds), memory) as process:
            return process.ask(request)
    except EndedError as error:
        raise CheckpointError(f"the process that reads its pickle {error}; {HARM}") from None


@dataclass(eq=False)
class Storage:
    """The elements of a storage, or of a part of a storage, and the tensors over these elements.

    Equal views are one tensor object, so that callers find tied tensors with `is`.
    """

    elements: Tensor
    views: dict[Any, Tensor] = field(default_factory=dict)
    viewed: int = 0


@dataclass
class Builder:
    """Makes plain data and tensors from the lists that `program` wrote.

    Attributes:
        blob: the bytes that the lists refer to.
        elements: returns the elements [count] of a storage for its key, type and count.
        nested: returns the storage in a file inside the pickle, for that file's contents and the bytes after them.
        aliases: known names for names in the file.
    """

    blob: bytes
    elements: Callable[[str, torch.dtype, int], Tensor]
    aliases: Mapping[str, str]
    nested: Callable[[list[Any], bytes], Storage] | None = None
    _storages: dict[Any, tuple[Any, Storage]] = field(default_factory=dict)

    def plain(self, written: Any) -> Any:
        """Return the plain data, or the tensor, that a value written by `program` describes.

        Raises:
            CheckpointError: the value describes neither, or a tensor lies outside its storage.
        """
        if isinstance(value := self.any(written), Storage):
            raise CheckpointError(f"the content has a Storage where plain data was expected; {HARM}")
        return value

    def any(self, written: Any) -> Any:
        """Return plain data, a tensor or a `Storage`; raise the errors of `plain`."""
        if type(written) is not list:
            return written
        kind, *parts = written
        match kind:
            case program.LIST:
                return [*map(self.plain, parts)]
            case program.TUPLE:
                return (*map(self.plain, parts),)
            case program.DICT:
                values = map(self.plain, parts)
                return _mapping([*zip(values, values, strict=True)])
            case program.BYTES:
                return self.blob[parts[0] : parts[1]]
            case program.NAME:
                return Name(self.aliases.get(parts[0], parts[0]))
            case program.OUTSIDE:
                return self._outside(self.plain(*parts))
            case program.FILE if self.nested is not None:
                if parts[0] not in self._storages:
                    self._storages[parts[0]] = None, self.nested(parts[2:], self.plain(parts[1]))
                return self._storages[parts[0]][1]
            case program.MADE:
                return self._object(self.aliases.get(parts[0], parts[0]), *parts[1:])
        raise CheckpointError("a tensor was saved by pickle, not by torch.save; save the file again with torch.save")

    def _object(self, name: str, args: list[Any], states: list[Any], values: list[Any], pairs: list[Any]) -> Any:
        """Call the entry of `FUNCTIONS` for a name, or make a stub; add the pickle's states, list items and pairs."""
        match name, args:  # a tensor of a subclass: drop its type and attributes, keep the tensor
            case "torch._tensor._rebuild_from_type_v2", [[program.NAME, function], _, [program.TUPLE, *inner], _]:
                name, args = function, inner
        if call := FUNCTIONS.get(name):
            try:
                result = call(*map(self.any, args))
            except (TypeError, ValueError):
                raise CheckpointError(f"the pickle calls {name} with what it does not take; {HARM}") from None
            if type(result) is list:
                result += map(self.plain, values)
            elif type(result) is dict:
                result |= self.plain([program.DICT, *pairs])
            return result
        stub = Stub(name, {}, (*map(self.plain, args),))
        for state in map(self.plain, states):
            # an object with slots has a pair of states: its __dict__, its slots
            for part in state if type(state) is tuple and len(state) == 2 else (state,):
                if type(part) is dict and all(type(key) is str for key in part):
                    stub.state |= part
                elif part is not None:
                    stub.built = state
        if name.startswith("omegaconf."):
            return stub.state.get("_content", stub.state.get("_val"))
        return _numpy(stub) if name.startswith("numpy.") else stub

    def _outside(self, pid: Any) -> Storage:
        match pid:
            case ("storage", Name() as kind, str(key), _, int(count), *view) if count >= 0:
                dtype = STORAGE_TYPES.get(kind.class_name)
            case _:
                dtype = None
        if dtype is None:
            message = "sparse, quantised and complex tensors are not read here"
            raise CheckpointError(f"the pickle refers to something that is no storage of a known type; {message}")
        if key not in self._storages:
            self._storages[key] = (dtype, count), Storage(self.elements(key, dtype, count))
        known, storage = self._storages[key]
        if known != (dtype, count):
            message = f"storage {shown(key)} is {known[1]} × {known[0]} and {count} × {dtype} at once"
            raise CheckpointError(f"{message}; save a state dict whose tensors do not share memory under two types")
        match view:
            case [] | [None]:
                return storage
            # only torch ≤ 1.5 wrote parts of storages
            case [(_, int(first), int(many))] if 0 <= first <= first + many <= count:
                part = Storage(storage.elements[first : first + many])
                return self._storages.setdefault((key, first, many), (None, part))[1]
        raise CheckpointError(f"a part of storage {shown(key)} lies outside it; {HARM}")


def _listed(items: Any = ()) -> list[Any]:
    if type(items) not in (list, tuple):  # refuses a tensor, whose iteration would yield a tensor for each number
        raise TypeError
    return [*items]


def _mapping(items: Any = ()) -> dict[Any, Any]:
    pairs = [*items.items()] if type(items) is dict else _listed(items)
    try:
        if len(pairs) - len({hash(key) for key, _ in pairs}) > ALIKE:
            raise CheckpointError(f"a dictionary has more than {ALIKE} keys of one hash; {HARM}")
        return dict(pairs)
    except (TypeError, ValueError):
        raise CheckpointError(f"a mapping is not made of pairs with keys; {HARM}") from None


def _integers(values: Any, what: str) -> tuple[int, ...]:
    numbers = type(values) in (tuple, list) and len(values) <= AXES
    if not (numbers and all(type(n) is int and 0 <= n < 1 << 62 for n in values)):
        raise CheckpointError(f"{what} of a tensor is not a tuple of at most {AXES} numbers ≥ 0; {HARM}")
    return tuple(values)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Tensor:
    """Return a tensor inside its storage; `more` holds requires_grad, hooks, and flags such as conjugate."""
    if not isinstance(storage, Storage):
        raise CheckpointError(f"a tensor is not described by storage, offset, size and stride; {HARM}")
    if any(more[2:]):
        raise CheckpointError("a tensor is conjugate or negated; save it again with resolve_conj()/resolve_neg()")
    (first,), size = _integers((offset,), "the offset"), _integers(size, "the shape")
    place = first, size, stride = first, size, _integers(stride, "the stride")
    elements, count, most = storage.elements.numel(), math.prod(size), math.prod(n or 1 for n in size)
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    # Compare `count` as well as `last`: with stride 0 a few bytes could stand for any number of elements.
    if first > elements or count > elements or (count and last >= elements) or most > LONGEST:
        raise CheckpointError(
            f"a tensor of {shown(str(size))} with stride {shown(str(stride))} at {first} does not fit into its "
            f"storage of {elements} elements; the file is damaged, or was saved without contiguous()"
        )
    if place not in storage.views:
        storage.viewed += count
        if storage.viewed > VIEWS * elements:
            raise CheckpointError(f"tensors have more than {VIEWS} times the elements of their storage; {HARM}")
        # as_strided counts from the beginning of the memory; `elements` may begin later in it.
        storage.views[place] = storage.elements.as_strided(size, stride, storage.elements.storage_offset() + first)
    return storage.views[place]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "ruamel.yaml.comments.CommentedMap"), _mapping),
    **dict.fromkeys(("builtins.set", "builtins.frozenset", "ruamel.yaml.comments.CommentedSeq"), _listed),
    **dict.fromkeys(("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"), _tensor),
    "collections.defaultdict": lambda *_: {},
    "ruamel.yaml.scalarfloat.ScalarFloat": float,
    "builtins.bytes": lambda: b"",  # protocol 2 writes b"" as a call without arguments
    "torch.Size": lambda sizes: _integers(sizes, "the shape"),
    # returns the same tensor object, so that tied parameters stay tied
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    "torch.jit._pickle.restore_type_tag": lambda made, _: made,
    **{f"torch.jit._pickle.build_{kind}list": lambda made: made for kind in ("bool", "double", "int", "tensor")},
}
"""Functions by name, for the calls in a pickle that need more than a stub: each returns plain data or a tensor."""


def _numpy(stub: Stub) -> Any:
    """Return a pickled NumPy number as Python's number and an array as a tensor; any other stub as it is."""
    match stub.class_name.rpartition(".")[2], stub.args, stub.built:
        case "scalar" as what, (Stub() as kind, bytes(data)), _:
            shape, columns = (), False
        case "_reconstruct" as what, _, (_, shape, Stub() as kind, bool(columns), bytes(data)):
            pass
        case "_frombuffer" as what, (bytes(data), Stub() as kind, shape, str(order)), _:
            columns = order == "F"  # Fortran order: the first axis runs fastest
        case _:
            return stub
    match kind.args, kind.built:
        case (str(name), *_), (_, "<" | "|" | "=", *_) if name in NUMPY:
            dtype, sizes = NUMPY[name], _integers(shape, "an array")
        case _:
            return stub
    if math.prod(sizes) * dtype.itemsize != len(data) or math.prod(n or 1 for n in sizes) > LONGEST:
        raise CheckpointError(f"an array of {len(data)} bytes has the shape {list(sizes)} of {name}; {HARM}")
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0, dtype=dtype)
    if columns:
        return flat.reshape(sizes[::-1]).permute(*range(len(sizes))[::-1]).contiguous()
    return flat.item() if what == "scalar" else flat.reshape(sizes)
