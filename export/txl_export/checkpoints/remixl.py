"""remi-xl of YatingMusic/compound-word-transformer (commit 1a56daa, workspace/uncond/remi-xl).

kimiyoung's layers between a plain embedding and an output layer of its own: no adaptive softmax, nothing tied.
Memory starts empty; with same_length a query sees M keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from torch import Tensor
from txl_runtime.bundle.format1 import ModelConfig
from txl_runtime.bundle.tables import Count, Index
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.loading import module_state
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.imported import Evaluation, Imported, Unwrapped, convert_config, take
from txl_export.checkpoints.kimiyoung import decoder_layer
from txl_export.families.transformer_xl.weights import layer_name

NAME = "remixl"
MARKS = ("word_emb.lut.weight",)


class RemixlConfig(Struct, kw_only=True):
    """The names of model_setting that matter; the code reads d_embed and div_val but builds nothing from them."""

    n_token: Count | None = None
    n_layer: Count
    n_head: Count
    d_model: Count
    d_inner: Count
    d_embed: Count | None = None
    div_val: Count = 1
    pre_lnorm: bool
    tgt_len: Count | None = None
    mem_len: Index | None = None
    ext_len: Index = 0
    same_length: bool | None = None
    clamp_len: int | None = None

    def model_config(self, vocab_size: int, source: str) -> ModelConfig:
        """The canonical config; heads have d_model // n_head entries.

        Raises:
            CheckpointError: a setting this version cannot express.
        """
        if self.ext_len:
            raise CheckpointError(f"{source}: ext_len {self.ext_len}, expected 0; no engine keeps an extended context")
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

    def evaluation(self) -> Evaluation:
        """What the settings say of evaluation; clamp_len below 1 means no clamp."""
        clamp = None if self.clamp_len is None else max(self.clamp_len, 0)
        return Evaluation(self.mem_len, self.tgt_len, self.same_length, clamp)


def unwrap(content: Any, source: str) -> Unwrapped | None:
    """A training checkpoint, state_dict and model_setting; or a whole module, whose attributes are the settings."""
    if isinstance(content, Stub):
        state, plain = module_state(content)
        values = {name: value for name, value in plain.items() if name in RemixlConfig.__struct_fields__}
        return Unwrapped(state, values, f"a pickled module {content.class_name}") if recognise(state) else None
    if not isinstance(content, Mapping) or not {"state_dict", "model_setting"} <= set(content):
        return None
    if not isinstance(content["state_dict"], Mapping) or not recognise(content["state_dict"]):
        return None
    return Unwrapped(content["state_dict"], content["model_setting"], "state_dict and model_setting")


def recognise(names: Mapping[str, Any]) -> bool:
    """Whether a state has this code's names."""
    return all(mark in names for mark in MARKS)


def from_state(state: Mapping[str, Tensor], values: Mapping[str, Any], source: str) -> Imported:
    """Import a state_dict with the values of model_setting; n_token is the embedding's height where they lack it."""
    found, notes = convert_config(values, RemixlConfig, source)
    table = take(state, "word_emb.lut.weight", source)
    config = found.model_config(found.n_token or table.shape[0], source)
    canonical = {
        "embedding.tables.0": table,
        "softmax.tables.0": take(state, "linear_proj.weight", source),
        "softmax.biases.0": take(state, "linear_proj.bias", source),
    }
    for i in range(config.n_layer):
        canonical |= decoder_layer(i, state, f"layers.{i}", source)
        canonical[f"{layer_name(i)}.attention.content_bias"] = take(state, "r_w_bias", source)
        canonical[f"{layer_name(i)}.attention.position_bias"] = take(state, "r_r_bias", source)
    return Imported(NAME, config, canonical, "empty", 0, found.evaluation(), None, notes)
