"""The manifest: the description of a bundle, `manifest.json`, and its decoder.

A manifest is one JSON object of format 2, whose tables hold everything that a reader of any kind of model needs.
Unknown fields are ignored, so that a newer minor version still loads; a different major version is refused. `derived`
adds fields that the tables imply and an older manifest lacks. `agreement` checks the tables against each other.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from txl_runtime.bundle.abilities import Abilities
from txl_runtime.bundle.agreement import contradictions
from txl_runtime.bundle.derived import completed, says_nothing
from txl_runtime.bundle.tables import (
    BYTES,
    Count,
    Counter,
    FileRecord,
    Index,
    Input,
    Output,
    Precision,
    Program,
    Sha256,
    Size,
    StateTensor,
    Tables,
)
from txl_runtime.errors import BundleError

if TYPE_CHECKING:  # an application with bundles of other models need not ship the Transformer-XL's config
    from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig, TransformerXL

FORMAT = "txl-deploy.bundle"
"""Value of the field `format` in every manifest."""
FORMAT_VERSION = "2.1"
"""The format version that this code writes. This code reads all versions 2.x."""
OLD_SELFTEST = "selftest.npz"
"""File name of the stored vectors in bundles of format 2.0, whose manifests do not name the file."""
IGNORED = "attention"
"""A kind of program that only bundles of version 0.8 have; the runtime skips it."""
MOST_BYTES = 1 << 24
"""Maximum size of a manifest, 16 MiB: a hundred times the manifest of a large model."""
MOST_SAID = 400
"""Maximum number of characters of an error message: a hostile manifest may hold names of any length."""


class Manifest(Struct, Tables, frozen=True, kw_only=True, dict=True):
    """The facts about a bundle that a runtime needs, read from `manifest.json`.

    Attributes:
        format, format_version: "txl-deploy.bundle" and its version, major.minor.
        model_id: a SHA-256 that identifies the function that the bundle computes, whatever its precision, batch size
            and segment lengths.
        batch_size: B, the number of sequences in every program: the largest number of sequences of a stream.
        batch_sizes: smaller batch sizes that engines are also built for, largest first.
        precision: number format of the weights and of the graphs' arithmetic.
        inputs, outputs, states: tables of the tensors that a step reads, returns and carries.
        programs: table of the graphs.
        counters: numbers per sequence that the runtime keeps; "fill" counts memory rows.
        streams: "independent": each sequence can be idle, reset and moved alone. "lockstep": all of them run, or none.
        joint: whether sequences influence one another; a stream must then have all B of them.
        lengths: "valid": in a segment any number of positions may count. "exact": all positions count, or none.
        commits: "rows": the state can be committed after any position of a segment. "segment": only after the last.
        reach: number of tokens that can influence a prediction; null if unknown.
        stepwise: the longest segment, in positions, that gives the same outputs and state as single steps, up to
            rounding; 1 if a segment of two positions already differs; null if unknown.
        boundary_token: id of the token that separates texts; null if there is none.
        family: facts about the model for the exporter: the family's "name", and fields that the runtime does not read.
        weights: name of the file of weights that all graphs share.
        files: size and hash of every file except the manifest itself.
        vocabulary: name of the file with the vocabulary; null if the checkpoint had none.
        selftest: name of the file with the stored vectors; null if there are none.
        parameters: number of trained values.
        parity: results of the export's verification, for people and `inspect`; the full table is in report.json.
        provenance: source file, its hash, tool and library versions.
    """

    format: Annotated[str, Meta(extra_json_schema={"const": FORMAT})]
    format_version: Annotated[str, Meta(extra_json_schema={"pattern": r"^2(\..*)?$"})]
    model_id: Sha256
    batch_size: Count
    batch_sizes: tuple[Count, ...] = ()
    precision: Precision
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    states: tuple[StateTensor, ...]
    programs: Annotated[tuple[Program, ...], Meta(min_length=1)]
    counters: Annotated[dict[str, Counter], Meta(extra_json_schema={"propertyNames": {"const": "fill"}})] = (
        msgspec.field(default_factory=dict)
    )
    streams: Literal["independent", "lockstep"]
    joint: bool = False
    lengths: Literal["exact", "valid"]
    commits: Literal["rows", "segment"] = "rows"
    reach: Count | None = None
    stepwise: Count | None = None
    boundary_token: Index | None = None
    family: dict[str, Any] = msgspec.field(default_factory=dict)
    weights: str
    files: dict[str, FileRecord]
    vocabulary: str | None = None
    selftest: str | None = None
    parameters: Size = 0
    parity: dict[str, Any] = msgspec.field(default_factory=dict)
    provenance: dict[str, Any] = msgspec.field(default_factory=dict)

    @cached_property
    def can(self) -> Abilities:
        """The operations that the model supports."""
        return Abilities(self)

    @property
    def used_files(self) -> frozenset[str]:
        """Names of the files that running the model needs: weights, vocabulary, graphs."""
        named = [self.weights, *([self.vocabulary] if self.vocabulary else [])]
        return frozenset([*named, *(program.file for program in self.programs)])

    @property
    def weight_bytes(self) -> int:
        """The size of the weight file in bytes."""
        return self.files[self.weights].size if self.weights in self.files else 0

    @property
    def state_bytes(self) -> int:
        """The size of one sequence's state in bytes, with M memory rows, even if a ring has more slots."""
        states = self.states_of(self.updates[0])
        return sum(BYTES.get(state.dtype, 4) * state.values(self.memory_length) for state in states)

    @property
    def softmax_products(self) -> int:
        """The softmax's multiplications per row, width * vocab_size, by which an engine may choose its threads."""
        return 0 if self.logprobs is None else (self.logprobs.width or 0) * self.vocab_size

    @property
    def family_name(self) -> str:
        """Name of the model family, for export, verification and description; "" if the manifest has none."""
        return str(self.family.get("name", ""))

    @property
    def has_config(self) -> bool:
        """True if the model is a Transformer-XL, so that `config` has its sizes."""
        return self.family_name == "transformer_xl"

    @property
    def transformer_xl(self) -> TransformerXL:
        """The field `family` of a Transformer-XL, decoded.

        Raises:
            BundleError: the model is of a different family, or the field is damaged.
        """
        from txl_runtime.bundle.transformer_xl import TransformerXL

        try:
            return msgspec.convert(self.family, TransformerXL)
        except msgspec.ValidationError as error:
            raise BundleError(
                f"the bundle's family is {self.family_name!r} ({error}), expected a Transformer-XL with its config; "
                "read the tables of the manifest instead, or export the model again"
            ) from None

    @property
    def config(self) -> ModelConfig:
        """A Transformer-XL's config; raises the error of `transformer_xl`."""
        return self.transformer_xl.config

    @property
    def dialect(self) -> Dialect:
        """A Transformer-XL's dialect; raises the error of `transformer_xl`."""
        return self.transformer_xl.dialect


