"""Checks that a bundle's tables do not contradict each other, so that readers can trust them without opening a graph.

This module checks ranges, uniqueness and sizes, and that every program has exactly the inputs and outputs that the
tables imply. `bindings` compares a graph with its program's row in the table when the graph is opened.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, pairwise

from txl_runtime.bundle.derived import differences
from txl_runtime.bundle.tables import (
    UPDATE_RULES,
    Output,
    Program,
    StateTensor,
    Tables,
    TensorSpec,
    ring_slots,
)

SEGMENT_KINDS = ("step", "logprobs", "hidden")
"""Kinds of programs in a bundle that run segments; engines have more kinds."""
MOST_VALUES = 2**40
"""Maximum number of values of one state tensor; as float32, 4 TiB. A larger shape is a mistake in the file."""
MOST_UNSEEN = 2**12
"""Largest batch size of a bundle in which no tensor has a batch axis. No shape limits that batch size, but streams keep
a counter per sequence.
"""
_OUT = r'<>:"|?*\\/\x00-\x1f\x7f'
PART = re.compile(rf"(?!(con|prn|aux|nul|com\d|lpt\d)(\.|$))[^{_OUT}]*[^{_OUT} .]", re.IGNORECASE)
"""A pattern of file names that every system allows. It excludes e.g. "con", a device on Windows, and a final dot."""


def contradictions(tables: Tables, used: Sequence[str], files: Collection[str]) -> Iterator[str]:
    """Yield one sentence for each contradiction in a manifest; nothing if the manifest is sound.

    Args:
        used: paths that the manifest names outside its list of files.
        files: paths in the manifest's list of files.

    The time grows about linearly with the manifest's length, even if the manifest is hostile.
    """
    yield from (f"{path} is used but not in the list of files" for path in used if path not in files)
    alike = Counter(path.casefold() for path in files)
    for path in files:
        if not all(PART.fullmatch(part) for part in path.split("/")):
            yield f"file name {path!r} leaves the bundle, or is one that not every system can have"
        if alike[path.casefold()] > 1:
            yield f"file name {path!r} is there twice but for upper and lower case, expected it once"
    problems = [*_rules(tables), *_interface(tables)]
    yield from problems
    if not problems:  # the next checks assume that the tables so far are sound
        for state in tables.states:
            yield from _state(tables, state)
        yield from chain(_memory(tables), _programs(tables), differences(tables))


def _rules(m: Tables) -> Iterator[str]:
    """Check that this version knows every update rule and every kind of program."""
    known = ", ".join(UPDATE_RULES)
    for state in m.states:
        if state.update not in UPDATE_RULES:
            yield f"{state.name} has update rule {state.update!r}, this version knows {known}"
    for program in m.programs:
        softmax = _is_softmax(program.kind)
        if program.update not in (*UPDATE_RULES, "none"):
            yield f"program {program.name} has update rule {program.update!r}, this version knows {known}"
        elif softmax != (program.update == "none"):
            yield f"program {program.name} has update rule {program.update!r}, which its kind {program.kind} has not"
        if not softmax and program.kind not in SEGMENT_KINDS:
            yield f"program {program.name} is {program.kind!r}, known: {', '.join(SEGMENT_KINDS)}, head, tail.<c>"
        if softmax != (program.segment_length == 0):
            yield f"program {program.name} of kind {program.kind} has segments of {program.segment_length}"
    if not any(program.segment_length for program in m.programs):
        yield "no program runs segments"


def _interface(m: Tables) -> Iterator[str]:
    """Check names, roles, counters, batch sizes, and the columns of log-probabilities."""
    names = [("input", [entry.name for entry in m.inputs]), ("output", [entry.name for entry in m.outputs])]
    names += [("program", [program.name for program in m.programs])]
    names += [(f"state|of rule {rule}", [state.name for state in m.states_of(rule)]) for rule in UPDATE_RULES]
    for kind, listed in names:
        for name in sorted(name for name, times in Counter(listed).items() if times > 1):
            noun, _, which = kind.partition("|")
            yield f"two {noun}s {which}{' ' if which else ''}are called {name}"
    read = {entry.name for entry in m.inputs}
    carried = {state.input for state in m.states}
    yield from (f"{name} is an input and a state" for name in sorted(read & carried))
    for entry in m.inputs:
        if (entry.role == "tokens") != (entry.vocab is not None):
            yield f"input {entry.name} of role {entry.role} has vocab {entry.vocab}, expected one for tokens alone"
        if entry.role in ("valid", "fill", "head") and (entry.dtype, entry.shape) != ("int32", ("B",)):
            yield f"input {entry.name} is {entry.dtype} {list(entry.shape)}, expected a count, int32 ['B']"
    roles = {entry.role for entry in m.inputs}
    if "fill" in roles and "fill" not in m.counters:
        yield "the programs read a fill, but no counter is called fill"
    for name, counter in m.counters.items():
        if name != "fill":
            yield f"counter {name!r} is not known to this version, expected fill"
        if counter.start > counter.most:
            yield f"counter {name} starts at {counter.start}, expected at most {counter.most}"
    if m.lengths == "valid" and "valid" not in roles:
        yield "lengths are 'valid', but the programs read no valid"
    alone = [s for s in m.states if s.update == "replace" and (s.batch_axis is None or s.rows or s.absent)]
    if m.streams == "independent" and alone:
        yield f"sequences are independent, but {alone[0].name} is shared, grows or is absent at first"
    if m.streams == "independent" and m.joint:
        yield "sequences are independent and influence one another, expected one of the two"
    if m.streams == "independent" and "valid" not in roles:
        yield "sequences are independent, but the programs read no valid"
    if [m.batch_size, *m.batch_sizes] != sorted({m.batch_size, *m.batch_sizes}, reverse=True):
        yield f"batch_sizes are {list(m.batch_sizes)}, expected smaller ones than B {m.batch_size}, the largest first"
    longest = m.segment_lengths[0] if m.segment_lengths else 0
    if m.stepwise is not None and m.stepwise > longest:
        yield f"stepwise is {m.stepwise}, expected at most {longest}, the positions of the longest segment"
    seen = [entry.axes.batch for entry in m.interface] + [state.batch_axis for state in m.states]
    if m.batch_size > MOST_UNSEEN and all(axis is None for axis in seen):
        yield f"batch_size is {m.batch_size}, which no input, output or state has, expected at most {MOST_UNSEEN}"
    if m.batch_sizes and not all(program.open_batch for program in m.programs if program.segment_length):
        yield "there are several batch_sizes, but a program's graph is of one B"
    steps = [program for program in m.programs if program.kind == "step" and program.open_batch]
    if m.streams == "lockstep" and steps:
        yield f"sequences run all or none, but program {steps[0].name} leaves their number open"
    if m.boundary_token is not None and not 0 <= m.boundary_token < m.vocab_size:
        yield f"boundary_token is {m.boundary_token}, expected an id below {m.vocab_size}"
    if m.logprobs is not None:
        yield from _columns(m.logprobs, m.vocab_size)


def _columns(output: Output, vocab_size: int) -> Iterator[str]:
    """Check that log-probabilities have one column per token id, and that clusters are consecutive ranges of ids."""
    columns = output.shape[-1] if output.shape else "no"
    if vocab_size and columns != vocab_size:
        yield f"{output.name} has {columns} columns, expected the {vocab_size} of the vocabulary"
    edges = [0, *(last for _, last in output.clusters)]
    if output.clusters and (
        output.clusters != tuple(pairwise(edges))
        or any(first >= last for first, last in output.clusters)
        or edges[-1] != vocab_size
        or output.width is None
    ):
        yield f"clusters {[list(pair) for pair in output.clusters]} do not ascend within the vocabulary of {vocab_size}"


def _state(m: Tables, state: StateTensor) -> Iterator[str]:
    """Check one row of the state table."""
    where, axes = f"the state table does not fit: {state.name}", range(len(state.shape))
    if state.batch_axis is not None and (state.batch_axis not in axes or state.shape[state.batch_axis] != m.batch_size):
        yield f"{where} is {list(state.shape)} with batch axis {state.batch_axis}, expected B {m.batch_size} there"
    if state.row_axis is not None and (state.row_axis not in axes or state.row_axis == state.batch_axis):
        yield f"{where} is {list(state.shape)} with row axis {state.row_axis}, expected another of its axes"
    elif state.rows is not None and (state.row_axis is None or state.rows != (0, state.shape[state.row_axis])):
        yield f"{where} has {list(state.rows)} rows, expected none up to those of its shape {list(state.shape)}"
    if math.prod(state.shape) > MOST_VALUES:
        yield f"{where} is {list(state.shape)}, expected at most {MOST_VALUES} values"
    if isinstance(state.initial, float) and not math.isfinite(state.initial):
        yield f"{where} starts as {state.initial}, expected a finite number"
    if state.update != "replace" and (
        state.batch_axis != 0 or state.row_axis is None or state.rows or state.absent or "float" not in state.dtype
    ):
        yield f"{where} has rule {state.update}, expected floating memory rows of every sequence, the batch first"
    if state.update != "ring" and state.slots is not None:
        yield f"{where} has {state.slots} slots, expected them of a ring alone"


def _memory(m: Tables) -> Iterator[str]:
    """Check the memory rows: equal row shapes within an update rule, and the same tensors in every rule."""
    rows = {state.name: (state.row_shape, state.dtype) for state in m.states if state.counted}
    initial = {state.name: state.initial for state in m.states}
    for state in m.states:
        if state.initial != initial[state.name]:
            yield f"{state.name} starts as {state.initial} and as {initial[state.name]}, expected the same in all rules"
    held, run = {state.update for state in m.states}, set(m.updates)
    if run and "replace" not in run:
        held.discard("replace")  # a bundle of one rule's memory rows may have "replace" states, too
    for rule in sorted(held ^ run if m.states else ()):
        yield f"the state table does not fit: rule {rule} has states or programs, expected both"
    if "fill" in m.counters and m.states and not rows:
        yield "counter fill counts memory rows, but the states are replaced, expected it with rolled or ring states"
    longest = m.segment_lengths[0]
    ring, columns = ring_slots(m.memory_length, longest)
    for rule, slots, size in (("ring", ring, columns), ("rolled", None, m.memory_length)):
        states = [state for state in m.states_of(rule) if state.counted]
        if not states:
            continue
        first = states[0]
        for state in states:
            assert state.row_axis is not None
            alike = (state.shape, state.row_axis, state.dtype) == (first.shape, first.row_axis, first.dtype)
            if (state.shape[state.row_axis], state.slots) != (size, slots) or not alike:
                yield (
                    f"the state table does not fit memory of {m.memory_length} rows and segments of {longest}: "
                    f"{state.name} of rule {rule} is {state.dtype} {list(state.shape)} with {state.slots} slots"
                )
        if {(state.name, (state.row_shape, state.dtype)) for state in states} != rows.items():
            yield f"the state table does not fit: rule {rule} keeps other tensors than the bundle's other rules"
    for rule in m.updates:
        sides = ([s.input for s in m.states_of(rule)], [s.output for s in m.states_of(rule)])
        for names in sides:
            ordered = sorted(names)
            for before, after in pairwise(ordered):
                if after.startswith(before):
                    yield f"the state table does not fit: {before} is a prefix of {after}, expected names that are none"
        if [name for _, name in sorted(zip(*sides, strict=True))] != sorted(sides[1]):
            yield f"the state table does not fit: inputs and outputs of rule {rule} sort differently"


def _programs(m: Tables) -> Iterator[str]:
    """Check that no program is missing, and that each program reads and returns exactly what the tables imply."""
    lengths, states = m.segment_lengths, {rule: m.states_of(rule) for rule in UPDATE_RULES}
    for rule in m.updates:
        mine = [program for program in m.programs if program.update == rule]
        kind = mine[0].kind
        if len({program.kind for program in mine}) > 1 or (rule == "replace" and kind != "step"):
            yield f"the programs of rule {rule} are of kinds {sorted({program.kind for program in mine})}"
        for length in sorted({*lengths} - {program.segment_length for program in mine}):
            yield f"program {kind}{'-ring' if rule == 'ring' else ''}-{length} is missing"
    softmax = _softmax(m.logprobs)
    held = {program.kind for program in m.programs if _is_softmax(program.kind)}
    if held or any(program.kind == "hidden" for program in m.programs):
        yield from (f"program {kind} is missing" for kind in softmax or ["head"] if kind not in held)
    width = None if m.logprobs is None else m.logprobs.width
    seen: dict[object, str] = {}
    for program in m.programs:
        if _is_softmax(program.kind):
            if program.kind not in softmax:
                yield f"program {program.name} is {program.kind!r}, known: {', '.join(softmax) or 'no softmax'}"
            else:
                for side, promised in zip(("inputs", "outputs"), softmax[program.kind], strict=True):
                    if getattr(program, side) != promised:
                        yield f"the {side} of program {program.name} do not fit the output table"
        else:
            yield from _segment_program(m, program, states[program.update], width)
            if not program.name.partition(".")[0].endswith(f"-{program.segment_length}"):
                yield f"program {program.name} has segments of {program.segment_length}, expected them in its name"
            other = seen.setdefault((program.update, program.inputs), program.name)
            if other != program.name:
                yield f"program {program.name} takes the same segments as {other}, expected one program for them"


def _segment_program(m: Tables, program: Program, states: Sequence[StateTensor], width: int | None) -> Iterator[str]:
    """Check the inputs and outputs of one program of segments."""
    length = program.segment_length
    read = [
        TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.sizes(m.batch_size, length))
        for entry in m.inputs
        if entry.role != "targets" and (entry.role != "head" or program.update == "ring")
    ]
    returned = [
        TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.sizes(m.batch_size, length)) for entry in m.outputs
    ]
    if program.kind == "hidden":
        if width is None:
            yield f"program {program.name} is 'hidden', but no output says how wide its rows are"
            return
        returned = [TensorSpec(name="hidden", dtype="float32", shape=(m.batch_size, length, width))]
    inputs = {spec.name: spec for spec in program.inputs}
    carried = [state for state in states if state.input in inputs]
    missing = [state for state in states if state.input not in inputs]
    fits = all(_takes(inputs[state.input], state) for state in carried)
    may_lack = all(state.absent or (state.rows is not None and state.rows[0] == 0) for state in missing)
    if [*program.inputs] != [*read, *(inputs[state.input] for state in carried)] or not fits or not may_lack:
        yield f"the inputs of program {program.name} do not fit the state table"
    outputs = {spec.name: spec for spec in program.outputs}
    whole = all(state.output in outputs and _takes(outputs[state.output], state) for state in states)
    if not whole or [*program.outputs] != [*returned, *(outputs[state.output] for state in states)]:
        yield f"the outputs of program {program.name} do not fit the state table"


def _takes(spec: TensorSpec, state: StateTensor) -> bool:
    """Return whether a program's tensor has the state's type and shape; a growing axis may have any size of `rows`."""
    if spec.dtype != state.dtype or len(spec.shape) != len(state.shape):
        return False
    for axis, (size, most) in enumerate(zip(spec.shape, state.shape, strict=True)):
        if axis == state.row_axis and state.rows is not None:
            if size != "rows" and not state.rows[0] <= int(size) <= state.rows[1]:
                return False
        elif size != most:
            return False
    return True


def _softmax(output: Output | None) -> dict[str, tuple[tuple[TensorSpec, ...], ...]]:
    """Return (inputs, outputs) of programs "head" and "tail.<c>", by kind. The head's last columns are for tails."""
    signatures: dict[str, tuple[tuple[TensorSpec, ...], ...]] = {}
    for cluster, (first, last) in enumerate(() if output is None else output.clusters):
        assert output is not None
        assert output.width is not None
        columns = last - first + (0 if cluster else len(output.clusters) - 1)
        signatures[f"tail.{cluster}" if cluster else "head"] = (
            (TensorSpec(name="hidden", dtype="float32", shape=("rows", output.width)),),
            (TensorSpec(name="logprobs", dtype="float32", shape=("rows", columns)),),
        )
    return signatures


def _is_softmax(kind: str) -> bool:
    return kind == "head" or kind.startswith("tail.")
