"""Defines the types of importers: the state and config that an importer reads, and the result that it returns."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from torch import Tensor
from txl_runtime.bundle.encoding import canonical_json
from txl_runtime.bundle.transformer_xl import ModelConfig
from txl_runtime.errors import CheckpointError, UsageError, some

from txl_export.checkpoints.files.pickle_names import shown
from txl_export.families.transformer_xl.weights import Weights
from txl_export.options import ClusterOrder, MemoryStart

S = TypeVar("S", bound=msgspec.Struct)

# Values of Transformer-XL base for WikiText-103 under each code base's names; messages show them as examples.
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


MOST_CLUSTERS = 256
"""Upper limit of the number of clusters. Models have about 4; thousands would cut a table into thousands of tensors."""


class ConfigNeededError(UsageError):
    """Config values are missing from the file and the user gave none; the message names them."""


class ScriptedError(CheckpointError):
    """The file is a TorchScript archive whose tensors fit no known model: the user has to write its module."""


@dataclass(frozen=True)
class Evaluation:
    """Settings that are chosen when a model is evaluated, not trained; None for a setting that the file lacks.

    Attributes:
        memory_length: the number of memory rows, M.
        segment_length: the file's tgt_len, which is only shown.
        same_length: whether every query sees the same number of keys.
        clamp_length: largest distance to a key; larger distances count as this one. 0 for no clamp.
    """

    memory_length: int | None = None
    segment_length: int | None = None
    same_length: bool | None = None
    clamp_length: int | None = None


@dataclass(frozen=True)
class Imported:
    """A checkpoint in canonical form, not yet checked against its config.

    Attributes:
        family: the code base of the file.
        config, weights: the model, in the form of module `families.transformer_xl.weights`.
        memory_start: the memory before the first token, "zeros" or "empty".
        window_beyond_memory: with same_length a query sees M plus this many keys.
        evaluation: the settings in the file.
        vocabulary: the vocabulary as bundle JSON; None if the file has none.
        notes: what was ignored or assumed, for the user.
        window_of: the number of keys that a query sees with same_length. "memory": M + `window_beyond_memory`.
            "segment": T in a segment of T tokens, and all keys if T = 1.
        cluster_order: the order in which the file stores the adaptive softmax's columns for clusters; `weights` holds
            them ascending.
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
    """The parts of a code base's file, before its tensors get canonical names.

    Attributes:
        state: tensors by the code's own names.
        config: values under the code's own config names; None if the file has none.
        reason: the mark by which the file was recognised, for the user.
        vocabulary: the vocabulary as bundle JSON, if the file has one.
        notes: what was ignored, for the user.
    """

    state: Mapping[str, Tensor]
    config: Mapping[str, Any] | None
    reason: str
    vocabulary: bytes | None = None
    notes: tuple[str, ...] = ()


class State(UserDict[str, Tensor]):
    """The tensors of a checkpoint by their own names, with a record of the names that an importer has read.

    A tensor that is left unread would be missing from the model.

    Attributes:
        source: the name of the file, for messages.
        used: the names read so far.
    """

    def __init__(self, tensors: Mapping[str, Tensor], source: str) -> None:
        super().__init__(tensors)
        self.source = source
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        self.used.add(name)
        return tensor

    def take(self, name: str) -> Tensor:
        """Return a required tensor with at least one axis.

        For example, `take("word_emb.weight")` is [256, 32].

        Raises:
            CheckpointError: the state has no tensor of this name, or the tensor is a single number.
        """
        if name not in self:
            raise CheckpointError(
                f"{self.source}: {name} is missing, the file has {len(self)} other tensors; "
                "check --family and the config against the code that trained it"
            )
        if not self[name].dim():
            raise CheckpointError(
                f"{self.source}: {name} is a single number, expected a table or a row; "
                "check --family and the config against the code that trained it"
            )
        return self[name]

    def take_layers(self, prefix: str, names: Mapping[str, str]) -> Weights:
        """Return weights and biases of linear layers and layer norms under canonical names.

        With prefix "layers.0" and names {"a.norm": "ln"}, "layers.0.ln.weight" becomes "a.norm.weight".

        Raises:
            CheckpointError: a tensor is missing.
        """
        return {
            f"{canonical}.{part}": self.take(f"{prefix}.{own}.{part}")
            for part in ("weight", "bias")
            for canonical, own in names.items()
        }

    def split(self, name: str, parts: tuple[str, ...]) -> dict[str, Tensor]:
        """Cut a tensor into parts of equal height, e.g. [3D, D] into query, key and value of [D, D].

        Raises:
            CheckpointError: the tensor is missing, or its rows are no multiple of the number of parts.
        """
        joined = self.take(name)
        if joined.shape[0] % len(parts):
            raise CheckpointError(
                f"{self.source}: {name} has shape {list(joined.shape)}, expected as many rows for each of "
                f"{', '.join(parts)}; check --family and the config against the code that trained it"
            )
        return dict(zip(parts, joined.chunk(len(parts)), strict=True))


