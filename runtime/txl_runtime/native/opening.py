"""The choice and opening of a bundle's compiled step, which is machine code.

A user who names the backend runs the code in the bundle, as with any other engine. "auto" never runs that code. It runs
the copy that `txl-deploy build` left in this user's cache folder, if the bundle lists a step with the same hash.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.reading import NATIVE, Bundle
from txl_runtime.bundle.tables import Sha256, Size
from txl_runtime.errors import BackendError, BundleError, one_line
from txl_runtime.host.backend import HostBackend
from txl_runtime.host.processor import processor_flags
from txl_runtime.native.engine import NativeEngine
from txl_runtime.native.ring import ByteRing, HalfRing, NativeRing
from txl_runtime.system import is_own

STEP, SIDECAR = f"{NATIVE}step.so", f"{NATIVE}step.json"
"""Names of two files in a bundle: the compiled step, and the step's facts."""

Instructions = Literal["avx512_bf16", "avx512", "avx2", "neon", "plain"]
Cache = Literal["fp32", "fp16", "int8"]
Weights = Literal["fp32", "bf16", "int8", "int4"]

ORDER = ("fp32", "fp16", "bf16", "int8", "int4")
"""Precisions by their limits in the ladder, the narrowest first; a step's widest precision gives its limits."""
RINGS: dict[Cache, type[NativeRing]] = {"fp32": NativeRing, "fp16": HalfRing, "int8": ByteRing}

_AVX2 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni")
FLAGS: dict[Instructions, tuple[str, ...]] = {
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon": ("asimd", "asimddp", "atomics"),
    "plain": (),
}
"""Features of a processor, as /proc/cpuinfo names them, that a step needs, by its instructions, the best first."""


class NativeSidecar(Struct, frozen=True, kw_only=True):
    """The facts of a compiled step.

    Attributes:
        instructions, platform: instruction set and system that the step was compiled for, e.g. avx512, Linux-x86_64.
        precision: precision of the weights: the bundle's, or bf16 from fp32.
        cache: precision of keys, values and tables of positions.
        compiler: the first line of the compiler's own description.
        weights: SHA-256 of the weight file that the step was verified with.
        sha256, bytes: hash and size of the library.
        seconds: duration of the compilation.
        reached: largest differences of log-probabilities and of memory in the self-test on the building machine.
        compared: the largest differences from ONNX Runtime, e.g. {"logprobs": 2e-6}.
        verified_on: platform and instructions of a step of the same sources that was compared in place of this step,
            because this step could not run on the building machine; "" if this step was compared.
    """

    format: Literal["txl-deploy.native"] = "txl-deploy.native"
    format_version: Literal["1.0"] = "1.0"
    instructions: Instructions
    platform: str
    precision: Weights
    cache: Cache
    compiler: str
    weights: Sha256
    sha256: Sha256
    bytes: Size
    seconds: float
    reached: tuple[Annotated[float, Meta(ge=0, le=1)], Annotated[float, Meta(ge=0, le=1)]]
    compared: dict[str, float]
    verified_on: str = ""


def platform_name() -> str:
    """Return the operating system and processor, e.g. Linux-x86_64."""
    return f"{platform.system()}-{platform.machine()}"


def best_instructions() -> Instructions:
    """Return the best instructions in `FLAGS` that this processor has."""
    has = processor_flags()
    return next(name for name, flags in FLAGS.items() if has.issuperset(flags))


def kept_step(sha256: str) -> Path:
    """Return the place of a step's copy in the user's cache folder, where `txl-deploy build` puts it.

    Args:
        sha256: hash of the step's sidecar, which names weights and precisions: the same code may serve other bundles.

    Raises:
        BackendError: this user has no home folder.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:  # XDG's specification says to ignore a relative path, which would lead into a stranger's folder
        home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
        cache = cache_home if cache_home.is_absolute() else home
    except RuntimeError:
        if not cache_home.is_absolute():
            raise BackendError("this user has no home folder, expected one for caches; set XDG_CACHE_HOME") from None
        cache = cache_home
    return cache / "txl-deploy" / "native" / f"{sha256}.so"


def built_here(bundle: Bundle) -> Path | None:
    """Return the user's own copy of the step that a bundle lists; None if this user did not build it here."""
    code, facts = map(bundle.manifest.files.get, (STEP, SIDECAR))
    if code is None or facts is None:
        return None
    try:
        copy = kept_step(facts.sha256)
        same = file_sha256(bundle.file(SIDECAR)) == facts.sha256 and file_sha256(copy) == code.sha256
        return copy if same and is_own(copy.parent) and is_own(copy) else None
    except (OSError, BackendError):
        return None


