"""`txl-deploy conformance`: whether a runtime, in whatever language, does what the conformance list says."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from msgspec import to_builtins
from rich.text import Text
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Json
from txl_deploy.conformance.messages import PROMISES
from txl_deploy.conformance.running import BAD, Conformance, Tally
from txl_deploy.console import Display, facts_table, number, plain, print_json, rows_table, stdout

MOST = 12
"""Failures that are shown; --json has all."""


def run(
    driver: Annotated[
        str | None,
        typer.Option(
            "--driver",
            metavar="COMMAND",
            help="What answers requests; see conformance/README.md. (default Python's own)",
        ),
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="The conformance list.")] = Path("conformance"),
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="A bundle of the list, or bad_bundles; repeatable. (default all)"),
    ] = None,
    silence: Annotated[float, typer.Option("--silence", help="Seconds that the driver may take for a reply.")] = 60.0,
    json: Json = False,
) -> None:
    """Run the conformance list through a runtime's driver; exit code 1 when anything is not as expected."""
    words = None if driver is None else _words(driver)
    if not 0 < silence < float("inf"):
        raise UsageError(f"--silence is {silence:g}, expected seconds, more than 0")
    asked = Conformance(folder, words, silence, only or ())
    with Display() as display:
        found = list(asked.run(display))
    failed, passed = (sum(getattr(tally, what) for tally in found) for what in ("failed", "passed"))
    claimed = {name for tally in found for name in tally.declined} - {name for tally in found for name in tally.kept}
    right = not failed and not claimed and passed > 0
    if json:
        print_json(
            {
                "driver": to_builtins(asked.hello),
                "passed": right,
                "bundles": [asdict(tally) for tally in found],
            }
        )
    else:
        _show(asked, found, claimed, right)
    if not right:
        raise typer.Exit(1)


def _words(driver: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(driver))
    except ValueError as error:
        raise UsageError(f"--driver is {driver!r}: {error}; expected a command as a shell takes it") from None
    if not words:
        raise UsageError("--driver is empty, expected a command; leave it out for Python's own")
    return words


def _show(asked: Conformance, found: list[Tally], claimed: set[str], right: bool) -> None:
    """Print tables, then failures, then the verdict."""
    said = {None: "–", True: "yes", False: "no"}
    shared = ["vectors", "passed", "failed", "unsupported"]
    rows = {tally.name: [getattr(tally, name) for name in shared] for tally in found}
    names = ["vectors", "passed", "failed", "not supported"]
    good = [
        [t.name, *rows[t.name], number(t.largest), number(t.limit), said[t.same_bits]] for t in found if t.name != BAD
    ]
    if good:
        stdout.print(rows_table(["bundle", *names, "largest", "limit", "same bits"], good))
    for t in found[-1:]:
        if t.name == BAD:
            counts = [*rows[BAD], t.refused, t.opened, t.died]
            stdout.print(rows_table(["\nbad bundles", *names[1:], "refused", "wrongly opened", "died"], [counts]))
    failures = [failure for tally in found for failure in tally.failures]
    for failure in failures[:MOST]:
        place = f"{failure.bundle}, {failure.vector} ({', '.join(failure.shows)})"
        stdout.print(Text(f"{place}: ", "bold") + Text(plain(" ".join(failure.found.split())[:300])))
    if len(failures) > MOST:
        stdout.print(f"and {len(failures) - MOST} more; --json has all")
    facts: dict[str, object] = {
        "driver": f"{asked.hello.name} {asked.hello.version}, {asked.hello.engine}",
        "not supported": sum(tally.unsupported for tally in found),
    }
    kept = {promise for tally in found for promise in tally.kept}
    if broken := sorted({promise for failure in failures for promise in failure.shows} - kept):
        facts["kept by no vector"] = ", ".join(broken)
    if unknown := sorted(set(asked.hello.supports) - set(PROMISES)):
        facts["unknown promises"] = ", ".join(unknown)
    if claimed:
        facts["claimed, but never done"] = ", ".join(sorted(claimed))
    failing = Text("FAILED" if failures or claimed else "nothing was run", "bold red")
    stdout.print(facts_table(facts | {"verdict": Text("passed", "green") if right else failing}))
