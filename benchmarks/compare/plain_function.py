"""Compile a package in plain C as a shared object, and call its functions from Python with NumPy arrays."""

from __future__ import annotations

import ctypes
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Input, Output, StateTensor
from txl_runtime.native.ring import LANES, STRIP
from txl_runtime.types import Array, Arrays, Ids

from txl_deploy.plain_c.compiling import find_compiler
from txl_deploy.plain_c.step import whole_update

KINDS = {"float": ctypes.c_float, "int32_t": ctypes.c_int32, "bool": ctypes.c_bool}
MEMBER = re.compile(r"^    (float|int32_t|bool) (\w+)((?:\[\d+\])*);", re.MULTILINE)


def flags_of(package: Path) -> str:
    """Return the flags with which a package's Makefile compiles it."""
    match = re.search(r"^CFLAGS = (.*)$", (package / "Makefile").read_text(), re.MULTILINE)
    assert match is not None, "a package has a Makefile"
    return match[1]


class PlainFunction:
    """A package in plain C, with one state struct, which holds the state of all B sequences.

    Args:
        package: a folder that `txl-deploy package --target c` wrote, with the weights inside.
        manifest: the manifest of the bundle that the package was made of.
        folder: the folder into which the shared object is written.

    Attributes:
        batch_size, length: B and L of a step.
    """

    def __init__(self, package: Path, manifest: Manifest, folder: Path) -> None:
        (header,) = package.glob("*.h")
        self._name, self._manifest = header.stem, manifest
        sizes = dict(re.findall(r"^#define \w+?_(BATCH_SIZE|SEGMENT_LENGTH) (\d+)$", header.read_text(), re.MULTILINE))
        self.batch_size, self.length = int(sizes["BATCH_SIZE"]), int(sizes["SEGMENT_LENGTH"])
        library, source = folder / f"{self._name}.so", package / f"{self._name}.c"
        flags = [*shlex.split(flags_of(package)), "-std=c99", "-shared", "-fPIC"]
        subprocess.run([*find_compiler(), *flags, source, "-o", library, "-lm"], check=True)
        self._library = ctypes.CDLL(str(library))
        struct, fields = re.search(r"typedef struct \w+ {(.*?)^}", header.read_text(), re.DOTALL | re.MULTILINE), []
        assert struct is not None, "a header has the struct of its state"
        for kind, name, sizes in MEMBER.findall(struct[1]):
            of_c: Any = KINDS[kind]
            for size in reversed(re.findall(r"\d+", sizes)):
                of_c = of_c * int(size)
            fields.append((name, of_c))
        self._state: Any = type("State", (ctypes.Structure,), {"_fields_": fields})()
        # all bits of the state are set first, so that `init` fails if it reads the state
        ctypes.memset(ctypes.byref(self._state), 0xFF, ctypes.sizeof(self._state))
        self._members = [name for name, _ in fields]
        self._call("init")

    def run(self, inputs: Arrays, counts: Ids, commit: bool = True) -> dict[str, Array]:
        """Run one segment of b sequences, at most B, and return the outputs by name.

        Missing sequences and positions are filled with values that would change every result, if the package read them.

        Args:
            inputs: arrays by name, b sequences of at most L positions, in the manifest's order of axes: [2, 5, 8] for
                b = 2, 5 positions and 8 features.
            counts: the number of positions that count in each sequence, [b], e.g. [5, 3].
            commit: False restores the state after the segment.
        """
        whole, before = np.zeros(self.batch_size, np.int32), bytes(self._state)
        whole[: len(counts)] = max(counts) if self._manifest.streams == "lockstep" else counts
        given = [self._filled(entry, inputs[entry.name], len(counts)) for entry in self._manifest.given]
        results = [np.full(self._sizes(entry), 1, np.dtype(entry.dtype)) for entry in self._manifest.outputs]
        self._call("step", *given, whole, *results)
        if not commit:
            ctypes.memmove(ctypes.byref(self._state), before, len(before))
        length = max((entry.axes.length(inputs[entry.name]) for entry in self._manifest.given), default=1)
        return {
            entry.name: array[entry.axes.at(slice(len(counts)), slice(length))]
            for entry, array in zip(self._manifest.outputs, results, strict=True)
        }

    def feeding(self, given: Array, found: Array) -> Callable[[], object]:
        """Return a function that calls the package's `feed`, which reads `given` [positions, …], e.g. [1000, 8], and
        writes its outputs into `found`. Only packages of several segment lengths have `feed`.
        """
        places = [ctypes.c_void_p(array.ctypes.data) for array in (given, found)]
        arguments = ctypes.byref(self._state), places[0], ctypes.c_size_t(given.size), places[1]
        return partial(getattr(self._library, f"{self._name}_feed"), *arguments)

    def reset(self, which: Array | None = None) -> None:
        """Reset the sequences that are True in a mask [B], e.g. [True, False]; reset all for None."""
        self._call("reset", None if which is None else which.astype(np.uint8))

    def adopt(self, other: PlainFunction) -> None:
        """Copy the state of a second package of the same model, whose segment length differs, into this one."""
        ctypes.memmove(ctypes.byref(self._state), bytes(other._state), ctypes.sizeof(other._state))

    def states(self) -> dict[str, Array]:
        """Return the current states of all B sequences by name, e.g. {"h": [2, 32]} for B = 2 and a width of 32."""
        states = self._manifest.states_of(whole_update(self._manifest))
        if "keys" in self._members:
            return {state.name: self._memory(number, state) for number, state in enumerate(states)}
        side = self._state.side
        sides = (np.array(getattr(self._state, name)[side]) for name in self._members[: len(states)])
        return {
            state.name: side.astype(state.dtype).reshape(state.shape) for state, side in zip(states, sides, strict=True)
        }

    def fill(self) -> Ids:
        """Return the number of memory rows by sequence, [B], e.g. [16, 3]; zeros if the model has no memory rows."""
        return np.array(getattr(self._state, "fill", [0] * self.batch_size), np.int32)

    def _memory(self, number: int, state: StateTensor) -> Array:
        """Return the memory rows of state `number`, oldest first, [B, H, M, d_head]; missing rows are zeros."""
        batch, heads, rows, width = state.shape
        keys, layer = number % 2 == 0, number // 2
        if keys:
            ring = np.array(self._state.keys[layer]).reshape(batch, heads, -1, width, STRIP)
            ring = ring.swapaxes(3, 4).reshape(batch, heads, -1, width)
        else:
            ring = np.array(self._state.values[layer]).reshape(batch, heads, -1, -(-width // LANES) * LANES)
        slots, result = rows + self.length, np.zeros(state.shape, np.float32)
        for row, (head, fill) in enumerate(zip(self._state.head, self._state.fill, strict=True)):
            result[row, :, rows - fill :] = ring[row][:, (head - fill + np.arange(fill)) % slots, :width]
        return result

    def _call(self, what: str, *arrays: Array | None) -> None:
        pointers = (None if array is None else ctypes.c_void_p(array.ctypes.data) for array in arrays)
        getattr(self._library, f"{self._name}_{what}")(ctypes.byref(self._state), *pointers)

    def _sizes(self, entry: Input | Output) -> tuple[int, ...]:
        return entry.sizes(self.batch_size, self.length)

    def _filled(self, entry: Input, array: Array, b: int) -> Array:
        dtype = np.dtype(entry.dtype)
        whole = np.full(self._sizes(entry), np.nan if dtype.kind == "f" else 1, dtype)
        length = array.shape[entry.axes.positions[0]] if entry.axes.positions else 0
        whole[entry.axes.at(slice(b), slice(length))] = array
        return whole
