"""Compiles one engine in a separate process: `python -m txl_engines.worker`, which `building` starts.

The compiler orders some tables by address, so a process that has built before gives other bytes. Each engine is
therefore compiled in a fresh process, in a fresh thread (which has its own heap), and the library receives nothing that
differs from machine to machine, such as a path. Builds then give equal bytes, with exceptions: 480 of 480 builds here
were equal, and one on a busier machine was not. A separate process can also be stopped at any moment, and a crash of
native code ends nothing else.

The process reads from stdin: the request, as a line of JSON; the graph's bytes; and, once it has reported that the
engine is compiled, a line with the file to write. The end of stdin means that the parent has gone. The process writes
lines of JSON to stdout: steps of the builder, that the engine is compiled, and the outcome. The working folder of the
process contains only the graph's weights. This folder is never the bundle, which may be hostile: Python and the
system's linker look for code in the working folder.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Literal

import msgspec
from msgspec import Struct
from txl_runtime.bundle.bindings import check_bindings
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.engines.sidecar import GivenWeight, with_weights
from txl_runtime.bundle.tables import Program
from txl_runtime.bundle.writing import write_file
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.device.engines.library_features import Compiled
from txl_runtime.errors import BackendError, BundleError, TxlError

from txl_engines.compiler import Compiler, Network, NodeError
from txl_engines.layers import LayerReport, read_layers

IN_PLACE = "KV_CACHE_UPDATE"
"""Layer type that TensorScatter becomes; the layer's output may share the memory of its input."""
SECONDS_BETWEEN_STEPS = 0.05
"""Least number of seconds between two messages about steps; more messages would not be visible."""
ADVICE = "export the model again"


class BuildRequest(Struct, frozen=True, kw_only=True):
    """The request for one engine.

    Attributes:
        target: the library.
        size: number of bytes of the graph, which follow the request.
        file: the graph's file name.
        program: the graph's program.
        given: the weights that the program gets as inputs besides its own.
        gpus: see `Compiler.build`.
        scatters: number of states that must be updated in place.
        states: names of these states, as inputs and as outputs.
    """

    target: Compiled
    size: int
    file: str
    program: Program
    given: tuple[GivenWeight, ...] = ()
    gpus: tuple[int, ...]
    scatters: int
    states: tuple[str, ...] = ()

    @property
    def whole(self) -> Program:
        """The program with the weights that it gets as inputs."""
        return with_weights(self.program, self.given)


class Steps(Struct, frozen=True, tag="steps"):
    """The number of steps that the builder has taken since the last message of this kind."""

    count: int


class BuildFinished(Struct, frozen=True, tag="finished"):
    """A message that the engine is compiled in memory; the process now waits for the name of the file to write."""


class Outcome(Struct, frozen=True, kw_only=True, tag="outcome"):
    """The end of a build.

    Attributes:
        failure: the stage that failed; "" for a finished engine. "refused" has a `message` for the user; other stages
            have the library's words: `complaints` of its parser, or `said`, lines of its logger.
        message, error: a refusal's text, and the name of its class.
        sha256, bytes, seconds: the engine's hash, its size, and the duration of the build.
        layers: the layers that the compiler made of the graph.
        in_place: number of states that are updated in place.
        verified: the checks that the file passed.
    """

    failure: Literal["", "parse", "build", "refused"] = ""
    message: str = ""
    error: str = ""
    complaints: tuple[NodeError, ...] = ()
    said: str = ""
    sha256: str = ""
    bytes: int = 0
    seconds: float = 0.0
    layers: LayerReport = LayerReport(None, (), {})
    in_place: int = 0
    verified: tuple[str, ...] = ()


def compile_graph(
    request: BuildRequest, graph: bytes, library: Library, place: Callable[[], Path], on_step: Callable[[], None]
) -> Outcome:
    """Build an engine in this process, write it, read it back and check it.

    `place` is called when the engine is built, and returns the file to write; `on_step` is called at each step of the
    builder.

    Raises:
        TxlError: the library or its engine does not fit the program.
    """
    started = time.monotonic()
    compiler = Compiler(library)
    parsed = compiler.parse(graph, request.file)
    errors = library.journal.errors
    if parsed.errors:
        return Outcome(failure="parse", complaints=parsed.errors, said="\n".join(errors))
    _check_network(parsed, request, library)
    plan = compiler.build(parsed, request.gpus, on_step)
    if plan is None:
        return Outcome(failure="build", said="\n".join(errors))
    seconds = time.monotonic() - started
    out = place()
    write_file(out, memoryview(plan))
    written = out.read_bytes()
    verified, inspected = check_engine(written, request.whole, library, request.states)
    listed = read_layers(library.journal.layers, request.states)
    return Outcome(
        sha256=file_sha256(out),
        bytes=len(written),
        seconds=round(seconds, 3),
        layers=listed if listed.rows else inspected,
        in_place=parsed.layer_types.count(IN_PLACE),
        verified=verified,
    )


