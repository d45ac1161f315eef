"""Imports NVIDIA's Transformer-XL (DeepLearningExamples, commit 729963d, PyTorch/LanguageModeling/Transformer-XL).

The layers are kimiyoung's, and memory starts empty. With same_length a query sees M + 1 keys. The adaptive softmax has
other names: a list of biases, a list of weights (absent if tied), and two lists of projections, of which one is shared
with the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txl_runtime.bundle.transformer_xl import ModelConfig
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.imported import Imported, State, Unwrapped, check_config, convert_config
from txl_export.checkpoints.kimiyoung import KimiyoungConfig, cluster_columns, layers, position_rows
from txl_export.checkpoints.vocabularies import word_vocabulary
from txl_export.families.transformer_xl.weights import Weights

NAME = "nvidia"
MARKS: tuple[str, ...] = ("word_emb.emb_layers.0.weight", "crit.out_layers_biases.0")


class NvidiaConfig(KimiyoungConfig, kw_only=True):
    """The values in model_config: kimiyoung's names, with NVIDIA's default for tie_projs."""

    tie_projs: tuple[bool, ...] = (False,)


def unwrap(content: Any, source: str) -> Unwrapped | None:
    """Return the model_config, model_state and vocabulary of a training checkpoint; None for other content."""
    if not isinstance(content, Mapping) or not {"model_config", "model_state"} <= set(content):
        return None
    vocabulary: bytes | None = None
    notes: tuple[str, ...] = ()
    if isinstance(vocab := content.get("vocab"), Stub):
        try:
            vocabulary = word_vocabulary(vocab.state, source)
        except CheckpointError as error:
            notes = (f"the vocabulary was left out: {error}",)
    state, config = content["model_state"], content["model_config"]
    if not isinstance(state, Mapping) or not isinstance(config, Mapping):
        raise CheckpointError(
            f"{source}: model_state or model_config is no mapping, expected both to be; save it again"
        )
    return Unwrapped(state, config, "model_config and model_state", vocabulary, notes)


def from_state(state: State, values: Mapping[str, Any]) -> Imported:
    """Import a model_state with the values of model_config."""
    settings, notes = convert_config(values, NvidiaConfig, state.source)
    evaluation, config = settings.evaluation(state.source), settings.model_config(state.source, position_rows(state))
    if len(settings.tie_projs) < len(config.clusters):
        raise CheckpointError(
            f"{state.source}: tie_projs has {len(settings.tie_projs)} entries, expected one for each of the "
            f"{len(config.clusters)} clusters; check the config against the code that trained it"
        )
    check_config(config, state)
    canonical = layers(config, state) | _softmax(config, settings, state)
    notes += settings.notes()
    return Imported(NAME, config, canonical, "empty", 1, evaluation, None, notes, cluster_order="reversed")


def _softmax(config: ModelConfig, settings: NvidiaConfig, state: State) -> Weights:
    """Return the adaptive softmax `crit`; with div_val 1 one table [V, D] is cut into the clusters' rows."""
    canonical: Weights = {}
    for c, (first, last) in enumerate(config.clusters):
        own = 0 if config.div_val == 1 else c
        rows = slice(first, last) if config.div_val == 1 else slice(None)
        if (table := f"crit.out_layers_weights.{own}") in state or not settings.tie_weight:
            canonical[f"softmax.tables.{c}"] = state.take(table)[rows]
        canonical[f"softmax.biases.{c}"] = state.take(f"crit.out_layers_biases.{own}")[rows]
        # shared_out_projs holds the embedding's projections: one for all clusters, one per cluster, or no tensor
        shared = f"crit.shared_out_projs.{own}"
        if settings.tie_projs[c] and shared in state:
            canonical[f"softmax.projections.{c}"] = state[shared]
        elif not settings.tie_projs[c] and (config.div_val > 1 or config.d_embed != config.d_model):
            canonical[f"softmax.projections.{c}"] = state.take(f"crit.out_projs.{c}")
    return canonical | cluster_columns(config, state, reverse=True)
