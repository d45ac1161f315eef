"""A Transformer-XL's config and dialect, as stored in the field `family` of a bundle's manifest.

This is the only module of the runtime that knows a model family; all others read `tables`. One form of config and
dialect describes the models of all code bases, so that reference and graph never ask which code trained a model (Dai et
al. 2019, arXiv 1901.02860; attention types as in kimiyoung/transformer-xl).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct

from txl_runtime.bundle.tables import Count, Index

Positive = Annotated[float, Meta(gt=0)]
"""A number above 0."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The architecture of a Transformer-XL, which the weights determine.

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
        position_rows: number of rows of the learned tables of attn_type 1 and 3, one row per distance; 0 for 0 and 2.
        pre_lnorm: layer norm before each block instead of after it.
        layer_norm_epsilon: number that layer norms add to the variance.
        activation: function of the feed-forward layer.
        final_norm: whether a layer norm follows the last layer.
        attention_bias: whether the q, k, v, r and output projections have biases.
        softmax_bias: whether the output logits have a bias.
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
        """True if positions are added to the layers' inputs, and so to memory, instead of to the attention scores."""
        return self.attn_type in (2, 3)

    @property
    def clusters(self) -> tuple[tuple[int, int], ...]:
        """Token id ranges [first, last) of the adaptive softmax's clusters; one range without cutoffs."""
        edges = (0, *self.cutoffs, self.vocab_size)
        return tuple(pairwise(edges))

    def cluster_width(self, cluster: int) -> int:
        """Return the embedding width of one cluster."""
        return int(self.d_embed // self.div_val**cluster)


class Dialect(Struct, frozen=True, kw_only=True):
    """The choices of a code base and of evaluation that do not change the weights.

    Attributes:
        family: the code base that wrote the checkpoint; for people only.
        memory_start: "empty": before the first token there is nothing to attend to. "zeros": M rows of zeros that
            queries do attend to (Hugging Face, TensorFlow).
        window: number of keys that a query may see, itself included; None for all keys in memory and segment.
        segment_window: a query sees as many keys as its segment has tokens, itself included, and all keys if the
            segment is a single token (Chinese-Transformer-XL); `window` is None then.
        single_steps: a segment of at most this number of positions gives the same results as single steps: each query
            sees the M keys before it and itself, as a segment of one position does; None if no segment does.
        clamp_length: larger distances use the position of this distance; None for no limit. With attn_type 1 it is the
            number of rows of the table that are kept, so distances >= clamp_length use row clamp_length - 1; attn_type
            3 has no clamp_length.
    """

    family: str = "txl"
    memory_start: Literal["empty", "zeros"] = "empty"
    window: Count | None = None
    segment_window: bool = False
    single_steps: Count | None = None
    clamp_length: Index | None = None

    def window_of(self, positions: int, memory_length: int) -> int | None:
        """Return the number of keys that a query of a segment may see, itself included; None for all."""
        if self.single_steps is not None and positions <= self.single_steps:
            return memory_length + 1
        return positions if self.segment_window and positions > 1 else self.window


class TransformerXL(Struct, frozen=True, kw_only=True):
    """The field `family` of a Transformer-XL's manifest.

    Attributes:
        name: name of the model family.
        config, dialect: the model's architecture, and the choices of its code base.
        memory: "kv": memory rows are keys and values. "hidden": they are the layers' inputs.
    """

    name: Literal["transformer_xl"] = "transformer_xl"
    config: ModelConfig
    dialect: Dialect
    memory: Literal["kv", "hidden"]

    def reach(self, memory_length: int, longest: int) -> int:
        """Return the number of tokens that can influence a prediction: layers × memory + segment, fewer with a window.

        Without a window, a memory row depends on its segment from the beginning on. If the memory length is no multiple
        of the segment length, the oldest row is in the middle of a segment, and every further layer reaches back to
        that segment's beginning.
        """
        window, rows = self.widest(memory_length, longest), memory_length
        if window is not None:
            return self.config.n_layer * min(rows, window - 1) + longest
        return (self.config.n_layer - 1) * -(-rows // longest) * longest + rows + longest

    def widest(self, memory_length: int, longest: int) -> int | None:
        """Return the largest number of keys that a query in any segment may see, itself included; None for all."""
        few = self.dialect.single_steps
        return memory_length + 1 if few is not None and longest <= few else self.dialect.window

    def stepwise(self, memory_length: int, longest: int) -> int:
        """Return the longest segment, in positions, that gives the same results as single steps: 1 … `longest`.

        A single step sees M keys and itself. Without a window, position i of a segment sees i keys more once the memory
        is full. Absolute positions are counted back from a segment's last position, so they differ as well.
        """
        if self.config.absolute_positions:
            return 1
        window = self.dialect.window
        if window is not None and window <= memory_length + 1:
            return longest
        return min(self.dialect.single_steps or 1, longest)
