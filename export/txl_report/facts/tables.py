"""Turn a manifest into tables of inputs, outputs, states and programs; states that differ only in name share a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from txl_runtime.bundle.manifest import Manifest

from txl_report.facts.plain import some
from txl_report.schema.reading import short


class TensorRow(NamedTuple):
    """A tensor that a step reads or returns; for `lookahead` see `txl_runtime.bundle.tables.Input`."""

    name: str
    dtype: str
    shape: str
    role: str
    lookahead: int = 0


class StateRow(NamedTuple):
    """States that differ only in name, such as one state of each layer.

    Attributes:
        name: the state's name; for several states, the first and the last name and their number.
        dtype, shape, update: type, shape and update rule of each state.
        starts: the value with which a sequence begins.
    """

    name: str
    dtype: str
    shape: str
    update: str
    starts: str


class ProgramRow(NamedTuple):
    """A program and its graph; `segment_length` is 0 for the parts of the softmax."""

    name: str
    kind: str
    segment_length: int
    update: str
    file: str


class Tables(NamedTuple):
    """The tensors that a step reads, returns and carries, and the programs that run it."""

    reads: tuple[TensorRow, ...]
    returns: tuple[TensorRow, ...]
    carries: tuple[StateRow, ...]
    programs: tuple[ProgramRow, ...]


def tables_of(manifest: Manifest) -> Tables:
    """Make the tables of a manifest."""
    return Tables(
        reads=some(
            TensorRow(short(one.name), one.dtype, _sizes(one.shape), one.role, one.lookahead) for one in manifest.inputs
        ),
        returns=some(
            TensorRow(short(one.name), one.dtype, _sizes(one.shape), short(one.role)) for one in manifest.outputs
        ),
        carries=some(_states(manifest)),
        programs=some(
            ProgramRow(short(one.name), short(one.kind), one.segment_length, one.update, short(one.file))
            for one in manifest.programs
        ),
    )


def _states(manifest: Manifest) -> list[StateRow]:
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for state in manifest.states:
        rowless = state.rows or (state.row_axis is not None and not manifest.fresh_fill)
        begins = "absent" if state.absent else "no rows" if rowless else state.initial
        if isinstance(begins, str) and begins.startswith("initial."):
            begins = "a tensor"
        form = (state.dtype, _sizes(state.shape), state.update, "zeros" if begins in (None, 0.0) else short(begins))
        alike.setdefault(form, []).append(short(state.name))
    return [StateRow(_first_and_last(names), *form) for form, names in alike.items()]


def _first_and_last(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]} ({len(names)})"


def _sizes(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
