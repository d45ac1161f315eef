"""The recurrences of a step: states that lead back to themselves, and the nodes on the way, to run at each position.

* m' = max(m + d, k): one core, the state m with Add and Max.
* s' = exp(m - m') s + v: another, s with Mul and Add. exp(m - m') leads nowhere back and is no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import onnx_ir as ir

Core: TypeAlias = "frozenset[ir.Value]"
"""States that lead back to one another."""


def find_cores(graph: ir.Graph, after: Mapping[ir.Value, ir.Value]) -> dict[Core, list[ir.Node]]:
    """The states that lead back to themselves, those that lead to one another together, with the nodes to repeat.

    Args:
        graph: of a step.
        after: the next values of states.
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
    cores = dict[Core, list[ir.Node]]()
    for number, one in enumerate(back):
        if one >> number & 1 and not any(states[number] in core for core in cores):
            same = [other for other in range(len(states)) if one >> other & 1 and back[other] >> number & 1]
            bits = sum(1 << other for other in same)
            ways = [node for node in graph if any(reached[v] & bits and leads.get(v, 0) & bits for v in node.outputs)]
            cores[frozenset(states[other] for other in same)] = ways
    return cores
