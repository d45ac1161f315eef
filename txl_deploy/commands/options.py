"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Backend", "Bundle", "Json", "Text", "Threads", "Tokens"]

Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle that `export` made.", show_default=False)]
Backend = Annotated[str, typer.Option("--backend", help="auto or cpu.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads of the engine; all cores without it.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
Text = Annotated[Path | None, typer.Option("--text", help="Real text to judge on, for the checkpoint's vocabulary.")]
Tokens = Annotated[Path | None, typer.Option("--tokens", help="Real text as token ids, an .npy file.")]
