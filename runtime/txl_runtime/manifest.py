"""The manifest: what a bundle says of itself, and the checks that it can be believed.

`manifest.json` is one JSON object. Unknown fields are ignored, so that a newer minor version still loads; a newer
major version is refused by name. Everything that the files have to agree on is cross-checked here, without opening
them: shapes against the config, programs against the state table, paths against the folder.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from txl_runtime.config import Count, Dialect, Index, ModelConfig
from txl_runtime.errors import BundleError

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "FileRecord",
    "Manifest",
    "Program",
    "StateTensor",
    "TensorSpec",
    "decode_manifest",
    "expected_states",
    "program_inputs",
    "program_outputs",
]

FORMAT = "txl-deploy.bundle"
FORMAT_VERSION = "1.0"
UPDATE_RULES = ("rolled",)
PROGRAM_KINDS = ("logprobs",)

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
DType = Literal["int32", "float32"]


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One graph input or output."""

    name: str
    dtype: DType
    shape: tuple[Count, ...]


class StateTensor(Struct, frozen=True, kw_only=True):
    """One tensor of the recurrent state, as the programs see it.

    Attributes:
        name: as `Stream.memory()` calls it, e.g. "layers.00.key".
        input, output: the names in the graphs; they sort alike, and none is a prefix of another.
        shape: with the batch first; `axis` is the one whose rows are memory rows, oldest first.
        initial: the weight file's tensor that every row starts as; None for zeros.
        update: "rolled": the graph returns the whole new memory; filled rows stand last.
    """

    name: str
    input: str
    output: str
    dtype: Literal["float32"] = "float32"
    shape: tuple[Count, ...]
    axis: Index
    initial: str | None = None
    update: str = "rolled"


