"""Imports kimiyoung/transformer-xl, the paper's own code in PyTorch (commit 44781ed, pytorch/mem_transformer.py).

Memory starts empty; with same_length a query sees M keys. With attn_type 0 all layers share the biases u and v. Learned
tables of positions end with distance 0. The columns of the adaptive softmax's clusters are stored last cluster first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct
from torch import Tensor
from txl_runtime.bundle.tables import Count, Index
from txl_runtime.bundle.transformer_xl import ModelConfig, Positive
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import Stub, shown
from txl_export.checkpoints.imported import (
    Evaluation,
    Imported,
    State,
    Unwrapped,
    check_config,
    check_cutoffs,
    convert_config,
)
from txl_export.checkpoints.modules import module_state, submodule
from txl_export.families.transformer_xl.weights import Weights, layer_name

NAME = "kimiyoung"
MARKS: tuple[str, ...] = ("word_emb.emb_layers.0.weight", "crit.out_layers.0.bias")


class LengthSettings(Struct, kw_only=True):
    """Lengths for evaluation, under the names of code bases with the paper's layers; no layer depends on them."""

    tgt_len: Count | None = None
    mem_len: Index | None = None
    ext_len: Index = 0
    same_length: bool | None = None
    clamp_len: int | None = None

    def evaluation(self, source: str) -> Evaluation:
        """Return the settings for evaluation; clamp_len below 1 means no clamp.

        Raises:
            CheckpointError: ext_len is not 0.
        """
        if self.ext_len:
            advice = "no engine keeps an extended context; to run it without one, give --extended-length 0"
            raise CheckpointError(f"{source}: ext_len {self.ext_len}, expected 0, because {advice}")
        clamp = None if self.clamp_len is None else max(self.clamp_len, 0)
        return Evaluation(self.mem_len, self.tgt_len, self.same_length, clamp)


class KimiyoungConfig(LengthSettings, kw_only=True):
    """The arguments of the constructor that evaluation needs, under the constructor's names.

    The last three fields are no arguments: layer_norm_epsilon and emb_scale are read from pickled modules, where a fork
    may have changed them, and num_mem_tokens exists only in LM-RMT.
    """

    n_token: Count
    n_layer: Count
    n_head: Count
    d_model: Count
    d_head: Count
    d_inner: Count
    d_embed: int | None = None
    div_val: Count = 1
    cutoffs: tuple[Count, ...] = ()
    pre_lnorm: bool
    attn_type: Literal[0, 1, 2, 3] = 0
    tie_weight: bool = True
    tie_projs: tuple[bool, ...] = ()
    sample_softmax: int = -1
    layer_norm_epsilon: Positive = 1e-5
    emb_scale: Positive | None = None
    num_mem_tokens: Index | None = None

    def model_config(self, source: str, position_rows: int = 0) -> ModelConfig:
        """Return the canonical config; `position_rows` is the height of learned position tables.

        Raises:
            CheckpointError: the model has memory tokens, or its cutoffs do not ascend.
        """
        if self.num_mem_tokens:
            raise CheckpointError(
                f"{source}: num_mem_tokens {self.num_mem_tokens}, expected a Transformer-XL without memory tokens; a "
                "recurrent memory transformer cannot be exported"
            )
        check_cutoffs(self.cutoffs, self.n_token, source)
        return ModelConfig(
            vocab_size=self.n_token,
            n_layer=self.n_layer,
            n_head=self.n_head,
            d_model=self.d_model,
            d_head=self.d_head,
            d_inner=self.d_inner,
            d_embed=self.d_embed if self.d_embed and self.d_embed > 0 else self.d_model,
            cutoffs=self.cutoffs,
            div_val=self.div_val,
            attn_type=self.attn_type,
            position_rows=position_rows,
            pre_lnorm=self.pre_lnorm,
            layer_norm_epsilon=self.layer_norm_epsilon,
            embedding_scale=self.emb_scale or self.d_model**0.5,
        )

    def notes(self) -> tuple[str, ...]:
        """Return notes on arguments that have no effect on evaluation."""
        if self.sample_softmax <= 0:
            return ()
        return (f"sample_softmax {self.sample_softmax} is for training only: all log-probabilities are computed",)


