"""Imports Chinese-Transformer-XL of THUDM (commit d374101, model/gpt2_modeling.py and mpu/transformer.py).

The model is a GPT-2 with relative positions. Layer norm stands before each block and after the last. All layers have
biases except the output, whose matrix is the embedding; the embedding has no scale. Memory starts empty. The attention
mask is fixed: a token in a segment of T tokens sees T keys; a single token (T = 1) sees all of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from txl_runtime.bundle.tables import Count, Index
from txl_runtime.bundle.transformer_xl import ModelConfig
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.imported import Evaluation, Imported, State, Unwrapped, check_config, convert_config
from txl_export.families.transformer_xl.weights import Weights, layer_name

NAME = "cntxl"
MARKS: tuple[str, ...] = ("word_embeddings.weight", "transformer.layers.0.attention.relative.weight")


class CntxlConfig(Struct, kw_only=True):
    """The arguments of GPT2Model that evaluation needs."""

    num_layers: Count
    vocab_size: Count
    hidden_size: Count
    num_attention_heads: Count
    max_memory_length: Index | None = None
    relative_encoding: bool = False

    def model_config(self, source: str) -> ModelConfig:
        """Return the canonical config; the feed-forward layer is 4 · hidden_size wide.

        Raises:
            CheckpointError: the model is a plain GPT-2.
        """
        if not self.relative_encoding:
            raise CheckpointError(
                f"{source}: relative_encoding is off, expected a Transformer-XL; a plain GPT-2 has no memory to export"
            )
        return ModelConfig(
            vocab_size=self.vocab_size,
            n_layer=self.num_layers,
            n_head=self.num_attention_heads,
            d_model=self.hidden_size,
            d_head=self.hidden_size // self.num_attention_heads,
            d_inner=4 * self.hidden_size,
            d_embed=self.hidden_size,
            pre_lnorm=True,
            activation="gelu_tanh",
            final_norm=True,
            attention_bias=True,
            softmax_bias=False,
            embedding_scale=1.0,
        )


def unwrap(content: Any, source: str) -> Unwrapped | None:
    """Return None: files of this code hold no config, so they are recognised by tensor names and need --config."""
    return None


def from_state(state: State, values: Mapping[str, Any]) -> Imported:
    """Import the state_dict of a whole model (parts of a model-parallel run are refused) with GPT2Model's arguments."""
    settings, notes = convert_config(values, CntxlConfig, state.source)
    config = settings.model_config(state.source)
    check_config(config, state)
    table, biases = state.take("word_embeddings.weight"), state.take("transformer.r_w_bias")
    if biases.shape[0] < config.n_head and table.shape[0] < config.vocab_size:
        raise CheckpointError(
            f"{state.source}: has {biases.shape[0]} of {config.n_head} heads and {table.shape[0]} of "
            f"{config.vocab_size} tokens, expected the whole model; merge the model-parallel parts with the code's "
            "change_mp.py first"
        )
    canonical: Weights = {"embedding.tables.0": table}
    for i in range(config.n_layer):
        canonical |= _layer(i, state)
        canonical[f"{layer_name(i)}.attention.content_bias"] = biases
        canonical[f"{layer_name(i)}.attention.position_bias"] = state.take("transformer.r_r_bias")
    canonical |= state.take_layers("transformer", {"final_norm": "final_layernorm"})
    evaluation = Evaluation(memory_length=settings.max_memory_length, same_length=True, clamp_length=0)
    return Imported(NAME, config, canonical, "empty", 0, evaluation, None, notes, window_of="segment")


def _layer(i: int, state: State) -> Weights:
    """Return one layer's tensors except the biases u and v, which all layers share; every matrix has a bias."""
    own = f"transformer.layers.{i}"
    attention, feed_forward = f"{layer_name(i)}.attention", f"{layer_name(i)}.feed_forward"
    names = {
        f"{attention}.position": "attention.relative",
        f"{attention}.output": "attention.dense",
        f"{attention}.norm": "input_layernorm",
        f"{feed_forward}.inner": "mlp.dense_h_to_4h",
        f"{feed_forward}.outer": "mlp.dense_4h_to_h",
        f"{feed_forward}.norm": "post_attention_layernorm",
    }
    canonical = state.take_layers(own, names)
    for part in ("weight", "bias"):
        joined = state.split(f"{own}.attention.query_key_value.{part}", ("query", "key", "value"))
        canonical |= {f"{attention}.{name}.{part}": rows for name, rows in joined.items()}
    return canonical
