"""`txl-deploy export`: checkpoint → verified bundle."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from txl_export.options import ExportOptions, flags_of_export
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Json, parse_aliases
from txl_deploy.console import Display, print_json, quantity, stdout
from txl_deploy.extras import lean_heap, require_export
from txl_deploy.parity_tables import print_parity


def _with_export_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for every option of an export that has one, before its --json."""
    signature, fields = inspect.signature(command, eval_str=True), inspect.signature(ExportOptions).parameters
    flags = []
    for name, flag in flags_of_export().items():
        default = None if fields[name].default == () else fields[name].default
        option = typer.Option(default, flag.names, help=flag.help)
        flags.append(fields[name].replace(default=option, annotation=flag.kind))
    *first, json, _ = signature.parameters.values()
    parameters = [*first, *flags, json.replace(kind=json.KEYWORD_ONLY)]
    vars(command)["__signature__"] = signature.replace(parameters=parameters)
    return command


@_with_export_options
def run(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint file or a Hugging Face folder.", show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The bundle; CHECKPOINT with suffix .txl without it.")
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Turn a trained Transformer-XL into a verified, self-contained bundle."""
    require_export("export")
    lean_heap()
    import txl_export
    from txl_export.parity.report import ParityError

    given = {name: value for name, value in options.items() if value is not None}
    given["aliases"] = parse_aliases(options["aliases"])
    try:
        with Display() as display:
            result = txl_export.export(checkpoint, output or _beside(checkpoint), listener=display, **given)
    except ParityError as error:
        if not json:
            print_parity(error.parity.document())
        raise
    size = sum(record.size for record in result.manifest.files.values())
    parity = None if result.parity is None else result.parity.document()
    if json:
        print_json({"bundle": str(result.path), "bytes": size, "model_id": result.manifest.model_id, "parity": parity})
        return
    if parity is not None:
        print_parity(parity)
    verified = "NOT verified" if parity is None else "verified"
    stdout.print(f"{result.path}: {quantity(size)}, {verified}", soft_wrap=True)


def _beside(checkpoint: Path) -> Path:
    """The default name: CHECKPOINT with suffix .txl."""
    if checkpoint.name in ("", ".."):
        raise UsageError(f"{checkpoint}: has no name to call the bundle by, expected CHECKPOINT's; give -o BUNDLE")
    if checkpoint.is_dir():
        return checkpoint.with_name(f"{checkpoint.name}.txl")  # a folder's dots are part of its name
    return checkpoint.with_suffix(".txl")
