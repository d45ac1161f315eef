"""The JSON beside an engine: what the engine is, from what it was made, and so whether it still fits.

An engine is reused when everything that went into it is the same. Otherwise each difference is told in a sentence.
An engine is what a backend of a device loads: a plan that TensorRT or TensorRT-RTX compiled, or, for backend cuda, a
graph of fixed sizes that ONNX Runtime opens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from txl_runtime.bundle.encoding import canonical_json, file_sha256
from txl_runtime.bundle.folder import Folder
from txl_runtime.bundle.tables import Count, Floating, Index, Program, Sha256, Size, TensorSpec
from txl_runtime.device.dtypes import tensor_bytes
from txl_runtime.device.engines.library_features import MODULES
from txl_runtime.errors import BundleError, one_line

FORMAT = "txl-deploy.engine"
FORMAT_VERSION = "1.0"
MOST_BYTES = 1 << 24
"""Of a sidecar; it lists the layers of an engine."""
MOST_OFFSET = (1 << 63) - 1
"""In a file."""
ADVICE = "build the engine again with `txl-deploy build`"
RECIPE, RTX_RECIPE = 2, 4
"""Count changes of how engines are built from the same graph; part of an engine's identity. The second is that of
TensorRT-RTX: since 4, an engine makes no device memory while it runs, so others can record its work."""

Target = Literal["rtx", "tensorrt", "cuda"]
"""The backends that load engines."""
TARGETS: tuple[Target, ...] = ("rtx", "tensorrt", "cuda")
FLAVOURS: dict[Target, str] = {"rtx": MODULES["rtx"], "tensorrt": MODULES["tensorrt"], "cuda": "onnxruntime"}
"""The module that runs a target's engines."""
COMPOSED = "recipe 2"
"""The `version` of graphs for backend cuda: it changes when they are composed in a way that the runtime has to know."""
ANYWHERE = "any"
"""The `platform` of engines that fit every one."""


class GivenWeight(TensorSpec, frozen=True, kw_only=True):
    """A weight that an engine takes as an input, with its type and shape there.

    Attributes:
        offset: where it starts in the bundle's file of weights.
        turned: whether the last two axes lie the other way round in that file.
    """

    dtype: Floating
    shape: Annotated[tuple[Count, ...], Meta(min_length=2, max_length=32)]
    offset: Size
    turned: bool

    def __post_init__(self) -> None:
        if self.offset + tensor_bytes(self) > MOST_OFFSET:
            raise ValueError("a weight that no file holds")

    @property
    def place(self) -> tuple[int, tuple[int, ...]]:
        """What is equal of two where one is the beginning of the other on the device, as tables of two sizes are."""
        return self.offset, self.fixed if self.turned else ()


def with_weights(program: Program, given: Sequence[GivenWeight]) -> Program:
    """A program with the weights that its engine is given among its inputs, behind its own."""
    return msgspec.structs.replace(program, inputs=(*program.inputs, *given))


def distinct(given: Iterable[GivenWeight]) -> dict[tuple[int, tuple[int, ...]], GivenWeight]:
    """By its place, each weight that lies on the device: of those at one place the largest."""
    found: dict[tuple[int, tuple[int, ...]], GivenWeight] = {}
    for weight in given:
        found[weight.place] = max(weight, found.get(weight.place, weight), key=tensor_bytes)
    return found


class Identity(Struct, frozen=True, kw_only=True):
    """Everything that decides an engine's bytes.

    Attributes:
        flavour, version: the module that runs it, "tensorrt", "tensorrt_rtx" or "onnxruntime", and the version that
            built it. Graphs for ONNX Runtime fit every version of it; theirs is `COMPOSED`.
        compute_capabilities: the GPUs that it was asked for; empty for the library's default or the GPU at hand.
        device: the GPU that it was built on, where it runs on no other; None where any GPU will do. Up to 0.8.0 it is
            written without the number of multiprocessors, and then not held against one.
        platform: operating system and processor, or `ANYWHERE`. Up to 0.8.0 engines of TensorRT-RTX have one too, which
            is not held against them.
        program, kind, segment_length, update, inputs, outputs: the `Program`.
        precision: of the bundle.
        onnx: SHA-256 of the graph that it was made of.
        weights: SHA-256 of each file of external weights.
        recipe: see `RECIPE`.
        given: weights that the engine does not hold and takes as inputs beside those of the program.
    """

    flavour: str
    version: str
    compute_capabilities: tuple[Count, ...]
    device: str | None
    platform: str
    program: str
    kind: str
    segment_length: Count
    update: str
    precision: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    onnx: Sha256
    weights: dict[str, Sha256]
    recipe: Index = RECIPE
    given: tuple[GivenWeight, ...] = ()

    @property
    def given_memory(self) -> bool:
        """Whether the engine works in device memory that it is given. TensorRT's makes its own when it is loaded."""
        return self.flavour == MODULES["rtx"] and self.recipe >= RTX_RECIPE

    @property
    def key(self) -> str:
        """SHA-256 over all of it."""
        return hashlib.sha256(canonical_json(self)).hexdigest()

    def as_program(self) -> Program:
        """The program that the engine was built of."""
        return Program(
            name=self.program,
            kind=self.kind,
            segment_length=self.segment_length,
            update=self.update,
            file="",
            inputs=self.inputs,
            outputs=self.outputs,
        )


