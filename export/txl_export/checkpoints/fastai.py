"""TransformerXL of fastai 1.0 (1.0.61, text/models/transformer.py), also as musicautobot trains it.

The model stands at 0 and its decoder at 1 of a SequentialRNN. Layer norm after each block, no scale on the embedding,
memory that starts empty, a query sees everything before it: there is neither a window nor a clamp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct
from torch import Tensor
from txl_runtime.bundle.format1 import ModelConfig
from txl_runtime.bundle.tables import Count, Index
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.imported import Evaluation, Imported, Unwrapped, convert_config, split_rows, take
from txl_export.families.transformer_xl.weights import Weights, layer_name

NAME = "fastai"
MARKS = ("0.encoder.weight", "0.layers.0.mhra.r_attn.weight")
ACTIVATIONS = ("ReLU", "Swish", "GeLU")  # the members of its Enum, from 1 on


class FastaiConfig(Struct, kw_only=True):
    """The names of tfmerXL_lm_config that matter, and what musicautobot adds; vocab_sz is not among them as a rule."""

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
        """The canonical config.

        Raises:
            CheckpointError: a setting this version cannot express.
        """
        refused = {
            "scale": not self.scale,
            "mask": not self.mask,
            "learned_pos_enc": self.learned_pos_enc,
            "encode_position": self.encode_position,
        }
        if names := [name for name, present in refused.items() if present]:
            raise CheckpointError(
                f"{source}: {names[0]} is {getattr(self, names[0])}, expected {not getattr(self, names[0])}; only "
                "causal attention over relative positions of a single token input can be exported"
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
    """What musicautobot's learners save: model and config."""
    if not isinstance(content, Mapping) or not {"model", "config"} <= set(content):
        return None
    if not isinstance(content["model"], Mapping) or not recognise(content["model"]):
        return None  # other code calls its parts so too
    return Unwrapped(content["model"], content["config"], "model and config")


def recognise(names: Mapping[str, Any]) -> bool:
    """Whether a state has this code's names."""
    return all(mark in names for mark in MARKS)


def from_state(state: Mapping[str, Tensor], values: Mapping[str, Any], source: str) -> Imported:
    """Import a model's state with the values of its config; the vocabulary's size is the embedding's height."""
    found, notes = convert_config({**values, "act": _activation(values.get("act", "ReLU"))}, FastaiConfig, source)
    if second := sorted(name for name in state if name.startswith("0.beat_enc.")):
        raise CheckpointError(
            f"{source}: has {second[0]}, an embedding of beats; expected a model whose only input are tokens; train it "
            "with encode_position off"
        )
    table = take(state, "0.encoder.weight", source)
    out_bias = "1.decoder.bias" in state if found.out_bias is None else found.out_bias
    config = found.model_config(found.vocab_sz or table.shape[0], out_bias, source)
    canonical: Weights = {"embedding.tables.0": table}
    if "1.decoder.weight" in state or not found.tie_weights:
        canonical["softmax.tables.0"] = take(state, "1.decoder.weight", source)
    if out_bias:
        canonical["softmax.biases.0"] = take(state, "1.decoder.bias", source)
    for i in range(config.n_layer):
        canonical |= _layer(i, found, state, source)
        for name, own in (("content_bias", "0.u"), ("position_bias", "0.v")):
            bias = take(state, own, source)  # [H, 1, d_head]
            canonical[f"{layer_name(i)}.attention.{name}"] = bias.reshape(bias.shape[0], bias.shape[-1])
    evaluation = Evaluation(found.mem_len, found.ctx_len, False, 0)
    return Imported(NAME, config, canonical, "empty", 0, evaluation, None, notes)


def _activation(value: Any) -> str:
    """The name of a member of the code's Enum: of the member itself, of its value in a file, or of its name."""
    if isinstance(value, Stub):
        match value.args:
            case (int(number),) if 1 <= number <= len(ACTIVATIONS):
                return ACTIVATIONS[number - 1]
        return value.class_name
    return str(getattr(value, "name", value)).rpartition(".")[2]


def _layer(i: int, found: FastaiConfig, state: Mapping[str, Tensor], source: str) -> Weights:
    """One layer but for u and v; the places in `ff.layers` depend on the dropout after the activation."""
    attention, feed_forward = f"{layer_name(i)}.attention", f"{layer_name(i)}.feed_forward"
    outer, norm = (3, 6) if found.double_drop else (2, 5)
    names = {
        f"{attention}.norm": "mhra.ln",
        f"{feed_forward}.inner": "ff.layers.0",
        f"{feed_forward}.outer": f"ff.layers.{outer}",
        f"{feed_forward}.norm": f"ff.layers.{norm}",
    }
    projections = {f"{attention}.position": "mhra.r_attn", f"{attention}.output": "mhra.out"}
    canonical: Weights = {}
    for part in ("weight", "bias"):
        for name, own in names.items():
            canonical[f"{name}.{part}"] = take(state, f"0.layers.{i}.{own}.{part}", source)
        if part == "bias" and not found.bias:
            continue
        for name, own in projections.items():
            canonical[f"{name}.{part}"] = take(state, f"0.layers.{i}.{own}.{part}", source)
        joined = split_rows(state, f"0.layers.{i}.mhra.attention.{part}", ("query", "key", "value"), source)
        canonical |= {f"{attention}.{name}.{part}": rows for name, rows in joined.items()}
    return canonical