def unwrap(content: Any, source: str) -> Unwrapped | None:
    """Return the state of a module that torch.save(model) wrote, with its attributes as the config; else None."""
    if not isinstance(content, Stub):
        return None
    state, plain = module_state(content)
    _check_module(content, source)
    values = {name: value for name, value in plain.items() if name in KimiyoungConfig.__struct_fields__}
    for part, names in (
        ("word_emb", ("div_val", "cutoffs", "emb_scale")),
        ("layers.0.dec_attn", ("pre_lnorm",)),
        ("layers.0.pos_ff", ("d_inner",)),
    ):
        module = submodule(content, part)
        values |= {name: module.state[name] for name in names if module is not None and name in module.state}
    norm = submodule(content, "layers.0.pos_ff.layer_norm")
    if norm is not None and "eps" in norm.state:
        values["layer_norm_epsilon"] = norm.state["eps"]
    if isinstance(cutoffs := values.get("cutoffs"), list):
        values["cutoffs"] = cutoffs[:-1]  # the module appends the size of the vocabulary
    values["tie_weight"] = any(
        state.get(f"crit.out_layers.{c}.weight") is table
        for c in range(len(state))
        if (table := state.get(f"word_emb.emb_layers.{c}.weight")) is not None
    )
    return Unwrapped(state, values, f"a pickled module {shown(content.class_name)}")


def _check_module(module: Stub, source: str) -> None:
    """Refuse a fork's module that computes a different function with the original's tensors.

    Raises:
        CheckpointError: its activation is not ReLU, or a tensor is an attribute instead of a parameter.
    """
    activation, model = submodule(module, "layers.0.pos_ff.CoreNet.1"), submodule(module, "")
    if activation is not None and activation.class_name.rpartition(".")[2] != "ReLU":
        raise CheckpointError(f"{source}: its feed-forward layers use {shown(activation.class_name)}, expected ReLU")
    loose = [name for name, value in model.state.items() if isinstance(value, Tensor)] if model is not None else []
    if loose:
        raise CheckpointError(
            f"{source}: has a tensor {shown(loose[0])} beside its parameters, as memory tokens are, expected none; a "
            "recurrent memory transformer cannot be exported"
        )


def from_state(state: State, values: Mapping[str, Any]) -> Imported:
    """Import a bare state dict with the constructor's arguments."""
    settings, notes = convert_config(values, KimiyoungConfig, state.source)
    evaluation, config = settings.evaluation(state.source), settings.model_config(state.source, position_rows(state))
    check_config(config, state)
    state = _listed_projections(state)
    canonical = layers(config, state)
    canonical |= adaptive_softmax(config, state, settings.tie_weight, settings.tie_projs, reverse=True)
    notes += settings.notes()
    return Imported(NAME, config, canonical, "empty", 0, evaluation, None, notes, cluster_order="reversed")


def _listed_projections(state: State) -> State:
    """Return the state with LM-RMT's names emb_projs_0 and out_projs_0 replaced by emb_projs.0 and out_projs.0."""
    listed = {re.sub(r"\.(emb|out)_projs_(\d+)$", r".\1_projs.\2", name): name for name in state}
    return state if set(listed) == set(state) else State({new: state[own] for new, own in listed.items()}, state.source)


def layers(config: ModelConfig, state: State) -> Weights:
    """Return the canonical tensors before the softmax: embedding, layers, and biases or tables of positions."""
    canonical = embedding(config, state, "word_emb") | _positions(config, state)
    for i in range(config.n_layer):
        canonical |= decoder_layer(i, state, f"layers.{i}", config.attn_type)
    return canonical


def embedding(config: ModelConfig, state: State, prefix: str) -> Weights:
    """Return the embedding's tables, one per cluster (one table if div_val is 1), and the projections that exist."""
    canonical: Weights = {}
    for c in range(1 if config.div_val == 1 else len(config.clusters)):
        canonical[f"embedding.tables.{c}"] = state.take(f"{prefix}.emb_layers.{c}.weight")
        if (projection := f"{prefix}.emb_projs.{c}") in state:
            canonical[f"embedding.projections.{c}"] = state[projection]
    return canonical


def position_rows(state: State) -> int:
    """Return the height of the learned position tables r_emb [n_layer, rows, …]; 0 if there is no r_emb."""
    table = state.get("r_emb")
    return table.shape[1] if table is not None and table.dim() > 1 else 0


