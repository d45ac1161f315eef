"""Options that several verbs share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from txl_runtime.errors import UsageError

Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle that `export` made.", show_default=False)]
Backend = Annotated[str, typer.Option("--backend", help="auto, cpu, cuda, tensorrt or rtx.")]
Threads = Annotated[
    int | None, typer.Option("--threads", help="How many threads the engine uses. (default one per physical core)")
]
Module = Annotated[
    str | None, typer.Option("--module", help="FILE.py:FUNCTION of the model of your own that it came from.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]


def like_export(name: str) -> Any:
    """Return the flag of an export's option, for a different verb that has it too."""
    from txl_export.options import flags_of_export

    flag = flags_of_export()[name]
    return typer.Option(flag.names, help=flag.help)


def parse_aliases(pairs: list[str] | None) -> dict[str, str]:
    """Parse the pairs of --alias; raises as `parse_pairs`."""
    return parse_pairs("--alias", pairs, "theirs=original, dotted names both")


def parse_pairs(flag: str, pairs: list[str] | None, form: str, empty: bool = False) -> dict[str, str]:
    """Parse pairs such as "A=B" of a repeatable option, into {"A": "B"}; with `empty`, "A=" is allowed.

    Raises:
        UsageError: a pair does not have that form, or a name is given twice.
    """
    split = [(pair, *pair.partition("=")) for pair in pairs or []]
    if wrong := [pair for pair, name, sign, target in split if not (name and sign and (target or empty))]:
        raise UsageError(f"{flag} is {wrong[0]!r}, expected {form}; check it")
    if twice := [name for name, count in Counter(name for _, name, *_ in split).items() if count > 1]:
        raise UsageError(f"{flag} is given twice for {twice[0]}, expected one for each name; leave one out")
    return {name: target for _, name, _, target in split}
