"""Defines the canonical parameters: names, shapes and checks.

Every importer returns these parameters. `i` is the layer, two digits at least; `c` the cluster of the adaptive softmax.

    embedding.tables.{c}                        [rows of c, width of c]; with div_val 1 one table [V, d_embed], c = 0
    embedding.projections.{c}                   [D, width of c]; absent if the embedding already has width D
    layers.{i}.attention.{query,key,value}.weight   [H·d_head, D]
    layers.{i}.attention.position.weight        [H·d_head, D]           attn_type 0 (relative sinusoidal)
    layers.{i}.attention.output.weight          [D, H·d_head]
    layers.{i}.attention.content_bias           [H, d_head]             u of the paper; attn_type 0 and 1
    layers.{i}.attention.position_bias          [H, d_head]             v of the paper; attn_type 0
    layers.{i}.attention.distance.keys          [K, H, d_head]          row d for distance d; attn_type 1
    layers.{i}.attention.distance.biases        [K, H]                  added to the score at distance d; attn_type 1
    layers.{i}.positions                        [K, D]                  row d for distance d; attn_type 3
    layers.{i}.attention.norm.{weight,bias}     [D]
    layers.{i}.feed_forward.inner.{weight,bias} [d_inner, D], [d_inner]
    layers.{i}.feed_forward.outer.{weight,bias} [D, d_inner], [D]
    layers.{i}.feed_forward.norm.{weight,bias}  [D]
    final_norm.{weight,bias}                    [D]                     if the config has one
    softmax.tables.{c}                          [rows of c, width of c]; absent: tied to the embedding
    softmax.biases.{c}                          [rows of c]
    softmax.projections.{c}                     [D, width of c]; absent: tied to the embedding's
    softmax.cluster.{weight,bias}               [clusters - 1, width of cluster 0], row c-1 stands for cluster c

Matrices multiply as `x @ W.T`. An absent softmax tensor is tied to the embedding's; files that store it twice lose the
copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from txl_runtime.bundle.encoding import canonical_json
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.errors import CheckpointError, some

Weights = dict[str, Tensor]
SHARED, FEW = 64, 1 << 20
"""A bundle stores a tensor that layers share once per layer. That may make at most `SHARED` times the checkpoint's own
values plus `FEW`; without a limit a small file could fill the disk."""


def layer_name(layer: int) -> str:
    """Return a layer's name, e.g. "layers.07": zero-padded, so that names sort by layer."""
    return f"layers.{layer:02d}"


