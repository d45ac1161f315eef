"""Reduces a graph to some of its values, adds nodes and other graphs, and completes it as a program's graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.tables import Program, TensorSpec
from txl_runtime.errors import BundleError

from txl_engines.checking import import_onnx


class Weaver:
    """A graph that is first reduced to the nodes that compute some values, and then extended."""

    def __init__(self, model: Any, path: Path, wanted: Collection[str]) -> None:
        self.onnx = import_onnx()
        self._model, self._graph, self._path = model, model.graph, path
        self._constants: dict[tuple[str, bytes], str] = {}
        self._cut(wanted)

    def add(self, operator: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Add a node; return the name of its result."""
        name = out or f"whole.{len(self._graph.node)}"
        self._graph.node.append(
            self.onnx.helper.make_node(operator, inputs, [name], name=f"whole.{operator}.{name}", **attributes)
        )
        return name

    def constant(self, array: NDArray[Any]) -> str:
        """Return the name of a constant array, e.g. int64 [2]; equal constants share one name."""
        key = f"{array.dtype}{array.shape}", array.tobytes()
        if key not in self._constants:
            name = self._constants[key] = f"whole.constant.{len(self._constants)}"
            self._graph.initializer.append(self.onnx.numpy_helper.from_array(array, name))
        return self._constants[key]

    def int32(self, value: int) -> str:
        """Return the name of a scalar int32 constant."""
        return self.constant(np.array(value, np.int32))

    def reshape(self, value: str, *shape: int, out: str = "") -> str:
        """Reshape a value, e.g. "rows" [B·L, V] to (B, L, V)."""
        return self.add("Reshape", value, self.constant(np.array(shape, np.int64)), out=out)

    def columns(self, value: str, first: int, last: int, out: str = "") -> str:
        """Select columns [first, last): [n, V] → [n, last - first]."""
        places = (self.constant(np.array([place], np.int64)) for place in (first, last, 1))
        return self.add("Slice", value, *places, out=out)

    def best(self, value: str, count: str, out: str) -> tuple[str, str]:
        """Select the `count` largest values of each row, in order: [n, V] → values and columns, [n, count] each."""
        places = f"{out}.places"
        name = f"whole.TopK.{out}"
        self._graph.node.append(self.onnx.helper.make_node("TopK", [value, count], [out, places], name=name, axis=1))
        return out, places

    def attach(self, model: Any, prefix: str, feeds: Mapping[str, str], path: Path) -> str:
        """Append a graph; return the name of its only output. External weights keep their names, so both share them."""
        names = dict(feeds)
        weights = {tensor.name: tensor for tensor in self._graph.initializer if tensor.external_data}
        for tensor in model.graph.initializer:
            names[tensor.name] = tensor.name if tensor.external_data else f"{prefix}/{tensor.name}"
            if tensor.external_data and tensor.name in weights:
                if tensor != weights[tensor.name]:
                    raise BundleError(
                        f"{path}: {tensor.name} is another tensor than in {self._path.name}, expected the same one; "
                        "export the model again"
                    )
                continue
            self._graph.initializer.add().CopyFrom(tensor)
            self._graph.initializer[-1].name = names[tensor.name]
        for node in model.graph.node:
            names |= {name: f"{prefix}/{name}" for name in node.output if name}
            copy = self._graph.node.add()
            copy.CopyFrom(node)
            copy.name = f"{prefix}/{node.name}"
            copy.input[:] = [names.get(name, name) for name in node.input]
            copy.output[:] = [names.get(name, name) for name in node.output]
        return names[model.graph.output[0].name]

    def finish(self, program: Program) -> bytes:
        """Return the graph's bytes, with a program's inputs and outputs and only the nodes that it needs."""
        graph = self._graph
        self._cut({spec.name for spec in program.outputs})
        graph.input.extend(self._declare(spec) for spec in program.inputs)
        graph.output.extend(self._declare(spec) for spec in program.outputs)
        graph.name = program.name
        metadata = {"txl-deploy.program": program.note()}
        self.onnx.helper.set_model_props(self._model, metadata)
        data: bytes = self._model.SerializeToString(deterministic=True)
        return data

    def _cut(self, wanted: Collection[str]) -> None:
        """Remove every node and constant that no wanted value depends on."""
        graph, needed, nodes = self._graph, set(wanted), []
        for node in reversed(graph.node):
            if needed.intersection(node.output):
                needed.update(node.input)
                nodes.append(deepcopy(node))
        initializers = [deepcopy(tensor) for tensor in graph.initializer if tensor.name in needed]
        for field in ("node", "initializer", "input", "output", "value_info"):
            graph.ClearField(field)
        graph.node.extend(reversed(nodes))
        graph.initializer.extend(initializers)

    def _declare(self, spec: TensorSpec) -> Any:
        kinds = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "int32": "INT32", "bool": "BOOL"}
        kind = self.onnx.TensorProto.DataType.Value(kinds[spec.dtype])
        return self.onnx.helper.make_tensor_value_info(spec.name, kind, spec.fixed)