def missing(bundle: Bundle, update: str | None, lean: bool) -> str:
    """Return the reason why "auto" does not take a bundle's step, found without loading it; "" if there is none."""
    todo = f"txl-deploy build {bundle.path} --target native"
    if STEP not in bundle.manifest.files:
        return f"the bundle has no compiled step, expected that of: {todo}"
    if lean or update not in (None, "ring"):
        return "it keeps memory in a ring and lays weights out anew, and lean or a different update was asked for"
    if built_here(bundle) is None:
        return f"its step is machine code that this user did not compile here, expected that of: {todo}"
    return ""


def read_sidecar(bundle: Bundle) -> NativeSidecar:
    """Return the facts of a bundle's step.

    Raises:
        BackendError: the bundle has no step.
        BundleError: the facts are unreadable, or are not of the step that the bundle lists.
    """
    todo = f"txl-deploy build {bundle.path} --target native"
    files = bundle.manifest.files
    if STEP not in files or SIDECAR not in files:
        raise BackendError(f"{bundle.path}: has no compiled step, expected one for --backend native; {todo}")
    try:
        sidecar = msgspec.json.decode(bundle.read(SIDECAR), type=NativeSidecar)
    except msgspec.MsgspecError as error:
        raise BundleError(f"{bundle.file(SIDECAR)}: {one_line(error)}; {todo}") from None
    if (sidecar.sha256, sidecar.weights) != (files[STEP].sha256, files[bundle.manifest.weights].sha256):
        raise BundleError(f"{bundle.file(SIDECAR)}: is of a different step or different weights; {todo}")
    return sidecar


def check_processor(sidecar: NativeSidecar, source: str) -> None:
    """Raise BackendError if this machine lacks the system or instructions for which a step was compiled."""
    other = sidecar.platform != platform_name()
    lacks = [] if other else sorted({*FLAGS[sidecar.instructions]} - processor_flags())
    if other or lacks:
        here = platform_name() + (f" without {', '.join(lacks)}" if lacks else "")
        raise BackendError(
            f"{source}: was compiled for {sidecar.platform} with {sidecar.instructions}, this is {here}; build it "
            "here with `txl-deploy build`, or use backend cpu"
        )


def open_native(
    bundle: Bundle, update: str | None, threads: int | None, lean: bool, large_pages: bool, own: bool = False
) -> HostBackend:
    """Open a bundle's compiled step.

    Args:
        own: take the user's own copy of the step instead of the bundle's file.
        update, threads, lean, large_pages: see `txl_runtime.load`.

    Raises:
        BackendError: there is no step, or it cannot run here or with these options.
        BundleError: a file is altered.
    """
    sidecar = read_sidecar(bundle)
    check_processor(sidecar, str(bundle.file(STEP)))
    if lean or update not in (None, "ring"):
        raise BackendError(
            "backend native has a ring and a copy of the weights, expected neither lean nor rolled memory; use "
            "backend cpu"
        )
    place = built_here(bundle) if own else bundle.file(STEP)
    if place is None:
        raise BackendError(f"{bundle.path}: this user's copy of its step is gone, expected it; build it again")
    bf16 = sidecar.precision == "bf16"
    if not bf16 and sidecar.precision != bundle.manifest.precision:
        raise BundleError(f"{bundle.file(SIDECAR)}: is of {sidecar.precision}, the bundle is not; build it again")
    opened = open_step(bundle, place, sidecar.cache, threads, large_pages, sidecar.sha256, bf16)
    if f"({sidecar.instructions}," not in opened.description:
        raise BundleError(f"{bundle.file(SIDECAR)}: is of {sidecar.instructions}, the step is not; build it again")
    if (sidecar.cache, sidecar.precision) != ("fp32", "fp32"):
        opened.reached = sidecar.reached
    return opened


def open_step(
    bundle: Bundle,
    library: Path,
    cache: Cache,
    threads: int | None,
    large_pages: bool = True,
    sha256: str = "",
    bf16: bool = False,
) -> HostBackend:
    """Open a compiled step with a bundle's weights.

    Args:
        bf16: whether to round the weights to bf16.

    Raises:
        BackendError: the library or the bundle is of a different kind.
        BundleError: a weight is missing or of a different shape.
    """
    engine = NativeEngine(bundle, library, threads or _cores(), cache, bf16, large_pages, sha256)
    programs = tuple(program for program in bundle.manifest.programs if program.update == "ring")
    precision = bundle.manifest.precision
    lower = max(precision, cache, "bf16" if bf16 else precision, key=ORDER.index)
    ring, changed = RINGS[cache], lower if lower != precision else None
    return HostBackend(engine, "ring", programs, engine.description, "native", ring, precision=changed)


def _cores() -> int:
    """Return the number of physical cores that this process may run on; of all processors if the cores are unknown."""
    try:
        usable = os.sched_getaffinity(0)  # only Linux has this function
        shared = Path("/sys/devices/system/cpu")
        return len({(shared / f"cpu{number}/topology/thread_siblings_list").read_text() for number in usable})
    except (AttributeError, OSError):
        return os.cpu_count() or 1
