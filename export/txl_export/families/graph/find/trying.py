"""Finds sizes and inputs with which a graph runs: symbols have roles, and several sizes are tried for each role."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
from txl_runtime.types import Array

from txl_export.families.graph.find.naming import speaks_of
from txl_export.families.graph.find.structure import Structure
from txl_export.families.graph.take.reading import MOST_NUMBERS, Foreign, Port
from txl_export.families.graph.take.running import RunError, Runner

LENGTHS = (4, 1, 2, 8, 16, 32, 64, 128, 160, 256, 320, 480, 512, 576, 640, 1024, 1536, 1600, 3200, 16000)
"""Numbers of positions that are tried if a graph leaves them open; the larger numbers are usual frame sizes of
audio."""
ROWS = (6, 0, 1, 16)
"""Numbers of rows of a cache that are tried if a graph leaves them open."""
CALLED = {
    "batch": ("batch",),
    "total": ("total",),
    "rows": ("past", "cache", "kv", "mem", "hist"),
    "segment": ("seq", "time", "len", "t", "l", "chunk", "frames", "samples"),
}
"""Beginnings of words in the names of symbols, by the role that they indicate."""
_MADE_UP = re.compile(r"(_dynamic_axes|_dim)_\d+|(input|output) .* axis \d+")
"""Matches names that an exporter or `reading` made up from a symbol's place, which say nothing about its role."""
_SUM = re.compile(r"[\w.]+( *\+ *[\w.]+)+")