def canonical_shapes(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return names and shapes of a config's required parameters, and of parameters that may be absent (tied)."""
    c, heads = config, config.n_head * config.d_head
    must: dict[str, tuple[int, ...]] = {}
    may: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        must[f"{name}.weight"] = (rows, columns)
        if bias:
            must[f"{name}.bias"] = (rows,)

    def norm(name: str) -> None:
        must[f"{name}.weight"] = must[f"{name}.bias"] = (c.d_model,)

    whole = c.div_val == 1
    for cluster, (first, last) in enumerate([(0, c.vocab_size)] if whole else c.clusters):
        width = c.cluster_width(cluster)
        must[f"embedding.tables.{cluster}"] = (last - first, width)
        if not whole or width != c.d_model:
            must[f"embedding.projections.{cluster}"] = (c.d_model, width)
    for i in range(c.n_layer):
        layer = layer_name(i)
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.{part}", heads, c.d_model, c.attention_bias)
        linear(f"{layer}.attention.output", c.d_model, heads, c.attention_bias)
        if c.attn_type == 0:
            linear(f"{layer}.attention.position", heads, c.d_model, c.attention_bias)
            must[f"{layer}.attention.content_bias"] = must[f"{layer}.attention.position_bias"] = (c.n_head, c.d_head)
        elif c.attn_type == 1:
            must[f"{layer}.attention.content_bias"] = (c.n_head, c.d_head)
            must[f"{layer}.attention.distance.keys"] = (c.position_rows, c.n_head, c.d_head)
            must[f"{layer}.attention.distance.biases"] = (c.position_rows, c.n_head)
        elif c.attn_type == 3:
            must[f"{layer}.positions"] = (c.position_rows, c.d_model)
        norm(f"{layer}.attention.norm")
        linear(f"{layer}.feed_forward.inner", c.d_inner, c.d_model, True)
        linear(f"{layer}.feed_forward.outer", c.d_model, c.d_inner, True)
        norm(f"{layer}.feed_forward.norm")
    if c.final_norm:
        norm("final_norm")
    for cluster, (first, last) in enumerate(c.clusters):
        width = c.cluster_width(cluster)
        may[f"softmax.tables.{cluster}"] = (last - first, width)
        if c.div_val > 1 or width != c.d_model or cluster:
            may[f"softmax.projections.{cluster}"] = (c.d_model, width)
        if c.softmax_bias:
            must[f"softmax.biases.{cluster}"] = (last - first,)
    if len(c.clusters) > 1:
        linear("softmax.cluster", len(c.clusters) - 1, c.cluster_width(0), c.softmax_bias)
    return must, may


def check_weights(config: ModelConfig, weights: Mapping[str, Tensor], source: str) -> Weights:
    """Return the weights as contiguous float32, checked against the config.

    For example, `weights` {"embedding.tables.0": [256, 32], …}.

    Raises:
        CheckpointError: a parameter is missing, unexpected, of a wrong shape or dtype, holds NaN or infinity, or is
            shared by too many names.
    """
    if config.n_layer > len(weights) or len(config.clusters) > len(weights):
        raise CheckpointError(
            f"{source}: n_layer {config.n_layer} and {len(config.clusters)} clusters, but {len(weights)} tensors; "
            "check the config against the code that trained it"
        )
    must, may = canonical_shapes(config)
    if missing := sorted(set(must) - set(weights)):
        raise CheckpointError(
            f"{source}: {some(missing)} missing; a model with n_layer {config.n_layer}, attn_type {config.attn_type} "
            "needs them; check the config against the code that trained it"
        )
    if unexpected := sorted(set(weights) - set(must) - set(may)):
        raise CheckpointError(
            f"{source}: {some(unexpected)} not expected for n_layer {config.n_layer}, attn_type {config.attn_type}; "
            "check the config against the code that trained it"
        )
    shapes = must | may
    checked: Weights = {}
    converted: dict[Any, Tensor] = {}  # each tensor that several names share is converted once
    values = 0
    for name in sorted(weights):
        tensor = weights[name]
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"{source}: {name} has shape {list(tensor.shape)}, expected {list(shapes[name])} from the config; "
                "check the config against the code that trained it"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{source}: {name} holds {tensor.dtype}, expected floating point; convert it first")
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        values += tensor.numel()
        if place in converted:
            checked[name] = converted[place]
            continue
        tensor = converted[place] = tensor.detach().to(torch.float32).contiguous()
        if not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"{source}: {name} holds {bad} values that are NaN or infinite, expected finite weights; "
                "take an earlier checkpoint"
            )
        checked[name] = tensor
    if values > SHARED * sum(tensor.numel() for tensor in converted.values()) + FEW:
        raise CheckpointError(
            f"{source}: {values} values are made of {sum(tensor.numel() for tensor in converted.values())}, expected "
            f"layers that share their weights at most {SHARED} times; check the file against the code that trained it"
        )
    return drop_ties(config, checked)


def drop_ties(config: ModelConfig, weights: Weights) -> Weights:
    """Return the weights without output parameters that equal the embedding's, so that all tied files have one form."""
    unique = dict(weights)
    for cluster, (first, last) in enumerate(config.clusters):
        if config.div_val == 1:
            table, projection = weights["embedding.tables.0"][first:last], weights.get("embedding.projections.0")
        else:
            table = weights[f"embedding.tables.{cluster}"]
            projection = weights.get(f"embedding.projections.{cluster}")
        for name, tied in ((f"softmax.tables.{cluster}", table), (f"softmax.projections.{cluster}", projection)):
            own = unique.get(name)
            if own is not None and tied is not None and (own is tied or torch.equal(own, tied)):
                del unique[name]
    return unique


def model_id(config: ModelConfig, dialect: Dialect, memory_length: int, weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of config, dialect (without family), memory length and weights; it identifies the function.

    For example, "9f2c…", 64 digits.
    """
    facts = {"config": config, "dialect": dialect, "memory_length": memory_length}
    # ids of version 0.8 were made without single_steps
    drop = ("family",) if dialect.single_steps else ("family", "single_steps")
    digest = hashlib.sha256(canonical_json(facts, drop=drop))
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().to(torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def parameter_count(weights: Mapping[str, Tensor]) -> int:
    """Return the number of values in the weights; tied parameters are counted once.

    For example, 8192 for one table [256, 32] that is both embedding and softmax.
    """
    return sum(tensor.numel() for tensor in weights.values())
