"""What an importer hands on: the canonical model, and what the file said of its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeVar

import msgspec
from torch import Tensor
from txl_runtime.bundle.encoding import canonical_json
from txl_runtime.bundle.format1 import ModelConfig
from txl_runtime.errors import CheckpointError, UsageError

from txl_export.families.transformer_xl.weights import Weights

S = TypeVar("S", bound=msgspec.Struct)
MemoryStart = Literal["empty", "zeros"]
ClusterOrder = Literal["ascending", "reversed"]

# For messages: WikiText-103's base model, under the names of all families.
EXAMPLES: dict[str, Any] = {
    **dict.fromkeys(("n_token", "vocab_size"), 267735),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 16),
    **dict.fromkeys(("n_head", "n_heads", "num_attention_heads"), 10),
    **dict.fromkeys(("d_model", "d_embed", "hidden_size"), 410),
    "d_head": 41,
    "d_inner": 2100,
    "pre_lnorm": False,
    "embedding_scale": 20.248,
}


class ConfigNeededError(UsageError):
    """A model's config has values that its file does not hold and that nobody gave."""


@dataclass(frozen=True)
class Evaluation:
    """Settings that are chosen when a model is evaluated; None where nothing was said.

    Attributes:
        memory_length: M.
        segment_length: L the file names (tgt_len); only ever shown.
        same_length: whether every query sees the same number of keys.
        clamp_length: largest distance told apart; 0 for no clamp.
    """

    memory_length: int | None = None
    segment_length: int | None = None
    same_length: bool | None = None
    clamp_length: int | None = None


@dataclass(frozen=True)
class Imported:
    """A checkpoint in canonical form, not yet checked against its config.

    Attributes:
        family: the code base it came from.
        config, weights: the model (module `weights`).
        memory_start: of the dialect.
        window_beyond_memory: with same_length a query sees M plus this many keys.
        evaluation: what the file itself says.
        vocabulary: its vocabulary as bundle JSON, if it has one.
        notes: what was ignored or assumed, for people.
        window_of: what same_length counts. "memory": a query sees M plus `window_beyond_memory` keys. "segment": as
            many keys as its segment has tokens, and everything where the segment is a single token.
        cluster_order: how the file ordered the adaptive softmax's columns for whole clusters; in `weights` they ascend.
    """

    family: str
    config: ModelConfig
    weights: Weights
    memory_start: MemoryStart
    window_beyond_memory: int = 0
    evaluation: Evaluation = field(default_factory=Evaluation)
    vocabulary: bytes | None = None
    notes: tuple[str, ...] = ()
    window_of: Literal["memory", "segment"] = "memory"
    cluster_order: ClusterOrder = "ascending"


@dataclass(frozen=True)
class Unwrapped:
    """What a family's file holds, before its tensors are given canonical names.

    Attributes:
        state: tensors by the family's names.
        config: values under the family's own config names; None when the file has none.
        reason: what the file was recognised by, for people.
        vocabulary: as bundle JSON, if the file has one.
        notes: what was ignored, for people.
    """

    state: Mapping[str, Tensor]
    config: Mapping[str, Any] | None
    reason: str
    vocabulary: bytes | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """How the files of one code base are recognised and read.

    Attributes:
        recognise: whether a state has this code's tensor names.
        from_state: the canonical form of a state with config values; the last argument names the source in errors.
        unwrap: what is in a file of this code's own making; None when the content is something else.
        marks: tensor names that it is recognised by, for people.
    """

    recognise: Callable[[Mapping[str, Any]], bool]
    from_state: Callable[[Mapping[str, Tensor], Mapping[str, Any], str], Imported]
    unwrap: Callable[[Any, str], Unwrapped | None]
    marks: tuple[str, ...]


def convert_config(values: Mapping[str, Any], kind: type[S], source: str) -> tuple[S, tuple[str, ...]]:
    """A family's own config names, typed and range-checked; and the keys that mean nothing here, as a note.

    Raises:
        ConfigNeededError: a name is missing.
        CheckpointError: a value is of the wrong kind or range.
    """
    if missing := [field.name for field in msgspec.structs.fields(kind) if field.required and field.name not in values]:
        example = canonical_json({name: EXAMPLES.get(name, 1) for name in missing}).decode()
        raise ConfigNeededError(
            f"{source}: does not say its {', '.join(missing)}, expected {'them' if len(missing) > 1 else 'it'} of the "
            f"code that trained it; give --config FILE.json, which holds e.g. {example}"
        )
    try:
        config = msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source}: config: {error}; check the config against the code that trained it") from None
    unknown = sorted(str(key) for key in set(values) - set(kind.__struct_fields__))
    if not unknown:
        return config, ()
    more = f" and {len(unknown) - 6} more" if len(unknown) > 6 else ""
    return config, (f"config keys without a meaning here, ignored: {', '.join(unknown[:6])}{more}",)


def check_cutoffs(cutoffs: Sequence[int], vocab_size: int, source: str) -> None:
    """Refuse boundaries of the adaptive softmax's clusters that leave a cluster without tokens.

    Raises:
        CheckpointError: they do not ascend, or not within the vocabulary.
    """
    if any(first >= last for first, last in pairwise((0, *cutoffs, vocab_size))):
        raise CheckpointError(
            f"{source}: cutoffs {list(cutoffs)} do not ascend between 0 and the vocabulary's {vocab_size}, expected "
            "the boundaries between clusters without these two, such as [20000, 40000, 200000] of 267735; check the "
            "config against the code that trained it"
        )


def take(state: Mapping[str, Tensor], name: str, source: str) -> Tensor:
    """A tensor by its name in the file.

    Raises:
        CheckpointError: there is none.
    """
    if name not in state:
        raise CheckpointError(
            f"{source}: {name} is missing, the file has {len(state)} other tensors; "
            "check --family and the config against the code that trained it"
        )
    return state[name]


def split_rows(state: Mapping[str, Tensor], name: str, parts: tuple[str, ...], source: str) -> dict[str, Tensor]:
    """A tensor that holds several of equal height one above the other, by part: e.g. q, k and v in one matrix.

    Raises:
        CheckpointError: there is none, or its rows cannot be dealt out evenly.
    """
    joined = take(state, name, source)
    if not joined.dim() or joined.shape[0] % len(parts):
        raise CheckpointError(
            f"{source}: {name} has shape {list(joined.shape)}, expected as many rows for each of {', '.join(parts)}; "
            "check --family and the config against the code that trained it"
        )
    return dict(zip(parts, joined.chunk(len(parts)), strict=True))
