"""The engine of the backend "native": the step in C with a bundle's weights.

The engine runs the programs "hidden" of a ring, and the programs of the softmax, each as one C function. It does not
read the programs' graphs: the manifest's config decides what is computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol
from weakref import finalize

import numpy as np

from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BackendError, BundleError
from txl_runtime.host.engine import Engine
from txl_runtime.native.library import Shape, open_library
from txl_runtime.native.parameters import Blocks, Matrix, Parameters, pad_heads
from txl_runtime.types import Array, Arrays, Call, Floats

ACTIVATIONS = ("relu", "gelu", "gelu_tanh")
PRECISIONS = ("fp32", "int8", "int4")
CACHES = ("fp32", "fp16", "int8")
"""Precisions of keys, values and tables of positions, in the order of C's numbers."""


def unsupported(bundle: Bundle) -> str:
    """Return the reason why the step in C cannot run a bundle; "" if it can.

    Raises:
        BundleError: the bundle is of a different family.
    """
    manifest = bundle.manifest
    if not manifest.has_config:
        return f"it is of family {manifest.family_name}, expected one that has a step in C"
    if "ring" not in manifest.updates:
        kind = manifest.config.attn_type
        feature = f"attn_type {kind}" if kind > 1 else f"{manifest.memory_length} rows, in the form that was exported"
        return f"its memory is not a ring ({feature}), expected keys and values in a ring"
    if manifest.precision not in PRECISIONS:
        more = " (build an fp32 bundle with --precision bf16)" if manifest.precision == "bf16" else ""
        return f"its precision is {manifest.precision}, expected {', '.join(PRECISIONS)}{more}"
    return ""


