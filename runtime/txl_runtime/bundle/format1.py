"""A Transformer-XL's config, and the adapter for bundles of format 1, which described every bundle by such a config.

This is the one module of the runtime that knows what a Transformer-XL is. Its config and dialect serve every checkpoint
family, so that reference and graph never ask which code trained a model (Dai et al. 2019, arXiv 1901.02860; attention
types as in kimiyoung/transformer-xl). Everything else in the runtime reads tables (`tables`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from txl_runtime.bundle.tables import (
    AXES,
    Count,
    Counter,
    DType,
    FileRecord,
    Index,
    Input,
    Output,
    Precision,
    Program,
    Sha256,
    Size,
    StateTensor,
)

Positive = Annotated[float, Meta(gt=0)]


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The architecture: everything that is fixed once the weights are.

    Attributes:
        vocab_size: V, number of token ids.
        n_layer: number of decoder layers.
        n_head: H, attention heads.
        d_model: D, width of the residual stream.
        d_head: width of one head; H * d_head need not equal D.
        d_inner: width of the feed-forward layer.
        d_embed: width of the embedding of cluster 0; projected to D when it differs.
        cutoffs: interior boundaries of the adaptive embedding's clusters, ascending; empty for one cluster.
        div_val: cluster c has embedding width d_embed // div_val**c.
        attn_type: 0 relative sinusoidal (the paper), 1 relative learned, 2 absolute sinusoidal, 3 absolute learned.
        position_rows: height of the learned tables of attn_type 1 and 3, one row per distance; 0 for the others.
        pre_lnorm: layer norm before each block instead of after it.
        layer_norm_epsilon: added to the variance.
        activation: of the feed-forward layer.
        final_norm: a layer norm after the last layer.
        attention_bias: biases on the q, k, v, r and output projections.
        softmax_bias: a bias on the output logits.
        embedding_scale: factor on the embedding, sqrt(d_model) in most code bases.
    """

    vocab_size: Count
    n_layer: Count
    n_head: Count
    d_model: Count
    d_head: Count
    d_inner: Count
    d_embed: Count
    cutoffs: tuple[Count, ...] = ()
    div_val: Count = 1
    attn_type: Literal[0, 1, 2, 3] = 0
    position_rows: Index = 0
    pre_lnorm: bool = False
    layer_norm_epsilon: Positive = 1e-5
    activation: Literal["relu", "gelu", "gelu_tanh"] = "relu"
    final_norm: bool = False
    attention_bias: bool = False
    softmax_bias: bool = True
    embedding_scale: Positive

    @property
    def absolute_positions(self) -> bool:
        """Whether positions are added to what layers read (and remember) instead of entering the scores."""
        return self.attn_type in (2, 3)

    @property
    def clusters(self) -> tuple[tuple[int, int], ...]:
        """Token id ranges [first, last) of the adaptive softmax's clusters; one range without cutoffs."""
        edges = (0, *self.cutoffs, self.vocab_size)
        return tuple(pairwise(edges))

    def cluster_width(self, cluster: int) -> int:
        """Embedding width of one cluster."""
        return int(self.d_embed // self.div_val**cluster)


class Dialect(Struct, frozen=True, kw_only=True):
    """What a code base does differently, and what is chosen at evaluation time; none of it changes a weight.

    Attributes:
        family: the code base the checkpoint came from; for people, nothing depends on it.
        memory_start: "empty": before the first token there is nothing to attend to. "zeros": M rows of zeros which
            ARE attended (Hugging Face, TensorFlow).
        window: W, the number of keys a query may see, itself included; None for everything in memory and segment.
        segment_window: a query sees as many keys as its segment has tokens, itself included, and everything where the
            segment is a single token (Chinese-Transformer-XL); `window` is None then.
        clamp_length: distances above it use its position; None for no clamp. With attn_type 1 it is the number of
            rows that are kept of the table, so distances from it on use the one before it; attn_type 3 has none.
    """

    family: str = "txl"
    memory_start: Literal["empty", "zeros"] = "empty"
    window: Count | None = None
    segment_window: bool = False
    clamp_length: Index | None = None


class TransformerXL(Struct, frozen=True, kw_only=True):
    """What the family block of a Transformer-XL's manifest holds.

    Attributes:
        name: of the model family.
        config, dialect: the model.
        memory: "kv" keeps keys and values, "hidden" the layers' inputs.
    """

    name: Literal["transformer_xl"] = "transformer_xl"
    config: ModelConfig
    dialect: Dialect
    memory: Literal["kv", "hidden"]

    def block(self) -> dict[str, Any]:
        """All of it as plain JSON has it."""
        block: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return block

    def inputs(self, updates: tuple[str, ...]) -> tuple[Input, ...]:
        """What its programs read beside the memory, for some update rules."""
        counts: tuple[Literal["valid", "fill", "head"], ...] = (
            ("valid", "fill", "head") if "ring" in updates else ("valid", "fill")
        )
        return (
            Input(name="tokens", dtype="int32", shape=("B", "L"), role="tokens", vocab=self.config.vocab_size),
            *(Input(name=count, dtype="int32", shape=("B",), role=count) for count in counts),
        )

    def output(self, softmax: bool) -> Output:
        """What it returns; `softmax` says whether there are programs of the softmax alone."""
        return Output(
            name="logprobs",
            dtype="float32",
            shape=("B", "L", self.config.vocab_size),
            role="logprobs",
            clusters=self.config.clusters if softmax else (),
            width=self.config.d_model,
        )

    def counters(self, memory_length: int) -> dict[str, Counter]:
        """The fill of its memory; rows of zeros that are attended exist from the beginning."""
        start = memory_length if self.dialect.memory_start == "zeros" else 0
        return {"fill": Counter(start=start, most=memory_length)}

    def reach(self, memory_length: int, longest: int) -> int:
        """Tokens that can influence a prediction: layers × memory + segment, or what the window leaves of it.

        Without a window a row of memory has seen as much as its whole segment: where M is no multiple of L, the oldest
        row stands inside a segment, and every further layer reaches back to that segment's begin.
        """
        window, rows = self.dialect.window, memory_length
        if window is not None:
            return self.config.n_layer * min(rows, window - 1) + longest
        return (self.config.n_layer - 1) * -(-rows // longest) * longest + rows + longest


class _State(Struct, frozen=True, kw_only=True):
    """A row of the state table of format 1: memory rows of every sequence, the batch first."""

    name: str
    input: str
    output: str
    dtype: DType = "float32"
    shape: Annotated[tuple[Count, ...], AXES]
    axis: Index
    initial: str | None = None
    update: str = "rolled"
    slots: Count | None = None

    def row(self) -> StateTensor:
        """The same in the tables of format 2."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "axis"}
        return StateTensor(row_axis=self.axis, **fields)


class Format1(Struct, frozen=True, kw_only=True):
    """A manifest of format 1; the fields that format 2 has too are those of `manifest.Manifest`."""

    format: str
    model_id: Sha256
    config: ModelConfig
    dialect: Dialect
    memory_length: Index
    batch_size: Count
    memory: Literal["kv", "hidden"]
    precision: Precision
    states: tuple[_State, ...]
    programs: Annotated[tuple[Program, ...], Meta(min_length=1)]
    weights: str
    files: dict[str, FileRecord]
    vocabulary: str | None = None
    parameters: Size = 0
    parity: dict[str, Any] = msgspec.field(default_factory=dict)
    provenance: dict[str, Any] = msgspec.field(default_factory=dict)

    def problem(self) -> str | None:
        """What in the config cannot be true, if anything: format 2 reads no config."""
        c, bounds = self.config, (0, *self.config.cutoffs, self.config.vocab_size)
        if any(first >= last for first, last in pairwise(bounds)):
            return f"cutoffs {list(c.cutoffs)} do not ascend within the vocabulary of {c.vocab_size}"
        kept = [state.name for state in self.states if state.update == self.states[0].update]
        expected = c.n_layer * (2 if self.memory == "kv" else 1) if self.memory_length else 0
        if len(kept) != expected:
            return f"n_layer is {c.n_layer}, but the state table has {len(kept)} tensors of {self.memory} memory"
        return None

    def upgraded(self) -> dict[str, Any]:
        """The fields of a manifest of format 2 that says the same."""
        model = TransformerXL(config=self.config, dialect=self.dialect, memory=self.memory)
        updates = tuple({state.update for state in self.states} | {program.update for program in self.programs})
        softmax = any(program.kind == "head" for program in self.programs)
        longest = max(program.segment_length for program in self.programs)
        given = ("format", "model_id", "batch_size", "precision", "programs", "weights", "files", "vocabulary")
        return {
            **{name: getattr(self, name) for name in (*given, "parameters", "parity", "provenance")},
            "inputs": model.inputs(updates),
            "outputs": (model.output(softmax),),
            "states": tuple(state.row() for state in self.states),
            "counters": model.counters(self.memory_length),
            "streams": "independent",
            "lengths": "valid",
            "reach": model.reach(self.memory_length, longest),
            "family": model.block(),
        }


def transformer_xl(family: Mapping[str, Any]) -> TransformerXL:
    """A Transformer-XL's family block, typed.

    Raises:
        msgspec.ValidationError: it is another model family, or its fields are not those of a Transformer-XL.
    """
    return msgspec.convert(family, TransformerXL)
