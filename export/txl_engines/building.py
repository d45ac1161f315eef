"""Engines of TensorRT and TensorRT-RTX: each is compiled in a process of its own, and its errors say what to do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
from txl_runtime import errors
from txl_runtime.bundle.tables import Program
from txl_runtime.device.engines.facts import Facts
from txl_runtime.device.engines.library import Library
from txl_runtime.device.engines.sidecar import Target
from txl_runtime.device.gpu import gpu_name, platform_name
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError
from txl_runtime.listener import Listener

from txl_engines.adapting import adapt, newest_opset
from txl_engines.checking import Graph, read_graph
from txl_engines.compiler import NodeError
from txl_engines.messages import explain_build, explain_parse
from txl_engines.worker import Finished, Outcome, Request, Steps

COMMAND = ("-m", "txl_engines.worker")
PATIENCE = 30
"""Seconds that a build process may take to end after its last word."""


class CompiledEngines:
    """Makes engines with TensorRT or TensorRT-RTX. See `targets.Maker`.

    Args:
        library: from `load_library`.
        precision: of the bundle.
        gpus: compute capabilities, for a library that takes a list; empty for the library's default.

    Raises:
        UsageError: the library takes no list, or cannot build for one of the GPUs.
        BackendError: the library is too old for the precision.
    """

    def __init__(self, library: Library, precision: str, gpus: Sequence[int] = ()) -> None:
        if precision == "bf16" and not library.facts.bfloat16:
            raise BackendError(
                f"the bundle's precision is bf16, {library.title} has none; export it again with --precision fp16"
            )
        self.library, self.precision = library, precision
        self.target: Target = library.target
        self.title, self.version = library.title, library.version
        self.gpus = check_gpus(gpus, precision, library)
        self.device = None if library.facts.portable else gpu_name()
        self.platform = platform_name()
        self.ring = ring_works(library.facts)

    def read(self, data: bytes, program: Program, folder: Path, hashes: Mapping[str, str] | None = None) -> Graph:
        """See `targets.Maker`."""
        facts = self.library.facts
        return adapt(read_graph(data, program, folder, newest_opset(facts), hashes), facts)

    def make(self, graph: Graph, program: Program, out: Path, listener: Listener) -> Outcome:
        """See `targets.Maker`."""
        library = self.library
        listener.stage(f"building {program.name} with {library.title}")
        request = Request(
            target=library.target,
            size=len(graph.data),
            file=graph.path.name,
            program=program,
            gpus=self.gpus,
            half=self.precision == "fp16",
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
        for warning in _doubts(outcome, graph.attention_layers, self.precision):
            listener.warn(f"{program.name}: {warning}")
        return outcome


def check_gpus(gpus: Sequence[int], precision: str, library: Library) -> tuple[int, ...]:
    """A list of compute capabilities, sorted and without repetitions.

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


def ring_works(facts: Facts) -> bool:
    """Whether a library updates memory in place, and its parser takes the opset of the graphs that do."""
    return facts.ring and facts.opset >= 24


def _run(request: Request, graph: Graph, out: Path, listener: Listener, stderr: IO[bytes]) -> Outcome:
    """Have another process build it. However this ends, nothing of that process is left afterwards."""
    # Modules are not to be imported from the working folder (Python knows this variable from 3.11 on).
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(  # noqa: S603 - this Python, this package
        [sys.executable, *COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        cwd=graph.path.absolute().parent,  # where its weights are
        start_new_session=True,  # Ctrl-C in a terminal reaches this process alone, which then ends the other one
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n" + graph.data)
            process.stdin.flush()
            for line in process.stdout:
                message = msgspec.json.decode(line, type=Steps | Finished | Outcome)
                if isinstance(message, Outcome):
                    return message
                if isinstance(message, Finished):
                    process.stdin.write(msgspec.json.encode(str(out)) + b"\n")
                    process.stdin.flush()
                elif message.count:
                    listener.advance(message.count)
            process.wait(PATIENCE)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass  # the process ended before it had read everything, or it does not end
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
    """Why an engine may be slower than it could be."""
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