class CodeBase(Protocol):
    """The interface of a module in `MODULES`, which recognises and reads the files of one code base.

    Attributes:
        NAME: the code base's name for --family.
        MARKS: tensor names that together occur only in this code base's states.
    """

    NAME: str
    MARKS: tuple[str, ...]

    def unwrap(self, content: Any, source: str) -> Unwrapped | None:
        """Return the parts of a file whose layout is this code base's; None for other content."""

    def from_state(self, state: State, values: Mapping[str, Any]) -> Imported:
        """Return the canonical form of a state, with the config values under the code base's names."""


def convert_config(values: Mapping[str, Any], kind: type[S], source: str) -> tuple[S, tuple[str, ...]]:
    """Return config values with checked types and ranges, and a note that lists the keys that are ignored.

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
        config = msgspec.convert({name: values[name] for name in kind.__struct_fields__ if name in values}, kind)
    except (msgspec.ValidationError, UnicodeError, OverflowError) as error:
        raise CheckpointError(f"{source}: config: {error}; check the config against the code that trained it") from None
    for name, value in msgspec.structs.asdict(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"{source}: config: {name} is {value}, expected a finite number; correct the config")
    unknown = sorted(shown(key) if isinstance(key, str) else "…" for key in values if key not in kind.__struct_fields__)
    if not unknown:
        return config, ()
    return config, (f"config keys without a meaning here, ignored: {some(unknown, 6)}",)


def check_config(config: ModelConfig, state: State) -> None:
    """Refuse sizes below 1, and more layers than tensors, before anything of these sizes is allocated.

    Raises:
        CheckpointError: a size is too small, or n_layer too large.
    """
    advice = "check the config against the code that trained it"
    if config.n_layer > len(state):
        raise CheckpointError(
            f"{state.source}: n_layer is {config.n_layer}, expected no more than {len(state)}, the number of "
            f"tensors; {advice}"
        )
    learned = ("position_rows",) if config.attn_type in (1, 3) else ()
    for name in ("vocab_size", "n_head", "d_model", "d_head", "d_inner", "d_embed", *learned):
        if getattr(config, name) < 1:
            raise CheckpointError(
                f"{state.source}: {name} comes out as {getattr(config, name)}, expected at least 1; {advice}"
            )
    for cluster in range(len(config.clusters)):
        if config.cluster_width(cluster) < 1:
            raise CheckpointError(
                f"{state.source}: the embedding of cluster {cluster} has width 0, d_embed {config.d_embed} // div_val "
                f"{config.div_val}^{cluster}, expected at least 1: all its tokens would look alike; train with fewer "
                "cutoffs, a larger d_embed or a smaller div_val"
            )


def check_cutoffs(cutoffs: Sequence[int], vocab_size: int, source: str) -> None:
    """Refuse boundaries of the adaptive softmax's clusters that leave a cluster without tokens.

    Raises:
        CheckpointError: the boundaries do not ascend between 0 and the vocabulary's size, or there are too many.
    """
    if len(cutoffs) >= MOST_CLUSTERS:
        raise CheckpointError(
            f"{source}: has {len(cutoffs)} cutoffs, expected fewer than {MOST_CLUSTERS}; check the config against the "
            "code that trained it"
        )
    if any(first >= last for first, last in pairwise((0, *cutoffs, vocab_size))):
        raise CheckpointError(
            f"{source}: cutoffs {list(cutoffs)} do not ascend between 0 and the vocabulary's {vocab_size}, expected "
            "the boundaries between clusters without these two, such as [20000, 40000, 200000] of 267735; check the "
            "config against the code that trained it"
        )
