"""Format 1 of a bundle: a Transformer-XL's config, and the states and programs that follow from it.

This is the one module of the runtime that knows what a Transformer-XL is. Its config and dialect serve every checkpoint
family, so that reference, graph and runtime never ask which code trained a model (Dai et al. 2019, arXiv 1901.02860;
attention types as in kimiyoung/transformer-xl). Everything else in the runtime reads tables (`tables`), and the few
facts that `TransformerXL` derives from the config for them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct

from txl_runtime.bundle.tables import (
    STATE_DTYPES,
    Count,
    Index,
    Precision,
    Program,
    StateTensor,
    Tables,
    TensorSpec,
    ring_slots,
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


class TransformerXL(Tables):
    """What follows from a manifest's config and dialect, for readers that know neither."""

    __slots__ = ()
    config: ModelConfig
    dialect: Dialect
    memory_length: int
    memory: Literal["kv", "hidden"]
    precision: Precision

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids."""
        return self.config.vocab_size

    @property
    def clusters(self) -> tuple[tuple[int, int], ...]:
        """Token id ranges [first, last) of the softmax's clusters; one range where the softmax has a head alone."""
        return self.config.clusters

    @property
    def fresh_fill(self) -> int:
        """Memory rows that exist before anything was seen: 0, or M where memory starts as rows that are attended."""
        return self.memory_length if self.dialect.memory_start == "zeros" else 0

    @property
    def softmax_products(self) -> int:
        """Multiplications per row of the whole softmax, by which an engine may choose its threads."""
        return self.config.d_model * self.config.vocab_size

    @property
    def context(self) -> int:
        """Tokens that can influence a prediction: layers × memory + segment, or what the window leaves of it."""
        window = self.segment_lengths[0] if self.dialect.segment_window else self.dialect.window
        reach = self.memory_length if window is None else min(self.memory_length, window - 1)
        return self.config.n_layer * reach + self.segment_lengths[0]

    def config_problems(self) -> list[str]:
        """What in the config cannot be true; to be empty before anything is derived from it."""
        config, found = self.config, []
        bounds = (0, *config.cutoffs, config.vocab_size)
        if any(first >= last for first, last in pairwise(bounds)):
            found.append(f"cutoffs {list(config.cutoffs)} do not ascend within the vocabulary of {config.vocab_size}")
        if config.n_layer > max(len(self.states), 1) and self.memory_length:
            found.append(f"n_layer is {config.n_layer}, but the state table has {len(self.states)} tensors")
        return found

    def implied_states(self) -> tuple[StateTensor, ...]:
        """The state table that the config implies, every initial value left out."""
        return expected_states(
            self.config,
            self.memory,
            self.batch_size,
            self.memory_length,
            self.updates,
            self.segment_lengths[0],
            self.precision,
        )

    def implied_programs(self) -> tuple[Program, ...]:
        """The programs that the config and the state table imply."""
        return expected_programs(self.config, self.states, self.batch_size, self.segment_lengths, self.updates)


def expected_states(
    config: ModelConfig,
    memory: str,
    batch_size: int,
    memory_length: int,
    updates: tuple[str, ...],
    longest: int,
    precision: str = "fp32",
) -> tuple[StateTensor, ...]:
    """The state table that a config implies, for some update rules and a longest segment; none when M is 0."""
    if not memory_length:
        return ()
    ring, columns = ring_slots(memory_length, longest)
    table = []
    for update in updates:
        slots = columns if update == "ring" else memory_length
        roles, axis = (("key", "value"), 2) if memory == "kv" else (("hidden",), 1)
        kv_shape = (batch_size, config.n_head, slots, config.d_head)
        shape = kv_shape if memory == "kv" else (batch_size, slots, config.d_model)
        names = [f"layers.{i:02d}.{role}" for i in range(config.n_layer) for role in roles]
        table += [
            StateTensor(
                name=name,
                input=f"memory.{name}",
                output=f"new_memory.{name}",
                dtype=STATE_DTYPES.get(precision, "float32"),
                shape=shape,
                axis=axis,
                update=update,
                slots=ring if update == "ring" else None,
            )
            for name in names
        ]
    return tuple(table)


def segment_program(
    config: ModelConfig, states: tuple[StateTensor, ...], batch_size: int, length: int, kind: str, update: str
) -> Program:
    """A program of segments: "logprobs" or "hidden", or an engine's "last" or "score"; rolled or ring.

    What the softmax takes and what it returns is float32 in every precision.
    """
    mine = [state for state in states if state.update == update]
    counts = ("valid", "fill", "head") if update == "ring" else ("valid", "fill")
    results = {
        "logprobs": TensorSpec(name="logprobs", dtype="float32", shape=(batch_size, length, config.vocab_size)),
        "hidden": TensorSpec(name="hidden", dtype="float32", shape=(batch_size, length, config.d_model)),
        "last": TensorSpec(name="logprobs", dtype="float32", shape=(batch_size, config.vocab_size)),
        "score": TensorSpec(name="nll", dtype="float32", shape=(batch_size, length)),
    }
    read = ("tokens", "targets") if kind == "score" else ("tokens",)
    name = f"{kind}-{length}" if update == "rolled" else f"{kind}-{update}-{length}"
    return Program(
        name=name,
        kind=kind,
        segment_length=length,
        update=update,
        file=f"{name}.onnx" if update == "rolled" else f"{kind}-{update}.onnx",
        inputs=(
            *(TensorSpec(name=ids, dtype="int32", shape=(batch_size, length)) for ids in read),
            *(TensorSpec(name=count, dtype="int32", shape=(batch_size,)) for count in counts),
            *(TensorSpec(name=state.input, dtype=state.dtype, shape=state.shape) for state in mine),
        ),
        outputs=(
            results[kind],
            *(TensorSpec(name=state.output, dtype=state.dtype, shape=state.shape) for state in mine),
        ),
    )


def softmax_program(config: ModelConfig, cluster: int) -> Program:
    """The program of a cluster's words; cluster 0 is the head, which holds the further clusters as well."""
    first, last = config.clusters[cluster]
    columns = last - first + (0 if cluster else len(config.clusters) - 1)
    name = f"tail.{cluster}" if cluster else "head"
    return Program(
        name=name,
        kind=name,
        segment_length=0,
        update="none",
        file=f"{name}.onnx",
        inputs=(TensorSpec(name="hidden", dtype="float32", shape=("rows", config.d_model)),),
        outputs=(TensorSpec(name="logprobs", dtype="float32", shape=("rows", columns)),),
    )


def expected_programs(
    config: ModelConfig,
    states: tuple[StateTensor, ...],
    batch_size: int,
    lengths: tuple[int, ...],
    updates: tuple[str, ...],
) -> tuple[Program, ...]:
    """The programs of a bundle: whole ones that are rolled; for the ring, and for engines, layers and softmax apart."""
    programs = []
    if "ring" in updates:
        programs += [segment_program(config, states, batch_size, length, "hidden", "ring") for length in lengths]
    programs += [softmax_program(config, cluster) for cluster in range(len(config.clusters))]
    if "rolled" in updates:
        programs += [segment_program(config, states, batch_size, length, "logprobs", "rolled") for length in lengths]
    return tuple(programs)
