"""Compiles a bundle's step in C, verifies it beside ONNX Runtime, and puts it into the bundle."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast

import msgspec
import numpy as np
import txl_runtime
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.bundle.writing import write_whole
from txl_runtime.errors import BackendError, CheckError, UsageError, one_line
from txl_runtime.ladder import no_drift_limit, rung
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model
from txl_runtime.native.engine import unsupported
from txl_runtime.native.opening import (
    SIDECAR,
    STEP,
    Cache,
    Instructions,
    NativeSidecar,
    Weights,
    best_instructions,
    kept_step,
    open_step,
    platform_name,
)
from txl_runtime.selftest import run_selftest
from txl_runtime.starting import APART, environment
from txl_runtime.types import Floats, Ids

from txl_engines.publishing import staging

SOURCES = Path(txl_runtime.__file__).parent / "native" / "source"
OPTIONS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_AVX512 = ("-march=x86-64-v4", "-mavx512vnni")
MACHINES: dict[Instructions, tuple[str, ...]] = {
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-march=x86-64-v3",),
    "neon": ("-march=armv8.2-a+dotprod",),
    "plain": (),
}
"""Options that name an instruction set to the compiler; GCC 11 and Clang 12 know these options."""
COMPILERS = ("cc", "gcc", "clang")
Platform = Literal["linux-x86_64", "linux-aarch64"]
PLATFORMS: dict[Platform, Instructions] = {"linux-x86_64": "avx2", "linux-aarch64": "neon"}
"""Instruction set of a step for a platform that is not this one: most processors have it since 2015 or 2018 (Arm)."""
ZIG = (("x86-64-", "x86_64_"), ("-march=armv8.2-a+", "-mcpu=generic+v8_2a+"))
"""Parts of GCC's options that name processors, each with the part that ziglang has in its place."""
GLIBC = "2.28"
"""Oldest glibc, of 2018, with which a step for a different platform runs if ziglang compiles it."""
FULL, SHORT = 24, 8
"""Number of segments that are compared with a full memory; maximum number of positions of every second segment."""
SPREAD = 5e-4
"""Mean error below fp32 by which late segments may exceed early ones, as a share of the standard deviation."""


@dataclass(frozen=True)
class NativeBuild:
    """A compiled step: its bundle, its facts, and the number of segments in which it was compared."""

    bundle: Path
    sidecar: NativeSidecar
    segments: int


def build_native(
    path: str | Path,
    cache: Cache = "fp32",
    instructions: Instructions | None = None,
    listener: Listener | None = None,
    bf16: bool = False,
    platform: Platform | None = None,
) -> NativeBuild:
    """Compile a bundle's step, verify it, and put it into the bundle.

    For a different platform the same sources are first compiled for this machine and verified here.

    Args:
        path: the bundle.
        cache: precision of keys, values and tables of positions.
        instructions: the instruction set to compile for; None for the best that the processor has.
        listener: receives progress.
        bf16: whether the step rounds the weights of an fp32 bundle to bf16.
        platform: the platform to compile for; None for this machine's.

    Raises:
        UsageError: the step cannot run the bundle, or bf16 is asked for a bundle that is not fp32.
        BackendError: there is no compiler, it failed, or this is Windows.
        CheckError: the step differs from the bundle in ONNX Runtime; the bundle is unchanged.
    """
    if sys.platform == "win32":
        raise BackendError("no step in C is made on Windows, expected Linux or macOS; backend cpu runs the bundle")
    listener, bundle = listener or Silent(), open_bundle(path)
    if reason := unsupported(bundle):
        raise UsageError(f"{bundle.path}: {reason}; build no native step of it, backend cpu runs it")
    weights = bundle.manifest.precision
    if bf16 and weights != "fp32":
        raise UsageError(f"{bundle.path}: its precision is {weights}, expected fp32 for --precision bf16; leave it out")
    command, chosen = find_compiler(), instructions or best_instructions()
    where, verified_on = platform_name(), ""
    other = find_cross_compiler(platform) if platform and platform != where.lower() else None
    if not other:
        _place("")  # fail before the compiler runs for seconds
    with staging(bundle.path) as stage:
        library, started = stage.reserve(STEP), time.monotonic()
        listener.stage(f"compile for {chosen}")
        compile_step(command, library, chosen)
        seconds = time.monotonic() - started
        listener.stage("compare with ONNX Runtime")
        reached, compared, segments = _verified(bundle, library, cache, bf16)
        if platform and other:
            verified_on, chosen, command = f"{where} ({chosen})", PLATFORMS[platform], other
            where, started = platform.capitalize(), time.monotonic()
            listener.stage(f"compile for {where}")
            compile_step(command, library, chosen)
            seconds = time.monotonic() - started
        sidecar = NativeSidecar(
            instructions=chosen,
            platform=where,
            precision=cast(Weights, "bf16" if bf16 else weights),
            cache=cache,
            compiler=_version(command),
            weights=bundle.manifest.files[bundle.manifest.weights].sha256,
            sha256=file_sha256(library),
            bytes=library.stat().st_size,
            seconds=round(seconds, 2),
            reached=reached,
            compared=compared,
            verified_on=verified_on,
        )
        facts = msgspec.json.format(msgspec.json.encode(sidecar))
        stage.place(SIDECAR, facts)
        if not other:
            # Keep the user's copy first: otherwise a bundle could have a step that "auto" does not run.
            _keep(library, hashlib.sha256(facts).hexdigest())
        stage.publish()
    return NativeBuild(bundle.path, sidecar, segments)


