"""Defines the options of an export, with types, defaults and meaning, once for Python and for the command line.

An option is added here, as a field of `ExportOptions`: `txl_export.export` takes it as a keyword argument, and
`txl-deploy export` offers it as a flag if the field has one. Importing this module needs neither torch nor onnx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.tables import Precision
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener
from txl_runtime.streaming.checks import is_whole, shown

PRECISIONS: tuple[str, ...] = get_args(Precision)
CodeBase = Literal["auto", "kimiyoung", "nvidia", "hf", "remixl", "fastai", "cntxl", "txl"]
MemoryStart = Literal["empty", "zeros"]
ClusterOrder = Literal["ascending", "reversed"]
Growth = Literal["auto", "symbolic", "stages"]


@dataclass(frozen=True)
class Flag:
    """An option on the command line.

    Attributes:
        help: the help text; it documents the field of `ExportOptions` as well.
        kind: the option's type on the command line; None for the field's type.
        names: the option's names on the command line; "" for the field's name with dashes.
    """

    help: str
    kind: Any = None
    names: str = ""


_File = Path | None
_Names = list[str] | None


FOR_FILES = ("states", "open", "fix", "initial", "batch_axes", "position_axes", "outputs", "windows")
"""Options that are given only with an ONNX file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportOptions:
    """The options of an export; an option that is left out has its default, or the checkpoint's value.

    Raises:
        UsageError: a value is wrong for every checkpoint.
    """

    family: Annotated[str, Flag("The code base it was trained with.", CodeBase)] = "auto"
    adapter: Annotated[
        str | None,
        Flag("The adapter for the package that --weights is of, such as mamba; docs/adapters.md lists all."),
    ] = None
    config: Annotated[
        str | Path | Mapping[str, Any] | None,
        Flag("JSON of the constructor's arguments: the family's, config.json, or the --adapter's package's.", _File),
    ] = None
    segment_length: Annotated[
        int | Sequence[int],
        Flag("L of a program; repeat for several. (default 64 and 1, or what the model says)", list[int] | None),
    ] = ()
    memory_length: Annotated[int | None, Flag("M, memory rows per layer.")] = None
    clamp_length: Annotated[int | None, Flag("Largest distance told apart; 0 for no clamp.")] = None
    extended_length: Annotated[int | None, Flag("0: run without the extended context (ext_len) of training.")] = None
    same_length: Annotated[
        bool | None, Flag("Every query sees equally many keys.", None, "--same-length/--no-same-length")
    ] = None
    lookup: Annotated[
        bool,
        Flag(
            "Up to 5 tokens at once give what single steps give, for drafts that are looked up; adds L 5.",
            None,
            "--lookup",
        ),
    ] = False
    features: Annotated[
        bool,
        Flag("Return what enters the last feed-forward layer too, for datastores.", None, "--features"),
    ] = False
    batch_size: Annotated[
        int | Sequence[int],
        Flag(
            "B, the most sequences that advance together; repeat for further B that engines are built for. (default 1)",
            list[int] | None,
        ),
    ] = ()
    memory: Annotated[
        Literal["kv", "hidden"] | None,
        Flag("Keep keys and values, or the layers' inputs. (default kv, hidden where kv cannot be)"),
    ] = None
    precision: Annotated[
        str | None,
        Flag(
            "Of weights and arithmetic; int8 and int4 are for the CPU. (default fp32; of an ONNX file in fp16 that)",
            Precision | None,
        ),
    ] = None
    keep: Annotated[
        Sequence[str], Flag("With int8 and int4: leave these matrices in fp32, e.g. layers.03; repeatable.", _Names)
    ] = ()
    text: Annotated[
        str | Path | None,
        Flag(
            "Text to judge on, for the checkpoint's vocabulary; from 40,000 tokens export fits int4 to the first 80 %.",
            _File,
        ),
    ] = None
    tokens: Annotated[
        str | Path | NDArray[np.integer[Any]] | None,
        Flag("Real text as token ids, an .npy file; from 40,000 tokens export fits int4 to the first 80 %.", _File),
    ] = None
    verify: Annotated[bool, Flag("Compare with PyTorch before naming it.", None, "--verify/--no-verify")] = True
    force: Annotated[bool, Flag("Replace an existing bundle.", None, "--force")] = False
    vocabulary: Annotated[str | Path | None, Flag("Vocabulary file, where the checkpoint has none.", _File)] = None
    specials: Annotated[str | None, Flag("Words that the vocabulary's list lacks in front: '<S>,<pad>'.")] = None
    missing_words: Annotated[bool, Flag("The last ids have no word.", None, "--missing-words")] = False
    boundary_token: Annotated[
        int | None, Flag("Id that separates texts; an empty prompt is it. (default the vocabulary's end of a line)")
    ] = None
    aliases: Annotated[
        Mapping[str, str] | None, Flag("Class of a fork and what it stands for: theirs=original.", _Names, "--alias")
    ] = None
    initial_memory: Annotated[
        MemoryStart | None, Flag("What is attended to before the first token. (default as the family's)")
    ] = None
    cluster_order: Annotated[
        ClusterOrder | None, Flag("How the file orders the softmax's clusters. (default as the family's)")
    ] = None
    embedding_scale: Annotated[float | None, Flag("Factor on the embedding. (default as the family's)")] = None
    weights: Annotated[
        str | Path | None,
        Flag("Of a model of your own: what its function is given; of --adapter, the checkpoint.", _File),
    ] = None
    inputs: Annotated[
        str | Path | None, Flag("Of a model of your own: real inputs to verify on, an .npz file by input name.", _File)
    ] = None
    growth: Annotated[
        Growth, Flag("Of a model of your own whose state grows: one graph of open sizes, or one per size reached.")
    ] = "auto"
    states: Annotated[
        Mapping[str, str] | None,
        Flag(
            "Of an ONNX file: IN=OUT, an input and its next value, where inspect is not sure; IN= says that it is no "
            "state; repeatable.",
            _Names,
            "--state",
        ),
    ] = None
    open: Annotated[
        bool,
        Flag(
            "Of an ONNX file: carry on what recurrences, convolutions and sums forget after each call.", None, "--open"
        ),
    ] = False
    fix: Annotated[
        Mapping[str, Any] | None,
        Flag("Of an ONNX file: NAME=VALUE, an input or an open size that is always the same; repeatable.", _Names),
    ] = None
    initial: Annotated[
        str | Path | Mapping[str, Any] | None,
        Flag("Of an ONNX file: what its states hold first, an .npz file by input name. (default zeros)", _File),
    ] = None
    batch_axes: Annotated[
        Mapping[str, int] | None,
        Flag(
            "Of an ONNX file: NAME=N, the axis on which sequences stand in an input or output; repeatable.",
            _Names,
            "--batch-axis",
        ),
    ] = None
    position_axes: Annotated[
        Mapping[str, int] | None,
        Flag(
            "Of an ONNX file: NAME=N, the axis on which positions stand in an input or output; repeatable.",
            _Names,
            "--position-axis",
        ),
    ] = None
    outputs: Annotated[
        Sequence[str],
        Flag("Of an ONNX file: an output that is kept, beside states; repeatable. (default all)", _Names, "--output"),
    ] = ()
    windows: Annotated[
        Mapping[str, int] | None,
        Flag(
            "Of an ONNX file: NAME=ROWS, a cache that grows and the rows of it that are kept; repeatable.",
            _Names,
            "--window",
        ),
    ] = None
    listener: Listener | None = None
    """Receives stages, progress and warnings."""

    def __post_init__(self) -> None:
        if self.memory not in (None, "kv", "hidden"):
            raise UsageError(f"memory is {self.memory!r}, expected kv or hidden; check --memory")
        if self.precision not in (None, *PRECISIONS):
            raise UsageError(
                f"precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}; check --precision"
            )
        if self.growth not in get_args(Growth):
            raise UsageError(
                f"growth is {self.growth!r}, expected one of {', '.join(get_args(Growth))}; check --growth"
            )
        if self.extended_length not in (None, 0):
            raise UsageError(f"extended_length is {shown(self.extended_length)}, expected 0; check --extended-length")
        if not isinstance(self.specials, str | None):
            raise UsageError(f"specials is {shown(self.specials)}, expected a text such as '<S>,<pad>'")
        if self.boundary_token is not None and (not is_whole(self.boundary_token) or self.boundary_token < 0):
            raise UsageError(
                f"boundary_token is {shown(self.boundary_token)}, expected a token id of 0 …; check --boundary-token"
            )
        if isinstance(self.segment_length, str):
            raise UsageError(f"segment_length is {self.segment_length!r}, expected whole numbers")
        if isinstance(self.batch_size, str):
            raise UsageError(f"batch_size is {self.batch_size!r}, expected a whole number, or several")

    def refuse(self, names: Sequence[str], purpose: str) -> None:
        """Refuse options among `names` that were given; `purpose` says in the message which sources they are for.

        Raises:
            UsageError: an option among `names` was given.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in names and value is not field.default and value != field.default:
                flag = flags_of_export()[field.name].names.partition("/")[0]
                raise UsageError(f"{flag} is for {purpose}; leave it out")

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """The segment lengths L that were given, in order; () if no length was given."""
        return _numbers(self.segment_length)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes B that were given, in order and without repetition; (1,) if no size was given."""
        return tuple(dict.fromkeys(_numbers(self.batch_size))) or (1,)


def _numbers(value: int | Sequence[int]) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, Sequence) else (value,)
    return tuple(int(number) if isinstance(number, np.integer) else number for number in numbers)


def flags_of_export() -> dict[str, Flag]:
    """Return each option's flag by field name, with its type and names: "segment_length" has "--segment-length"."""
    hints = get_type_hints(ExportOptions, include_extras=True)
    flags = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {
        name: Flag(flag.help, flag.kind or own, flag.names or f"--{name.replace('_', '-')}")
        for name, (own, flag) in flags.items()
    }
