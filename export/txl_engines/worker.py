"""One engine, in a process of its own: `python -m txl_engines.worker`, started by `building`.

Two builds give the same bytes only where memory has no history: the compiler orders some tables by address. So each
engine is compiled in a fresh process, in a fresh thread of it (which has a heap of its own), and nothing that differs
from place to place, such as a path, is given to the library. Besides, a process can be stopped at any moment, and a
crash of native code is its end alone.

On stdin stand the request, a line of JSON, the graph's bytes, and later a line with the file to write. Its end means
that nobody waits for the engine any more. Lines of JSON on stdout tell of steps, that the engine is compiled, and of
the outcome. The graph's weights are looked for in the folder that the process was started in.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Literal

import msgspec
from msgspec import Struct
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.device.engines.facts import Target
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.errors import BackendError, BundleError, TxlError

from txl_engines.compiler import Binding, Compiler, Network
from txl_engines.layers import LayerReport, read_layers

__all__ = ["Compiled", "Outcome", "Request", "Steps", "check_engine", "compile_graph", "main"]

IN_PLACE = "KV_CACHE_UPDATE"
"""The layer that TensorScatter becomes; its output may share its input's memory."""
SECONDS_BETWEEN_STEPS = 0.05


class Request(Struct, frozen=True, kw_only=True):
    """What to build.

    Attributes:
        target: the library.
        size: bytes of the graph that follow.
        file: the graph's file name.
        name, inputs, outputs: the program's, as the manifest has them.
        gpus, half: see `Library.build`.
        scatters: states that have to be updated in place.
    """

    target: Target
    size: int
    file: str
    name: str
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    gpus: tuple[int, ...]
    half: bool
    scatters: int


class Steps(Struct, frozen=True, tag="steps"):
    """So many steps of the builder since the last time."""

    count: int


class Compiled(Struct, frozen=True, tag="compiled"):
    """The engine is there, in memory; where should it be written?"""


class Outcome(Struct, frozen=True, kw_only=True, tag="outcome"):
    """How it ended.

    Attributes:
        failure: where it failed, empty for a finished engine. "refused" has a message for the user; of the others only
            what the library said is known: `complaints` of its parser, `said` by its logger.
        message, error: of a refusal, and the name of its class.
        sha256, bytes, seconds: of the engine.
        layers: what the compiler made of the graph.
        in_place: states that are updated in place.
        verified: what was checked of the file.
    """

    failure: Literal["", "parse", "build", "refused"] = ""
    message: str = ""
    error: str = ""
    complaints: tuple[tuple[int, str], ...] = ()
    said: str = ""
    sha256: str = ""
    bytes: int = 0
    seconds: float = 0.0
    layers: LayerReport = LayerReport(None, (), {})
    in_place: int = 0
    verified: tuple[str, ...] = ()


def compile_graph(
    request: Request, graph: bytes, library: Library, place: Callable[[], Path], on_step: Callable[[], None]
) -> Outcome:
    """Build an engine here, write it, read it back and check it.

    Args:
        request: what to build.
        graph: the graph's bytes.
        library: what with.
        place: asked for the engine file when it can be written.
        on_step: called at each step of the builder.

    Raises:
        TxlError: the library or its engine is not what the program needs.
    """
    started = time.monotonic()
    compiler = Compiler(library)
    parsed = compiler.parse(graph, request.file)
    said = library.journal.errors
    if parsed.errors:
        complaints = tuple((error.node, error.text) for error in parsed.errors)
        return Outcome(failure="parse", complaints=complaints, said="\n".join(said))
    _check_network(parsed, request, library)
    plan = compiler.build(parsed, request.gpus, request.half, on_step)
    if plan is None:
        return Outcome(failure="build", said="\n".join(said))
    seconds = time.monotonic() - started
    out = place()
    with out.open("wb") as stream:
        stream.write(memoryview(plan))
        stream.flush()
        os.fsync(stream.fileno())
    written = out.read_bytes()
    verified, inspected = check_engine(written, request.name, request.inputs, request.outputs, library)
    listed = read_layers(library.journal.layers)
    return Outcome(
        sha256=file_sha256(out),
        bytes=len(written),
        seconds=round(seconds, 3),
        layers=inspected if listed.kernels is None else listed,
        in_place=parsed.layer_types.count(IN_PLACE),
        verified=verified,
    )


