"""Fields of the tables that other fields imply. Format 2.1 stores these fields, so that readers need no rules.

This module has the rules. Exporters write the fields; a manifest without them (format 2.0) is completed when it is
read; a manifest that has them is compared with the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from txl_runtime.bundle.tables import Counting, Input, Output, StateTensor, Tables

DERIVED = {"inputs": ("counter", "beyond"), "outputs": ("cluster_columns",), "states": ("spill", "in_place")}
"""Names of the derived fields in each table. An unset field has a falsy default: None, (), 0 or False."""
MOST_SHOWN = 80
"""Maximum number of characters of a value in a message; a hostile manifest may hold longer values."""


def completed(tables: Tables) -> Any:
    """Return the manifest with its derived fields set. Its tables may still be wrong: `agreement` checks them later."""
    manifest: Any = tables
    return msgspec.structs.replace(manifest, **_implied(tables))


def says_nothing(tables: Tables) -> bool:
    """Return True if no derived field of a manifest is set, as in format 2.0."""
    rows = ((row, names) for side, names in DERIVED.items() for row in getattr(tables, side))
    return not any(getattr(row, name) for row, names in rows for name in names)


def differences(tables: Tables) -> Iterator[str]:
    """Yield one sentence for each derived field that differs from the rules; nothing if no derived field is set."""
    for side, rows in ({} if says_nothing(tables) else _implied(tables)).items():
        for stored, expected in zip(getattr(tables, side), rows, strict=True):
            for name in DERIVED[side]:
                if getattr(stored, name) != getattr(expected, name):
                    value, implied = (_shown(getattr(row, name)) for row in (stored, expected))
                    yield f"{side[:-1]} {stored.name} says {name} {value}, expected {implied} as the other fields imply"


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) < MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def _implied(tables: Tables) -> dict[str, tuple[Any, ...]]:
    return {
        "inputs": tuple(_input(tables, entry) for entry in tables.inputs),
        "outputs": tuple(_output(entry) for entry in tables.outputs),
        "states": tuple(_state(state) for state in tables.states),
    }


def _input(tables: Tables, entry: Input) -> Input:
    counter, slots = None, next((state.slots for state in tables.states if state.slots), None)
    if entry.role == "fill" and (fill := tables.counters.get("fill")):
        counter = Counting(start=fill.start, most=fill.most, over="stay")
    elif entry.role == "head" and slots:
        counter = Counting(start=0, most=slots, over="wrap")
    beyond = ("largest" if tables.streams == "lockstep" else "zero") if entry.role == "valid" else None
    return msgspec.structs.replace(entry, counter=counter, beyond=beyond)


def _output(output: Output) -> Output:
    first = output.clusters[0][1] if output.clusters else 0
    columns = tuple(first + tail for tail in range(len(output.clusters) - 1))
    return msgspec.structs.replace(output, cluster_columns=columns)


def _state(state: StateTensor) -> StateTensor:
    ring, axis, slots = state.update == "ring", state.row_axis, state.slots
    rows = state.shape[axis] if ring and slots and axis is not None and axis < len(state.shape) else 0
    return msgspec.structs.replace(state, spill=max(rows - (slots or 0), 0), in_place=ring)
