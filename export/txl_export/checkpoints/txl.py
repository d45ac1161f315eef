"""The project's own checkpoints: canonical names, plain tensors, everything in one mapping.

    {"format": "txl-deploy.checkpoint", "version": 1, "config": {...}, "state": {...},
     "vocabulary": {"kind": "bytes"} | None, "training": {...}}

`config` has the fields of `ModelConfig` plus memory_start, memory_length, segment_length, clamp_length and same_length.
A bare state with canonical names takes the same mapping through --config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from torch import Tensor
from txl_runtime.config import Index, ModelConfig
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.imported import Evaluation, Imported, convert_config

__all__ = ["FORMAT", "NAME", "from_checkpoint", "from_state", "recognise"]

NAME = "txl"
FORMAT = "txl-deploy.checkpoint"
VERSION = 1


class TxlConfig(ModelConfig, frozen=True, kw_only=True):
    """`ModelConfig` and what is chosen at evaluation time."""

    memory_start: Literal["empty", "zeros"] = "empty"
    memory_length: Index | None = None
    segment_length: Annotated[int, Meta(ge=1)] | None = None
    clamp_length: Index | None = None
    same_length: bool = False


def recognise(names: Mapping[str, Any]) -> bool:
    """Whether a state has canonical names."""
    return "embedding.tables.0" in names


def from_checkpoint(loaded: Mapping[str, Any], source: str) -> Imported:
    """Import what `samples/train_char_lm.py` writes."""
    version = loaded.get("version")
    if version != VERSION:
        raise CheckpointError(f"{source}: checkpoint version {version!r}, expected {VERSION}; upgrade txl-deploy")
    for part in ("config", "state"):
        if not isinstance(loaded.get(part), Mapping):
            raise CheckpointError(f"{source}: {part!r} is not a mapping; expected a {FORMAT} file; save it again")
    vocabulary = loaded.get("vocabulary")
    return from_state(
        loaded["state"], loaded["config"], source, msgspec.json.encode(vocabulary) if vocabulary is not None else None
    )


def from_state(
    state: Mapping[str, Tensor], values: Mapping[str, Any], source: str, vocabulary: bytes | None = None
) -> Imported:
    """Import a state with canonical names."""
    config, notes = convert_config(values, TxlConfig, source)
    architecture = ModelConfig(**{name: getattr(config, name) for name in ModelConfig.__struct_fields__})
    evaluation = Evaluation(config.memory_length, config.segment_length, config.same_length, config.clamp_length or 0)
    return Imported(NAME, architecture, dict(state), config.memory_start, 0, evaluation, vocabulary, notes)