def check_engine(
    data: bytes, name: str, inputs: Sequence[Binding], outputs: Sequence[Binding], library: Library
) -> tuple[tuple[str, ...], LayerReport]:
    """Check an engine's bytes, as far as this machine can; what was done, and the layers where they could be read.

    Raises:
        BundleError: they are no engine of this library, or not one of this program.
    """
    examined = Compiler(library).examine(data)
    if examined.problem:
        said = " ".join(" ".join(library.journal.errors).split())[:300]
        told = f" ({said})" if said else ""
        raise BundleError(f"{name}: {examined.problem}{told}, expected an engine; build it again")
    if examined.inputs or examined.outputs:
        _compare(examined.inputs, inputs, "inputs", name)
        _compare(examined.outputs, outputs, "outputs", name)
    return examined.verified, read_layers(examined.layers)


def _check_network(parsed: Network, request: Request, library: Library) -> None:
    _compare(parsed.inputs, request.inputs, "inputs", request.file)
    _compare(parsed.outputs, request.outputs, "outputs", request.file)
    updates = parsed.layer_types.count(IN_PLACE)
    if updates != request.scatters:
        raise BackendError(
            f"{request.file}: {library.title} updates {updates} of {request.scatters} states in place, expected "
            "all; use --update rolled"
        )


def _compare(found: Sequence[Binding], wanted: Sequence[Binding], side: str, name: str) -> None:
    """Hold bindings against the manifest's; their order is the library's own."""
    has = {binding.name: (binding.dtype, binding.shape) for binding in found}
    wants = {spec.name: (spec.dtype, spec.shape) for spec in wanted}
    for key in sorted(has.keys() | wants.keys()):
        if has.get(key) != wants.get(key):
            raise BundleError(
                f"{name}: among its {side} {key} is {_shown(has.get(key))}, expected {_shown(wants.get(key))} as the "
                "manifest has it; export the model again"
            )


def _shown(binding: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if binding is None else f"{binding[0]}{list(binding[1])}"


class _Teller:
    """Tells of steps, not more often than is of use."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._count, self._told = 0, time.monotonic()

    def step(self) -> None:
        self._count += 1
        if time.monotonic() - self._told > SECONDS_BETWEEN_STEPS:
            self.flush()

    def flush(self) -> None:
        self.tell(Steps(self._count))
        self._count, self._told = 0, time.monotonic()

    def tell(self, message: Steps | Compiled | Outcome) -> None:
        self._stream.write(msgspec.json.encode(message) + b"\n")
        self._stream.flush()


def main() -> None:
    """Serve one request."""
    with os.fdopen(os.dup(1), "wb") as stream:
        os.dup2(2, 1)  # whatever native code prints is no part of the answer
        request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Request)
        graph = sys.stdin.buffer.read(request.size)
        teller, places = _Teller(stream), _Places()
        threading.Thread(target=places.listen, daemon=True).start()
        builder = threading.Thread(target=_serve, args=(request, graph, teller, places))
        builder.start()
        builder.join()
    os._exit(0)  # the libraries' own end takes time: nothing is left to be done


def _serve(request: Request, graph: bytes, teller: _Teller, places: _Places) -> None:
    def place() -> Path:
        teller.flush()
        teller.tell(Compiled())
        return places.get()

    try:
        outcome = compile_graph(request, graph, load_library(request.target), place, teller.step)
    except TxlError as error:
        outcome = Outcome(failure="refused", message=str(error), error=type(error).__name__)
    except (OSError, MemoryError) as error:
        message = f"{request.name}: {error}; expected the machine to have room and rights for an engine"
        outcome = Outcome(failure="refused", message=message, error=TxlError.__name__)
    except Exception as error:  # whatever it is, who asked has to hear of it
        message = f"{request.name}: {type(error).__name__}: {error}; expected it to build; please report it"
        outcome = Outcome(failure="refused", message=" ".join(message.split()), error=BackendError.__name__)
    teller.tell(outcome)


class _Places:
    """The second line of stdin, and its end."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Path] = SimpleQueue()

    def listen(self) -> None:
        for line in sys.stdin.buffer:
            self._queue.put(Path(msgspec.json.decode(line, type=str)))
        os._exit(1)  # who asked has gone, killed perhaps

    def get(self) -> Path:
        return self._queue.get()


if __name__ == "__main__":
    main()