class Sidecar(Struct, frozen=True, kw_only=True):
    """An engine's facts.

    Attributes:
        identity: what it was made from; `key` is its hash.
        sha256, bytes: of the engine file.
        seconds: that the build took.
        weight_bytes: of the weights out of the bundle's file that the engine holds itself; None up to 0.8.0.
        kernels: layers that start work on the device, those of a loop once; None where nothing lists them all.
        layers: each layer's name and kind, in the order they run.
        attention_layers, fused_attention: attentions in the graph, and those that became one kernel each.
        fused_kernels: their names.
        in_place: states that are updated in place.
        read_in_place: those of them that attention reads where they are; the others it reads from a copy.
        copying: kernels that do nothing but copy such states.
        verified_on: what was checked, and where.
    """

    format: str = FORMAT
    format_version: str = FORMAT_VERSION
    key: Sha256
    identity: Identity
    sha256: Sha256
    bytes: Size
    seconds: Annotated[float, Meta(ge=0)]
    weight_bytes: Size | None = None
    kernels: Index | None = None
    layers: tuple[tuple[str, str], ...] = ()
    attention_layers: Index = 0
    fused_attention: Index = 0
    fused_kernels: dict[str, Index] = msgspec.field(default_factory=dict)
    in_place: Index = 0
    read_in_place: Index = 0
    copying: Index = 0
    verified_on: tuple[str, ...] = ()


def held_weights(engines: Sequence[Sidecar], weight_bytes: int) -> tuple[int, int]:
    """Bytes of weights on a device: of all together, and of those that are there once for all engines.

    Args:
        weight_bytes: of their bundle, for engines whose facts do not say what they hold.
    """
    given = (weight for engine in engines for weight in engine.identity.given)
    shared = sum(map(tensor_bytes, distinct(given).values()))
    own = (weight_bytes if engine.weight_bytes is None else engine.weight_bytes for engine in engines)
    return shared + sum(own), shared


def engine_path(target: Target, program: str) -> str:
    """Where the engine of a program of that name lies in a bundle."""
    return f"engines/{target}/{program}.{'onnx' if target == 'cuda' else 'engine'}"


def sidecar_path(engine: str) -> str:
    """Where the facts of an engine file lie."""
    return f"{engine.rpartition('.')[0]}.json"


def read_sidecar(path: Path) -> Sidecar:
    """Read an engine's facts.

    Raises:
        BundleError: there are none, or they cannot be read.
    """
    try:
        with Folder(path.parent).open(path.name) as (file, _):
            return decode_sidecar(file.read(MOST_BYTES + 1), str(path))
    except FileNotFoundError:
        raise BundleError(f"{path}: missing, expected the facts of the engine beside it; {ADVICE}") from None
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; expected the facts of an engine; {ADVICE}") from None


def decode_sidecar(data: bytes, source: str) -> Sidecar:
    """An engine's facts from their JSON.

    Raises:
        BundleError: they are none, or of a newer version.
    """
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        sidecar = msgspec.json.decode(data, type=Sidecar)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise BundleError(f"{source}: {one_line(error)}; expected the facts of an engine; {ADVICE}") from None
    if sidecar.format != FORMAT:
        raise BundleError(f"{source}: format is {sidecar.format[:40]!r}, expected {FORMAT!r}; {ADVICE}")
    if sidecar.format_version.partition(".")[0] != FORMAT_VERSION.partition(".")[0]:
        raise BundleError(
            f"{source}: written in format {sidecar.format_version[:40]}, this version reads {FORMAT_VERSION}; upgrade "
            "txl-deploy, or build the engine again"
        )
    return sidecar


# What an engine that differs "was" or "has"; an entry for one flavour goes before the one for all.
WORDS = {
    "flavour": "was built by {found}, the library here is {wanted}",
    "version": "was built by version {found}, the library here is {wanted}, and engines fit one version only",
    "version of onnxruntime": "was composed by {found}, this version of txl-deploy takes {wanted}",
    "compute_capabilities": "was built for {found}, asked for is {wanted}",
    "device": "was built on {found}, here is {wanted}, and it fits one GPU only",
    "platform": "was built for {found}, this is {wanted}",
    "onnx": "was built from another graph file",
    "weights": "was built from other weights",
    "recipe": "was built in an older way",
    "precision": "was built for {found}, the bundle is {wanted}",
    "inputs": "was built for other inputs",
    "outputs": "was built for other outputs",
    "given": "shares {found} weights with other engines, asked for is {wanted}",
}


def differences(found: Identity, wanted: Identity) -> list[str]:
    """Why an engine is not the one wanted, a sentence each; empty when it is."""
    reasons = []
    for name in Identity.__struct_fields__:
        has, wants = getattr(found, name), getattr(wanted, name)
        uncounted = wants == ANYWHERE if name == "platform" else name == "device" and str(wants).startswith(f"{has}, ")
        if has != wants and not uncounted:
            words = WORDS.get(name, f"has {name} {{found}}, asked for is {{wanted}}")
            words = WORDS.get(f"{name} of {wanted.flavour}", words)
            reasons.append(words.format(found=_shown(name, has), wanted=_shown(name, wants)))
    return reasons


def _shown(name: str, value: Any) -> str:
    if name == "compute_capabilities":
        return f"SM {', '.join(map(str, value))}" if value else "the default list of GPUs"
    if name == "given":
        return str(len(value))
    return "no known GPU" if value is None else str(value)


def is_intact(path: Path, sidecar: Sidecar) -> bool:
    """Whether an engine file is the one its sidecar describes."""
    return path.is_file() and path.stat().st_size == sidecar.bytes and file_sha256(path) == sidecar.sha256