class Program(Struct, frozen=True, kw_only=True):
    """One graph: a kind of output, a segment length, an update rule."""

    name: str
    kind: str
    segment_length: Count
    update: str
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class FileRecord(Struct, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 of a file in the bundle."""

    size: Index
    sha256: Sha256


class Manifest(Struct, frozen=True, kw_only=True):
    """Everything a runtime needs to know of a bundle.

    Attributes:
        format, format_version: "txl-deploy.bundle" and its version, major.minor.
        model_id: SHA-256 over config, dialect, M and canonical weights: which function the bundle computes.
        config, dialect: the model.
        memory_length, batch_size: M and B of every program.
        memory: "kv" keeps keys and values, "hidden" the layers' inputs.
        precision: of the weights and of the graphs' arithmetic.
        states: the recurrent state.
        programs: the graphs.
        weights: the file that all graphs share.
        files: size and hash of every file but the manifest itself.
        vocabulary: file with the vocabulary, if the checkpoint had one.
        parameters: number of trained values.
        parity: what the export's verification reached, for people and `inspect`; the full table is in report.json.
        provenance: source file, its hash, tool and library versions.
    """

    format: str
    format_version: str
    model_id: Sha256
    config: ModelConfig
    dialect: Dialect
    memory_length: Index
    batch_size: Count
    memory: Literal["kv", "hidden"]
    precision: Literal["fp32"]
    states: tuple[StateTensor, ...]
    programs: Annotated[tuple[Program, ...], Meta(min_length=1)]
    weights: str
    files: dict[str, FileRecord]
    vocabulary: str | None = None
    parameters: Index = 0
    parity: dict[str, Any] = msgspec.field(default_factory=dict)
    provenance: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """L of the programs, largest first."""
        return tuple(sorted({program.segment_length for program in self.programs}, reverse=True))

    @property
    def state_bytes(self) -> int:
        """Bytes of memory that one stream holds."""
        return sum(4 * _product(state.shape) for state in self.states) // self.batch_size

    @property
    def context(self) -> int:
        """Tokens that can influence a prediction: layers × memory + segment, or what the window leaves of it."""
        window = self.segment_lengths[0] if self.dialect.segment_window else self.dialect.window
        reach = self.memory_length if window is None else min(self.memory_length, window - 1)
        return self.config.n_layer * reach + self.segment_lengths[0]


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def expected_states(config: ModelConfig, memory: str, batch_size: int, memory_length: int) -> tuple[StateTensor, ...]:
    """The state table that a config implies; none when M is 0."""
    if not memory_length:
        return ()
    roles, axis = (("key", "value"), 2) if memory == "kv" else (("hidden",), 1)
    kv_shape = (batch_size, config.n_head, memory_length, config.d_head)
    shape = kv_shape if memory == "kv" else (batch_size, memory_length, config.d_model)
    names = [f"layers.{i:02d}.{role}" for i in range(config.n_layer) for role in roles]
    return tuple(
        StateTensor(name=name, input=f"memory.{name}", output=f"new_memory.{name}", shape=shape, axis=axis)
        for name in names
    )


def program_inputs(states: tuple[StateTensor, ...], batch_size: int, segment_length: int) -> tuple[TensorSpec, ...]:
    """The inputs of a rolled program, in the order of the graph."""
    return (
        TensorSpec(name="tokens", dtype="int32", shape=(batch_size, segment_length)),
        TensorSpec(name="valid", dtype="int32", shape=(batch_size,)),
        TensorSpec(name="fill", dtype="int32", shape=(batch_size,)),
        *(TensorSpec(name=state.input, dtype=state.dtype, shape=state.shape) for state in states),
    )


def program_outputs(
    config: ModelConfig, states: tuple[StateTensor, ...], batch_size: int, segment_length: int
) -> tuple[TensorSpec, ...]:
    """The outputs of a rolled `logprobs` program, in the order of the graph."""
    return (
        TensorSpec(name="logprobs", dtype="float32", shape=(batch_size, segment_length, config.vocab_size)),
        *(TensorSpec(name=state.output, dtype=state.dtype, shape=state.shape) for state in states),
    )


class _Header(Struct):
    format: str
    format_version: str


def decode_manifest(data: bytes, source: str) -> Manifest:
    """Parse and cross-check a manifest.

    Raises:
        BundleError: not JSON, a field of the wrong kind or range, a newer major version, or fields that contradict.
    """
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.format != FORMAT:
            raise BundleError(f"{source}: format is {header.format!r}, expected {FORMAT!r}; export the model again")
        _check_version(header.format_version, source)
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BundleError(f"{source}: {error}; expected the manifest of a bundle; export the model again") from None
    except RecursionError:
        raise BundleError(f"{source}: nested too deeply for a manifest; export the model again") from None
    for problem in _contradictions(manifest):
        raise BundleError(f"{source}: {problem}; export the model again")
    return manifest


def _check_version(version: str, source: str) -> None:
    known = FORMAT_VERSION.split(".")[0]
    major = version.split(".")[0]
    if not major.isdecimal():
        raise BundleError(f"{source}: format_version is {version!r}, expected e.g. {FORMAT_VERSION!r}; export again")
    if int(major) > int(known):
        raise BundleError(
            f"{source}: written in format {version}, this version reads up to {known}.x; upgrade txl-deploy"
        )


def _contradictions(manifest: Manifest) -> list[str]:
    """What in a manifest cannot be true; empty when all is well."""
    m, found = manifest, []
    bounds = (0, *m.config.cutoffs, m.config.vocab_size)
    if any(first >= last for first, last in pairwise(bounds)):
        found.append(f"cutoffs {list(m.config.cutoffs)} do not ascend within the vocabulary of {m.config.vocab_size}")
    for state in m.states:
        if state.update not in UPDATE_RULES:
            found.append(f"{state.name} has update rule {state.update!r}, this version knows {', '.join(UPDATE_RULES)}")
    if m.config.n_layer > max(len(m.states), 1) and m.memory_length:
        found.append(f"n_layer is {m.config.n_layer}, but the state table has {len(m.states)} tensors")
    if found:
        return found
    plain = expected_states(m.config, m.memory, m.batch_size, m.memory_length)
    if [msgspec.structs.replace(state, initial=None) for state in m.states] != list(plain):
        found.append(f"the state table does not fit {m.memory} memory with B {m.batch_size}, M {m.memory_length}")
    for path in [m.weights, *([m.vocabulary] if m.vocabulary else []), *(p.file for p in m.programs)]:
        if path not in m.files:
            found.append(f"{path} is used but not in the list of files")
    found.extend(f"file name {path!r} leaves the bundle" for path in m.files if not _inside(path))
    names = [program.name for program in m.programs]
    found.extend(f"two programs are called {name}" for name in sorted(set(names)) if names.count(name) > 1)
    seen: set[tuple[str, int, str]] = set()
    for program in m.programs:
        if program.update not in UPDATE_RULES:
            found.append(f"program {program.name} has update rule {program.update!r}, known: {', '.join(UPDATE_RULES)}")
        if program.kind not in PROGRAM_KINDS:
            found.append(f"program {program.name} is of kind {program.kind!r}, known: {', '.join(PROGRAM_KINDS)}")
        key = (program.kind, program.segment_length, program.update)
        if key in seen:
            found.append(f"two programs are {program.kind} of segment length {program.segment_length}")
        seen.add(key)
        if program.inputs != program_inputs(m.states, m.batch_size, program.segment_length):
            found.append(f"the inputs of program {program.name} do not fit the state table")
        if program.outputs != program_outputs(m.config, m.states, m.batch_size, program.segment_length):
            found.append(f"the outputs of program {program.name} do not fit the state table")
    return found


def _inside(path: str) -> bool:
    parts = PurePosixPath(path)
    plain = not parts.is_absolute() and ".." not in parts.parts and path == parts.as_posix()
    return bool(path) and path != "." and plain and "\\" not in path and ":" not in path and "\0" not in path