def _keep(library: Path, sha256: str) -> None:
    """Copy a step into the user's cache folder, from which "auto" takes it."""
    copy = _place(sha256)
    write_whole(copy, library.read_bytes())
    copy.chmod(0o600)


def _place(sha256: str) -> Path:
    """Make the user's cache folder, which only the user can read; return the step's place in it.

    Raises:
        BackendError: the folder cannot be made.
    """
    copy = kept_step(sha256)
    try:
        copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        copy.parent.chmod(0o700)
    except OSError as error:
        raise BackendError(
            f"{copy.parent}: {error.strerror}, expected a folder for the user's copy of the step; set XDG_CACHE_HOME"
        ) from None
    return copy


def find_cross_compiler(platform: Platform) -> tuple[str, ...]:
    """Return the command of a C compiler for a platform: the package ziglang's, or a GCC for that platform.

    Raises:
        BackendError: no such compiler was found.
    """
    target = f"{platform.removeprefix('linux-')}-linux-gnu"
    if find_spec("ziglang") is not None:
        return sys.executable, "-m", "ziglang", "cc", "-target", f"{target}.{GLIBC}"
    if gcc := shutil.which(f"{target}-gcc"):
        return (gcc,)
    raise BackendError(f"no C compiler for {platform} was found, expected {target}-gcc or: pip install ziglang")


