"""The manifest: what a bundle says of itself.

`manifest.json` is one JSON object of format 2, whose tables say everything that a reader needs, whatever the model is.
Unknown fields are ignored, so that a newer minor version still loads; every other major version is refused by name. A
manifest that says nothing of what its tables imply is completed (`derived`). What the tables have to agree on is
checked by `agreement`.
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

if TYPE_CHECKING:  # an application whose bundles are of other models does not carry this one's config
    from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig, TransformerXL

FORMAT = "txl-deploy.bundle"
FORMAT_VERSION = "2.1"
OLD_SELFTEST = "selftest.npz"
"""The file of stored vectors that bundles of format 2.0 have: their manifests do not name it."""
IGNORED = "attention"
"""The kind of a program that bundles of 0.8 may have beside the others: nothing runs it."""
MOST_BYTES = 1 << 24
"""Of a manifest: a hundred times what a large model's takes."""
MOST_SAID = 400
"""Characters of a message: names in a manifest may be of any length."""


class Manifest(Struct, Tables, frozen=True, kw_only=True, dict=True):
    """Everything a runtime needs to know of a bundle.

    Attributes:
        format, format_version: "txl-deploy.bundle" and its version, major.minor.
        model_id: which function the bundle computes, whatever its precision, B and L: a SHA-256.
        batch_size: B of every program; the most sequences of a stream.
        batch_sizes: smaller B that engines are built for as well, for streams of fewer sequences; largest first.
        precision: of the weights and of the graphs' arithmetic.
        inputs, outputs, states: what a step reads, returns and carries.
        programs: the graphs.
        counters: numbers per sequence that the runtime keeps; "fill" counts memory rows.
        streams: "independent": each sequence can be idle, reset and moved alone. "lockstep": all of them run, or none.
        joint: whether sequences influence one another, so that a stream has to have all B of them.
        lengths: "valid": a segment may hold any number of rows that count. "exact": a whole segment or nothing.
        commits: "rows": the state after a segment may be that of any of its rows. "segment": only of whole ones.
        reach: tokens that can influence a prediction, where that is known.
        boundary_token: the token that separates texts, where there is one.
        family: what the exporter knows of the model; its "name", and fields that mean nothing to the runtime.
        weights: the file that all graphs share.
        files: size and hash of every file but the manifest itself.
        vocabulary: file with the vocabulary, if the checkpoint had one.
        selftest: file with the stored vectors, if there are any.
        parameters: number of trained values.
        parity: what the export's verification reached, for people and `inspect`; the full table is in report.json.
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
        """What the model may be asked for."""
        return Abilities(self)

    @property
    def used_files(self) -> frozenset[str]:
        """The files that the model itself needs."""
        named = [self.weights, *([self.vocabulary] if self.vocabulary else [])]
        return frozenset([*named, *(program.file for program in self.programs)])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight file."""
        return self.files[self.weights].size if self.weights in self.files else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of state that one sequence has. A tensor of memory counts with its M rows, whatever their layout."""
        states = self.states_of(self.updates[0])
        return sum(BYTES.get(state.dtype, 4) * state.values(self.memory_length) for state in states)

    @property
    def softmax_products(self) -> int:
        """Multiplications per row of the softmax's programs, by which an engine may choose its threads."""
        return 0 if self.logprobs is None else (self.logprobs.width or 0) * self.vocab_size

    @property
    def family_name(self) -> str:
        """Which family of models it is, for whoever exports, verifies and describes."""
        return str(self.family.get("name", ""))

    @property
    def transformer_xl(self) -> TransformerXL:
        """The family block of a Transformer-XL.

        Raises:
            BundleError: it is another model, or the block is damaged.
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
        """A Transformer-XL's config; raises what `transformer_xl` does."""
        return self.transformer_xl.config

    @property
    def dialect(self) -> Dialect:
        """A Transformer-XL's dialect; raises what `transformer_xl` does."""
        return self.transformer_xl.dialect


class _Header(Struct):
    format: str
    format_version: str


def decode_manifest(data: bytes, source: str) -> Manifest:
    """Parse and cross-check a manifest.

    Raises:
        BundleError: not JSON, too long, a field of the wrong kind or range, a newer major version, or fields that
            contradict.
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
        said = str(error)[:MOST_SAID]
        raise BundleError(f"{source}: {said}; expected the manifest of a bundle; export the model again") from None
    except RecursionError:
        raise BundleError(f"{source}: nested too deeply for a manifest; export the model again") from None
    return manifest


def _check_version(version: str) -> None:
    known, major = FORMAT_VERSION.partition(".")[0], version.partition(".")[0]
    if not (major.isascii() and major.isdecimal()) or major.startswith("0") or major == "1":
        raise BundleError(f"format_version is {version[:40]!r}, expected e.g. {FORMAT_VERSION!r}; export again")
    if major != known:
        raise BundleError(f"written in format {version[:40]}, this version reads up to {known}.x; upgrade txl-deploy")
