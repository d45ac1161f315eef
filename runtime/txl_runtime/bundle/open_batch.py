"""Programs whose graphs leave B open: they run any number of sequences up to the manifest's batch size.

Only a bundle that has such programs needs this module.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program, Tables, TensorSpec, axes_of

BATCH = "batch"
"""What a graph calls the number of sequences where it leaves it open."""
OPENED = "[batch]"
"""Behind the name of a constant: what an opened graph has in its place; no parameter is called so."""


def batch_axes(tables: Tables, program: Program) -> dict[str, int]:
    """The axis of sequences in each input and output of a program of segments that has one, by name."""
    return {name: axes.batch for name, axes in axes_of(tables, program).items() if axes.batch is not None}


def sequences(program: Program, tables: Tables) -> int:
    """The number of sequences in a program's tensors."""
    axes = batch_axes(tables, program)
    return next(spec.fixed[axes[spec.name]] for spec in (*program.inputs, *program.outputs) if spec.name in axes)


def with_sequences(program: Program, tables: Tables, size: int | str = BATCH) -> Program:
    """A program with another number of sequences in its tensors: a number, or `BATCH` as the graph has it."""
    return at_axes(program, batch_axes(tables, program), size)


def at_axes(program: Program, axes: Mapping[str, int], size: int | str = BATCH) -> Program:
    """See `with_sequences`; the axis of sequences is given by the tensors' names."""

    def other(spec: TensorSpec) -> TensorSpec:
        return msgspec.structs.replace(spec, shape=_at(spec.shape, axes.get(spec.name), size))

    inputs, outputs = (tuple(map(other, side)) for side in (program.inputs, program.outputs))
    return msgspec.structs.replace(program, inputs=inputs, outputs=outputs)


def smaller(manifest: Manifest, size: int) -> Manifest:
    """The manifest as it would be of a bundle that was exported for `size` sequences at most."""
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
