"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from txl_runtime.errors import UsageError

Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle that `export` made.", show_default=False)]
Backend = Annotated[str, typer.Option("--backend", help="auto, cpu, cuda, tensorrt or rtx.")]
Threads = Annotated[
    int | None, typer.Option("--threads", help="How many threads the engine uses. (default one per physical core)")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
Text = Annotated[Path | None, typer.Option("--text", help="Real text to judge on, for the checkpoint's vocabulary.")]
Tokens = Annotated[Path | None, typer.Option("--tokens", help="Real text as token ids, an .npy file.")]
Family = Annotated[
    Literal["auto", "kimiyoung", "nvidia", "hf", "remixl", "fastai", "cntxl", "txl"],
    typer.Option("--family", help="The code base it was trained with."),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="JSON with the family's own constructor or config.json names.")
]
Alias = Annotated[
    list[str] | None, typer.Option("--alias", help="Class of a fork and what it stands for: theirs=original.")
]


def parse_aliases(pairs: list[str] | None) -> dict[str, str]:
    """What --alias says.

    Raises:
        UsageError: one is not of the form theirs=original.
    """
    split = [(pair, *pair.partition("=")) for pair in pairs or []]
    if wrong := [pair for pair, name, _, target in split if not (name and target)]:
        raise UsageError(f"--alias is {wrong[0]!r}, expected theirs=original, dotted names both; check it")
    return {name: target for _, name, _, target in split}
