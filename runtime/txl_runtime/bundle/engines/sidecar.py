"""The sidecar, a JSON file beside an engine: its facts and the origin that decides whether it still fits.

An engine is reused if everything that decided its bytes is the same; otherwise a message names each difference. An
engine is the file that a device's backend loads: a plan that TensorRT or TensorRT-RTX compiled, or, for backend cuda,
a graph of fixed sizes that ONNX Runtime opens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from txl_runtime.bundle.encoding import canonical_json, file_sha256
from txl_runtime.bundle.folder import Folder
from txl_runtime.bundle.tables import Count, Floating, Index, Program, Sha256, Size, TensorSpec, tensor_bytes
from txl_runtime.errors import BundleError, one_line, printable

FORMAT = "txl-deploy.engine"
FORMAT_VERSION = "1.0"
MOST_BYTES = 1 << 24
"""Maximum number of bytes of a sidecar, 16 MiB: it lists all layers of an engine."""
MOST_OFFSET = (1 << 63) - 1
"""Largest offset in a file, in bytes: systems count offsets in signed 64-bit integers."""
MOST_REACHED = 50.0, 1.0
"""Largest allowed `Sidecar.reached`, in nats and relative: with larger values any result of a device would pass."""
ADVICE = "build the engine again with `txl-deploy build`"
RECIPE, RTX_RECIPE = 2, 4
"""Versions of the way in which engines are built from the same graph; part of an engine's identity. `RTX_RECIPE` is for
TensorRT-RTX: since 4, an engine allocates no device memory while it runs, so the loop can record its work.
"""

Target = Literal["rtx", "tensorrt", "cuda"]
"""Names of the backends that load engines."""
TARGETS: tuple[Target, ...] = ("rtx", "tensorrt", "cuda")
Rounding = Literal["int8", "fp8", "int4"]
"""Precisions to which `txl-deploy build` rounds an engine's matrices."""
CODES: dict[Rounding, Literal["int8", "float8e4m3fn"]] = {"int8": "int8", "fp8": "float8e4m3fn"}
"""Types of codes by precision. A code is a weight divided by its matrix's one scale, and rounded. Engines can share
matrices of such codes; int4 has more than one scale per matrix.
"""
FLAVOURS: dict[Target, str] = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt", "cuda": "onnxruntime"}
"""Python modules that run engines, by target."""
COMPOSED = "recipe 2"
"""`Identity.version` of graphs for backend cuda; it changes if newly composed graphs need a new runtime."""
ANYWHERE = "any"
"""`Identity.platform` of engines that fit all platforms."""


Place: TypeAlias = tuple[int, str, tuple[int, ...], float | None]


class GivenWeight(TensorSpec, frozen=True, kw_only=True):
    """A weight that an engine takes as an input, with the input's type and shape.

    Attributes:
        offset: place of the weight's first byte in the bundle's weight file, in bytes.
        turned: whether the last two axes are transposed in that file: an input [K, N] is [N, K] in the file.
        scale: number by which the engine multiplies its input, which holds codes; None for the file's own values.
    """

    dtype: Floating | Literal["int8", "float8e4m3fn"]  # type: ignore[assignment]  # no table of a bundle has codes
    shape: Annotated[tuple[Count, ...], Meta(min_length=2, max_length=32)]
    offset: Size
    turned: bool
    scale: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        if self.offset + tensor_bytes(self) > MOST_OFFSET:
            raise ValueError("a weight that no file holds")

    @property
    def place(self) -> Place:
        """The key of the weight's device memory: weights of the same key begin at the same byte and share memory."""
        return self.offset, self.dtype, self.fixed if self.turned else (), self.scale


def with_weights(program: Program, given: Sequence[GivenWeight]) -> Program:
    """Return the program with the engine's weights as further inputs after the program's own inputs."""
    return msgspec.structs.replace(program, inputs=(*program.inputs, *given))


def distinct(given: Iterable[GivenWeight]) -> dict[Place, GivenWeight]:
    """Return the weights to put on the device, by place; only the largest if several weights have one place."""
    weights: dict[Place, GivenWeight] = {}
    for weight in given:
        weights[weight.place] = max(weight, weights.get(weight.place, weight), key=tensor_bytes)
    return weights


