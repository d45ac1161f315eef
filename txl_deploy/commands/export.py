"""`txl-deploy export`: checkpoint → verified bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Alias, Config, Family, Json, Text, Tokens, parse_aliases
from txl_deploy.commands.report import print_parity
from txl_deploy.console import Display, print_json, quantity, stdout
from txl_deploy.extras import lean_heap, require_export

__all__ = ["run"]


def run(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint file or a Hugging Face folder.", show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The bundle; CHECKPOINT with suffix .txl without it.")
    ] = None,
    family: Family = "auto",
    config: Config = None,
    segment_length: Annotated[
        list[int] | None,
        typer.Option("--segment-length", help="L of a program; repeat for several. (default 64 and 1)"),
    ] = None,
    memory_length: Annotated[int | None, typer.Option("--memory-length", help="M, memory rows per layer.")] = None,
    clamp_length: Annotated[
        int | None, typer.Option("--clamp-length", help="Largest distance told apart; 0 for no clamp.")
    ] = None,
    same_length: Annotated[
        bool | None, typer.Option("--same-length/--no-same-length", help="Every query sees equally many keys.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="B, the most streams that advance together.")] = 1,
    memory: Annotated[
        Literal["kv", "hidden"] | None,
        typer.Option(
            "--memory", help="Keep keys and values, or the layers' inputs. (default kv, hidden where kv cannot be)"
        ),
    ] = None,
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8", "int4"],
        typer.Option("--precision", help="Of weights and arithmetic; int8 and int4 are for the CPU."),
    ] = "fp32",
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", help="With int8 and int4: leave these matrices in fp32, e.g. layers.03; repeatable."),
    ] = None,
    text: Text = None,
    tokens: Tokens = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with PyTorch before naming it.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    vocabulary: Annotated[
        Path | None, typer.Option("--vocabulary", help="Vocabulary file, where the checkpoint has none.")
    ] = None,
    alias: Alias = None,
    initial_memory: Annotated[
        Literal["empty", "zeros"] | None,
        typer.Option("--initial-memory", help="What is attended to before the first token. (default as the family's)"),
    ] = None,
    cluster_order: Annotated[
        Literal["ascending", "reversed"] | None,
        typer.Option("--cluster-order", help="How the file orders the softmax's clusters. (default as the family's)"),
    ] = None,
    embedding_scale: Annotated[
        float | None, typer.Option("--embedding-scale", help="Factor on the embedding. (default as the family's)")
    ] = None,
    json: Json = False,
) -> None:
    """Turn a trained Transformer-XL into a verified, self-contained bundle."""
    require_export("export")
    lean_heap()
    import txl_export
    from txl_export.parity.report import ParityError

    try:
        with Display() as display:
            result = txl_export.export(
                checkpoint,
                output or _beside(checkpoint),
                family=family,
                config=config,
                segment_length=segment_length or (),
                memory_length=memory_length,
                clamp_length=clamp_length,
                same_length=same_length,
                batch_size=batch_size,
                memory=memory,
                precision=precision,
                keep=keep or (),
                text=text,
                tokens=tokens,
                verify=verify,
                force=force,
                vocabulary=vocabulary,
                aliases=parse_aliases(alias),
                initial_memory=initial_memory,
                cluster_order=cluster_order,
                embedding_scale=embedding_scale,
                listener=display,
            )
    except ParityError as error:
        if not json:
            print_parity(error.parity.document())
        raise
    size = sum(record.size for record in result.manifest.files.values())
    if json:
        parity = None if result.parity is None else result.parity.document()
        print_json({"bundle": str(result.path), "bytes": size, "model_id": result.manifest.model_id, "parity": parity})
        return
    if result.parity is not None:
        print_parity(result.parity.document())
    stdout.print(f"{result.path}: {quantity(size)}, {'verified' if verify else 'NOT verified'}", soft_wrap=True)


def _beside(checkpoint: Path) -> Path:
    """The default name: CHECKPOINT with suffix .txl."""
    if checkpoint.name in ("", ".."):
        raise UsageError(f"{checkpoint}: has no name to call the bundle by, expected CHECKPOINT's; give -o BUNDLE")
    if checkpoint.is_dir():
        return checkpoint.with_name(f"{checkpoint.name}.txl")  # a folder's dots are part of its name
    return checkpoint.with_suffix(".txl")
