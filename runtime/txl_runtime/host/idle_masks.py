"""Removal of the masks of idle sequences from a checked graph; the loop on the CPU keeps idle states instead.

In a graph, `Where(Reshape(valid > 0), new, old)` at each state's output returns an idle sequence's state unchanged. The
mask copies every state in every step, although sequences are seldom idle. Without the mask, the node that computes
`new` writes the output, and the loop copies the old state of idle sequences. A mask of a different form is not removed,
nor is a mask whose result is read by a node. Nothing else in the graph changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.guard.graph_check import NODE, Value, Walk
from txl_runtime.guard.protobuf import fields, message

BODY, NODES = 7, 1
"""Protocol-buffer field numbers: of the graph in a model, and of a node in a graph."""
Made: TypeAlias = "Mapping[str, tuple[int, str, list[str]]]"
"""Triples (index of the node that returns a value, the node's operator, names of its inputs), by the value's name."""


def without_idle_masks(graph: bytes, found: Walk, manifest: Manifest) -> tuple[bytes, frozenset[str]]:
    """Return the graph without idle masks, and the outputs in which the caller must restore idle sequences."""
    states = manifest.states_of("replace")
    valid = next((entry.name for entry in manifest.inputs if entry.role == "valid"), "")
    if manifest.streams != "independent" or any(state.absent or state.rows is not None for state in states):
        return graph, frozenset()
    makers = {name: (place, op, read) for place, (op, read, names) in enumerate(found.nodes) for name in names}
    reads = Counter(name for _, read, _ in found.nodes for name in read)
    new, gone, spare = dict[str, str](), set[int](), set[int]()
    for state in states:
        mask = _mask(state, makers, found, valid)
        value = found.nodes[mask[0]][1][1] if mask and not reads[state.output] else ""
        if value and value not in found.returned and value not in new:
            new[value] = state.output
            gone.add(mask[0])
            spare.update(mask[1:])
    if not new:
        return graph, frozenset()
    # a node that reads a value comes after the node that writes it, so this loop visits readers first
    for place in sorted(gone | spare, reverse=True):
        _, read, names = found.nodes[place]
        if place in gone or not any(reads[name] or name in found.returned for name in names):
            gone.add(place)
            reads.subtract(read)
    body, place = list[tuple[int, Any]](), 0
    for number, part in found.body:
        if number == NODES:
            _, read, names = found.nodes[place]
            if place not in gone:
                body.append((number, part if new.keys().isdisjoint(read + names) else _renamed(part, new)))
            place += 1
        else:
            body.append((number, part))
    whole = message((number, message(body) if number == BODY else part) for number, part in found.model)
    return whole, frozenset(new.values())


def _mask(state: StateTensor, makers: Made, walk: Walk, valid: str) -> list[int]:
    """Return the indices of the mask's nodes at a state's output, the last node first; [] if there is no removable
    mask.

    The new value must come from a node, and its declared shape must be the state's, because `Where` would broadcast a
    smaller value. Without a declared shape the mask is kept. If the declared shape is wrong, ONNX Runtime refuses the
    graph or a run of it, because the bound output has the state's shape.
    """
    place, op, read = makers.get(state.output, (0, "", []))
    if op != "Where" or read[2] != state.input or read[1] not in makers or state.batch_axis is None:
        return []
    declared = walk.declared[state.input]
    if walk.declared.get(read[1]) != declared or "" in declared:
        return []
    chain, rank = [place], len(state.shape)
    place, op, read = makers.get(read[0], (0, "", []))
    if op == "Reshape":
        if _numbers(walk.values[read[1]]) != [-1 if axis == state.batch_axis else 1 for axis in range(rank)]:
            return []
        chain.append(place)
        place, op, read = makers.get(read[0], (0, "", []))
    elif rank != 1:
        return []
    zero = walk.values[read[1]] if op == "Greater" and read[0] == valid else None
    return [*chain, place] if zero is not None and _numbers(zero) == [0] and len(zero.dims) < 2 else []


def _numbers(value: Value) -> list[int]:
    """Return a constant's numbers; [] for a node's result, even a constant result, whose type and axes may differ."""
    return value.numbers.tolist() if value.constant and value.numbers is not None else []


def _renamed(node: bytes, names: Mapping[str, str]) -> bytes:
    """Return a node with inputs and outputs renamed."""
    known: dict[Any, Any] = {name.encode(): other.encode() for name, other in names.items()}
    parts: list[tuple[int, Any]] = fields(node, NODE, "a node")
    return message((number, known.get(part, part) if number in (1, 2) else part) for number, part in parts)