def find_compiler() -> tuple[str, ...]:
    """Return the command of a C compiler: $CC, one of `COMPILERS`, or the compiler of the package ziglang.

    Raises:
        BackendError: no compiler was found, or $CC is not a command.
    """
    named = os.environ.get("CC", "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise BackendError(f"$CC is {named!r} ({error}), expected a command; set it to a C compiler") from None
    if command:  # the compiler is started in a different folder
        return (str(Path(command[0]).absolute()) if os.sep in command[0] else command[0], *command[1:])
    if compiler := next(filter(None, map(shutil.which, COMPILERS)), None):
        return (compiler,)
    if find_spec("ziglang") is not None:
        return sys.executable, "-m", "ziglang", "cc"
    raise BackendError(
        f"no C compiler was found, expected {', '.join(COMPILERS)} or $CC; install one, or: pip install ziglang"
    )


def compile_step(command: Sequence[str], library: Path, instructions: Instructions, more: Sequence[str] = ()) -> None:
    """Compile the step's sources into a library.

    Raises:
        BackendError: the compiler is missing or failed; the message has the first line with "error" that it wrote.
    """
    sources = sorted(map(str, SOURCES.glob("*.c")))
    machine = MACHINES[instructions]
    if "ziglang" in command:  # ziglang has names of its own, and traps undefined behaviour unless told not to
        for name, own in ZIG:
            machine = tuple(option.replace(name, own) for option in machine)
        machine = (*machine, "-fno-sanitize=all")
    line = [*command, *OPTIONS, *machine, *more, *sources, "-o", str(library.absolute()), "-lm"]
    try:
        ran = subprocess.run(  # noqa: S603 - the user's compiler
            line, capture_output=True, text=True, errors="replace", check=False, env=environment(), cwd=APART
        )
    except OSError as error:
        raise BackendError(f"{command[0]}: {error.strerror}, expected a C compiler; set $CC to one") from None
    if ran.returncode or not library.exists():
        lines = [text for text in ran.stderr.splitlines() if "error" in text] or ran.stderr.splitlines() or ["nothing"]
        raise BackendError(
            f"{shlex.join(command)} failed ({one_line(ValueError(lines[0]))}), expected GCC 11, Clang 12 or newer; "
            "set $CC to one, or: pip install ziglang"
        )


def _version(command: Sequence[str]) -> str:
    ran = subprocess.run(  # noqa: S603 - as above
        [*command, "--version"], capture_output=True, text=True, check=False, env=environment(), cwd=APART
    )
    return next(iter(ran.stdout.splitlines()), "")[:200]


def _verified(
    bundle: Bundle, library: Path, cache: Cache, bf16: bool
) -> tuple[tuple[float, float], dict[str, float], int]:
    """Run the step beside the bundle in ONNX Runtime; return the self-test's differences, the chain's differences by
    name, and the number of segments.

    Raises:
        CheckError: step and bundle differ by more than the ladder allows.
    """
    expected = Model(bundle, "cpu", update="ring")
    model = Model(bundle, "cpu", update="ring")
    model.backend = open_step(bundle, library, cache, threads=None, bf16=bf16)
    precision = model.backend.precision or bundle.manifest.precision
    plain = precision == "fp32"
    differences, divergences, segments, spread = _compared(expected, model)
    compared = {"logprobs": float(max(map(np.max, differences)))}
    early, late = (float(np.mean(part)) for part in np.array_split([one.mean() for one in differences[-FULL:]], 4)[::3])
    limits = [("drift", late, no_drift_limit(early, None if plain else SPREAD * spread))]
    if plain:
        limits.append(("logprobs", compared["logprobs"], rung("fp32", "native").logprobs or 0))
    else:
        compared["kl"] = float(np.mean(np.concatenate(divergences)))
        limits.append(("kl", compared["kl"], rung(precision, "any").kl))
    for name, value, limit in limits:
        if not value <= limit:
            raise CheckError(
                f"{bundle.path}: the compiled step differs from ONNX Runtime ({name} {value:.2e}, expected at most "
                f"{limit:.2e} over {segments} segments); it was not placed: set $CC to another compiler"
            )
    tested = run_selftest(model).largest
    return (tested["logprobs"], tested["memory"]), compared, segments


def _compared(expected: Model, found: Model) -> tuple[list[Floats], list[Floats], int, float]:
    """Return |Δ| and KL of log-probabilities by segment, the number of segments, and the standard deviation."""
    one, other = expected.stream(), found.stream()
    differences, divergences, deviation = [], [], 0.0
    plan = list(_segments(expected))
    for tokens, lengths in plan:
        wanted, given = one.step(tokens, lengths), other.step(tokens, lengths)
        counts = np.arange(tokens.shape[1]) < lengths[:, None]
        wanted, given = wanted[counts].astype(np.float64), given[counts].astype(np.float64)
        differences.append(np.nan_to_num(np.abs(wanted - given), nan=np.inf))
        wanted, given = (part - np.log(np.exp(part).sum(axis=-1, keepdims=True)) for part in (wanted, given))
        divergences.append((np.exp(wanted) * (wanted - given)).sum(axis=-1))
        deviation = float(wanted.std())
    return differences, divergences, len(plan), deviation


def _segments(model: Model) -> Iterator[tuple[Ids, Ids]]:
    """Yield tokens [B, T] and lengths [B]: partial segments until memory is full, then whole and short segments."""
    rng, longest, memory = np.random.default_rng(0), model.segment_lengths[0], model.memory_length or 0
    batch, words = model.batch_size, model.vocab_size or 1
    fills = -(-memory // longest) + 2
    for number in range(2 * fills + FULL):
        length = longest
        if number >= 2 * fills and number % 2:  # 1, 2, … positions: up to `single_steps` the window differs
            length = 1 + number // 2 % min(longest, SHORT)
        tokens = rng.integers(0, words, (batch, length), dtype=np.int32)
        lengths = rng.integers(0, length + 1, batch, dtype=np.int32) if number < 2 * fills else None
        if lengths is None or not lengths.any():
            lengths = np.full(batch, length, np.int32)
        yield tokens, lengths
