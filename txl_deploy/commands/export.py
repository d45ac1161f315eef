"""`txl-deploy export`: make a verified bundle from a checkpoint, or from a model of your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from txl_export.options import ExportOptions, flags_of_export
from txl_report.facts.model import size_of_files
from txl_report.numbers import prefixed
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Json, parse_aliases, parse_pairs
from txl_deploy.commands.own_modules import check_source, of_adapter, of_own_module, own_frames
from txl_deploy.console import Display, print_json, stdout
from txl_deploy.extras import lean_heap, require_export
from txl_deploy.parity_tables import print_parity

PAIRS = (
    ("states", "--state", "IN=OUT, an input and an output of the file, or IN=", True),
    ("fix", "--fix", "NAME=VALUE, an input or an open size of the file", False),
    ("batch_axes", "--batch-axis", "NAME=N, an input or output of the file and an axis of it from 0", False),
    ("position_axes", "--position-axis", "NAME=N, an input or output of the file and an axis of it from 0", False),
    ("windows", "--window", "NAME=ROWS, an input of the file and a number of rows", False),
)
"""Options that take pairs NAME=VALUE: (field, flag, description of a pair for messages, True if VALUE may be empty)."""


def _with_export_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag for every field of `ExportOptions` to the command's parameters, before its --json."""
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
        str | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint file, a Hugging Face folder, FILE.py:FUNCTION for a model of your own, FILE.onnx, or a "
            "folder of LEAPP's; none with --adapter.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", metavar="BUNDLE", help="The bundle. (default CHECKPOINT's file with the suffix .txl)"),
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Turn a trained Transformer-XL, or a model of your own that carries state, into a verified bundle."""
    require_export("export")
    chosen = {name: value for name, value in options.items() if value is not None}
    chosen["aliases"] = parse_aliases(options["aliases"]) or None
    chosen |= {name: parse_pairs(flag, options[name], form, empty) or None for name, flag, form, empty in PAIRS}
    chosen |= {name: _numbers(flag, chosen[name], form) for name, flag, form, _ in PAIRS[2:]}
    if options["adapter"] is not None:
        source: str | Path = of_adapter(options["adapter"], checkpoint, chosen.pop("weights", None))
    elif checkpoint is None:
        raise UsageError(
            "no CHECKPOINT is given, expected a file, a folder, FILE.py:FUNCTION, or --adapter NAME; see txl-deploy "
            "export --help"
        )
    else:
        source = of_own_module(checkpoint) or Path(checkpoint)
        check_source(checkpoint)
    target = output or _beside(source)
    lean_heap()
    from txl_export.bundle.placing import check_destination

    check_destination(target, options["force"])
    import txl_export
    from txl_export.checkpoints.imported import ScriptedError
    from txl_export.describing import describe_checkpoint
    from txl_export.proof.parity import ParityError

    try:
        with Display() as display, own_frames():
            result = txl_export.export(source, target, listener=display, **chosen)
    except ParityError as error:
        if not json:
            print_parity(error.parity.verification())
        raise
    except ScriptedError:
        skeleton = describe_checkpoint(Path(source)).get("skeleton")
        if skeleton and not json:
            stdout.print(skeleton, soft_wrap=True, end="")
        raise
    size = size_of_files(result.manifest)
    parity = None if result.parity is None else result.parity.verification()
    if json:
        print_json({"bundle": str(result.path), "bytes": size, "model_id": result.manifest.model_id, "parity": parity})
        return
    if parity is not None:
        print_parity(parity)
    verified = "NOT verified" if parity is None else "verified"
    stdout.print(f"{result.path}: {prefixed(size)}, {verified}", soft_wrap=True)


def _numbers(flag: str, pairs: dict[str, str] | None, form: str) -> dict[str, int] | None:
    if wrong := [f"{name}={number}" for name, number in (pairs or {}).items() if not number.isdecimal()]:
        raise UsageError(f"{flag} is {wrong[0]!r}, expected {form}; check it")
    return {name: int(number) for name, number in pairs.items()} if pairs else None


def _beside(source: str | Path) -> Path:
    """Return the default path of the bundle: the path of the checkpoint or model file, with the suffix .txl."""
    path = source if isinstance(source, Path) else Path(source.rpartition(":")[0])
    # FOLDER:NODE becomes FOLDER-NODE, because not every system allows a colon in file names
    path = path.with_name(path.name.replace(":", "-")) if path.name else path
    if path.name in ("", ".."):
        raise UsageError(f"{path}: has no name to call the bundle by, expected CHECKPOINT's; give -o BUNDLE")
    if path.is_dir():
        return path.with_name(f"{path.name}.txl")  # a dot in a folder's name does not begin a suffix
    return path.with_suffix(".txl")
