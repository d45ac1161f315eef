"""The manifest: the description of a bundle, `manifest.json`, and its decoder.

It is one JSON object of format 2, whose tables hold everything that a reader needs, for any kind of model. Unknown
fields are ignored, so that a newer minor version still loads; every other major version is refused by name. `derived`
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

if TYPE_CHECKING:  # an application whose bundles are of other models does not carry this one's config
    from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig, TransformerXL

FORMAT = "txl-deploy.bundle"
FORMAT_VERSION = "2.1"
OLD_SELFTEST = "selftest.npz"
"""The file of stored vectors in bundles of format 2.0, whose manifests do not name it."""
IGNORED = "attention"
"""A kind of program that only bundles of 0.8 have: nothing runs it."""
MOST_BYTES = 1 << 24
"""Most bytes of a manifest, 16 MiB: a hundred times a large model's."""
MOST_SAID = 400
"""Most characters of a message: a hostile manifest may hold names of any length."""


class Manifest(Struct, Tables, frozen=True, kw_only=True, dict=True):
    """The facts about a bundle that a runtime needs.

    Attributes:
        format, format_version: "txl-deploy.bundle" and its version, major.minor.
        model_id: a SHA-256 that names the function which the bundle computes, independent of precision, B and L.
        batch_size: B of every program; the most sequences of a stream.
        batch_sizes: smaller B that engines are also built for, for streams of fewer sequences; largest first.
        precision: number format of the weights and of the graphs' arithmetic.
        inputs, outputs, states: tables of the tensors that a step reads, returns and carries.
        programs: table of the graphs.
        counters: numbers per sequence that the runtime keeps; "fill" counts memory rows.
        streams: "independent": each sequence can be idle, reset and moved alone. "lockstep": all of them run, or none.
        joint: whether sequences influence one another, so that a stream has to have all B of them.
        lengths: "valid": a segment may hold any number of rows that count. "exact": a whole segment or nothing.
        commits: "rows": the state after a segment may be that of any of its rows. "segment": only of whole ones.
        reach: number of tokens that can influence a prediction; null if unknown.
        boundary_token: id of the token that separates texts; null if there is none.
        family: the exporter's facts about the model: its "name", and fields that mean nothing to the runtime.
        weights: name of the file of weights that all graphs share.
        files: size and hash of every file but the manifest itself.
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
        """Bytes of the weight file."""
        return self.files[self.weights].size if self.weights in self.files else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state, with M rows of each memory tensor, even of a ring, which has more."""
        states = self.states_of(self.updates[0])
        return sum(BYTES.get(state.dtype, 4) * state.values(self.memory_length) for state in states)

    @property
    def softmax_products(self) -> int:
        """Multiplications per row of the softmax, width * V, by which an engine may choose its threads."""
        return 0 if self.logprobs is None else (self.logprobs.width or 0) * self.vocab_size

    @property
    def family_name(self) -> str:
        """Name of the family of models, for export, verification and description; "" if the manifest has none."""
        return str(self.family.get("name", ""))

    @property
    def transformer_xl(self) -> TransformerXL:
        """The family block of a Transformer-XL.

        Raises:
            BundleError: the model is of a different family, or the block is damaged.
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
        BundleError: the bytes are no JSON or too long, a field has the wrong type or range, the major version
            is not 2, or fields contradict each other.
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
