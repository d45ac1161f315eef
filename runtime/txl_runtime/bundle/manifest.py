"""The manifest: what a bundle says of itself, and the checks that it can be believed.

`manifest.json` is one JSON object. Unknown fields are ignored, so that a newer minor version still loads; a newer major
version is refused by name. Everything that the files have to agree on is cross-checked here, without opening them:
states and programs against the config, files against the list, paths against the folder.
"""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from txl_runtime.bundle.format1 import Dialect, ModelConfig, TransformerXL
from txl_runtime.bundle.tables import (
    STATE_DTYPES,
    UPDATE_RULES,
    Count,
    FileRecord,
    Index,
    Precision,
    Program,
    Sha256,
    Size,
    StateTensor,
)
from txl_runtime.errors import BundleError

FORMAT = "txl-deploy.bundle"
FORMAT_VERSION = "1.1"


class Manifest(Struct, TransformerXL, frozen=True, kw_only=True):
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
    def state_bytes(self) -> int:
        """Bytes of memory that one stream holds: M rows per tensor, however they are laid out."""
        states = self.states_of(self.updates[0])
        size = 2 if self.precision in STATE_DTYPES else 4
        return size * self.memory_length * sum(math.prod(state.row_shape) for state in states)


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
    m, found = manifest, manifest.config_problems()
    for state in m.states:
        if state.update not in UPDATE_RULES:
            found.append(f"{state.name} has update rule {state.update!r}, this version knows {', '.join(UPDATE_RULES)}")
    if found:
        return found
    if not m.segment_lengths or not m.updates:
        return ["no program runs segments"]
    if [msgspec.structs.replace(state, initial=None) for state in m.states] != list(m.implied_states()):
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
    known = {program.name: program for program in m.implied_programs()}
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
