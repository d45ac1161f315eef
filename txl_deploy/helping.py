"""Lay out the texts of `--help`: options in groups, and names that are never cut, even in a narrow terminal."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

GROUPS = {
    "export": {
        "What a checkpoint may lack": "family config vocabulary specials missing-words boundary-token alias "
        "initial-memory cluster-order embedding-scale",
        "Lengths and memory": "segment-length batch-size memory memory-length clamp-length extended-length same-length "
        "lookup features",
        "Precision": "precision keep",
        "Proof": "verify text tokens inputs",
        "Models of your own and of packages": "adapter weights growth",
        "ONNX files": "state output window open fix initial batch-axis position-axis",
    },
    "verify": {
        "What it is compared with": "checkpoint module adapter config weights vocabulary",
        "What both read": "text tokens inputs segments state rename",
    },
    "package": {
        "Triton": "sequences idle-seconds backend",
        "Plain C": "segment-length batch-size name weights-file max-bytes unverified",
        "Browsers": "single onnxruntime-web",
    },
    "serve": {
        "Where it listens": "host port token token-file name",
        "Sessions": "max-sessions session-bytes idle-seconds checkpoint-dir checkpoint-every",
        "Requests": "max-waiting drain-seconds",
        "A datastore": "datastore knn knn-temperature knn-weight",
    },
}
"""Groups of options, by verb, for verbs with many options; an option that is in no group is listed under Options."""
SETTINGS = {"help_option_names": ["-h", "--help"], "terminal_width": min(shutil.get_terminal_size().columns, 100)}
"""Settings of every command: the names of its help option, and the width of its help."""
_NAMES = 20
"""Maximum width of the column of names, in characters; the text of a longer name begins in the next line."""
_CHOICES = re.compile(r"[<\[]([\w-]+(?:\|[\w-]+)+)[>\]]")
"""Regular expression of an option's allowed values in help texts of any version of typer, e.g. "<fp32|fp16>"."""


class Command(TyperCommand):
    """A verb whose help has a section for every group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the groups of options."""
        _write(formatter, _groups(self, ctx))


class Group(TyperGroup):
    """The command that has all verbs; `help VERB` shows the same as `VERB --help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before the verb, after turning `help VERB` into `VERB --help`."""
        return super().parse_args(ctx, [*args[1:2], "--help"] if args[:1] == ["help"] else args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs, then the options."""
        _write(formatter, {"Commands": [(name, str(verb.help)) for name, verb in self.commands.items()]})
        _write(formatter, _groups(self, ctx))


def _groups(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return a command's parameters as (name, description), by title of the section: arguments, options, groups."""
    named = GROUPS.get(command.name, {})
    titles = {f"--{name}": title for title, names in named.items() for name in names.split()}
    groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", "Options", *named)}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is None:  # hidden parameters have no help
            continue
        signature, help_text = (
            record[1].replace("\\[", "["),
            parameter.help or "",
        )  # older versions of typer escape "[" for rich
        if parameter.param_type_name == "argument":
            groups["Arguments"].append((parameter.metavar, signature))
            continue
        short_first = sorted(parameter.opts, key=len)
        names = " / ".join([", ".join(short_first), *parameter.secondary_opts])
        if choices := _CHOICES.search(record[0]):
            signature = f"{help_text} <{choices[1].replace('|', ' | ')}>{signature.removeprefix(help_text)}"
        row = (f"{names} {parameter.metavar or ''}".rstrip(), signature)
        groups[titles.get(short_first[-1], "Options")].append(row)
    return groups


def _write(formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> None:
    """Write a section for each group, with columns of the same width in all sections."""
    most = min(_NAMES, formatter.width // 3)
    room = max((len(name) for rows in groups.values() for name, _ in rows if len(name) <= most), default=most)
    # if neither variable is set, typer checks whether the output is a terminal
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    shown = str if plain else partial(typer.style, bold=True)
    for title, rows in groups.items():
        if rows:
            with formatter.section(shown(title)):
                formatter.write_dl([(shown(name.ljust(room)), text) for name, text in rows], room)
