"""One graph → one engine: read and checked here, compiled in a process of its own, told of in the user's words."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
from txl_runtime import errors
from txl_runtime.bundle.tables import Program, TensorSpec
from txl_runtime.device.engines.facts import Facts
from txl_runtime.device.engines.library import Library
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError
from txl_runtime.listener import Listener, Silent

from txl_engines.checking import Graph, read_graph
from txl_engines.compiler import Binding, NodeError
from txl_engines.messages import explain_build, explain_parse
from txl_engines.worker import Compiled, Outcome, Request, Steps

__all__ = [
    "Ask",
    "bindings_of",
    "build_engine",
    "build_graph",
    "check_gpus",
    "check_precision",
    "ring_works",
]

COMMAND = ("-m", "txl_engines.worker")
PATIENCE = 30
"""Seconds that a build process may take to end after its last word."""


@dataclass(frozen=True)
class Ask:
    """What to build an engine for.

    Attributes:
        library: from `load_library`.
        precision: of the graph: fp32, fp16 or bf16.
        gpus: compute capabilities, for libraries that take a list; empty for the library's default.
    """

    library: Library
    precision: str
    gpus: tuple[int, ...] = ()


def check_gpus(gpus: Sequence[int], precision: str, library: Library) -> tuple[int, ...]:
    """A list of compute capabilities, sorted, once each.

    Raises:
        UsageError: the library takes no list, or cannot build for one of them.
    """
    facts, chosen = library.facts, tuple(sorted(set(gpus)))
    if not chosen:
        return ()
    if not facts.portable:
        raise UsageError(
            f"--sm is {', '.join(map(str, chosen))}, but {library.title} builds for the GPU of the machine it runs on; "
            "leave --sm out and build on the target"
        )
    for gpu in chosen:
        if gpu not in facts.compute_capabilities:
            known = ", ".join(map(str, facts.compute_capabilities))
            raise UsageError(f"--sm holds {gpu}, {library.title} builds for {known}; {_instead(gpu)}")
        if precision == "bf16" and gpu < 80:
            raise UsageError(
                f"--sm holds {gpu}, which has no bf16, expected SM 80 or newer; leave it out or export fp16"
            )
    return chosen


def _instead(gpu: int) -> str:
    if gpu in (72, 87, 110):
        return "that is a Jetson: use --target tensorrt there, with the TensorRT of its JetPack"
    if gpu in (70, 90, 100, 103):
        return "that is a data-centre GPU: use --target tensorrt there"
    return "leave it out"


def check_precision(precision: str, facts: Facts, title: str) -> None:
    """Refuse a precision that an engine cannot have.

    Raises:
        UsageError: int8 or int4, which are for the CPU.
        BackendError: the library is too old for it.
    """
    if precision in ("int8", "int4"):
        raise UsageError(
            f"the bundle's precision is {precision}, which is for the CPU, expected fp32, fp16 or bf16; "
            "export it again with --precision fp16"
        )
    if precision == "bf16" and not facts.bfloat16:
        raise BackendError(f"the bundle's precision is bf16, {title} has none; export it again with --precision fp16")


def ring_works(facts: Facts) -> bool:
    """Whether a library updates memory in place, and its parser takes the opset that says so."""
    return facts.ring and facts.opset >= 24


def bindings_of(specs: Sequence[TensorSpec]) -> tuple[Binding, ...]:
    """A program's inputs or outputs as a library would tell them.

    Raises:
        UsageError: a shape is not fixed.
    """
    for spec in specs:
        if not all(isinstance(size, int) for size in spec.shape):
            raise UsageError(
                f"{spec.name} has the shape {list(spec.shape)}, expected numbers: engines have fixed shapes; build "
                "whole programs only"
            )
    return tuple(Binding(spec.name, spec.dtype, tuple(int(size) for size in spec.shape)) for spec in specs)


def build_engine(
    source: Path | bytes,
    program: Program,
    ask: Ask,
    out: Path,
    listener: Listener | None = None,
    folder: Path | None = None,
) -> Outcome:
    """Build the engine of one graph.

    Args:
        source: the graph's file, or its bytes with the external weights in `folder`.
        program: what the graph is.
        ask: what to build it for.
        out: the engine file to write; not there when the build fails.
        listener: hears of progress and warnings.
        folder: see `source`.

    Raises:
        UsageError, BundleError, BackendError: it cannot be built; the message says why and what to do.
        KeyboardInterrupt: somebody asked to stop.
    """
    check_precision(ask.precision, ask.library.facts, ask.library.title)
    gpus = check_gpus(ask.gpus, ask.precision, ask.library)
    graph = read_graph(source, program, ask.library.facts, folder)
    return build_graph(graph, program, Ask(ask.library, ask.precision, gpus), out, listener or Silent())


def build_graph(graph: Graph, program: Program, ask: Ask, out: Path, listener: Listener) -> Outcome:
    """As `build_engine`, of a graph that has been read and an `ask` that has been checked."""
    library = ask.library
    listener.stage(f"building {program.name} with {library.title}")
    request = Request(
        target=library.target,
        size=len(graph.data),
        file=graph.path.name,
        name=program.name,
        inputs=bindings_of(program.inputs),
        outputs=bindings_of(program.outputs),
        gpus=ask.gpus,
        half=ask.precision == "fp16",
        scatters=graph.scatters,
    )
    with tempfile.TemporaryFile() as stderr:
        outcome = _run(request, graph, out.absolute(), listener, stderr)
        stderr.seek(0)
        printed = stderr.read().decode(errors="backslashreplace")
    if outcome.failure:
        with contextlib.suppress(OSError):
            out.unlink()
        raise _explain(outcome, printed, graph, library)
    for warning in _doubts(outcome, graph.attention_layers, ask.precision):
        listener.warn(f"{program.name}: {warning}")
    return outcome


def _run(request: Request, graph: Graph, out: Path, listener: Listener, stderr: IO[bytes]) -> Outcome:
    """Have another process build it; nothing of that process is left afterwards, however this ends."""
    # The folder one happens to stand in is no place to import from (the variable is known from Python 3.11 on).
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(  # noqa: S603 - this Python, this package
        [sys.executable, *COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        cwd=graph.path.absolute().parent,  # where its weights are
        start_new_session=True,  # a terminal's Ctrl-C is for us to hear; we end it then
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n" + graph.data)
            process.stdin.flush()
            for line in process.stdout:
                message = msgspec.json.decode(line, type=Steps | Compiled | Outcome)
                if isinstance(message, Outcome):
                    return message
                if isinstance(message, Compiled):
                    process.stdin.write(msgspec.json.encode(str(out)) + b"\n")
                    process.stdin.flush()
                elif message.count:
                    listener.advance(message.count)
            process.wait(PATIENCE)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass  # it ended before it read, or does not end
        finally:
            if process.poll() is None:
                process.kill()
            code = process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
    return Outcome(failure="build", said=f"the build process {_end(code)}")


def _end(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _explain(outcome: Outcome, printed: str, graph: Graph, library: Library) -> TxlError:
    if outcome.failure == "refused":
        kinds: dict[str, type[TxlError]] = {
            kind.__name__: kind for kind in (errors.BackendError, errors.BundleError, errors.UsageError)
        }
        return kinds.get(outcome.error, TxlError)(outcome.message)
    if outcome.failure == "parse":
        complaints = [NodeError(node, text) for node, text in outcome.complaints]
        return BundleError(explain_parse(complaints, graph, library.title))
    return BackendError(explain_build(f"{outcome.said}\n{printed}", graph, library.title))


def _doubts(outcome: Outcome, attentions: int, precision: str) -> list[str]:
    """What about an engine is not as fast as it could be."""
    fused = outcome.layers.fused_attention
    if outcome.layers.kernels is None:
        return ["the library did not list its layers, so whether attention fused is not known"]
    if fused >= attentions:
        return []
    reason = (
        "in fp32 the compiler runs it as several; export with --precision fp16 or bf16 for one"
        if precision == "fp32"
        else "expected all of them; heads of 16 to 256 in multiples of 8 fuse best, see docs/engines.md"
    )
    return [f"{fused} of {attentions} attention layers became one kernel: {reason}"]
