"""Imports remi-xl of YatingMusic/compound-word-transformer (commit 1a56daa, workspace/uncond/remi-xl).

The model has kimiyoung's layers between a plain embedding and an untied output layer, without an adaptive softmax.
Memory starts empty; with same_length a query sees M keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from txl_runtime.bundle.tables import Count
from txl_runtime.bundle.transformer_xl import ModelConfig

from txl_export.checkpoints.files.pickle_names import Stub, shown
from txl_export.checkpoints.imported import Imported, State, Unwrapped, check_config, convert_config
from txl_export.checkpoints.kimiyoung import LengthSettings, decoder_layer
from txl_export.checkpoints.modules import module_state
from txl_export.families.transformer_xl.weights import layer_name

NAME = "remixl"
MARKS: tuple[str, ...] = ("word_emb.lut.weight",)


class RemixlConfig(LengthSettings, kw_only=True):
    """The names of model_setting that evaluation needs; d_embed and div_val have no effect in that code."""

    n_token: Count | None = None
    n_layer: Count
    n_head: Count
    d_model: Count
    d_inner: Count
    d_embed: Count | None = None
    div_val: Count = 1
    pre_lnorm: bool

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Return the canonical config, with d_head = d_model // n_head."""
        return ModelConfig(
            vocab_size=vocab_size,
            n_layer=self.n_layer,
            n_head=self.n_head,
            d_model=self.d_model,
            d_head=self.d_model // self.n_head,
            d_inner=self.d_inner,
            d_embed=self.d_model,
            pre_lnorm=self.pre_lnorm,
            embedding_scale=self.d_model**0.5,
        )


def unwrap(content: Any, source: str) -> Unwrapped | None:
    """Return the state and the settings (model_setting, or a pickled module's attributes); None for other content."""
    state: Mapping[str, Tensor]
    match content:
        case Stub():
            state, plain = module_state(content)
            values: Any = {name: value for name, value in plain.items() if name in RemixlConfig.__struct_fields__}
            reason = f"a pickled module {shown(content.class_name)}"
        case {"state_dict": Mapping() as state, "model_setting": values}:
            reason = "state_dict and model_setting"
        case _:
            return None
    return Unwrapped(state, values, reason) if set(MARKS) <= set(state) else None


def from_state(state: State, values: Mapping[str, Any]) -> Imported:
    """Import a state_dict with the values of model_setting; n_token defaults to the embedding's height."""
    settings, notes = convert_config(values, RemixlConfig, state.source)
    evaluation = settings.evaluation(state.source)
    table = state.take("word_emb.lut.weight")
    config = settings.model_config(settings.n_token or table.shape[0])
    check_config(config, state)
    canonical = {
        "embedding.tables.0": table,
        "softmax.tables.0": state.take("linear_proj.weight"),
        "softmax.biases.0": state.take("linear_proj.bias"),
    }
    for i in range(config.n_layer):
        canonical |= decoder_layer(i, state, f"layers.{i}")
        canonical[f"{layer_name(i)}.attention.content_bias"] = state.take("r_w_bias")
        canonical[f"{layer_name(i)}.attention.position_bias"] = state.take("r_r_bias")
    return Imported(NAME, config, canonical, "empty", 0, evaluation, None, notes)
