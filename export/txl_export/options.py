"""The options of an export: their names, types, defaults and meaning, once for Python and for the command line.

An option is added here, as a field of `ExportOptions`: `txl_export.export` takes it as a keyword argument, and
`txl-deploy export` offers it as a flag if the field has one. Importing this module needs neither torch nor onnx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.tables import Precision
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener

__all__ = ["ExportOptions", "Flag", "flags_of_export"]

PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True)
class Flag:
    """An option on the command line.

    Attributes:
        help: what the option is; it documents the field of `ExportOptions` as well.
        kind: its type on the command line.
        names: its names there.
    """

    help: str
    kind: Any
    names: str


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportOptions:
    """What an export may be asked for; without an option the default holds, or what the checkpoint says.

    Raises:
        UsageError: a value that means nothing whatever the checkpoint is.
    """

    family: Annotated[
        str,
        Flag(
            "The code base it was trained with.",
            Literal["auto", "kimiyoung", "nvidia", "hf", "remixl", "fastai", "cntxl", "txl"],
            "--family",
        ),
    ] = "auto"
    config: Annotated[
        str | Path | Mapping[str, Any] | None,
        Flag("JSON with the family's own constructor or config.json names.", Path | None, "--config"),
    ] = None
    segment_length: Annotated[
        int | Sequence[int],
        Flag("L of a program; repeat for several. (default 64 and 1)", list[int] | None, "--segment-length"),
    ] = ()
    memory_length: Annotated[int | None, Flag("M, memory rows per layer.", int | None, "--memory-length")] = None
    clamp_length: Annotated[
        int | None, Flag("Largest distance told apart; 0 for no clamp.", int | None, "--clamp-length")
    ] = None
    same_length: Annotated[
        bool | None, Flag("Every query sees equally many keys.", bool | None, "--same-length/--no-same-length")
    ] = None
    batch_size: Annotated[int, Flag("B, the most streams that advance together.", int, "--batch-size")] = 1
    memory: Annotated[
        str | None,
        Flag(
            "Keep keys and values, or the layers' inputs. (default kv, hidden where kv cannot be)",
            Literal["kv", "hidden"] | None,
            "--memory",
        ),
    ] = None
    precision: Annotated[
        str,
        Flag(
            "Of weights and arithmetic; int8 and int4 are for the CPU.",
            Literal["fp32", "fp16", "bf16", "int8", "int4"],
            "--precision",
        ),
    ] = "fp32"
    keep: Annotated[
        Sequence[str],
        Flag(
            "With int8 and int4: leave these matrices in fp32, e.g. layers.03; repeatable.", list[str] | None, "--keep"
        ),
    ] = ()
    text: Annotated[
        str | Path | None, Flag("Real text to judge on, for the checkpoint's vocabulary.", Path | None, "--text")
    ] = None
    tokens: Annotated[
        str | Path | NDArray[np.integer[Any]] | None,
        Flag("Real text as token ids, an .npy file.", Path | None, "--tokens"),
    ] = None
    verify: Annotated[bool, Flag("Compare with PyTorch before naming it.", bool, "--verify/--no-verify")] = True
    force: Annotated[bool, Flag("Replace an existing bundle.", bool, "--force")] = False
    vocabulary: Annotated[
        str | Path | None, Flag("Vocabulary file, where the checkpoint has none.", Path | None, "--vocabulary")
    ] = None
    aliases: Annotated[
        Mapping[str, str] | None,
        Flag("Class of a fork and what it stands for: theirs=original.", list[str] | None, "--alias"),
    ] = None
    initial_memory: Annotated[
        str | None,
        Flag(
            "What is attended to before the first token. (default as the family's)",
            Literal["empty", "zeros"] | None,
            "--initial-memory",
        ),
    ] = None
    cluster_order: Annotated[
        str | None,
        Flag(
            "How the file orders the softmax's clusters. (default as the family's)",
            Literal["ascending", "reversed"] | None,
            "--cluster-order",
        ),
    ] = None
    embedding_scale: Annotated[
        float | None,
        Flag("Factor on the embedding. (default as the family's)", float | None, "--embedding-scale"),
    ] = None
    listener: Listener | None = None
    """Hears of stages, progress and warnings."""

    def __post_init__(self) -> None:
        if self.memory not in (None, "kv", "hidden"):
            raise UsageError(f"memory is {self.memory!r}, expected kv or hidden; check --memory")
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}; check --precision"
            )
        if isinstance(self.segment_length, str):
            raise UsageError(f"segment_length is {self.segment_length!r}, expected whole numbers")

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Every L that was asked for, in the order given."""
        given = self.segment_length
        lengths = tuple(given) if isinstance(given, Sequence) else (given,)
        return tuple(int(length) if isinstance(length, np.integer) else length for length in lengths)


def flags_of_export() -> dict[str, Flag]:
    """The options that have a flag, by the names of their fields."""
    hints = get_type_hints(ExportOptions, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}