class Identity(Struct, frozen=True, kw_only=True):
    """Everything that decides an engine's bytes.

    Attributes:
        flavour, version: the Python module that runs the engine, "tensorrt", "tensorrt_rtx" or "onnxruntime", and the
            module's version that built the engine. Graphs for ONNX Runtime, which fit every version, have `COMPOSED`.
        compute_capabilities: compute capabilities, times 10, of the GPUs that the engine was built for; empty for the
            library's default or the building machine's GPU.
        device: the GPU that the engine was built on, if it runs on no other; None if any GPU will do. Files up to 0.8.0
            lack the number of multiprocessors, which is then not compared.
        platform: operating system and processor, or `ANYWHERE`. Engines of TensorRT-RTX up to 0.8.0 have a platform,
            too, which is not compared.
        program, kind, segment_length, update, inputs, outputs: fields of the `Program`.
        precision: the bundle's precision.
        onnx: SHA-256 of the graph that the engine was built from.
        weights: SHA-256 of each file of external weights.
        recipe: see `RECIPE`.
        given: weights that the engine does not hold and takes as inputs, besides the program's inputs.
        rounding: precision to which the engine's matrices were rounded; "" for the bundle's own precision.
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
    rounding: Rounding | Literal[""] = ""

    @property
    def given_memory(self) -> bool:
        """True if the engine has to be given its working memory; TensorRT's engines allocate it while loading."""
        return self.flavour == FLAVOURS["rtx"] and self.recipe >= RTX_RECIPE

    @property
    def key(self) -> str:
        """The SHA-256 over all fields of this identity, as hexadecimal digits."""
        return hashlib.sha256(canonical_json(self)).hexdigest()

    def as_program(self) -> Program:
        """Return the program that the engine was built from."""
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
        identity: everything that decides the engine's bytes; `key` is the identity's hash.
        sha256, bytes: hash and size of the engine file.
        seconds: duration of the build.
        weight_bytes: bytes of weights from the bundle's file that the engine holds itself; None in files up to 0.8.0.
        saved_bytes: bytes by which the engine's rounded matrices are smaller than the bundle's.
        kernels: number of layers that start work on the device, a loop's layers counted once; None if unknown.
        layers: each layer's name and kind, in the order in which they run.
        attention_layers, fused_attention: number of attentions in the graph, and of attentions that became one kernel.
        fused_kernels: number of kernels that are whole attentions, by the kernels' names.
        in_place: number of states that are updated in place.
        read_in_place: number of these states that attention reads in place; attention reads all others from a copy.
        copying: number of kernels that only copy such states.
        verified_on: checks that were made, and the machines.
        reached: largest differences of outputs and of states that the self-test of rounded matrices found on the CPU;
            the self-test's limits come from these.
        judged: values by which the ladder judged rounded matrices on the CPU, by gate; None for a gate that only real
            text judges.
    """

    format: str = FORMAT
    format_version: str = FORMAT_VERSION
    key: Sha256
    identity: Identity
    sha256: Sha256
    bytes: Size
    seconds: Annotated[float, Meta(ge=0)]
    weight_bytes: Size | None = None
    saved_bytes: Size = 0
    kernels: Index | None = None
    layers: tuple[tuple[str, str], ...] = ()
    attention_layers: Index = 0
    fused_attention: Index = 0
    fused_kernels: dict[str, Index] = msgspec.field(default_factory=dict)
    in_place: Index = 0
    read_in_place: Index = 0
    copying: Index = 0
    verified_on: tuple[str, ...] = ()
    reached: (
        tuple[Annotated[float, Meta(ge=0, le=MOST_REACHED[0])], Annotated[float, Meta(ge=0, le=MOST_REACHED[1])]] | None
    ) = None
    judged: dict[str, float | None] = msgspec.field(default_factory=dict)


def held_weights(engines: Sequence[Sidecar], weight_bytes: int) -> tuple[int, int]:
    """Return (bytes of all weights on a device, bytes of the weights there that engines share).

    Args:
        weight_bytes: bytes of the bundle's weights, for engines whose facts lack their own.
    """
    weights = (weight for engine in engines for weight in engine.identity.given)
    shared = sum(map(tensor_bytes, distinct(weights).values()))
    own = (weight_bytes if engine.weight_bytes is None else engine.weight_bytes for engine in engines)
    return shared + sum(own), shared


def engine_path(target: Target, program: str) -> str:
    """Return the path of a program's engine in a bundle: engines/rtx/step-1.engine."""
    return f"engines/{target}/{program}.{'onnx' if target == 'cuda' else 'engine'}"


def sidecar_path(engine: str) -> str:
    """Return the path of an engine file's sidecar: engines/rtx/step-1.json."""
    return f"{engine.rpartition('.')[0]}.json"


def read_sidecar(path: Path) -> Sidecar:
    """Return an engine's facts from its sidecar file.

    Raises:
        BundleError: the file is missing, or cannot be read.
    """
    try:
        with Folder(path.parent).open(path.name) as (file, _):
            return decode_sidecar(file.read(MOST_BYTES + 1), str(path))
    except FileNotFoundError:
        raise BundleError(f"{path}: missing, expected the facts of the engine beside it; {ADVICE}") from None
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; expected the facts of an engine; {ADVICE}") from None


def decode_sidecar(data: bytes, source: str) -> Sidecar:
    """Return an engine's facts from their JSON.

    Raises:
        BundleError: the bytes are no sidecar, or a sidecar of a newer version.
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


# Messages by the field that differs; an entry for one flavour takes precedence over the entry for all flavours.
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
    "rounding": "was built with matrices in {found}, asked for is {wanted}",
    "given": "shares {found} weights with other engines, asked for is {wanted}",
}


def differences(found: Identity, wanted: Identity) -> list[str]:
    """Return one sentence per difference between two identities; [] if they are equal."""
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
    if name == "rounding":
        return value or "the bundle's precision"
    return "no known GPU" if value is None else printable(str(value))


def is_intact(path: Path, sidecar: Sidecar) -> bool:
    """Return whether an engine file is the file that its sidecar describes."""
    return path.is_file() and path.stat().st_size == sidecar.bytes and file_sha256(path) == sidecar.sha256
