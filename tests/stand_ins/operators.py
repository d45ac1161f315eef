"""The operators of each engine by types: the table in `fixtures/operators`, and the rows that a graph needs of it.

The table has a row per operator, opset and types, and a column per library and version; `sources.json` says where each
column is from. Types are written as ONNX's schema names them: "T=float Tind=int32".
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import onnx

TABLE = Path(__file__).parents[1] / "fixtures" / "operators" / "kernels.csv"  # `support` needs PyTorch
OLDEST = 18
NAMES = {1: "float", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}


class Kernel(NamedTuple):
    """A row's operator and types."""

    operator: str
    opset: int
    types: str


@functools.cache
def table() -> dict[Kernel, dict[str, str]]:
    """By kernel what each library says: yes, no, or - where it knows no such opset."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {Kernel(row.pop("operator"), int(row.pop("opset")), row.pop("types")): row for row in rows}


@functools.cache
def _parameters(operator: str, opset: int) -> tuple[str, ...]:
    """The parameters of types that the table tells apart for an operator."""
    types = next((row.types for row in table() if (row.operator, row.opset) == (operator, opset)), "")
    return tuple(entry.partition("=")[0] for entry in types.split())


def kernels(model: onnx.ModelProto) -> list[tuple[onnx.NodeProto, Kernel]]:
    """Every node of a graph and the row of the table that it needs. The table begins at opset 18."""
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    graph = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    types: dict[str, Any] = {
        value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)
    }
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    rows = []
    for node in graph.node:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        found: dict[str, str] = {}
        for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs)):
            for index, name in enumerate(names):
                if name:
                    found.setdefault(formal[min(index, len(formal) - 1)].type_str, NAMES[types[name]])
        listed = max(opset, OLDEST)
        wanted = _parameters(node.op_type, listed)
        rows.append((node, Kernel(node.op_type, listed, " ".join(f"{name}={found[name]}" for name in wanted))))
    return rows


def lacking(found: Iterable[tuple[onnx.NodeProto, Kernel]], library: str) -> list[str]:
    """The nodes that a library has no kernel for, in words."""
    return [
        f"{node.name or node.op_type}: {kernel.operator} ({kernel.types or 'no row'}) of opset {kernel.opset}"
        for node, kernel in found
        if table().get(kernel, {}).get(library) != "yes"
    ]
