"""Makes the command of an export, which the bundle stores so that anybody can repeat it.

Files are stored by name without their folders, which would describe somebody's machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from txl_export.options import ExportOptions, flags_of_export

FILES = ("config", "text", "tokens", "vocabulary", "weights", "inputs", "initial")
"""Options whose value is the path of a file, or the file's content in memory."""
LEFT_OUT = ("force",)
"""Options that do not change the bundle, and so are not stored."""


def command_of(source: object, options: ExportOptions) -> dict[str, Any]:
    """Return the `txl-deploy export` command that repeats an export, without -o; Python calls are translated.

    Returns:
        "arguments": the words after `export`; "in_memory": names of options that were Python objects, which no command
            can express, and "source" for a model in memory.
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
    """Yield an option as words of a command, e.g. "--memory-length", "640"."""
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
    """Return whether an option has its default; types are compared first, because == of arrays gives no bool."""
    return value is default or (type(value) is type(default) and value == default)


def _file(path: str | Path) -> str:
    """Return a path's last part: "a/model.py:step" → "model.py:step"; "-x" → "./-x", which looks like no option."""
    text, function = str(path), ""
    if not Path(text).exists() and ":" in text:
        text, _, function = text.rpartition(":")
    name = Path(text).resolve().name + (f":{function}" if function else "")
    return f"./{name}" if name.startswith("-") else name