class NativeEngine(Engine):
    """An engine that runs a bundle's model with the step in C; see `Engine`.

    Args:
        library: path of the compiled step.
        threads: threads of a step, the caller's included.
        cache: precision of keys, values and tables of positions.
        bf16: whether to round the weights of an fp32 bundle to bf16; tables of positions too, unless they are in int8.
        large_pages: whether to ask the system for large pages for weights.

    Raises:
        BackendError: the bundle or the library is of a different kind, or there is no memory.
        BundleError: a tensor is missing or of a different shape.
    """

    least_rows = 1

    def __init__(
        self,
        bundle: Bundle,
        library: Path,
        threads: int,
        cache: str,
        bf16: bool = False,
        large_pages: bool = True,
        sha256: str = "",
    ) -> None:
        if reason := unsupported(bundle):
            raise BackendError(f"{bundle.path}: {reason}; use backend cpu")
        self._c, self._bundle = open_library(library, sha256), bundle
        layout = Weights(bundle)
        shape = layout.shape(CACHES.index(cache), bf16, large_pages)
        self._model = self._c.txl_open(ctypes.byref(shape), threads)
        if not self._model:
            raise BackendError("backend native got no memory or threads; give fewer threads, or use backend cpu")
        # The model is not closed at exit: a daemon thread may still be in a step, which needs the weights.
        finalize(self, self._c.txl_close, self._model).atexit = False
        layout.give(self)
        self._tables = layout.tables  # C reads the tables in NumPy's memory, so this object keeps them
        instructions = self._c.txl_instructions().decode()
        weights = "bf16" if bf16 else bundle.manifest.precision
        self.description = f"a step in C ({instructions}, weights in {weights}, keys and values in {cache}) on the CPU"

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        result = next(iter(outputs.values()))
        if program.kind != "hidden":
            return self._bind_softmax(program, next(iter(inputs.values())), result)
        count, manifest = 2 * self._bundle.manifest.config.n_layer, self._bundle.manifest
        roles = {entry.role: inputs[entry.name] for entry in manifest.inputs if entry.name in inputs}
        tokens, counters = roles["tokens"], [roles[role] for role in ("valid", "fill", "head")]
        states = [inputs[state.input] for state in manifest.states_of("ring")]
        keys, values = (
            (ctypes.c_void_p * (count // 2))(*(state.ctypes.data for state in states[first::2])) for first in (0, 1)
        )
        pointers = tuple(array.ctypes.data for array in (tokens, *counters))
        sizes, hidden = tokens.shape, result.ctypes.data
        held = tokens, counters, states, result  # the call keeps alive the arrays that C reads and writes

        def call(held: Any = held) -> None:
            self._c.txl_step(self._model, *sizes, *pointers, keys, values, hidden)

        return call

    def _bind_softmax(self, program: Program, rows: Array, out: Array) -> Call:
        cluster = int(program.kind.partition(".")[2] or 0)

        def call() -> None:
            self._c.txl_softmax(self._model, cluster, len(rows), rows.ctypes.data, out.ctypes.data)

        return call

    def kept(self, program: Program) -> Collection[str]:
        return ()

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        """Raise BackendError: no program of a ring leaves sizes open."""
        raise BackendError(f"program {program.name} leaves sizes open, expected one of a ring; use backend cpu")

    def release_pages(self) -> None:
        """Do nothing, because no file is memory-mapped."""

    def product(self, layer: int, which: int, matrix: Matrix | Blocks, bias: Floats | None) -> None:
        """Take a layer's matrix; see `Taker.product`."""
        where = self._model, layer, which
        if isinstance(matrix, Blocks):
            values = matrix.codes, matrix.scales, matrix.zeros
            sizes = matrix.size, len(matrix.codes), 2 * matrix.codes.shape[2]
            self._done(self._c.txl_set_nibbles(*where, *sizes, *map(_at, values), _at(bias)))
            return
        arguments = *where, *matrix.values.shape, _at(matrix.values), matrix.values.shape[1], 1
        if matrix.scales is None:
            self._done(self._c.txl_set_product(*arguments, _at(bias)))
        else:
            self._done(self._c.txl_set_codes(*arguments, _at(matrix.scales), _at(bias)))

    def vector(self, layer: int, which: int, values: Array) -> None:
        """Take a layer's vector; see `Taker.vector`."""
        self._done(self._c.txl_set_vector(self._model, layer, which, _at(values), values.size))

    def positions(self, layer: int, table: Floats, scores: Floats | None) -> None:
        """Take a layer's table of positions; see `Taker.positions`."""
        self._done(self._c.txl_set_positions(self._model, layer, _at(table), _at(scores)))

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
        """Take a cluster's embedding; see `Taker.cluster`."""
        sizes = self._model, number, first, last, width
        self._done(self._c.txl_set_cluster(*sizes, _at(table), _at(into), _at(out_of)))

    def softmax(self, number: int, words: Floats, bias: Floats | None) -> None:
        """Take a cluster's softmax; see `Taker.softmax`."""
        self._done(self._c.txl_set_softmax(self._model, number, *words.shape, _at(words), _at(bias)))

    def _done(self, status: int) -> None:
        if status:
            raise BackendError("backend native got no memory for the weights; use backend cpu with lean=True")


class Taker(Protocol):
    """An object that receives the weights for the step in C, with a method for each kind of weight."""

    def product(self, layer: int, which: int, matrix: Matrix | Blocks, bias: Floats | None) -> None:
        """Take a layer's matrix [in, out]; `which`: 0 query, key and value, 1 output, 2 and 3 the feed-forward layer.

        With D 8, `which` 0 is [8, 24] if there are two heads of 4.
        """

    def vector(self, layer: int, which: int, values: Array) -> None:
        """Take a layer's vector number `which`, as in `source/model.h`; layer n_layer has the final norm's vectors.

        With D 8, a norm's weight is [8].
        """

    def positions(self, layer: int, table: Floats, scores: Floats | None) -> None:
        """Take a table of positions [H, d_head, distances], and scores to add, [H, distances].

        With two heads of 4 and 20 distances, the table is [2, 4, 20].
        """

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
        """Take a cluster's embedding table [rows, width], and its projections into and out of the layers, [D, width].

        For example, words 100 … 299 with width 16 and D 64 have a table [200, 16] and projections [64, 16].
        """

    def softmax(self, number: int, words: Floats, bias: Floats | None) -> None:
        """Take the rows of a cluster's words in the softmax, [columns, width], and their bias, [columns].

        For example, words 100 … 299 with width 16 have rows [200, 16] and a bias [200].
        """


class Weights:
    """A bundle's weights in the form that the step in C takes.

    Attributes:
        tables: the embedding's tables, after they were passed to C.

    Raises:
        BundleError: the tables of states and programs contradict the config.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._parameters, self._config = bundle, Parameters(bundle), bundle.manifest.config
        self._check_tables()
        self.tables: list[Array] = []
        self._positions = [self._position_table(i) for i in range(self._config.n_layer)]

    def give(self, taker: Taker) -> None:
        """Give all weights to a taker. Call this once.

        Raises:
            BackendError: a matrix in int8 has a form that the step does not take.
            BundleError: a tensor is missing or of a different shape.
        """
        self._give_layers(taker)
        self._give_clusters(taker)

    def _check_tables(self) -> None:
        """Compare the tables, which size the arrays, with the config, which C uses to read and write them."""
        c, manifest = self._config, self._bundle.manifest
        states, batch, longest = manifest.states_of("ring"), manifest.batch_size, max(manifest.segment_lengths)
        rows = [(state.shape[0], state.shape[1], state.shape[3]) for state in states if len(state.shape) == 4]
        rings = {state.slots for state in states}
        most = min(slots or 0 for slots in rings) - longest
        widths = {p.outputs[0].shape[-1] for p in manifest.programs if p.kind == "hidden" and p.update == "ring"}
        heads = {
            p.kind: (p.inputs[0].shape[-1], p.outputs[0].shape[-1]) for p in manifest.programs if not p.segment_length
        }
        words = [last - first for first, last in c.clusters]
        wanted = {f"tail.{number}": (c.d_model, count) for number, count in enumerate(words) if number}
        wanted["head"] = c.d_model, words[0] + len(words) - 1
        fits = rows == [(batch, c.n_head, c.d_head)] * (2 * c.n_layer) and len(rings) == 1
        if not fits or manifest.memory_length > most or widths != {c.d_model} or heads != wanted:
            raise BundleError(
                f"{self._bundle.path}: the tables of states and programs are not those of its config, expected keys "
                "and values of each layer in one ring, and rows and words of the config's sizes; export the model again"
            )

    def shape(self, cache: int, bf16: bool, large_pages: bool) -> Shape:
        """Return the sizes and choices of the model, as C reads them."""
        c, manifest, dialect = self._config, self._bundle.manifest, self._bundle.manifest.dialect
        state = manifest.states_of("ring")[0]
        return Shape(
            vocabulary=c.vocab_size,
            layers=c.n_layer,
            heads=c.n_head,
            width=c.d_model,
            head_width=c.d_head,
            inner=c.d_inner,
            slots=state.slots,
            batch=manifest.batch_size,
            segment=max(manifest.segment_lengths),
            distances=self._positions[0].shape[-1],
            window=dialect.window or 0,
            segment_window=dialect.segment_window,
            single_steps=dialect.single_steps or 0,
            step_window=manifest.memory_length + 1,
            pre_norm=c.pre_lnorm,
            final_norm=c.final_norm,
            activation=ACTIVATIONS.index(c.activation),
            cache=cache,
            bf16=bf16,
            clusters=len(c.clusters),
            embedding=c.d_embed,
            div_val=c.div_val > 1,
            large_pages=large_pages,
            epsilon=c.layer_norm_epsilon,
            scale=c.embedding_scale,
        )

    def _position_table(self, layer: int) -> Floats:
        c = self._config
        return self._parameters.largest(f"layers.{layer:02d}.attention.position.table.", (c.n_head, c.d_head))

    def _give_layers(self, taker: Taker) -> None:
        c, p = self._config, self._parameters
        size = c.n_head * c.d_head
        for i in range(c.n_layer):
            attention, feed_forward = f"layers.{i:02d}.attention", f"layers.{i:02d}.feed_forward"
            joined = p.matrix(f"{attention}.query_key_value.weight", c.d_model, 3 * size)
            bias = p.optional(f"{attention}.query_key_value.bias", (3 * size,))
            bias = None if bias is None else pad_heads(bias, 0, 3 * c.n_head, c.d_head)
            taker.product(i, 0, joined.padded(1, 3 * c.n_head, c.d_head), bias)
            mixed = p.matrix(f"{attention}.output.weight", size, c.d_model).padded(0, c.n_head, c.d_head)
            taker.product(i, 1, mixed, p.optional(f"{attention}.output.bias", (c.d_model,)))
            inner = p.matrix(f"{feed_forward}.inner.weight", c.d_model, c.d_inner)
            taker.product(i, 2, inner, p.optional(f"{feed_forward}.inner.bias", (c.d_inner,)))
            outer = p.matrix(f"{feed_forward}.outer.weight", c.d_inner, c.d_model)
            taker.product(i, 3, outer, p.optional(f"{feed_forward}.outer.bias", (c.d_model,)))
            for which, name in enumerate(("content_bias", "position_bias")):
                query_bias = p.optional(f"{attention}.{name}", (c.n_head, c.d_head))
                taker.vector(i, which, np.zeros(size, np.float32) if query_bias is None else query_bias)
            for which, name in enumerate((f"{attention}.norm", f"{feed_forward}.norm")):
                self._give_norm(taker, i, 2 + 2 * which, name)
            table, scores = self._positions[i], None
            if c.attn_type == 1:
                start = f"layers.{i:02d}.attention.position.table.bias."
                scores = p.largest(start, (c.n_head, 1))[:, 0]
            sizes = {one.shape[-1] for one in (table, scores, self._positions[0]) if one is not None}
            if len(sizes) > 1:
                raise BundleError(
                    f"{self._bundle.path}: tables of positions have {sorted(sizes)} rows, expected one number; export "
                    "the model again"
                )
            taker.positions(i, table, scores)
        if c.final_norm:
            self._give_norm(taker, c.n_layer, 0, "final_norm")

    def _give_norm(self, taker: Taker, layer: int, which: int, name: str) -> None:
        for number, part in enumerate(("weight", "bias")):
            values = self._parameters.tensor(f"{name}.{part}", (self._config.d_model,))
            taker.vector(layer, which + number, values)

    def _give_clusters(self, taker: Taker) -> None:
        c, p = self._config, self._parameters
        several = len(c.clusters) > 1
        for number, (first, last) in enumerate(c.clusters):
            own = number if c.div_val > 1 else 0  # number of the table and projection that the cluster's words have
            width, table = c.cluster_width(own), None
            if c.div_val > 1 or not number:
                rows = last - first if c.div_val > 1 else c.vocab_size
                table = p.tensor(f"embedding.tables.{number}", (rows, width))
                self.tables.append(table)
            whole = self.tables[-1] if c.div_val > 1 or not number else self.tables[0]
            into = p.optional(f"embedding.projections.{own}", (c.d_model, width))
            out_of = p.optional(f"softmax.projections.{number}", (c.d_model, width))
            out_of = into if out_of is None else out_of
            if width != c.d_model and into is None:
                p.tensor(f"embedding.projections.{own}", (c.d_model, width))  # raises the error: this tensor is needed
            taker.cluster(number, first, last, width, table, None if table is None else into, out_of)
            words = p.optional(f"softmax.tables.{number}", (last - first, width))
            if words is None:
                words = whole if c.div_val > 1 else whole[first:last]
            bias = p.optional(f"softmax.biases.{number}", (last - first,))
            if not number and several:
                words, bias = self._with_clusters(words, bias)
            taker.softmax(number, words, bias)

    def _with_clusters(self, words: Floats, bias: Floats | None) -> tuple[Floats, Floats]:
        """Return cluster 0's softmax with a column for each further cluster behind it."""
        p, more = self._parameters, len(self._config.clusters) - 1
        columns = p.tensor("softmax.cluster.weight", (more, words.shape[1]))
        into = p.optional("softmax.cluster.bias", (more,))
        pairs = (words, bias), (columns, into)
        biases = [np.zeros(len(rows), np.float32) if one is None else one for rows, one in pairs]
        return np.concatenate([words, columns]), np.concatenate(biases)


def _at(array: Array | None) -> int | None:
    """Return the address of an array's first value; None, C's NULL, for None."""
    return None if array is None else array.ctypes.data
