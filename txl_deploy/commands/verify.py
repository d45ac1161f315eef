"""`txl-deploy verify`: is the bundle still the same function as PyTorch's?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from txl_deploy.commands.options import Backend, Bundle, Json, Text, Threads, Tokens
from txl_deploy.commands.report import print_parity
from txl_deploy.console import Display, print_json
from txl_deploy.extras import lean_heap, require_export


def run(
    bundle: Bundle,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="The checkpoint it came from, to prove the import again.")
    ] = None,
    text: Text = None,
    tokens: Tokens = None,
    segments: Annotated[int | None, typer.Option("--segments", help="Segments of the longest chain.")] = None,
    backend: Backend = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Compare a bundle with PyTorch over chained segments; exit code 1 when a gate fails."""
    require_export("verify")
    lean_heap()
    import txl_export

    with Display() as display:
        parity = txl_export.verify(
            bundle,
            checkpoint=checkpoint,
            text=text,
            tokens=tokens,
            segments=segments,
            backend=backend,
            threads=threads,
            listener=display,
        )
    document = parity.document()
    if json:
        print_json(document)
    else:
        print_parity(document)
    if not parity.passed:
        raise typer.Exit(1)
