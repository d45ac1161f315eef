"""Fixes inputs and open sizes of an ONNX graph to constants, before it runs: `--fix NAME=VALUE`.

NAME is an input, an open size, or INPUT:AXIS for an open size without a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
from txl_runtime.errors import CheckpointError, UsageError, one_line, some
from txl_runtime.types import Array

from txl_export.families.graph.find.behaviour import name_of_size
from txl_export.families.graph.take.reading import Foreign, Port, copied

_AXIS = re.compile(r"(.+):(\d+)")
ADVICE = "check --fix"


def fix(foreign: Foreign, values: Mapping[str, Any]) -> tuple[ir.Model, dict[str, Array]]:
    """Return a copy of the graph with some inputs as constants and some sizes as numbers.

    For example, `values` {"sr": 16000, "batch": 1} make the input sr a constant, and give the open size batch 1.

    Args:
        foreign: the file.
        values: values by name: numbers, arrays, or their JSON; for a size an integer.

    Returns:
        The new graph, and the values of the inputs that it no longer has.

    Raises:
        UsageError: the file has no such name, or the value does not fit.
        CheckpointError: see `copied`.
    """
    model, constants = copied(foreign.model), dict[str, Array]()
    ports = {port.name: port for port in (*foreign.inputs, *foreign.optional)}
    inputs = {str(value.name): value for value in model.graph.inputs}
    for name, value in values.items():
        if isinstance(value, str):
            value = _decoded(name, value)
        if name in ports:
            constants[name] = _constant(name, ports[name], value)
            _to_constant(model.graph, inputs[name], constants[name])
        elif places := _places(name, foreign):
            for port, axis in places:
                own = list(inputs[port].shape or ())
                own[axis] = _size(name, value)
                inputs[port].shape = ir.Shape(own)
            for result in model.graph.outputs:
                if result.shape is not None:
                    result.shape = ir.Shape([None if str(size) == name else size for size in result.shape])
        else:
            opened = [(port.name, at, size) for port in foreign.inputs for at, size in enumerate(port.shape)]
            sizes = [name_of_size(port, at, size) for port, at, size in opened if isinstance(size, str)]
            known = [*ports, *dict.fromkeys(sizes)]
            raise UsageError(
                f"{foreign.path}: has no {name}, expected an input or a size of {some(known, 9)}; {ADVICE}"
            )
    for left in foreign.optional:
        if left.name not in constants:
            model.graph.inputs.remove(inputs[left.name])
    forget_sizes(model.graph)
    return model, constants


def forget_sizes(graph: ir.Graph) -> None:
    """Remove the recorded shapes of intermediate values: they follow from the inputs' sizes, which have changed."""
    results = {id(value) for value in graph.outputs}
    for node in graph.all_nodes():
        for value in node.outputs:
            if id(value) not in results:
                value.shape = None


def drop_unread(model: ir.Model, kept: Collection[str]) -> dict[str, Array]:
    """Remove inputs of fixed shape that no node reads, in place, unless their names are in `kept`.

    For example, it returns {"mask": zeros [1, 8]}.

    Returns:
        Zeros by name, for calls of the original file, which still needs these inputs.
    """
    zeros: dict[str, Array] = {}
    for value in list(model.graph.inputs):
        sizes = list(value.shape) if value.shape is not None else [None]
        if value.uses() or value.is_graph_output() or str(value.name) in kept or value.dtype is None:
            continue
        if all(isinstance(size, int) for size in sizes):
            zeros[str(value.name)] = np.zeros([int(str(size)) for size in sizes], value.dtype.numpy())
            model.graph.inputs.remove(value)
    return zeros


def lengthen(model: ir.Model, segment: Mapping[str, int]) -> bool:
    """Open the axis of positions where a file fixes it, in place; return whether anything changed.

    The result may not run: nodes can contain the old number.

    Args:
        model: the file's graph.
        segment: the axis of positions by the name of an input.
    """
    fixed = False
    for value in model.graph.inputs:
        sizes, axis = [*(value.shape or ())], segment.get(str(value.name))
        if axis is not None and sizes and isinstance(sizes[axis], int):
            sizes[axis], fixed = None, True
            value.shape = ir.Shape(sizes)
    for result in model.graph.outputs if fixed else ():
        result.shape = None
    return fixed


def _decoded(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise UsageError(
            f"{name} is fixed to {text!r}, expected a number, true, false or a list of them; {ADVICE}"
        ) from None


def _constant(name: str, port: Port, value: Any) -> Array:
    try:
        array = np.asarray(value).astype(port.dtype)
        exact = np.array_equal(array.astype(np.float64), np.asarray(value, np.float64)) or array.dtype.kind == "f"
        sizes = [size if isinstance(size, int) else 0 for size in port.shape]
        if exact and (array.shape == tuple(sizes) or 0 not in sizes):
            return np.broadcast_to(array, sizes).copy()
        if exact and array.ndim == len(sizes):
            return array
    except (TypeError, ValueError):
        pass
    raise UsageError(f"{name} is fixed to {value!r}, expected {port.dtype or 'a tensor'} {list(port.shape)}; {ADVICE}")


def _to_constant(graph: ir.Graph, value: ir.Value, constant: Array) -> None:
    graph.inputs.remove(value)
    value.const_value = ir.tensor(constant, name=value.name)
    value.shape = ir.Shape(constant.shape)
    try:
        graph.register_initializer(value)
    except ValueError as error:  # the name also belongs to a node's result or to a second initializer
        raise CheckpointError(f"{value.name} cannot be fixed ({one_line(error)}); export the file again") from None


def _places(name: str, foreign: Foreign) -> list[tuple[str, int]]:
    """Return the axes of inputs that a name refers to, as (input, axis)."""
    named = [(port.name, axis) for port in foreign.inputs for axis, size in enumerate(port.shape) if size == name]
    if named or (match := _AXIS.fullmatch(name)) is None:
        return named
    port, axis = match[1], int(match[2])
    return [(one.name, axis) for one in foreign.inputs if one.name == port and axis < len(one.shape)]


def _size(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"the size {name} is fixed to {value!r}, expected a whole number from 1; {ADVICE}")
    return value
