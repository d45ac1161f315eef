"""Finds the recurrences of a step: states that depend on their earlier values, with the nodes on the way.

* m' = max(m + d, k) is one core: the state m, with Add and Max.
* s' = exp(m - m') s + v is a second core: s, with Mul and Add. exp(m - m') does not depend on s and is no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import onnx_ir as ir

Core: TypeAlias = "frozenset[ir.Value]"
"""States that depend on one another's earlier values."""


def find_cores(graph: ir.Graph, after: Mapping[ir.Value, ir.Value]) -> dict[Core, list[ir.Node]]:
    """Return the recurrences (cores), each with the nodes that must run once for every position.

    Args:
        graph: the step's graph.
        after: for each state, its next value.
    """
    states = list(after)
    # for each value, the states it depends on, a bit each
    reached: dict[ir.Value | None, int] = {state: 1 << number for number, state in enumerate(states)}
    leads = dict[ir.Value | None, int]()  # for each value, the states it leads to, a bit each
    for node in graph:
        count = 0
        for value in node.inputs:
            count |= reached.get(value, 0)
        reached.update(dict.fromkeys(node.outputs, count))
    for number, state in enumerate(states):
        leads[after[state]] = leads.get(after[state], 0) | 1 << number
    for node in reversed(graph):
        count = 0
        for value in node.outputs:
            count |= leads.get(value, 0)
        for value in node.inputs:
            leads[value] = leads.get(value, 0) | count
    back = [reached.get(after[state], 0) for state in states]
    for via in range(len(states)):
        back = [one | back[via] if one >> via & 1 else one for one in back]
    cores = dict[Core, list[ir.Node]]()
    for number, one in enumerate(back):
        if one >> number & 1 and not any(states[number] in core for core in cores):
            same = [other for other in range(len(states)) if one >> other & 1 and back[other] >> number & 1]
            bits = sum(1 << other for other in same)
            ways = [node for node in graph if any(reached[v] & bits and leads.get(v, 0) & bits for v in node.outputs)]
            cores[frozenset(states[other] for other in same)] = ways
    return cores
