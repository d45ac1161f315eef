"""A graph with its branches and bodies laid out as one list of nodes, in the order in which they run."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from onnx import numpy_helper

from txl_export.families.graph.reading import subgraphs

Scope: TypeAlias = "ChainMap[str, int]"
NONE = 0
"""The value that stands for an input that is left out."""
FEW = 64
"""Numbers of a constant that are looked at: of a larger one its sizes are enough."""


@dataclass(frozen=True)
class Node:
    """A node of the list.

    Attributes:
        op: its operator; "Either" joins the results of an If's branches, or what enters a Loop with what goes round.
        name: as the file calls it, or its first result.
        inputs, outputs: numbers of values.
        data: which inputs are merely passed on, of an "Either".
        attributes: by name, as onnx has them.
        branch: the If in one of whose branches it stands; "" outside of all.
    """

    op: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    data: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    branch: str = ""

    def number(self, name: str, default: int = 0) -> int:
        """A whole number among the attributes."""
        return int(self.attributes[name].i) if name in self.attributes else default

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers among the attributes, or nothing."""
        return list(self.attributes[name].ints) if name in self.attributes else []


class Flat:
    """The list, and what every value is.

    Attributes:
        nodes: in the order in which they run.
        inputs, outputs: the graph's values by name.
        tensors: constants by value, as onnx has them.
    """

    def __init__(self, model: Any) -> None:
        self.nodes: list[Node] = []
        self.tensors: dict[int, Any] = {}
        self.count = 1
        scope: Scope = ChainMap()
        self.inputs = {value.name: self._new(scope, value.name) for value in model.graph.input}
        self._graph(model.graph, scope, "")
        self.outputs = {value.name: scope.get(value.name, NONE) for value in model.graph.output}

    def numbers(self, value: int) -> list[int]:
        """A small constant of whole numbers as a list; empty for what is none."""
        tensor = self.tensors.get(value)
        if (
            tensor is None
            or tensor.external_data
            or np.prod(tensor.dims, dtype=float) > FEW
            or min(tensor.dims, default=0) < 0
        ):
            return []
        try:
            found = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, AttributeError):  # its bytes are not what its sizes say
            return []
        return found.ravel().tolist() if found.dtype.kind in "iu" else []

    def dims(self, value: int) -> list[int]:
        """The sizes of a constant; empty for what is none."""
        return list(self.tensors[value].dims) if value in self.tensors else []

    def _new(self, scope: Scope, name: str) -> int:
        self.count += 1
        if name:
            scope[name] = self.count
        return self.count

    def _graph(self, graph: Any, scope: Scope, branch: str) -> None:
        for tensor in graph.initializer:
            self.tensors[self._new(scope, tensor.name)] = tensor
        for node in graph.node:
            self._node(node, scope, branch)

    def _node(self, node: Any, scope: Scope, branch: str) -> None:
        inputs = tuple(scope.get(name, NONE) if name else NONE for name in node.input)
        attributes = {attribute.name: attribute for attribute in node.attribute}
        name = node.name or next(iter(node.output), "")
        if node.op_type in ("Loop", "Scan") and "body" in attributes:
            self._body(node, inputs, attributes, scope, branch)
            return
        if held := subgraphs(node):
            results = list(self._branches(held, scope, branch or name))
            for at, output in enumerate(node.output):
                ends = tuple(found[at] for found in results if at < len(found))
                value = self._new(scope, output)
                self.nodes.append(Node("Either", name, (*ends, *inputs), (value,), len(ends), {}, branch))
            return
        outputs = tuple(self._new(scope, output) for output in node.output)
        if node.op_type == "Constant" and "value" in attributes and outputs:
            self.tensors[outputs[0]] = attributes["value"].t
        self.nodes.append(Node(node.op_type, name, inputs, outputs, 0, attributes, branch))

    def _branches(self, held: list[Any], scope: Scope, branch: str) -> Iterator[list[int]]:
        for graph in held:
            inner = scope.new_child()
            self._graph(graph, inner, branch)
            yield [inner.get(value.name, NONE) for value in graph.output]

    def _body(self, node: Any, inputs: tuple[int, ...], attributes: dict[str, Any], scope: Scope, branch: str) -> None:
        """A Loop or Scan: what is carried enters the body, and what the body returns leaves it."""
        op, name, body = node.op_type, node.name or next(iter(node.output), ""), attributes["body"].g
        inner = scope.new_child()
        entered = [self._new(inner, value.name) for value in body.input]
        skipped = 2 if op == "Loop" else 0  # of the node and of its body: the count and the condition
        scanned = attributes["num_scan_inputs"].i if op == "Scan" and "num_scan_inputs" in attributes else 0
        carried = inputs[skipped : max(len(inputs) - scanned, skipped)]
        for at, value in enumerate(inputs[skipped:]):
            if skipped + at < len(entered):
                self.nodes.append(Node("Enter", name, (value,), (entered[skipped + at],), 0, {}, branch))
        self._graph(body, inner, branch)
        ends = [inner.get(value.name, NONE) for value in body.output][1 if op == "Loop" else 0 :]
        results = tuple(self._new(scope, output) for output in node.output)
        self.nodes.append(Node(op, name, (*inputs, *ends), results, len(carried), attributes, branch))
