"""`txl-deploy selftest`: replay the bundle's vectors here, without PyTorch."""

from __future__ import annotations

import time

import txl_runtime
import typer
from rich.text import Text
from txl_runtime.device.engines.facts import TARGETS
from txl_runtime.errors import TxlError
from txl_runtime.model import Model
from txl_runtime.selftest import run_selftest

from txl_deploy.commands.options import Backend, Bundle, Json, Threads
from txl_deploy.console import facts_table, number, print_json, stderr, stdout

__all__ = ["record_pass", "run"]


def run(bundle: Bundle, backend: Backend = "auto", threads: Threads = None, json: Json = False) -> None:
    """Replay stored vectors on this machine; exit code 1 when they differ."""
    started = time.monotonic()
    model = txl_runtime.load(bundle, backend=backend, threads=threads)
    result = run_selftest(model)
    seconds = time.monotonic() - started
    if result.passed:
        try:
            record_pass(model)
        except TxlError as error:  # a bundle that cannot be written passes all the same
            stderr.print(f"note: the engines' sidecars do not say that they passed: {error}", soft_wrap=True)
    if json:
        names = (
            "backend",
            "steps",
            "streams",
            "max_logprobs",
            "max_memory",
            "limit_logprobs",
            "limit_memory",
            "passed",
        )
        document = {name: getattr(result, name) for name in names}
        print_json(document | {"seconds": seconds, "backend_notes": model.backend_notes})
    else:
        streams = ", ".join(map(str, result.streams))
        facts = {
            "backend": result.backend,
            "replayed": f"{result.steps} steps with {streams} live streams, {seconds:.1f} s",
            "log-probs max abs": f"{number(result.max_logprobs)} (limit {number(result.limit_logprobs)})",
            "memory max abs": f"{number(result.max_memory)} (limit {number(result.limit_memory)})",
            "verdict": Text("passed", "green") if result.passed else Text("FAILED", "bold red"),
        }
        facts |= {f"not {name}": note for name, note in model.backend_notes.items()}
        stdout.print(facts_table(facts))
    if not result.passed:
        raise typer.Exit(1)


def record_pass(model: Model) -> None:
    """Have the sidecars of a model's engines say that they passed the self-test here; other backends have none.

    Raises:
        TxlError: the bundle cannot be written.
    """
    from txl_engines.bundles import record_verification

    for target in TARGETS:
        if target == model.backend.name:
            for program in model.backend.programs:
                record_verification(model.bundle.path, target, program.name, "self-test")
