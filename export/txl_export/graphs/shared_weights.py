"""Collects the weights of several graphs in one file; tensors with equal content are stored once.

Every capture contains its own constants: parameters, and values that the exporter computed. A tensor gets the name of
the parameter with the same content, else "constants.<n>". Small tensors and booleans stay in the graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor
from txl_runtime.errors import TxlError

from txl_export.bundle.placing import is_text
from txl_export.graphs.tracing import WeightFile

SMALL = 1024
"""Least number of bytes of a tensor that is stored in the weight file."""

_BFLOAT16 = ir.DataType.BFLOAT16.numpy()

_Content: TypeAlias = tuple[str, tuple[int, ...], str]


class SharedWeights:
    """The tensors of a weight file, collected from one graph after another.

    Args:
        parameters: the model's own tensors; the file contains only the tensors that a graph contains.
        taken: names that graphs use for something else.
    """

    def __init__(self, parameters: Mapping[str, Tensor], taken: Collection[str] = ()) -> None:
        self._own: dict[_Content, str] = {}
        self._values: dict[str, NDArray[np.generic]] = {}
        for name, tensor in parameters.items():
            values = _array(tensor.detach().cpu().contiguous())
            if values.nbytes >= SMALL and name not in taken:
                self._own.setdefault(_content(values), name)
                self._values[name] = values
        self._names_by_content: dict[_Content, str] = {}
        self._constants: dict[_Content, str] = {}
        self._half: dict[str, torch.dtype] = {}
        self._more: dict[str, Tensor] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors that graphs contain and the file will hold."""
        return frozenset([*self._names_by_content.values(), *self._constants.values()])

    def adopt(self, graph: ir.Graph) -> None:
        """Replace a graph's larger constants by the file's tensors, under the file's names; equal ones become one."""
        for value in list(graph.initializers.values()):
            assert value.const_value is not None
            values = value.const_value.numpy()
            # Booleans stay in the graph: the guard checks there that every byte is 0 or 1.
            if values.nbytes < SMALL or values.dtype.itemsize == 0 or values.dtype == np.bool_:
                continue
            name, turned = self._name(values)
            assert value.name is not None
            del graph.initializers[value.name]
            if name not in graph.initializers:
                graph.register_initializer(_initializer(name, self._values[name]))
            shared = graph.initializers[name]
            if turned:
                node = ir.node("Transpose", [shared], attributes={"perm": [1, 0]})
                result = node.outputs[0]
                result.name, result.type, result.shape = value.name, value.type, value.shape
                value.name = f"{name}.before"
                graph.insert_before(graph[0], node)
                shared = result
            ir.convenience.replace_all_uses_with(value, shared)

    def keep(self, names: Collection[str]) -> None:
        """Drop all collected tensors except those of `names`, because passes have removed constants since `adopt`."""
        for known in (self._names_by_content, self._constants):
            for key in [key for key, name in known.items() if name not in names]:
                del known[key]

    def halve(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Store the tensors of these names in half precision, as `dtype`."""
        self._half |= dict.fromkeys(names, dtype)

    def add(self, name: str, tensor: Tensor) -> None:
        """Store a tensor that no graph reads, e.g. an initial state [1, 32]."""
        self._more[name] = tensor

    def write(self, path: Path) -> WeightFile:
        """Write the file, and return the object that makes graphs refer to it; equal tensors give equal bytes."""
        tensors = dict(self._more)
        for name in [*self._names_by_content.values(), *self._constants.values()]:
            tensor = _tensor(self._values[name].copy())
            tensors[name] = tensor.to(self._half.get(name, tensor.dtype))
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise TxlError(f"{path.name} could not be written ({error}); make room or give another -o") from None
        return WeightFile(path, {})

    def _name(self, values: NDArray[np.generic]) -> tuple[str, bool]:
        """Return the name of a tensor in the file, and whether the file contains it transposed."""
        key = _content(values)
        for known in (self._names_by_content, self._constants):
            if key in known:
                return known[key], False
        if key in self._own:
            self._names_by_content[key] = self._own[key]
            return self._own[key], False
        if values.ndim == 2:  # the exporter transposes small matrices; a graph may read the parameter itself, too
            turned = _content(np.ascontiguousarray(values.T))
            if turned in self._own:
                self._names_by_content[turned] = self._own[turned]
                return self._own[turned], True
        name = f"constants.{len(self._constants)}"
        self._constants[key] = name
        self._values[name] = values
        return name, False


def _array(tensor: Tensor) -> NDArray[np.generic]:
    """Return a tensor as an array; bfloat16 goes through int16, because torch and NumPy exchange no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    values: NDArray[np.generic] = tensor.numpy()
    return values


def _tensor(values: NDArray[np.generic]) -> Tensor:
    if values.dtype == _BFLOAT16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _initializer(name: str, values: NDArray[np.generic]) -> ir.Value:
    tensor = ir.tensor(values, name=name)
    kind, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    return ir.Value(name=name, type=kind, shape=shape, const_value=tensor)


def _content(values: NDArray[np.generic]) -> _Content:
    data = np.ascontiguousarray(values)
    return str(data.dtype), tuple(data.shape), hashlib.sha256(data.tobytes()).hexdigest()


def read_weight_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a bundle's weight file; a file whose path is not UTF-8 is read instead of mapped.

    For example, {"embedding.tables.0": [256, 32]}.
    """
    return load_file(path) if is_text(path) else load(path.read_bytes())