class _Header(Struct):
    format: str
    format_version: str


def decode_manifest(data: bytes, source: str) -> Manifest:
    """Parse a manifest and check its fields against each other.

    Raises:
        BundleError: the bytes are not JSON or too long, a field has the wrong type or range, the major version is not
            2, or fields contradict each other.
    """
    try:
        if len(data) > MOST_BYTES:
            raise BundleError(f"more than {MOST_BYTES} bytes, expected the few kilobytes of a manifest; export again")
        header = msgspec.json.decode(data, type=_Header)
        if header.format != FORMAT:
            raise BundleError(f"format is {header.format[:40]!r}, expected {FORMAT!r}; export the model again")
        _check_version(header.format_version)
        manifest = msgspec.json.decode(data, type=Manifest)
        programs = tuple(program for program in manifest.programs if program.kind != IGNORED)
        manifest = msgspec.structs.replace(manifest, programs=programs)
        if manifest.selftest is None and OLD_SELFTEST in manifest.files:
            manifest = msgspec.structs.replace(manifest, selftest=OLD_SELFTEST)
        if says_nothing(manifest):
            manifest = completed(manifest)
        named = sorted(manifest.used_files | ({manifest.selftest} if manifest.selftest else set()))
        for problem in contradictions(manifest, named, manifest.files):
            raise BundleError(f"{problem[:MOST_SAID]}; export the model again")
    except BundleError as error:
        raise BundleError(f"{source}: {error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = str(error)[:MOST_SAID]
        raise BundleError(f"{source}: {reason}; expected the manifest of a bundle; export the model again") from None
    except RecursionError:
        raise BundleError(f"{source}: nested too deeply for a manifest; export the model again") from None
    return manifest


def _check_version(version: str) -> None:
    known, major = FORMAT_VERSION.partition(".")[0], version.partition(".")[0]
    if not (major.isascii() and major.isdecimal()) or major.startswith("0") or major == "1":
        raise BundleError(f"format_version is {version[:40]!r}, expected e.g. {FORMAT_VERSION!r}; export again")
    if major != known:
        raise BundleError(f"written in format {version[:40]}, this version reads up to {known}.x; upgrade txl-deploy")
