"""The bundle's weight file as graphs refer to it: parameters are byte ranges of it, not copies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from txl_runtime.bundle.weight_header import read_header


class WeightFile:
    """Where each tensor of a safetensors file lies, so that graphs can point into it.

    Args:
        path: the file.
        parts: further tensors that are rows [first, last) of one of the file's: name → (that one, first, last).

    Attributes:
        ranges: name → (offset, length) in bytes.
    """

    def __init__(self, path: Path, parts: Mapping[str, tuple[str, int, int]] | None = None) -> None:
        stored = read_header(path)
        self._path = path
        self.ranges = {name: (tensor.offset, tensor.length) for name, tensor in stored.items()}
        for name, (table, first, last) in (parts or {}).items():
            row = stored[table].length // stored[table].shape[0]
            self.ranges[name] = (stored[table].offset + first * row, (last - first) * row)

    def point_into(self, graph: ir.Graph) -> None:
        """Let the graph's parameters be ranges of the file. They get the file's names: the graph has "/" for "."."""
        for value in list(graph.initializers.values()):
            assert value.name is not None
            name = value.name.replace("/", ".")
            if name in self.ranges:
                assert value.dtype is not None
                assert value.shape is not None
                file, folder, where = self._path.name, self._path.parent, self.ranges[name]
                value.const_value = ir.ExternalTensor(
                    file, *where, value.dtype, shape=value.shape, name=name, base_dir=folder
                )
                value.name = name