def check_engine(
    data: bytes, program: Program, library: Library, states: Collection[str] = ()
) -> tuple[tuple[str, ...], LayerReport]:
    """Check an engine's bytes as far as this machine can; `states` names the states that are updated in place.

    Returns:
        The checks that were made, and the layers if they could be read.

    Raises:
        BundleError: the bytes are no engine of this library, or the engine of a different program.
    """
    examined = Compiler(library).examine(data)
    if examined.problem:
        complaints = library.journal.complaints()
        details = f" ({complaints})" if complaints else ""
        raise BundleError(f"{program.name}: {examined.problem}{details}, expected an engine; build it again")
    if examined.inputs or examined.outputs:
        check_bindings(program.name, examined.inputs, examined.outputs, program, ADVICE)
    return examined.verified, read_layers(examined.layers, states)


def _check_network(parsed: Network, request: BuildRequest, library: Library) -> None:
    check_bindings(request.file, parsed.inputs, parsed.outputs, request.whole, ADVICE)
    updates = parsed.layer_types.count(IN_PLACE)
    if updates != request.scatters:
        raise BackendError(
            f"{request.file}: {library.title} updates {updates} of {request.scatters} states in place, expected "
            "all; use --update rolled"
        )


class _Teller:
    """Sends messages to the parent process; numbers of steps at most every `SECONDS_BETWEEN_STEPS`."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._count, self._last_message = 0, time.monotonic()

    def step(self) -> None:
        self._count += 1
        if time.monotonic() - self._last_message > SECONDS_BETWEEN_STEPS:
            self.flush()

    def flush(self) -> None:
        self.tell(Steps(self._count))
        self._count, self._last_message = 0, time.monotonic()

    def tell(self, message: Steps | BuildFinished | Outcome) -> None:
        self._stream.write(msgspec.json.encode(message) + b"\n")
        self._stream.flush()


def main() -> None:
    """Serve one request, and end the process."""
    with os.fdopen(os.dup(1), "wb") as stream:
        os.dup2(2, 1)  # prints of native code go to stderr, or the parent would take them for an answer
        request = msgspec.json.decode(sys.stdin.buffer.readline(), type=BuildRequest)
        graph = sys.stdin.buffer.read(request.size)
        teller, places = _Teller(stream), SimpleQueue[Path]()
        threading.Thread(target=_listen, args=(places,), daemon=True).start()
        builder = threading.Thread(target=_serve, args=(request, graph, teller, places))
        builder.start()
        builder.join()
    os._exit(0)  # everything is written, and the libraries take long to shut down


def _serve(request: BuildRequest, graph: bytes, teller: _Teller, places: SimpleQueue[Path]) -> None:
    def place() -> Path:
        teller.flush()
        teller.tell(BuildFinished())
        return places.get()

    try:
        outcome = compile_graph(request, graph, load_library(request.target), place, teller.step)
    except TxlError as error:
        outcome = Outcome(failure="refused", message=str(error), error=type(error).__name__)
    except (OSError, MemoryError) as error:
        message = f"{request.program.name}: {error}; expected the machine to have room and rights for an engine"
        outcome = Outcome(failure="refused", message=message, error=TxlError.__name__)
    except Exception as error:  # the parent process must learn of any failure
        message = f"{request.program.name}: {type(error).__name__}: {error}; expected it to build; please report it"
        outcome = Outcome(failure="refused", message=" ".join(message.split()), error=BackendError.__name__)
    teller.tell(outcome)


def _listen(places: SimpleQueue[Path]) -> None:
    """Pass on each line of stdin after the request, and end the process when stdin ends."""
    for line in sys.stdin.buffer:
        places.put(Path(msgspec.json.decode(line, type=str)))
    os._exit(1)  # the parent process has gone, perhaps killed


if __name__ == "__main__":
    main()
