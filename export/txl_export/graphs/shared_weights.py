"""One weight file for graphs that were traced apart: a tensor that several of them hold is stored once.

Every trace holds its own constants: parameters, and what the exporter computed beforehand. Two of the same content are
one tensor of the file, whatever graph they come from. A tensor has the name of the parameter whose values it holds, or
"constants.<n>". Small tensors stay in the graphs.
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
"""Bytes from which on a tensor stands in the weight file."""

_BFLOAT16 = ir.DataType.BFLOAT16.numpy()

_Content: TypeAlias = tuple[str, tuple[int, ...], str]


class SharedWeights:
    """The tensors of a weight file, gathered from graphs one by one.

    Args:
        parameters: the model's own tensors; those that no graph holds are left out of the file.
        taken: names that graphs use otherwise.
    """

    def __init__(self, parameters: Mapping[str, Tensor], taken: Collection[str] = ()) -> None:
        self._own: dict[_Content, str] = {}
        self._values: dict[str, NDArray[np.generic]] = {}
        for name, tensor in parameters.items():
            values = _array(tensor.detach().cpu().contiguous())
            if values.nbytes >= SMALL and name not in taken:
                self._own.setdefault(_content(values), name)
                self._values[name] = values
        self._found: dict[_Content, str] = {}
        self._constants: dict[_Content, str] = {}
        self._half: dict[str, torch.dtype] = {}
        self._more: dict[str, Tensor] = {}

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors that graphs hold."""
        return frozenset([*self._found.values(), *self._constants.values()])

    def adopt(self, graph: ir.Graph) -> None:
        """Give the graph's larger constants the names of the file, and let equal ones be one."""
        for value in list(graph.initializers.values()):
            assert value.const_value is not None
            values = value.const_value.numpy()
            if values.nbytes < SMALL or values.dtype.itemsize == 0:
                continue
            name, turned = self._name(values)
            assert value.name is not None
            del graph.initializers[value.name]
            if name not in graph.initializers:
                graph.register_initializer(_initializer(name, self._values[name]))
            shared = graph.initializers[name]
            if turned:
                node = ir.node("Transpose", [shared], attributes={"perm": [1, 0]})
                made = node.outputs[0]
                made.name, made.type, made.shape = value.name, value.type, value.shape
                value.name = f"{name}.before"
                graph.insert_before(graph[0], node)
                shared = made
            ir.convenience.replace_all_uses_with(value, shared)

    def keep(self, names: Collection[str]) -> None:
        """Leave out of the file what graphs held when they were adopted and hold no more: all but these."""
        for known in (self._found, self._constants):
            for key in [key for key, name in known.items() if name not in names]:
                del known[key]

    def halve(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Store tensors in half precision."""
        self._half |= dict.fromkeys(names, dtype)

    def add(self, name: str, tensor: Tensor) -> None:
        """Store a tensor that no graph reads."""
        self._more[name] = tensor

    def write(self, path: Path) -> WeightFile:
        """Write the file, the same bytes for the same tensors; graphs can be pointed into it then."""
        tensors = dict(self._more)
        for name in [*self._found.values(), *self._constants.values()]:
            tensor = _tensor(self._values[name].copy())
            tensors[name] = tensor.to(self._half.get(name, tensor.dtype))
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise TxlError(f"{path.name} could not be written ({error}); make room or give another -o") from None
        return WeightFile(path, {})

    def _name(self, values: NDArray[np.generic]) -> tuple[str, bool]:
        """The name in the file, and whether the file has it transposed."""
        key = _content(values)
        for known in (self._found, self._constants):
            if key in known:
                return known[key], False
        if key in self._own:
            self._found[key] = self._own[key]
            return self._own[key], False
        if values.ndim == 2:  # the exporter turns small matrices beforehand; the parameter may be read as it is, too
            turned = _content(np.ascontiguousarray(values.T))
            if turned in self._own:
                self._found[turned] = self._own[turned]
                return self._own[turned], True
        name = f"constants.{len(self._constants)}"
        self._constants[key] = name
        self._values[name] = values
        return name, False


def _array(tensor: Tensor) -> NDArray[np.generic]:
    """NumPy has no bfloat16 of its own, so torch gives and takes none."""
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
    """The tensors of a bundle's weight file, mapped where safetensors can: it maps no path that is not UTF-8."""
    return load_file(path) if is_text(path) else load(path.read_bytes())
