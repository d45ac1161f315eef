"""`txl-deploy selftest`: replay the bundle's stored vectors on this machine, without PyTorch."""

from __future__ import annotations

import time

import typer
from rich.text import Text
from txl_runtime.errors import TxlError
from txl_runtime.model import Model
from txl_runtime.selftest import WORDS, run_selftest

from txl_deploy.commands.options import Backend, Bundle, Json, Threads
from txl_deploy.console import facts_table, number, print_json, stderr, stdout
from txl_deploy.loading import absent_backends, load_alone


def run(bundle: Bundle, backend: Backend = "auto", threads: Threads = None, json: Json = False) -> None:
    """Replay stored vectors on this machine; exit code 1 when they differ."""
    started = time.monotonic()
    model = load_alone(bundle, backend=backend, threads=threads)
    result = run_selftest(model)
    seconds = time.monotonic() - started
    if result.passed:
        _record(model)
    if json:
        words = {"vocabulary": "not compared"} if model.manifest.vocabulary else {}
        print_json(result.document() | words | {"seconds": seconds, "backend_notes": model.backend_notes})
    else:
        streams = ", ".join(map(str, result.streams))
        facts = {
            "backend": result.backend,
            "replayed": f"{result.steps} steps with {streams} live streams, {seconds:.1f} s",
        }
        for name, value in result.largest.items():
            facts[WORDS[name] if name == "rows" else f"{WORDS[name]} max abs"] = (
                f"{number(value)} (limit {number(result.limits[name])})"
            )
        verdict = {"verdict": Text("passed", "green") if result.passed else Text("FAILED", "bold red")}
        stdout.print(facts_table({**facts, **verdict, **absent_backends(model.backend_notes, model.manifest)}))
        if model.manifest.vocabulary:
            stdout.print("vocabulary not compared: txl-deploy verify does it", style="dim")
    if not result.passed:
        raise typer.Exit(1)


def _record(model: Model) -> None:
    """Record in the engines' sidecars that the engines passed; if the bundle is read-only, print a note instead."""
    if model.backend.name == "cpu":
        return
    from txl_engines.recording import record_pass

    try:
        record_pass(model)
    except TxlError as error:
        stderr.print(f"note: the engines' sidecars do not say that they passed: {error}", soft_wrap=True)
