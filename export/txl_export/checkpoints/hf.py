"""Hugging Face TransfoXLLMHeadModel (transformers 2.3.0 … 4.57.6).

Memory starts as M rows of zeros that are attended to; with same_length a query sees M keys; u and v are per layer
unless untie_r is off; clusters of the adaptive softmax ascend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from txl_runtime.config import Count, Index, Positive
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.imported import Imported, convert_config, take
from txl_export.checkpoints.kimiyoung import KimiyoungConfig, adaptive_softmax, decoder_layer, embedding
from txl_export.weights import layer_name

__all__ = ["NAME", "HfConfig", "from_state", "recognise"]

NAME = "hf"


class HfConfig(KimiyoungConfig, kw_only=True):
    """config.json's names, the original constructor's but for vocab_size; the defaults are TransfoXLConfig's."""

    n_token: Count = 267735
    attn_type: Literal[0] = 0  # transformers refuses to build the others
    pre_lnorm: bool = False
    mem_len: Index = 1600
    clamp_len: int = 1000
    same_length: bool = True
    div_val: Count = 4
    cutoffs: tuple[Count, ...] = (20000, 40000, 200000)
    layer_norm_epsilon: Positive = 1e-5
    untie_r: bool = True
    tie_word_embeddings: bool = True


def recognise(names: Mapping[str, Any]) -> bool:
    """Whether a state has this code's names."""
    return "transformer.word_emb.emb_layers.0.weight" in names


def from_state(state: Mapping[str, Tensor], values: Mapping[str, Any], source: str) -> Imported:
    """Import a state dict with the values of config.json."""
    renamed = {"n_token" if key == "vocab_size" else key: value for key, value in values.items()}
    found, notes = convert_config(renamed, HfConfig, source)
    config = found.model_config(source, found.layer_norm_epsilon)
    if not any(name.startswith("crit.") for name in state):
        raise CheckpointError(f"{source}: has no crit.* tensors, expected a language model (TransfoXLLMHeadModel)")
    canonical = embedding(config, state, "transformer.word_emb", source)
    for i in range(config.n_layer):
        prefix = f"transformer.layers.{i}"
        canonical |= decoder_layer(i, state, prefix, source)
        for name, own in (("content_bias", "r_w_bias"), ("position_bias", "r_r_bias")):
            # Safetensors files keep tied biases once, under the transformer itself.
            bias = state.get(f"{prefix}.dec_attn.{own}")
            shared = bias if bias is not None else take(state, f"transformer.{own}", source)
            canonical[f"{layer_name(i)}.attention.{name}"] = shared
    canonical |= adaptive_softmax(config, state, source, reverse_clusters=False)
    return Imported(NAME, config, canonical, "zeros", 0, found.evaluation(), None, notes)
