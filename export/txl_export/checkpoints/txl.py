"""Imports the project's own checkpoints: one mapping that holds config, tensors under canonical names, and vocabulary.

    {"format": "txl-deploy.checkpoint", "version": 1, "config": {...}, "state": {...},
     "vocabulary": {"kind": "bytes"} | None, "training": {...}}

`config` has the fields of `ModelConfig` plus memory_start, memory_length, segment_length, clamp_length and same_length.
For a bare state dict with canonical names, --config gives the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from txl_runtime.bundle.tables import Index
from txl_runtime.bundle.transformer_xl import ModelConfig
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.imported import (
    Evaluation,
    Imported,
    State,
    Unwrapped,
    check_config,
    check_cutoffs,
    convert_config,
)
from txl_export.options import MemoryStart

NAME = "txl"
MARKS: tuple[str, ...] = ("embedding.tables.0",)
FORMAT = "txl-deploy.checkpoint"
VERSION = 1


class TxlConfig(ModelConfig, frozen=True, kw_only=True):
    """The fields of `ModelConfig`, and the settings for evaluation."""

    memory_start: MemoryStart = "empty"
    memory_length: Index | None = None
    segment_length: Annotated[int, Meta(ge=1)] | None = None
    clamp_length: Index | None = None
    same_length: bool = False


def unwrap(content: Any, source: str) -> Unwrapped | None:
    """Return the parts of a file that e.g. `samples/train_char_lm.py` wrote; None for other content."""
    if not isinstance(content, Mapping):
        return None
    named, version = content.get("format"), content.get("version")
    if not isinstance(named, str) or named != FORMAT:
        return None
    if type(version) is not int or version != VERSION:
        shown_version = version if type(version) is int else f"of type {type(version).__name__}"
        raise CheckpointError(f"{source}: checkpoint version {shown_version}, expected {VERSION}; upgrade txl-deploy")
    for part in ("config", "state"):
        if not isinstance(content.get(part), Mapping):
            raise CheckpointError(f"{source}: {part!r} is not a mapping; expected a {FORMAT} file; save it again")
    vocabulary = content.get("vocabulary")
    try:
        encoded = None if vocabulary is None else msgspec.json.encode(vocabulary)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{source}: the vocabulary is not plain data ({error}); save it again") from None
    return Unwrapped(content["state"], content["config"], f"format {FORMAT}", encoded)


def from_state(state: State, values: Mapping[str, Any]) -> Imported:
    """Import a state with canonical names."""
    config, notes = convert_config(values, TxlConfig, state.source)
    check_cutoffs(config.cutoffs, config.vocab_size, state.source)
    architecture = ModelConfig(**{name: getattr(config, name) for name in ModelConfig.__struct_fields__})
    check_config(architecture, state)
    evaluation = Evaluation(config.memory_length, config.segment_length, config.same_length, config.clamp_length or 0)
    return Imported(NAME, architecture, dict(state), config.memory_start, 0, evaluation, None, notes)
