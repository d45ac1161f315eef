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

from txl_runtime.config import Count, Dialect, Index, ModelConfig, Size
from txl_runtime.errors import BundleError

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "STATE_DTYPES",
    "UPDATE_RULES",
    "FileRecord",
    "Manifest",
    "Precision",
    "Program",
    "StateTensor",
    "TensorSpec",
    "decode_manifest",
    "expected_programs",
    "expected_states",
    "ring_slots",
    "segment_program",
]

FORMAT = "txl-deploy.bundle"
FORMAT_VERSION = "1.1"
UPDATE_RULES = ("ring", "rolled")

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
Floating = Literal["float32", "float16", "bfloat16"]
DType = Literal["int32", "float32", "float16", "bfloat16"]
STATE_DTYPES: dict[str, Floating] = {"fp16": "float16", "bf16": "bfloat16"}
"""What memory is kept in, where it is not float32."""


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One graph input or output; "rows" in a shape is any number of them."""

    name: str
    dtype: DType
    shape: tuple[Count | Literal["rows"], ...]

    @property
    def fixed(self) -> tuple[int, ...]:
        """The shape of a tensor that leaves no size open."""
        return tuple(int(size) for size in self.shape)


class StateTensor(Struct, frozen=True, kw_only=True):
    """One tensor of the recurrent state, as the programs see it.

    Attributes:
        name: as `Stream.memory()` calls it, e.g. "layers.00.key".
        input, output: the names in the graphs; they sort alike, and none is a prefix of another.
        shape: with the batch first; `axis` is the one whose rows are memory rows, oldest first.
        initial: the weight file's tensor that every row starts as; None for zeros.
        update: "rolled": the graph returns the whole new memory; filled rows stand last. "ring": rows stand in slots
            0 … slots-1, the next one goes to slot `head`; what lies behind those slots is for rows to spill into.
            A tensor of one name stands in the table once for each rule that the bundle has programs of.
        slots: of the ring.
    """

    name: str
    input: str
    output: str
    dtype: Floating = "float32"
    shape: tuple[Count, ...]
    axis: Index
    initial: str | None = None
    update: str = "rolled"
    slots: Count | None = None


class Program(Struct, frozen=True, kw_only=True):
    """One graph: a kind of output, a segment length, an update rule.

    Attributes:
        name: of the program; unique.
        kind: what it computes. "logprobs": log-probabilities of a segment. "hidden": what the softmax takes, of a
            segment. "head", "tail.<c>": parts of the softmax, of any number of rows (`txl_export.softmax`). Only
            engines have "last", log-probabilities after a stream's last valid row, and "score", those of targets.
        segment_length: L; 0 for the softmax programs, which know no segments.
        update: what becomes of the memory, "rolled" or "ring"; "none" for the softmax programs.
        file: the graph. Programs that differ in L alone may share one.
        inputs, outputs: of the graph, in its order.
    """

    name: str
    kind: str
    segment_length: Index
    update: str
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class FileRecord(Struct, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 of a file in the bundle."""

    size: Size
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
    precision: Precision
    states: tuple[StateTensor, ...]
    programs: Annotated[tuple[Program, ...], Meta(min_length=1)]
    weights: str
    files: dict[str, FileRecord]
    vocabulary: str | None = None
    parameters: Size = 0
    parity: dict[str, Any] = msgspec.field(default_factory=dict)
    provenance: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """L of the programs, largest first."""
        return tuple(sorted({p.segment_length for p in self.programs if p.segment_length}, reverse=True))

    @property
    def updates(self) -> tuple[str, ...]:
        """The update rules it has programs of, the fastest first."""
        found = {program.update for program in self.programs}
        return tuple(rule for rule in UPDATE_RULES if rule in found)

    def states_of(self, update: str) -> tuple[StateTensor, ...]:
        """The state as the programs of one update rule see it."""
        return tuple(state for state in self.states if state.update == update)

    @property
    def state_bytes(self) -> int:
        """Bytes of memory that one stream holds: M rows per tensor, however they are laid out."""
        states = self.states_of(self.updates[0])
        rows = (_product(state.shape) // state.shape[state.axis] for state in states)
        size = 2 if self.precision in STATE_DTYPES else 4
        return size * self.memory_length * sum(rows) // self.batch_size

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


def ring_slots(memory_length: int, segment_length: int) -> tuple[int, int]:
    """R, the slots of a ring, and C, those with the ones to spill into, for segments of at most `segment_length`.

    R >= M + L, so that a segment's padding overwrites no memory. A segment of one token cannot spill.
    """
    ring = memory_length + segment_length
    return ring, ring + (segment_length if segment_length > 1 else 0)


def expected_states(
    config: ModelConfig,
    memory: str,
    batch_size: int,
    memory_length: int,
    updates: tuple[str, ...],
    longest: int,
    precision: str = "fp32",
) -> tuple[StateTensor, ...]:
    """The state table that a config implies, for some update rules and a longest segment; none when M is 0."""
    if not memory_length:
        return ()
    ring, columns = ring_slots(memory_length, longest)
    table = []
    for update in updates:
        slots = columns if update == "ring" else memory_length
        roles, axis = (("key", "value"), 2) if memory == "kv" else (("hidden",), 1)
        kv_shape = (batch_size, config.n_head, slots, config.d_head)
        shape = kv_shape if memory == "kv" else (batch_size, slots, config.d_model)
        names = [f"layers.{i:02d}.{role}" for i in range(config.n_layer) for role in roles]
        table += [
            StateTensor(
                name=name,
                input=f"memory.{name}",
                output=f"new_memory.{name}",
                dtype=STATE_DTYPES.get(precision, "float32"),
                shape=shape,
                axis=axis,
                update=update,
                slots=ring if update == "ring" else None,
            )
            for name in names
        ]
    return tuple(table)


def segment_program(
    config: ModelConfig, states: tuple[StateTensor, ...], batch_size: int, length: int, kind: str, update: str
) -> Program:
    """A program of segments: "logprobs" or "hidden", or an engine's "last" or "score"; rolled or ring.

    What the softmax takes and what it returns is float32 in every precision.
    """
    mine = [state for state in states if state.update == update]
    counts = ("valid", "fill", "head") if update == "ring" else ("valid", "fill")
    results = {
        "logprobs": TensorSpec(name="logprobs", dtype="float32", shape=(batch_size, length, config.vocab_size)),
        "hidden": TensorSpec(name="hidden", dtype="float32", shape=(batch_size, length, config.d_model)),
        "last": TensorSpec(name="logprobs", dtype="float32", shape=(batch_size, config.vocab_size)),
        "score": TensorSpec(name="nll", dtype="float32", shape=(batch_size, length)),
    }
    read = ("tokens", "targets") if kind == "score" else ("tokens",)
    name = f"{kind}-{length}" if update == "rolled" else f"{kind}-{update}-{length}"
    return Program(
        name=name,
        kind=kind,
        segment_length=length,
        update=update,
        file=f"{name}.onnx" if update == "rolled" else f"{kind}-{update}.onnx",
        inputs=(
            *(TensorSpec(name=ids, dtype="int32", shape=(batch_size, length)) for ids in read),
            *(TensorSpec(name=count, dtype="int32", shape=(batch_size,)) for count in counts),
            *(TensorSpec(name=state.input, dtype=state.dtype, shape=state.shape) for state in mine),
        ),
        outputs=(
            results[kind],
            *(TensorSpec(name=state.output, dtype=state.dtype, shape=state.shape) for state in mine),
        ),
    )


def softmax_program(config: ModelConfig, cluster: int) -> Program:
    """The program of a cluster's words; cluster 0 is the head, which holds the further clusters as well."""
    first, last = config.clusters[cluster]
    columns = last - first + (0 if cluster else len(config.clusters) - 1)
    name = f"tail.{cluster}" if cluster else "head"
    return Program(
        name=name,
        kind=name,
        segment_length=0,
        update="none",
        file=f"{name}.onnx",
        inputs=(TensorSpec(name="hidden", dtype="float32", shape=("rows", config.d_model)),),
        outputs=(TensorSpec(name="logprobs", dtype="float32", shape=("rows", columns)),),
    )


def expected_programs(
    config: ModelConfig,
    states: tuple[StateTensor, ...],
    batch_size: int,
    lengths: tuple[int, ...],
    updates: tuple[str, ...],
) -> tuple[Program, ...]:
    """The programs of a bundle: whole ones that are rolled; for the ring, and for engines, layers and softmax apart."""
    programs = []
    if "ring" in updates:
        programs += [segment_program(config, states, batch_size, length, "hidden", "ring") for length in lengths]
    programs += [softmax_program(config, cluster) for cluster in range(len(config.clusters))]
    if "rolled" in updates:
        programs += [segment_program(config, states, batch_size, length, "logprobs", "rolled") for length in lengths]
    return tuple(programs)


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
    lengths = m.segment_lengths
    if not lengths or not m.updates:
        return ["no program runs segments"]
    plain = expected_states(m.config, m.memory, m.batch_size, m.memory_length, m.updates, lengths[0], m.precision)
    if [msgspec.structs.replace(state, initial=None) for state in m.states] != list(plain):
        found.append(f"the state table does not fit {m.memory} memory with B {m.batch_size}, M {m.memory_length}")
        return found
    initial = {state.name: state.initial for state in m.states}
    found.extend(
        f"{state.name} starts as {state.initial} and as {initial[state.name]}, expected one row for all update rules"
        for state in m.states
        if state.initial != initial[state.name]
    )
    for path in [m.weights, *([m.vocabulary] if m.vocabulary else []), *(p.file for p in m.programs)]:
        if path not in m.files:
            found.append(f"{path} is used but not in the list of files")
    found.extend(f"file name {path!r} leaves the bundle" for path in m.files if not _inside(path))
    names = [program.name for program in m.programs]
    found.extend(f"two programs are called {name}" for name in sorted(set(names)) if names.count(name) > 1)
    known = {p.name: p for p in expected_programs(m.config, m.states, m.batch_size, lengths, m.updates)}
    # Rolled programs are whole: only engines are composed of them and a softmax apart, which format 1.0 did not write.
    optional = {name for name, program in known.items() if program.update == "none" and "ring" not in m.updates}
    missing = sorted(set(known) - set(names) - optional)
    found.extend(f"program {name} is missing" for name in missing)
    for program in m.programs:
        if program.update not in (*UPDATE_RULES, "none"):
            found.append(f"program {program.name} has update rule {program.update!r}, known: {', '.join(UPDATE_RULES)}")
        elif program.name not in known:
            found.append(f"program {program.name} is {program.kind!r}, known: {', '.join(known)}")
        else:
            expected = known[program.name]
            for field in ("kind", "segment_length", "update", "inputs", "outputs"):
                if getattr(program, field) != getattr(expected, field):
                    found.append(f"the {field} of program {program.name} do not fit the state table")
    return found


def _inside(path: str) -> bool:
    parts = PurePosixPath(path)
    plain = not parts.is_absolute() and ".." not in parts.parts and path == parts.as_posix()
    return bool(path) and path != "." and plain and "\\" not in path and ":" not in path and "\0" not in path
