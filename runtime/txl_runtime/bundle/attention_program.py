"""The program that tells where a model looks: found in the tables of its bundle, and held against them.

It stands aside: no stream runs it, no engine is built of it, and it leaves the state alone. So the other tables are
checked as if it were not there. Only a bundle that has it needs this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from txl_runtime.bundle.tables import Program, Tables, TensorSpec

ATTENTION = "attention"
"""The kind of the program, and the name of its one output."""


def attention_program(tables: Tables) -> Program | None:
    """The program, if the bundle has one."""
    return next((program for program in tables.programs if program.kind == ATTENTION), None)


def parted(tables: Tables) -> tuple[Tables, Iterator[str]]:
    """The tables without the program, and what about the program cannot be true, one sentence each.

    The sentences are derived from the other tables, which have to be sound when the first is asked for.
    """
    others = tuple(program for program in tables.programs if program.kind != ATTENTION)
    manifest: Any = tables
    rest: Tables = msgspec.structs.replace(manifest, programs=others)
    looks = [program for program in tables.programs if program.kind == ATTENTION]
    return rest, _contradictions(looks, rest)


def _contradictions(looks: list[Program], rest: Tables) -> Iterator[str]:
    program, *more = looks
    if more:
        yield f"two programs are of kind {ATTENTION}, {program.name} and {more[0].name}, expected one"
        return
    if program.update != "none" or program.open_batch:
        yield f"program {program.name} has update rule {program.update!r}, expected 'none' and one sequence"
    for what, name in (("name", program.name), ("file", program.file)):
        if any(getattr(other, what) == name for other in rest.programs):
            yield f"program {program.name} shares its {what} {name} with another, expected one of its own"
    tokens, length = rest.tokens, rest.segment_lengths[0]
    counted = {"valid", "fill"} <= {entry.role for entry in rest.inputs}
    if tokens is None or tokens.lookahead or not tokens.axes.plain or not counted:
        yield (
            f"program {program.name} is there, but the model does not read tokens, how many of them count and how many "
            "memory rows there are"
        )
        return
    if rest.memory_length and "rolled" not in rest.updates:
        yield f"program {program.name} takes rolled memory, which no other program of the bundle has"
        return
    read = tuple(
        TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.sizes(1, length))
        for entry in rest.inputs
        if entry.role not in ("targets", "head")
    )
    states = rest.states_of("rolled")
    taken = tuple(TensorSpec(name=state.input, dtype="float32", shape=(1, *state.shape[1:])) for state in states)
    if program.segment_length != length or program.inputs != (*read, *taken):
        yield f"the inputs of program {program.name} do not fit the state table and segments of {length}"
    layers, heads = _layers_and_heads(program)
    shape = (layers, 1, heads, length, rest.memory_length + length)
    if program.outputs != (TensorSpec(name=ATTENTION, dtype="float32", shape=shape),):
        yield (
            f"the outputs of program {program.name} are not {ATTENTION} [layers, 1, heads, {length}, "
            f"{rest.memory_length + length}]"
        )


def _layers_and_heads(program: Program) -> tuple[int, int]:
    """How many there are, where the program's output has five axes; else -1, which no shape holds."""
    shape = program.outputs[0].shape if program.outputs else ()
    layers, heads = (shape[0], shape[2]) if len(shape) == 5 else (0, 0)
    known = isinstance(layers, int) and isinstance(heads, int) and layers > 0 and heads > 0
    return (int(layers), int(heads)) if known else (-1, -1)
