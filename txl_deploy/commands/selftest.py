"""`txl-deploy selftest`: replay the bundle's vectors here, without PyTorch."""

from __future__ import annotations

import time

import txl_runtime
import typer
from rich.text import Text
from txl_runtime.selftest import run_selftest

from txl_deploy.commands.options import Backend, Bundle, Json, Threads
from txl_deploy.console import facts_table, number, print_json, stdout


def run(bundle: Bundle, backend: Backend = "auto", threads: Threads = None, json: Json = False) -> None:
    """Replay stored vectors on this machine; exit code 1 when they differ."""
    started = time.monotonic()
    result = run_selftest(txl_runtime.load(bundle, backend=backend, threads=threads))
    seconds = time.monotonic() - started
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
        print_json({name: getattr(result, name) for name in names} | {"seconds": seconds})
    else:
        streams = ", ".join(map(str, result.streams))
        facts = {
            "backend": result.backend,
            "replayed": f"{result.steps} steps with {streams} live streams, {seconds:.1f} s",
            "log-probs max abs": f"{number(result.max_logprobs)} (limit {number(result.limit_logprobs)})",
            "memory max abs": f"{number(result.max_memory)} (limit {number(result.limit_memory)})",
            "verdict": Text("passed", "green") if result.passed else Text("FAILED", "bold red"),
        }
        stdout.print(facts_table(facts))
    if not result.passed:
        raise typer.Exit(1)