class Inputs:
    """Draws inputs of a graph; the same seed gives the same numbers.

    Attributes:
        foreign, structure: the graph, and the facts that its nodes show.
        told: known axes of positions, by the names of inputs and outputs.
        could_be_states: inputs for which an output has the same type and sizes.
        fixed: sizes of symbols that a weight decides.
        sizes: the size of every symbol with which the graph runs.
        roles: the role of every symbol: batch, segment, rows (of a cache), total (rows and segment) or weight.
        given, first: the inputs of seed 0 and the graph's results for them; `find` sets both.
    """

    def __init__(self, foreign: Foreign, structure: Structure, told: Mapping[str, int] | None = None) -> None:
        self.foreign, self.structure, self.told = foreign, structure, told or {}
        self.could_be_states = {
            port.name for port in foreign.inputs if any(_alike(port, output) for output in foreign.outputs)
        }
        self.sizes, self.roles, self._plain = dict[str, int](), dict[str, str](), 0
        self.given, self.first = dict[str, Array](), dict[str, Array]()
        self.fixed = {
            symbol: structure.kinds.sizes[port.name, axis]
            for port in foreign.inputs
            for axis, symbol in enumerate(port.shape)
            if isinstance(symbol, str) and (port.name, axis) in structure.kinds.sizes
        }
        # States come first, because an open axis of a state is sequences or rows, while the first axis of data may be
        # positions.
        for port in sorted(foreign.inputs, key=lambda port: port.name not in self.could_be_states):
            for axis, symbol in enumerate(port.shape):
                if isinstance(symbol, str) and symbol not in self.roles and not _SUM.fullmatch(symbol):
                    self.roles[symbol] = self._role(port, axis, symbol)
        self.roles |= dict.fromkeys(self.fixed, "weight")
        self._floats = {port.name: port.dtype.startswith("float") for port in foreign.inputs}

    def find(self, runner: Runner) -> None:
        """Find sizes with which the graph runs.

        Raises:
            RunError: the graph ran with none of the sizes that were tried.
            EndedError: see `Runner.run`.
        """
        refused, empty = RunError("it takes nothing"), None
        for sizes, plain in self._attempts():
            self.sizes, self._plain = sizes, plain
            try:
                self.given = self.draw(0)
                self.first = runner.run(self.given)
            except RunError as error:
                refused = error
                continue
            if all(array.size for array in self.first.values()):
                return
            # results are empty, e.g. because there are too few samples for one frame
            empty = empty or (sizes, plain, self.given, self.first)
        if empty is None:
            raise refused
        self.sizes, self._plain, self.given, self.first = empty

    def draw(self, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Array]:
        """Draw inputs by name.

        For example, `draw(0, {"batch": 2})` gives {"x": [2, 8]}.

        Raises:
            RunError: an input is no tensor of numbers, or all inputs together have too many numbers.
        """
        draws, all_sizes = np.random.default_rng(seed), {**self.sizes, **(sizes or {})}
        shapes = [self.shape(port, all_sizes) for port in self.foreign.inputs]
        # 0 counts as 1, because NumPy limits the product of nonzero sizes
        numbers = sum(np.prod([size or 1 for size in shape], dtype=float) for shape in shapes)
        if numbers > MOST_NUMBERS:
            raise RunError(f"takes {numbers:.3g} numbers, of which at most {MOST_NUMBERS} are drawn")
        return {port.name: self._one(port, draws, all_sizes) for port in self.foreign.inputs}

    def shape(self, port: Port, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of an input with numbers for its symbols, e.g. (2, 8) for ("batch", 8) if batch is 2."""
        return tuple(size if isinstance(size, int) else _value(size, sizes) for size in port.shape)

    def varies(self, name: str) -> bool:
        """Return whether an input is data or a possible state, rather than a setting, mask, length or position."""
        return name in self.structure.rows or (self._floats[name] and not speaks_of(name, "mask"))

    def rows_of(self, name: str, axis: int) -> int:
        """Return the number of rows of a growing cache in the first run, or 1 if it had none."""
        return int(self.given[name].shape[axis]) or 1

    def stretches(self, name: str) -> bool:
        """Return whether an input grows with the segment, as data does and a state does not."""
        sizes = next(port.shape for port in self.foreign.inputs if port.name == name)
        return any(self.roles.get(str(size)) == "segment" for size in sizes)

    def _one(self, port: Port, draws: np.random.Generator, sizes: Mapping[str, int]) -> Array:
        shape, name, mask, rows = self.shape(port, sizes), port.name, speaks_of(port.name, "mask"), self.structure.rows
        try:
            dtype = np.dtype(port.dtype or "V")
        except TypeError:  # a type that NumPy lacks, e.g. bfloat16
            dtype = np.dtype("V")
        if dtype.kind == "f":
            return np.full(shape, 1, dtype) if mask else np.asarray(draws.normal(0, 0.7, shape), dtype)
        if dtype.kind not in "iub":
            raise RunError(f"{name} is {port.dtype or 'no tensor'}, expected numbers as NumPy has them")
        if self._plain:
            return np.full(shape, self._plain - 1, dtype)
        if dtype.kind == "b" or mask:
            return np.full(shape, mask or name in self.structure.branching, dtype)
        known = {role: sizes[symbol] for symbol, role in reversed(self.roles.items())}
        if speaks_of(name, "pos"):
            start = known.get("rows", 0)
            places = np.arange(start, start + shape[-1]) if shape else np.array(start)
            return np.broadcast_to(places, shape).astype(dtype)
        most, compared = np.iinfo(dtype).max, self.structure.compared.get(name)
        if name in rows:
            return draws.integers(0, min(max(rows[name], 1), most), shape).astype(dtype)
        if compared and name not in self.could_be_states:
            return np.full(shape, min(max(compared[0], 0), most) or 1, dtype)
        return np.full(shape, min(known.get("segment", 1), most) if speaks_of(name, "len") else 1, dtype)

    def _attempts(self) -> Iterator[tuple[dict[str, int], int]]:
        roles = {*self.roles.values()}
        wanted = [context.before + 4 * context.step for context in self.structure.contexts]
        lengths = dict.fromkeys([*wanted, *LENGTHS]) if "segment" in roles else (1,)
        counts = ROWS if "rows" in roles else (0,), lengths, (2, 1) if "batch" in roles else (1,)
        for plain, rows, length, batch in product((0, 1, 2), *counts):
            named = {"batch": batch, "segment": length, "rows": rows, "total": rows + length}
            yield {symbol: self.fixed.get(symbol) or named[role] for symbol, role in self.roles.items()}, plain

    def _role(self, port: Port, axis: int, symbol: str) -> str:
        """Return the role of a symbolic axis.

        The nodes that read the axis decide; without such nodes its name, and if that says nothing, its position.
        """
        kinds = self.structure.kinds
        if self.told.get(port.name) == axis:
            return "segment"
        for role, places in (("segment", kinds.positions), ("batch", kinds.sequences)):
            if places.get(port.name) == axis and (role == "batch" or port.name not in self.could_be_states):
                return role
        made_up = bool(_MADE_UP.search(symbol))
        called = next((role for role, words in CALLED.items() if speaks_of(symbol, *words) and not made_up), "")
        if called or symbol.lower() in ("b", "n", "bs", "bsz"):
            return called or "batch"
        if port.name in self.could_be_states and sum(isinstance(size, str) for size in port.shape) == 1:
            others = [output.shape[axis] for output in self.foreign.outputs if _alike(port, output)]
            named = [size for size in others if isinstance(size, str) and not _MADE_UP.search(size)]
            return "batch" if {*named} <= {symbol} else "rows"
        return "batch" if axis == 0 else "segment"


def other_than(value: Array, other: Array) -> Array:
    """Return `other`; if it equals `value`, return `value` with every number changed.

    For example, of [0, 0] and [0, 0] it returns an array whose two numbers are not 0.
    """
    if not np.array_equal(value, other):
        return other
    return ~value if value.dtype == bool else value + np.ones((), value.dtype)


def _alike(port: Port, output: Port) -> bool:
    """Return whether an output could be fed back to an input: same dtype, and no fixed sizes differ."""
    if port.dtype != output.dtype or not port.dtype or len(port.shape) != len(output.shape):
        return False
    fixed = [(a, b) for a, b in zip(port.shape, output.shape, strict=True) if isinstance(a, int) and isinstance(b, int)]
    return all(a == b for a, b in fixed)


def _value(symbol: str, sizes: Mapping[str, int]) -> int:
    """Return the size of a symbol, which may be a sum such as "past + 1"."""
    if symbol in sizes:
        return sizes[symbol]
    parts = [part.strip() for part in symbol.split("+")]
    return sum(int(part) if part.isdecimal() and len(part) < 9 else sizes.get(part, 1) for part in parts)
