"""Write a Transformer-XL's step as plain C, from the sources of backend "native", for one thread.

`generating` writes simple loops, which suit small steps. The sources of "native" are written for speed, read weights in
a layout of their own, and keep memory in a ring.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from txl_engines.native import SOURCES
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import BackendError, BundleError
from txl_runtime.native.engine import Weights, unsupported
from txl_runtime.native.library import Shape
from txl_runtime.native.parameters import Blocks, Matrix
from txl_runtime.native.ring import LANES, STRIP
from txl_runtime.types import Array, Floats

from txl_deploy.plain_c.step import PlainStep

FILES = ("products.c", "rows.c", "attention.c", "step.c")
"""C sources of a step, without the files that open, pack and free weights; headers are copied where they are included.
"""
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
_FUNCTION = re.compile(r"^(?=(?:void|int|size_t|float|const char \*|(?:struct|enum) \w+ \*?) ?\*?\w+\()", re.MULTILINE)
_VECTORS = "content_bias", "position_bias", "norm_1_weight", "norm_1_bias", "norm_2_weight", "norm_2_bias"
GROUP = 128
"""Number of rows that a step computes together, as in `step.c`."""
RAISED = 128
"""Number that is added to int8 activations for instructions that multiply only unsigned bytes; `CODE_OFFSET` in C."""


@dataclass
class Packed:
    """A model's constants for a C file: `arrays` holds them, and other attributes hold indices in `arrays`, or None.

    This class is a `Taker` of the native engine: its methods get the weights one by one.

    Attributes:
        shape: the model's sizes, and choices such as the precision.
        arrays: all constants.
        layers: products, vectors and positions of each layer.
        clusters: tables of embedding and softmax.
        final: weight and bias of the final norm.
        starts: for each layer's keys and values, the row [H, d_head] that memory begins with.
    """

    shape: Shape
    arrays: list[Array] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    clusters: list[dict[str, Any]] = field(default_factory=list)
    final: dict[int, int] = field(default_factory=dict)
    starts: list[int | None] = field(default_factory=list)

    def product(self, layer: int, which: int, matrix: Matrix | Blocks, bias: Floats | None) -> None:
        """Keep a matrix of a layer and its bias; see `Taker` for the arguments."""
        if isinstance(matrix, Blocks):
            raise BackendError("a package has no products in int4, expected fp32 or int8; the generator writes it")
        self._of(layer)["products"][which] = self._product(matrix, bias)

    def vector(self, layer: int, which: int, values: Array) -> None:
        """Keep a vector of a layer or of the final norm; see `Taker` for the arguments."""
        place = self.final if layer == self.shape.layers else self._of(layer)["vectors"]
        place[which] = self.add(_padded(values.ravel()))

    def positions(self, layer: int, table: Floats, scores: Floats | None) -> None:
        """Keep a layer's table of positions, without distances beyond the package's memory and segment; see `Taker`."""
        heads, width, rows = table.shape[0], table.shape[1], self.shape.distances
        columns = rounded(rows)
        strips = np.zeros((heads, width, rounded(rows, STRIP)), np.float32)
        strips[:, :, columns - rows : columns] = table[:, :, rows - 1 :: -1]
        added = np.zeros((heads, columns), np.float32)
        if scores is not None:
            added[:, columns - rows :] = scores[:, rows - 1 :: -1]
        self._of(layer).update(
            positions=self.add(strips.reshape(heads, width, -1, STRIP).swapaxes(1, 2)),
            scores=None if scores is None else self.add(added),
        )

    def cluster(
        self,
        number: int,
        first: int,
        last: int,
        width: int,
        table: Floats | None,
        into: Floats | None,
        out_of: Floats | None,
    ) -> None:
        """Keep a cluster's sizes and its tables of the embedding; see `Taker` for the arguments."""
        assert number == len(self.clusters), "clusters come in order"
        self.clusters.append(
            {
                "sizes": (first, last, width),
                "table": None if table is None else self.add(table),
                "into": None if into is None else self._product(Matrix(into.T), None),
                "out_of": None if out_of is None else self._product(Matrix(out_of), None),
            }
        )

    def softmax(self, number: int, words: Floats, bias: Floats | None) -> None:
        """Keep the softmax's matrix of a cluster and its bias; see `Taker` for the arguments."""
        self.clusters[number]["words"] = self._product(Matrix(words.T), bias)

    def _of(self, layer: int) -> dict[str, Any]:
        while len(self.layers) <= layer:
            self.layers.append({"products": {}, "vectors": {}})
        return self.layers[layer]

    def add(self, array: Array) -> int:
        """Keep an array; return its index: 0 for the first array, 1 for the second."""
        self.arrays.append(np.ascontiguousarray(array))
        return len(self.arrays) - 1

    def _product(self, matrix: Matrix, bias: Floats | None) -> dict[str, Any]:
        rows, columns = matrix.values.shape
        product: dict[str, Any] = {"in": rounded(rows), "out": rounded(columns), "columns": columns}
        strips = np.zeros((rounded(rows), rounded(columns, STRIP)), matrix.values.dtype)
        strips[:rows, :columns] = matrix.values
        if matrix.scales is None:
            product["matrix"] = self.add(strips.reshape(product["in"], -1, STRIP).swapaxes(0, 1))
        else:
            fours = strips.reshape(product["in"] // 4, 4, -1, STRIP).transpose(2, 0, 3, 1)
            sums = RAISED * matrix.values.sum(axis=0, dtype=np.int32)
            product |= {"codes": self.add(fours), "scales": self.add(_padded(matrix.scales))}
            product["sums"] = self.add(_padded(sums))
        return product | {"bias": None if bias is None else self.add(_padded(bias))}


def packed_step(bundle: Bundle, step: PlainStep) -> Packed | None:
    """Lay out a bundle's weights for the native step; return None if the native step does not support the bundle."""
    manifest, length = step.manifest, step.program.segment_length
    try:
        if unsupported(bundle):
            return None
        weights = Weights(bundle)
        shape = weights.shape(cache=0, bf16=False, large_pages=False)
        shape.batch, shape.segment = manifest.batch_size, length
        shape.slots = manifest.memory_length + length
        shape.distances = min(shape.distances, shape.slots)
        packed = Packed(shape)
        weights.give(packed)
        for state in step.states:
            start = step.starts[state.name]
            packed.starts.append(None if start is None else packed.add(start[:, 0]))
    # the bundle is of a different family, or its int8 weights have a different form
    except (BackendError, BundleError):
        return None
    return packed


def native_context(packed: Packed, step: PlainStep) -> dict[str, Any]:
    """Return the values that only the templates of a native step read; `context_of` has the values of all packages."""
    s, manifest = packed.shape, step.manifest
    batch, length = s.batch, s.segment
    wide, head, inner, columns = map(rounded, (s.width, s.head_width, s.inner, s.distances))
    rows, all_heads = min(batch * length, max(GROUP, length)), s.heads * head
    widest = max(wide, rounded(s.embedding))
    codes = any("codes" in product for layer in packed.layers for product in layer["products"].values())
    inputs = max(widest, inner, all_heads)
    room = {
        "x": rows * wide,
        "source": rows * wide if s.pre_norm else 0,
        "y": rows * widest,
        "qkv": rows * 3 * all_heads,
        "mixed": rows * all_heads,
        "inner": rows * inner,
        "hidden": batch * length * s.width,
        "scores": 4 * (rounded(s.slots) + LANES) + LANES,
        "by_distance": 4 * (columns + LANES) + LANES,
        "queries": 8 * head,
        "scales": rows if codes else 0,
        "row": widest,
        "codes": rows * (2 * inputs + 256) // 4 if codes else head,  # a step also writes keys through this memory
        "sums": rows * (inputs // 32 + 4) if codes else 0,
    }
    sizes = {
        "key_size": rounded(s.slots, STRIP) * s.head_width,
        "value_size": s.slots * head,
        "position_size": rounded(columns, STRIP) * s.head_width,
    }
    return {
        "shape": [(each[0], getattr(s, each[0])) for each in Shape._fields_],
        "layers": packed.layers,
        "vectors": _VECTORS,
        "clusters": packed.clusters,
        "final": packed.final,
        "room": {name: rounded(numbers) for name, numbers in room.items() if numbers},
        "starts": packed.starts,
        "codes": codes,
        "widest": max(product["out"] for layer in packed.layers for product in layer["products"].values()),
        "rows": rows,
        "pads": {
            "wide": wide,
            "head_pitch": head,
            "inner_pitch": inner,
            "ring_pitch": rounded(s.slots),
            "columns": columns,
            "widest": widest,
        },
        "memory": manifest.memory_length,
        "vocabulary": s.vocabulary,
        "width": s.width,
        "heads": s.heads,
        "head_width": s.head_width,
        "slots": s.slots,
        **sizes,
        "state_bytes": 4 * batch * (s.layers * s.heads * (sizes["key_size"] + sizes["value_size"]) + 2),
        "products": _multiply_adds(packed, manifest.memory_length),
    }


def native_source() -> str:
    """Return the C sources of a step as one text, in which every function is static."""
    seen: set[str] = {"txl_native.h"}

    def text(name: str) -> str:
        return _INCLUDE.sub(lambda found: _once(found[1]), (SOURCES / name).read_text(encoding="utf-8"))

    def _once(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        return text(name)

    return _FUNCTION.sub("static ", "\n".join(map(text, FILES)))


def rounded(count: int, whole: int = LANES) -> int:
    """Round a count up to a multiple of `whole`, e.g. 17 to 32 for 16."""
    return -(-count // whole) * whole


def _padded(values: Array) -> Array:
    return np.pad(values, (0, -len(values) % LANES))


def _multiply_adds(packed: Packed, memory: int) -> int:
    """Return the number of multiply-adds of a step with full memory; multiply-adds of padding do not count."""
    s, rows = packed.shape, packed.shape.batch * packed.shape.segment
    size = s.heads * s.head_width
    keys = min(s.slots, s.window or s.slots)
    layer = 4 * s.width * size + 2 * s.width * s.inner + size * (2 * keys + min(keys, s.distances))
    heads = sum(
        product["columns"] * (s.width if name == "out_of" else cluster["sizes"][2])
        for cluster in packed.clusters
        for name, product in cluster.items()
        if name in ("out_of", "words") and product is not None
    )
    own = max((cluster["sizes"][2] for cluster in packed.clusters if cluster["into"] is not None), default=0)
    return int(rows * (s.layers * layer + heads + own * s.width))
