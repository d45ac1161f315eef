"""Makes the engines of a target: TensorRT or TensorRT-RTX compiles them; for ONNX Runtime composed graphs are engines.

Each engine of TensorRT or TensorRT-RTX is compiled in a separate process; error messages say what to do.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

import msgspec
from txl_runtime import errors
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.engines.sidecar import (
    ANYWHERE,
    COMPOSED,
    FLAVOURS,
    RECIPE,
    RTX_RECIPE,
    TARGETS,
    Rounding,
    Target,
)
from txl_runtime.bundle.tables import Program
from txl_runtime.bundle.writing import write_file
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.device.engines.library_features import LibraryFeatures
from txl_runtime.device.gpu import gpu_model, platform_name
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError
from txl_runtime.listener import Listener
from txl_runtime.starting import environment, signal_of

from txl_engines.adapting import adapt, without_clip
from txl_engines.attention_operator import unite_attention
from txl_engines.checking import Graph, read_graph
from txl_engines.given_weights import give_weights
from txl_engines.messages import explain_build, explain_parse
from txl_engines.rounded_weights import round_weights
from txl_engines.worker import BuildFinished, BuildRequest, Outcome, Steps

COMMAND = ("-m", "txl_engines.worker")
PATIENCE = 30
"""Seconds that a build process may take to exit after its last message."""
FP8_SINCE = 89
"""Oldest GPU that has fp8, as ten times its compute capability 8.9."""
NEWEST_OPSET = 24
"""Newest opset that the exporter writes; the newest that ONNX Runtime runs depends on its version on the target."""


class CompiledEngines:
    """Makes engines with TensorRT or TensorRT-RTX.

    Attributes:
        target: the backend that will load the engines.
        title: the library's name and version, for messages.
        version, gpus, device, platform, recipe: the fields of an engine's `Identity`.
        ring: whether the library's engines can update a ring of memory in place.
        shares: whether the library's engines can read weights of which the device has only one copy.
        rounding: precision to which matrices are rounded; None for the bundle's own precision.
        positions: the longest segment in which attention becomes one operator, see `unite_attention`.

    Raises:
        UsageError: the library takes no list of GPUs, or cannot build for one of them.
    """

    def __init__(
        self,
        library: Library,
        precision: str,
        gpus: Sequence[int] = (),
        rounding: Rounding | None = None,
        positions: int = 1,
    ) -> None:
        self.library, self.precision, self.rounding, self.positions = library, precision, rounding, positions
        self.target: Target = library.target
        self.title, self.version = library.title, library.version
        self.gpus = check_gpus(gpus, precision, library, rounding)
        self.device = None if library.facts.portable else gpu_model()
        self.platform = ANYWHERE if library.facts.portable else platform_name()
        self.recipe = RTX_RECIPE if library.target == "rtx" else RECIPE
        self.ring = ring_works(library.facts)
        self.shares = library.facts.portable  # sharing was not tried with TensorRT itself

    def read(
        self, data: bytes, program: Program, folder: Path, hashes: Mapping[str, str] | None = None, shared: str = ""
    ) -> Graph:
        """Check a composed graph, and rewrite it for the target; matrices are rounded if the maker has a `rounding`.

        Args:
            folder: the folder with the graph's external weights.
            hashes: SHA-256 of weight files that are known already.
            shared: the weight file whose large tensors become inputs; "" to keep all in the engine.

        Raises:
            BundleError: the graph does not match its program.
            BackendError: onnx is not installed.
        """
        facts = self.library.facts
        graph = read_graph(data, program, folder, facts.opset, hashes)
        graph = round_weights(graph, program, self.rounding, shared) if self.rounding else graph
        graph = adapt(give_weights(graph, shared) if shared else graph)
        return unite_attention(graph, program, self.positions) if facts.reads_in_place else graph

    def make(self, graph: Graph, program: Program, out: Path, listener: Listener) -> Outcome:
        """Compile a graph from `read`, and write the engine to `out`; a failure leaves no file there.

        Raises:
            BundleError, BackendError: the engine cannot be made; the message says why and what to do.
            KeyboardInterrupt: the user pressed Ctrl-C.
        """
        library = self.library
        listener.stage(f"building {program.name} with {library.title}")
        request = BuildRequest(
            target=library.target,
            size=len(graph.data),
            file=graph.path.name,
            program=program,
            given=graph.given,
            gpus=self.gpus,
            scatters=graph.scatters,
            states=graph.states,
        )
        with tempfile.TemporaryFile() as stderr:
            outcome = _run(request, graph, out.absolute(), listener, stderr)
            stderr.seek(0)
            printed = stderr.read().decode(errors="backslashreplace")
        if outcome.failure:
            with contextlib.suppress(OSError):
                out.unlink()
            raise _explain(outcome, printed, graph, library)
        for warning in _doubts(outcome, graph.attention_layers, self.precision):
            listener.warn(f"{program.name}: {warning}")
        return outcome


class ComposedEngines:
    """Writes whole programs as graphs and compiles nothing, because ONNX Runtime opens them as they are."""

    target: Target = "cuda"
    version, platform = COMPOSED, ANYWHERE
    device: str | None = None
    gpus: tuple[int, ...] = ()
    recipe = RECIPE
    title = f"{FLAVOURS['cuda']} ({COMPOSED})"
    ring, shares = True, False
    rounding: Rounding | None = None

    def __init__(self, gpus: Sequence[int] = ()) -> None:
        if gpus:
            raise UsageError(
                f"--sm is {', '.join(map(str, gpus))}, but the graphs of --target cuda are for every GPU that ONNX "
                "Runtime runs on; leave --sm out"
            )

    def read(
        self, data: bytes, program: Program, folder: Path, hashes: Mapping[str, str] | None = None, shared: str = ""
    ) -> Graph:
        """Check a composed graph as `CompiledEngines.read` does; `shared` has no use: sessions hold their weights."""
        return without_clip(read_graph(data, program, folder, NEWEST_OPSET, hashes))

    def make(self, graph: Graph, program: Program, out: Path, listener: Listener) -> Outcome:
        """Write the graph to `out`, see `CompiledEngines.make`."""
        listener.stage(f"writing {program.name} for ONNX Runtime")
        started = time.monotonic()
        write_file(out, graph.data)
        return Outcome(
            sha256=file_sha256(out),
            bytes=len(graph.data),
            seconds=round(time.monotonic() - started, 3),
            in_place=graph.scatters,
            verified=("graph",),
        )


Maker: TypeAlias = CompiledEngines | ComposedEngines


def open_maker(
    target: str, precision: str, gpus: Sequence[int], rounding: Rounding | None = None, positions: int = 1
) -> Maker:
    """Return the maker of a target's engines, for a bundle's precision and the given compute capabilities.

    For `rounding` and `positions` see `CompiledEngines`.

    Raises:
        UsageError: the target is unknown, or it cannot build for these GPUs.
        BackendError: the library is not installed, or is too old.
    """
    if target == "cuda":
        return ComposedEngines(gpus)
    if target == "rtx" or target == "tensorrt":
        return CompiledEngines(load_library(target), precision, gpus, rounding, positions)
    raise UsageError(f"--target is {target!r}, expected {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")


def check_gpus(
    gpus: Sequence[int], precision: str, library: Library, rounding: Rounding | None = None
) -> tuple[int, ...]:
    """Check compute capabilities; return them sorted and each once, e.g. (86, 89) for [89, 86, 89].

    Without any, fp8 engines are for all GPUs that have fp8, because the library's own default includes GPUs without it.

    Raises:
        UsageError: the library takes no list of GPUs, or cannot build for one of them.
    """
    facts, chosen = library.facts, tuple(sorted(set(gpus)))
    if not chosen:
        return tuple(gpu for gpu in facts.gpus if gpu >= FP8_SINCE) if rounding == "fp8" else ()
    if not facts.portable:
        raise UsageError(
            f"--sm is {', '.join(map(str, chosen))}, but {library.title} builds for the GPU of the machine it runs on; "
            "leave --sm out and build on the target"
        )
    for gpu in chosen:
        if gpu not in facts.gpus:
            known = ", ".join(map(str, facts.gpus))
            raise UsageError(f"--sm holds {gpu}, {library.title} builds for {known}; {_instead(gpu)}")
        if precision == "bf16" and gpu < 80:
            raise UsageError(
                f"--sm holds {gpu}, which has no bf16, expected SM 80 or newer; leave it out or export fp16"
            )
        since = {"fp8": FP8_SINCE, "int4": 80}.get(rounding or "", 0)
        if gpu < since:
            raise UsageError(
                f"--sm holds {gpu}, which has no {rounding}, expected SM {since} or newer; leave it out or give "
                "--precision int8"
            )
    return chosen


def _instead(gpu: int) -> str:
    if gpu in (72, 87, 110):
        return "that is a Jetson: use --target tensorrt there, with the TensorRT of its JetPack"
    if gpu in (70, 90, 100, 103):
        return "that is a data-centre GPU: use --target tensorrt there"
    return "leave it out"


def ring_works(facts: LibraryFeatures) -> bool:
    """Return whether a library updates memory in place, and its parser reads opset 24, which ring graphs need."""
    return facts.ring and facts.opset >= 24


def _place(weights: Path, link: Path) -> None:
    try:
        link.symlink_to(weights)
    except OSError:  # on Windows only some users may create links
        shutil.copyfile(weights, link)


def _run(request: BuildRequest, graph: Graph, out: Path, listener: Listener, stderr: IO[bytes]) -> Outcome:
    """Build an engine in a separate process, in a folder that contains only the weights."""
    with tempfile.TemporaryDirectory(prefix="txl-deploy-build-") as folder:
        for name in graph.weights:
            _place(graph.path.absolute().parent / name, Path(folder) / name)
        return _talk(request, graph, out, listener, stderr, folder)


def _talk(
    request: BuildRequest, graph: Graph, out: Path, listener: Listener, stderr: IO[bytes], folder: str
) -> Outcome:
    """Send the request to a build process and read its answers; the process is ended in any case."""
    process = subprocess.Popen(  # noqa: S603 - runs this Python and this package
        [sys.executable, *COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment(),
        cwd=folder,
        start_new_session=True,  # Ctrl-C then reaches only this process, which ends the builder
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n" + graph.data)
            process.stdin.flush()
            for line in process.stdout:
                message = msgspec.json.decode(line, type=Steps | BuildFinished | Outcome)
                if isinstance(message, Outcome):
                    return message
                if isinstance(message, BuildFinished):
                    process.stdin.write(msgspec.json.encode(str(out)) + b"\n")
                    process.stdin.flush()
                elif message.count:
                    listener.advance(message.count)
            process.wait(PATIENCE)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass  # the process ended before it read everything, or does not end
        finally:
            if process.poll() is None:
                process.kill()
            code = process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
    name = signal_of(code)
    how = f"was ended by {name}" if name else f"ended with code {code}"
    return Outcome(failure="build", said=f"the build process {how}")


def _explain(outcome: Outcome, printed: str, graph: Graph, library: Library) -> TxlError:
    if outcome.failure == "refused":
        kind: type[TxlError] = vars(errors)[outcome.error]
        return kind(outcome.message)
    if outcome.failure == "parse":
        return BundleError(explain_parse(outcome.complaints, graph, library.title))
    return BackendError(explain_build(f"{outcome.said}\n{printed}", graph, library.title))


def _doubts(outcome: Outcome, attentions: int, precision: str) -> list[str]:
    """Return the reasons why an engine may be slower than possible."""
    fused = outcome.layers.fused_attention
    if fused >= attentions:
        return []
    if outcome.layers.kernels is None:
        return ["the library did not list its kernels, so whether attention fused is not known"]
    reason = (
        "in fp32 the compiler runs it as several; export with --precision fp16 or bf16 for one"
        if precision == "fp32"
        else "expected all of them; heads of 16 to 256 in multiples of 8 fuse best, see docs/engines.md"
    )
    return [f"{fused} of {attentions} attention layers became one kernel: {reason}"]