def _positions(config: ModelConfig, state: State) -> Weights:
    """Return the tensors of positions outside the layers: u and v (shared, or one per layer), or learned tables."""
    canonical: Weights = {}

    def one_each(name: str) -> Tensor:
        stacked = state.take(name)
        if stacked.dim() < 2 or stacked.shape[0] != config.n_layer:
            raise CheckpointError(
                f"{state.source}: {name} has shape {list(stacked.shape)}, expected one entry for each of "
                f"{config.n_layer} layers; check the config against the code that trained it"
            )
        return stacked

    for i in range(config.n_layer):
        attention = f"{layer_name(i)}.attention"
        if config.attn_type == 0:
            canonical[f"{attention}.content_bias"] = state.take("r_w_bias")
            canonical[f"{attention}.position_bias"] = state.take("r_r_bias")
        elif config.attn_type == 1:
            canonical[f"{attention}.content_bias"] = one_each("r_w_bias")[i]
            canonical[f"{attention}.distance.keys"] = one_each("r_emb")[i].flip(0)
            canonical[f"{attention}.distance.biases"] = one_each("r_bias")[i].flip(0)
        elif config.attn_type == 3:
            # kimiyoung stores [rows, heads, d_head], NVIDIA [rows, heads · d_head]: flattened they are equal.
            canonical[f"{layer_name(i)}.positions"] = one_each("r_emb")[i].flatten(start_dim=1).flip(0)
    return canonical


def decoder_layer(i: int, state: State, prefix: str, attn_type: int = 0) -> Weights:
    """Return one layer's tensors except the tensors of positions.

    One matrix holds the rows of query, key and value; with attn_type 2 and 3 a second matrix holds the query's rows.
    """
    attention, feed_forward = f"{layer_name(i)}.attention", f"{layer_name(i)}.feed_forward"
    if attn_type in (2, 3):
        joined = state.split(f"{prefix}.dec_attn.kv_net.weight", ("key", "value"))
        joined["query"] = state.take(f"{prefix}.dec_attn.q_net.weight")
    else:
        joined = state.split(f"{prefix}.dec_attn.qkv_net.weight", ("query", "key", "value"))
    canonical = {f"{attention}.{part}.weight": rows for part, rows in joined.items()}
    if attn_type == 0:
        canonical[f"{attention}.position.weight"] = state.take(f"{prefix}.dec_attn.r_net.weight")
    canonical[f"{attention}.output.weight"] = state.take(f"{prefix}.dec_attn.o_net.weight")
    names = {
        f"{attention}.norm": "dec_attn.layer_norm",
        f"{feed_forward}.inner": "pos_ff.CoreNet.0",
        f"{feed_forward}.outer": "pos_ff.CoreNet.3",
        f"{feed_forward}.norm": "pos_ff.layer_norm",
    }
    return canonical | state.take_layers(prefix, names)


def adaptive_softmax(
    config: ModelConfig, state: State, tie_weight: bool, tie_projs: tuple[bool, ...], reverse: bool
) -> Weights:
    """Return the adaptive softmax `crit`; a table or projection that is absent is tied to the embedding's.

    With div_val 1 the code has one table [V, D], which is cut into the clusters' rows. A tensor that the config says is
    not tied has to exist.
    """
    canonical: Weights = {}
    for c, (first, last) in enumerate(config.clusters):
        layer = f"crit.out_layers.{0 if config.div_val == 1 else c}"
        rows = slice(first, last) if config.div_val == 1 else slice(None)
        if f"{layer}.weight" in state or not tie_weight:
            canonical[f"softmax.tables.{c}"] = state.take(f"{layer}.weight")[rows]
        canonical[f"softmax.biases.{c}"] = state.take(f"{layer}.bias")[rows]
        projected = config.div_val > 1 or config.d_embed != config.d_model
        untied = bool(tie_projs) and not (c < len(tie_projs) and tie_projs[c])
        if f"crit.out_projs.{c}" in state or (projected and untied):
            canonical[f"softmax.projections.{c}"] = state.take(f"crit.out_projs.{c}")
    return canonical | cluster_columns(config, state, reverse)


def cluster_columns(config: ModelConfig, state: State, reverse: bool) -> Weights:
    """Return weight and bias of the clusters' logits; {} for one cluster.

    `reverse` says that the file stores the last cluster first.
    """
    if len(config.clusters) == 1:
        return {}
    parts = {part: state.take(f"crit.cluster_{part}") for part in ("weight", "bias")}
    return {f"softmax.cluster.{part}": rows.flip(0) if reverse else rows for part, rows in parts.items()}
