"""Imports Hugging Face's TransfoXLLMHeadModel (transformers 2.3.0 … 4.57.6).

Memory starts as M rows of zeros, which take part in attention. With same_length a query sees M keys. Each layer has its
own u and v unless untie_r is off. Clusters of the adaptive softmax ascend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from txl_runtime.bundle.tables import Count, Index
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.loading import Loaded, load_file
from txl_export.checkpoints.imported import Imported, State, Unwrapped, check_config, convert_config
from txl_export.checkpoints.kimiyoung import KimiyoungConfig, adaptive_softmax, decoder_layer, embedding
from txl_export.checkpoints.vocabularies import read_vocabulary_file
from txl_export.families.transformer_xl.weights import layer_name
from txl_export.regular import read_regular

NAME = "hf"
MARKS: tuple[str, ...] = ("transformer.word_emb.emb_layers.0.weight",)


class HfConfig(KimiyoungConfig, kw_only=True):
    """The arguments in config.json, with the defaults of TransfoXLConfig.

    They have the names of kimiyoung's constructor; its n_token is vocab_size in config.json.
    """

    n_token: Count = 267735
    attn_type: Literal[0] = 0  # transformers builds no model with another type
    pre_lnorm: bool = False
    mem_len: Index = 1600
    clamp_len: int = 1000
    same_length: bool = True
    div_val: Count = 4
    cutoffs: tuple[Count, ...] = (20000, 40000, 200000)
    proj_share_all_but_first: bool = True
    untie_r: bool = True
    tie_word_embeddings: bool = True

    def tied_projections(self, explicit: bool) -> tuple[bool, ...]:
        """Return for each cluster whether its output projection is the embedding's.

        tie_projs decides if the config has it (`explicit`). If not, the first cluster's is its own, and
        proj_share_all_but_first decides for all others.
        """
        clusters = len(self.cutoffs) + 1
        ties = self.tie_projs if explicit else (False, *[self.proj_share_all_but_first] * len(self.cutoffs))
        return (*ties, *[False] * clusters)[:clusters]


CONFIG = "config.json"
JSON_LIMIT = 1 << 24
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
VOCABULARIES = ("vocab.pkl", "vocab.bin", "vocab.txt")


def read_folder(path: Path) -> tuple[Unwrapped, Loaded]:
    """Read a folder that save_pretrained wrote: config.json, weights, and the vocabulary if the folder has one.

    Raises:
        CheckpointError: config.json or the weights are missing or cannot be read.
    """
    if not (path / CONFIG).exists():
        raise CheckpointError(
            f"{path}: a folder without {CONFIG}, expected a Hugging Face model, "
            "or a trainer's run with params/agent.yaml; name one, or a checkpoint file"
        )
    weights = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if weights is None:
        shards = next((name for name in WEIGHTS if (path / f"{name}.index.json").exists()), None)
        has = f"{shards} in several parts, which are not read" if shards else f"neither {' nor '.join(WEIGHTS)}"
        raise CheckpointError(
            f"{path}: has {has}, expected one file; load the model where it was trained and save it unsharded, "
            'model.save_pretrained(folder, max_shard_size="100GB")'
        )
    try:
        values = msgspec.json.decode(read_regular(path / CONFIG, JSON_LIMIT), type=dict[str, Any])
    except CheckpointError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from None
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / CONFIG}: {error}; expected one JSON object; copy the folder again") from None
    loaded = load_file(weights)
    vocabulary, notes = None, loaded.notes
    if file := next((path / name for name in VOCABULARIES if (path / name).is_file()), None):
        try:
            vocabulary = read_vocabulary_file(file)
            notes += (f"{file.name}: words split at white space; the tokenizer's own splitting is not part of it",)
        except CheckpointError as error:
            notes += (f"the vocabulary was left out: {error}",)
    return Unwrapped(loaded.content, values, f"{CONFIG} beside {weights.name}", vocabulary, notes), loaded


def unwrap(content: Any, source: str) -> Unwrapped | None:
    """Return content from `read_folder` unchanged; None for any other, because files of this code hold no config."""
    return content if isinstance(content, Unwrapped) else None


def from_state(state: State, values: Mapping[str, Any]) -> Imported:
    """Import a state dict with the values of config.json."""
    renamed = {"n_token" if key == "vocab_size" else key: value for key, value in values.items()}
    settings, notes = convert_config(renamed, HfConfig, state.source)
    evaluation, config = settings.evaluation(state.source), settings.model_config(state.source)
    check_config(config, state)
    if not any(name.startswith("crit.") for name in state):
        raise CheckpointError(
            f"{state.source}: has no crit.* tensors, expected a language model (TransfoXLLMHeadModel)"
        )
    canonical = embedding(config, state, "transformer.word_emb")
    for i in range(config.n_layer):
        prefix = f"transformer.layers.{i}"
        canonical |= decoder_layer(i, state, prefix)
        for name, own in (("content_bias", "r_w_bias"), ("position_bias", "r_r_bias")):
            # A safetensors file stores biases that all layers share only once, under "transformer.".
            bias = f"{prefix}.dec_attn.{own}"
            canonical[f"{layer_name(i)}.attention.{name}"] = state.take(bias if bias in state else f"transformer.{own}")
    tied = settings.tied_projections(explicit=values.get("tie_projs") is not None)
    canonical |= adaptive_softmax(config, state, settings.tie_word_embeddings, tied, reverse=False)
    return Imported(NAME, config, canonical, "zeros", 0, evaluation, None, notes + settings.notes())
