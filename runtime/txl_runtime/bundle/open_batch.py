"""Functions for programs whose graphs leave the batch size open: a graph runs 1 … the manifest's batch size sequences.

Only a bundle that has such a program needs this module.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program, Tables, TensorSpec, axes_of

BATCH = "batch"
"""Name of the open batch size in a graph's shapes."""
OPENED = "[batch]"
"""Suffix of names of values that replace constants when the batch size is opened; no parameter's name ends so."""


def batch_axes(tables: Tables, program: Program) -> dict[str, int]:
    """Return the axis of sequences of each input and output of a segment program, by name; leave out shared tensors."""
    return {name: axes.batch for name, axes in axes_of(tables, program).items() if axes.batch is not None}


def sequences(program: Program, tables: Tables) -> int:
    """Return the number of sequences in a program's tensors, its batch size."""
    axes = batch_axes(tables, program)
    return next(spec.fixed[axes[spec.name]] for spec in (*program.inputs, *program.outputs) if spec.name in axes)


def with_sequences(program: Program, tables: Tables, size: int | str = BATCH) -> Program:
    """Return the program with `size` sequences in its tensors: a number, or `BATCH` for an open batch size."""
    return at_axes(program, batch_axes(tables, program), size)


def at_axes(program: Program, axes: Mapping[str, int], size: int | str = BATCH) -> Program:
    """Return the program with `size` sequences, as `with_sequences` does, given the axes of sequences by name."""

    def other(spec: TensorSpec) -> TensorSpec:
        return msgspec.structs.replace(spec, shape=_at(spec.shape, axes.get(spec.name), size))

    inputs, outputs = (tuple(map(other, side)) for side in (program.inputs, program.outputs))
    return msgspec.structs.replace(program, inputs=inputs, outputs=outputs)


def smaller(manifest: Manifest, size: int) -> Manifest:
    """Return the manifest of the same bundle with a batch size of `size`."""
    states = tuple(
        msgspec.structs.replace(state, shape=_at(state.shape, state.batch_axis, size)) for state in manifest.states
    )
    programs = tuple(
        with_sequences(program, manifest, size) if program.update != "none" else program
        for program in manifest.programs
    )
    return msgspec.structs.replace(manifest, batch_size=size, batch_sizes=(), states=states, programs=programs)


def _at(shape: tuple[int | str, ...], axis: int | None, size: int | str) -> tuple[int | str, ...]:
    return tuple(size if place == axis else old for place, old in enumerate(shape))
