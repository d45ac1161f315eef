"""Imports TransformerXL of fastai 1.0 (1.0.61, text/models/transformer.py), which musicautobot uses, too.

A SequentialRNN holds the model as "0" and its decoder as "1". Layer norm stands after each block, the embedding has no
scale, and memory starts empty. A query sees everything before it: there is no window and no clamp.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

from msgspec import Struct
from torch import Tensor
from txl_runtime.bundle.tables import Count, Index
from txl_runtime.bundle.transformer_xl import ModelConfig
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.imported import Evaluation, Imported, State, Unwrapped, check_config, convert_config
from txl_export.families.transformer_xl.weights import Weights, layer_name

NAME = "fastai"
MARKS: tuple[str, ...] = ("0.encoder.weight", "0.layers.0.mhra.r_attn.weight")
ACTIVATIONS = ("ReLU", "Swish", "GeLU")  # fastai pickles a member of its Enum as a number; 1 is the first name here


class FastaiConfig(Struct, kw_only=True):
    """The arguments of tfmerXL_lm_config and of musicautobot that evaluation needs; most files lack vocab_sz."""

    vocab_sz: Count | None = None
    ctx_len: Count | None = None
    n_layers: Count
    n_heads: Count
    d_model: Count
    d_head: Count
    d_inner: Count
    bias: bool = False
    scale: bool = True
    act: Literal["ReLU", "GeLU"] = "ReLU"
    double_drop: bool = True
    tie_weights: bool = True
    out_bias: bool | None = None
    learned_pos_enc: bool = False
    mem_len: Index = 0
    mask: bool = True
    encode_position: bool = False

    def model_config(self, vocab_size: int, out_bias: bool, source: str) -> ModelConfig:
        """Return the canonical config.

        Raises:
            CheckpointError: a setting cannot be exported.
        """
        expected = {"scale": True, "mask": True, "learned_pos_enc": False, "encode_position": False}
        if wrong := [name for name, value in expected.items() if getattr(self, name) != value]:
            raise CheckpointError(
                f"{source}: {wrong[0]} is {getattr(self, wrong[0])}, expected {expected[wrong[0]]}; only causal "
                "attention over relative positions of a single token input can be exported"
            )
        return ModelConfig(
            vocab_size=vocab_size,
            n_layer=self.n_layers,
            n_head=self.n_heads,
            d_model=self.d_model,
            d_head=self.d_head,
            d_inner=self.d_inner,
            d_embed=self.d_model,
            activation="relu" if self.act == "ReLU" else "gelu_tanh",
            attention_bias=self.bias,
            softmax_bias=out_bias,
            embedding_scale=1.0,
        )


def unwrap(content: Any, source: str) -> Unwrapped | None:
    """Return the parts of a musicautobot learner's file, {"model": …, "config": …}; None for other content."""
    match content:
        # files of other code bases have both keys, too, so tensor names are checked
        case {"model": Mapping() as state, "config": config} if set(MARKS) <= set(state):
            return Unwrapped(state, config, "model and config")
    return None


def from_state(state: State, values: Mapping[str, Any]) -> Imported:
    """Import a model's state with the values of its config; vocab_sz defaults to the embedding's height."""
    values = {**values, "act": _activation(values.get("act", "ReLU"))}
    settings, notes = convert_config(values, FastaiConfig, state.source)
    if second := sorted(name for name in state if name.startswith("0.beat_enc.")):
        raise CheckpointError(
            f"{state.source}: has {second[0]}, an embedding of beats; expected a model whose only input are tokens; "
            "train it with encode_position off"
        )
    table = state.take("0.encoder.weight")
    out_bias = "1.decoder.bias" in state if settings.out_bias is None else settings.out_bias
    config = settings.model_config(settings.vocab_sz or table.shape[0], out_bias, state.source)
    check_config(config, state)
    canonical: Weights = {"embedding.tables.0": table}
    if "1.decoder.weight" in state or not settings.tie_weights:
        canonical["softmax.tables.0"] = state.take("1.decoder.weight")
    if out_bias:
        canonical["softmax.biases.0"] = state.take("1.decoder.bias")
    for i in range(config.n_layer):
        canonical |= _layer(i, settings, state)
        for name, own in (("content_bias", "0.u"), ("position_bias", "0.v")):
            canonical[f"{layer_name(i)}.attention.{name}"] = _heads(own, state)
    evaluation = Evaluation(settings.mem_len, settings.ctx_len, False, 0)
    return Imported(NAME, config, canonical, "empty", 0, evaluation, None, notes)


def _heads(own: str, state: State) -> Tensor:
    """Return the bias u or v as [heads, d_head]; the code stores [heads, 1, d_head]."""
    bias = state.take(own)
    if bias.dim() != 3 or bias.shape[1] != 1:
        raise CheckpointError(
            f"{state.source}: {own} has shape {list(bias.shape)}, expected [heads, 1, width of a head]; check --family"
        )
    return bias[:, 0]


def _activation(value: Any) -> str:
    """Return the activation's name, e.g. "ReLU"; `value` is an Enum member, its pickled number, or the name."""
    if isinstance(value, Stub):
        match value.args:
            case (int(number),) if 1 <= number <= len(ACTIVATIONS):
                return ACTIVATIONS[number - 1]
        return value.class_name
    name = value.name if isinstance(value, Enum) else value
    return name.rpartition(".")[2] if isinstance(name, str) else type(value).__name__


def _layer(i: int, settings: FastaiConfig, state: State) -> Weights:
    """Return one layer's tensors except the biases u and v.

    With double_drop, a second dropout moves the modules behind it in `ff.layers` by one place.
    """
    own = f"0.layers.{i}"
    attention, feed_forward = f"{layer_name(i)}.attention", f"{layer_name(i)}.feed_forward"
    outer, norm = (3, 6) if settings.double_drop else (2, 5)
    names = {
        f"{attention}.norm": "mhra.ln",
        f"{feed_forward}.inner": "ff.layers.0",
        f"{feed_forward}.outer": f"ff.layers.{outer}",
        f"{feed_forward}.norm": f"ff.layers.{norm}",
    }
    canonical = state.take_layers(own, names)
    for part in ("weight", "bias") if settings.bias else ("weight",):
        canonical[f"{attention}.position.{part}"] = state.take(f"{own}.mhra.r_attn.{part}")
        canonical[f"{attention}.output.{part}"] = state.take(f"{own}.mhra.out.{part}")
        joined = state.split(f"{own}.mhra.attention.{part}", ("query", "key", "value"))
        canonical |= {f"{attention}.{name}.{part}": rows for name, rows in joined.items()}
    return canonical
