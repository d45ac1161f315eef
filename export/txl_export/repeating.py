"""The command that an export was asked for by, noted in the bundle so that anybody can repeat it.

Files are noted by their names alone: where they lay on somebody's machine is nobody's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from txl_export.options import ExportOptions, flags_of_export

FILES = ("config", "text", "tokens", "vocabulary", "weights", "inputs", "initial")
"""Options that may be files, or the same in memory."""
LEFT_OUT = ("force",)
"""Options that say nothing of what is made."""


def command_of(source: object, options: ExportOptions) -> dict[str, Any]:
    """How `txl-deploy export` was asked for, or would be for what was asked for in Python; without -o.

    Returns:
        "arguments": the words of the command behind `export`; "in_memory": what was given as an object, which no
        command can name: options, and "source" for a model in memory.
    """
    words: list[str] = []
    in_memory: list[str] = []
    if isinstance(source, str | Path):
        name = _file(source)
        words += ["--weights", name] if options.adapter is not None else [name]
    else:
        in_memory.append("source")
    flags = flags_of_export()
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in flags or field.name in LEFT_OUT or value is None or _same(value, field.default):
            continue
        if field.name in FILES and not isinstance(value, str | Path):
            in_memory.append(field.name)
        else:
            words += _words(field.name, flags[field.name].names, value)
    return {"arguments": words, "in_memory": in_memory}


def _words(name: str, flag: str, value: Any) -> Iterator[str]:
    """An option as words of a command."""
    on, _, off = flag.partition("/")
    if isinstance(value, bool | np.bool_):
        yield on if value else off
    elif name in FILES:
        yield from (on, _file(value))
    elif isinstance(value, Mapping):
        for theirs, original in value.items():
            yield from (on, f"{theirs}={original}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            yield from (on, str(one))
    else:
        yield from (on, str(value))


def _same(value: object, default: object) -> bool:
    """Whether nothing was asked for; an array cannot be compared as a whole."""
    return value is default or (type(value) is type(default) and value == default)


def _file(path: str | Path) -> str:
    """The name of a file or a folder, of FILE.py:FUNCTION both; such that it is not taken for an option."""
    text, function = str(path), ""
    if not Path(text).exists() and ":" in text:
        text, _, function = text.rpartition(":")
    name = Path(text).resolve().name + (f":{function}" if function else "")
    return f"./{name}" if name.startswith("-") else name
