"""Sizes and inputs with which a foreign graph runs: symbols by what they seem to be, numbers by what the graph does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_export.families.graph.naming import speaks_of
from txl_export.families.graph.reading import Foreign, Port
from txl_export.families.graph.running import RunError, Runner
from txl_export.families.graph.structure import Structure

LENGTHS = (4, 1, 2, 8, 16, 32, 64, 128, 160, 256, 320, 480, 512, 576, 640, 1024, 1536, 1600, 3200, 16000)
"""Positions that are tried where a graph leaves them open."""
ROWS = (6, 0, 1, 16)
"""Rows of a cache that are tried where a graph leaves them open."""
MOST_NUMBERS = 2**24
"""Numbers of all inputs together; more are not drawn."""
CALLED = {
    "batch": ("batch",),
    "total": ("total",),
    "rows": ("past", "cache", "kv", "mem", "hist"),
    "segment": ("seq", "time", "len", "t", "l", "chunk", "frames", "samples"),
}
"""Beginnings of words in the names of symbols, and what they say."""
_MADE_UP = re.compile(r"(_dynamic_axes|_dim)_\d+|(input|output) .* axis \d+")
"""Symbols that an exporter or `reading` has called after their places."""
_SUM = re.compile(r"[\w.]+( *\+ *[\w.]+)+")


class Inputs:
    """Draws inputs of a graph; the same seed gives the same numbers.

    Attributes:
        foreign, structure: whose inputs they are, and what its nodes say.
        could_be_states: those with an output of their type and sizes.
        sizes: of every symbol, with which the graph runs.
        roles: of every symbol: batch, segment, rows (of a cache) or total (rows and segment).
    """

    def __init__(self, foreign: Foreign, structure: Structure) -> None:
        self.foreign, self.structure = foreign, structure
        self.could_be_states = {
            port.name for port in foreign.inputs if any(_alike(port, output) for output in foreign.outputs)
        }
        self.sizes, self.roles, self._plain = dict[str, int](), self._roles(), 0
        self._floats = {port.name: port.dtype.startswith("float") for port in foreign.inputs}

    def find(self, runner: Runner) -> dict[str, NDArray[Any]]:
        """Sizes with which the graph runs, and what it returns for them; they stay those of this object.

        Raises:
            RunError: no sizes that were tried are right.
            EndedError: see `Runner.run`.
        """
        refused = RunError("it takes nothing")
        for sizes, plain in self._attempts():
            self.sizes, self._plain = sizes, plain
            try:
                return runner.run(self.draw(0))
            except RunError as error:
                refused = error
        raise refused

    def draw(self, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, NDArray[Any]]:
        """Inputs by name.

        Raises:
            RunError: one is no tensor of numbers, or they have too many.
        """
        draws, all_sizes = np.random.default_rng(seed), {**self.sizes, **(sizes or {})}
        numbers = sum(np.prod(self.shape(port, all_sizes), dtype=float) for port in self.foreign.inputs)
        if numbers > MOST_NUMBERS:
            raise RunError(f"takes {numbers:.3g} numbers, of which at most {MOST_NUMBERS} are drawn")
        return {port.name: self._one(port, draws, all_sizes) for port in self.foreign.inputs}

    def shape(self, port: Port, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The sizes of an input."""
        return tuple(size if isinstance(size, int) else _value(size, sizes) for size in port.shape)

    def varies(self, name: str) -> bool:
        """Whether an input is data, or may be a state: no setting, mask, length or position."""
        return name in self.structure.rows or (self._floats[name] and not speaks_of(name, "mask"))

    def _one(self, port: Port, draws: np.random.Generator, sizes: Mapping[str, int]) -> NDArray[Any]:
        shape, name = self.shape(port, sizes), port.name
        try:
            dtype = np.dtype(port.dtype or "V")
        except TypeError:  # bfloat16, and the like
            dtype = np.dtype("V")
        if dtype.kind == "f":
            scalar = 1.0 if speaks_of(name, "mask") else draws.normal(0, 0.7, shape)
            return np.full(shape, scalar, dtype) if np.ndim(scalar) == 0 and shape else np.asarray(scalar, dtype)
        if dtype.kind not in "iub":
            raise RunError(f"{name} is {port.dtype or 'no tensor'}, expected numbers as NumPy has them")
        if self._plain:
            return np.full(shape, self._plain - 1, dtype)
        if dtype.kind == "b" or speaks_of(name, "mask"):
            return np.full(shape, speaks_of(name, "mask") or name in self.structure.branching, dtype)
        length = next((sizes[symbol] for symbol, role in self.roles.items() if role == "segment"), 1)
        if speaks_of(name, "pos"):
            rows = next((sizes[symbol] for symbol, role in self.roles.items() if role == "rows"), 0)
            places = np.arange(rows, rows + shape[-1]) if shape else np.array(rows)
            return np.broadcast_to(places, shape).astype(dtype)
        most = np.iinfo(dtype).max
        if name in self.structure.rows:
            return draws.integers(0, min(max(self.structure.rows[name], 1), most), shape).astype(dtype)
        if self.structure.compared.get(name) and name not in self.could_be_states:
            return np.full(shape, min(max(self.structure.compared[name][0], 0), most) or 1, dtype)
        return np.full(shape, min(length, most) if speaks_of(name, "len") else 1, dtype)

    def _attempts(self) -> Iterator[tuple[dict[str, int], int]]:
        roles = set(self.roles.values())
        wanted = [window.before + 4 * window.step for window in self.structure.windows if window.input]
        lengths = (*dict.fromkeys([*wanted, *LENGTHS]),) if "segment" in roles else (1,)
        for plain in (0, 1, 2):
            for rows in ROWS if "rows" in roles else (0,):
                for length in lengths:
                    for batch in (2, 1) if "batch" in roles else (1,):
                        named = {"batch": batch, "segment": length, "rows": rows, "total": rows + length}
                        yield {symbol: named[role] for symbol, role in self.roles.items()}, plain

    def _roles(self) -> dict[str, str]:
        """What each symbol seems to be, by its name, else by its place."""
        found: dict[str, str] = {}
        for port in self.foreign.inputs:
            for axis, symbol in enumerate(port.shape):
                if isinstance(symbol, int) or symbol in found or _SUM.fullmatch(symbol):
                    continue
                unnamed = bool(_MADE_UP.search(symbol))
                called = next((role for role, words in CALLED.items() if speaks_of(symbol, *words)), "")
                if not unnamed and (called or symbol.lower() in ("b", "n", "bs")):
                    found[symbol] = called or "batch"
                elif port.name in self.could_be_states and sum(isinstance(size, str) for size in port.shape) == 1:
                    grown = any(_grows(port, output, axis) for output in self.foreign.outputs)
                    found[symbol] = "rows" if grown else "batch"
                else:
                    found[symbol] = "batch" if axis == 0 else "segment"
        return found


def _alike(port: Port, output: Port) -> bool:
    """Whether a returned array could be given again: the same type, and no size that differs for sure on two axes."""
    if port.dtype != output.dtype or not port.dtype or len(port.shape) != len(output.shape):
        return False
    fixed = [(a, b) for a, b in zip(port.shape, output.shape, strict=True) if isinstance(a, int) and isinstance(b, int)]
    return all(a == b for a, b in fixed)


def _grows(port: Port, output: Port, axis: int) -> bool:
    """Whether an output has another named size where an input has an open one."""
    symbol = output.shape[axis] if _alike(port, output) else 0
    return isinstance(symbol, str) and symbol != port.shape[axis] and not _MADE_UP.search(symbol)


def _value(symbol: str, sizes: Mapping[str, int]) -> int:
    """A symbol's size, or the sum's that it is."""
    if symbol in sizes:
        return sizes[symbol]
    parts = [part.strip() for part in symbol.split("+")]
    return sum(int(part) if part.isdecimal() and len(part) < 9 else sizes.get(part, 1) for part in parts)
