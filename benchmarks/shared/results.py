"""Read the options that benchmarks share, and store their results: tables, the machine's conditions, all figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.shared.tables import Table
from txl_deploy.bench.measuring import cpu_name
from txl_deploy.extras import version_of

__all__ = ["finish", "parser", "store"]


def parser(
    description: str | None,
    seconds: float | None = 3.0,
    quick: str = "tiny shapes: proves that it runs, measures nothing",
    threads: str = "of every competitor (default 2)",
    several_threads: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks share.

    Args:
        description: the script's docstring, whose first line is the help's.
        seconds: the default of --seconds; None leaves the option out.
        quick: the help of --quick.
        threads: the help of --threads.
        several_threads: True if --threads takes several numbers, by default only 1; otherwise one number, by default 2.
    """
    summary = (description or "").strip().split("\n", maxsplit=1)[0]
    option_parser = argparse.ArgumentParser(description=summary)
    option_parser.add_argument("--quick", action="store_true", help=quick)
    option_parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write the tables (.md) and all figures (.json) here"
    )
    if several_threads:
        option_parser.add_argument("--threads", type=int, nargs="+", default=[1], help=threads)
    else:
        option_parser.add_argument("--threads", type=int, default=2, help=threads)
    if seconds is not None:
        option_parser.add_argument(
            "--seconds", type=float, default=seconds, help="of timing, per competitor and kind of work"
        )
    return option_parser


def finish(name: str, arguments: argparse.Namespace, tables: Sequence[Table], document: object) -> None:
    """Print the tables and the conditions as markdown; with --out, write them and all figures to that folder."""
    print(store(name, arguments, tables, document))


def store(name: str, arguments: argparse.Namespace, tables: Sequence[Table], document: object) -> str:
    """Return the tables and the conditions as markdown; with --out, write NAME.md and NAME.json to that folder.

    Args:
        name: NAME, the name of both files.
        arguments: the command line.
        tables: the tables.
        document: all figures, which NAME.json holds beside the options.
    """
    conditions = _conditions(arguments)
    text = "\n\n".join([*(table.markdown() for table in tables), conditions]) + "\n"
    if arguments.out is None:
        return text
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.md").write_text(text)
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    whole = {"conditions": conditions, "options": options, "results": msgspec.to_builtins(document)}
    (arguments.out / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    return text


def _conditions(arguments: argparse.Namespace) -> str:
    packages = {name: version_of(name) for name in ("txl-deploy", "torch", "onnxruntime", "numpy")}
    versions = ", ".join(f"{name} {result}" for name, result in packages.items())
    threads = arguments.threads if isinstance(arguments.threads, int) else " and ".join(map(str, arguments.threads))
    text = f"{cpu_name()}, {os.cpu_count()} cores, {threads} threads; Python {platform.python_version()}, "
    text += f"{versions}."
    return f"(--quick: tiny shapes, the figures mean nothing) {text}" if arguments.quick else text
