"""The recurrences of a step: states that lead back to themselves, and the nodes on the way, to run at each position.

* m' = max(m + d, k): one core, the state m with Add and Max.
* s' = exp(m - m') s + v: another, s with Mul and Add. exp(m - m') leads nowhere back and is no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import onnx_ir as ir

from txl_export.graphs.passes.values import sizes_of

Core: TypeAlias = "frozenset[ir.Value]"
"""States that lead back to one another."""

_LARGE = 2**14
"""A value of so many numbers costs more to write to memory and to read again than to compute where it is used: 64
positions took 27 % less with RetNet's states of 48 K numbers, and 11 % more with those of 4 K."""
_WEIGHING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""With weights these read far more than a state: they are to run once."""


def find_cores(graph: ir.Graph, after: Mapping[ir.Value, ir.Value], batch: int) -> dict[Core, list[ir.Node]]:
    """The states that lead back to themselves, those that lead to one another together, with the nodes to repeat.

    Args:
        graph: of a step, its values with sizes.
        after: the next values of states.
        batch: B.
    """
    states = list(after)
    reached: dict[ir.Value | None, int] = {state: 1 << number for number, state in enumerate(states)}  # by which
    leads = dict[ir.Value | None, int]()  # to which, a bit for each
    for node in graph:
        found = 0
        for value in node.inputs:
            found |= reached.get(value, 0)
        reached.update(dict.fromkeys(node.outputs, found))
    for number, state in enumerate(states):
        leads[after[state]] = leads.get(after[state], 0) | 1 << number
    for node in reversed(graph):
        found = 0
        for value in node.outputs:
            found |= leads.get(value, 0)
        for value in node.inputs:
            leads[value] = leads.get(value, 0) | found
    back = [reached.get(after[state], 0) for state in states]
    for via in range(len(states)):
        back = [one | back[via] if one >> via & 1 else one for one in back]
    cores = dict[Core, tuple[int, set[ir.Node]]]()
    for number, one in enumerate(back):
        if one >> number & 1:
            same = [other for other in range(len(states)) if one >> other & 1 and back[other] >> number & 1]
            bits = sum(1 << other for other in same)
            ways = {node for node in graph if any(reached[v] & bits and leads.get(v, 0) & bits for v in node.outputs)}
            cores[frozenset(states[other] for other in same)] = bits, ways
    taken = {node for _, ways in cores.values() for node in ways}
    for bits, ways in cores.values():
        _widen(graph, ways, taken, partial(_has, reached, bits), batch)
    return {core: [node for node in graph if node in ways] for core, (_, ways) in cores.items()}


def _has(reached: Mapping[ir.Value | None, int], bits: int, value: ir.Value) -> bool:
    return bool(reached.get(value, 0) & bits)


def _widen(
    graph: ir.Graph, core: set[ir.Node], taken: set[ir.Node], behind: Callable[[ir.Value], bool], batch: int
) -> None:
    """Repeat neighbours of a core, too, that make a large value of smaller ones for it, or smaller ones of its own.

    E.g. in S' = S + k vᵀ the product is made of k and v where it is added, and q S' where S' is.

    Args:
        graph: of all nodes.
        core: nodes that are repeated; there are more of them afterwards.
        taken: nodes of any core.
        behind: whether a value depends on the core's states.
        batch: B.
    """

    def size(value: ir.Value | None) -> int:
        known = [size for size in sizes_of(value) if isinstance(size, int)]
        return batch * math.prod(known) if len(known) < len(sizes_of(value)) else 0

    def add(node: ir.Node) -> None:
        weights = [value for value in node.inputs if value is not None and value.is_initializer()]
        if node not in taken and not (weights and node.op_type in _WEIGHING):
            core.add(node)
            taken.add(node)

    for node in reversed(graph):
        makes = sum(map(size, node.outputs))
        whole = any(value.is_graph_output() for value in node.outputs)
        inside = all(use.node in core for value in node.outputs for use in value.uses()) and not whole
        if inside and makes >= _LARGE and sum(map(size, set(node.inputs))) <= makes:
            add(node)
    for node in graph:
        given = [value for value in node.inputs if value is not None]
        large = max((size(value) for value in given if value.producer() in core), default=0)
        alone = not any(behind(value) for value in given if value.producer() not in core)
        if alone and large >= _LARGE and sum(map(size, node.outputs)) <= large:
            add(node)
