"""The commands that make a bundle, prove it and measure it again, exactly as a shell takes them.

What was asked for at export stands in the manifest's provenance. Where it does not, in bundles of older versions, the
command is put together from what the manifest says of the result.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import ENGINES
from txl_runtime.errors import BundleError

from txl_report.facts.plain import Missing, as_path, some
from txl_report.schema.reading import short

WORDS = 200
"""Of a command, at most; a stranger's manifest may have any number of them."""
IN_MEMORY = "At export these were given in memory, and have to be given as files: {}."
MODEL_IN_MEMORY = "The model was given in memory, by txl_export.export in Python; no command names it."
UNKNOWN = "The bundle does not say which file it was exported from."
FROM_RESULT = "Put together from the manifest: the bundle does not say with which options it was exported."
KEPT = ("--text", "--tokens")
"""Options of an export that later verifications take as well."""


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: "export", "build", "verify", "selftest", "bench", "report".
        line: for a shell, quoted; files are named without their folders.
        note: what a reader has to know, such as what is not recorded; "" where there is nothing.
    """

    name: str
    line: str
    note: str = ""


@dataclass(frozen=True)
class Commands:
    """All of them, in the order in which they are run; `export` may be missing: a model in memory has no command."""

    export: Command | Missing
    others: tuple[Command, ...]


def commands_of(manifest: Manifest, name: str) -> Commands:
    """The commands that repeat a bundle which is called `name`."""
    name = as_path(_word(name))
    arguments, in_memory, note = _asked(manifest)
    export: Command | Missing
    if arguments is None or "source" in in_memory:
        export = Missing(MODEL_IN_MEMORY if "source" in in_memory else UNKNOWN)
    else:
        others = ", ".join(in_memory)
        export = Command(
            "export", _line("export", *arguments, "-o", name), note or (others and IN_MEMORY.format(others))
        )
    against, text = _reference(manifest, arguments or [], in_memory), _kept(arguments or [])
    targets = dict.fromkeys(
        file.split("/")[1] for file in sorted(manifest.files) if file.count("/") > 1 and _engine(file)
    )
    return Commands(
        export,
        (
            *(Command("build", _line("build", name, "--target", target)) for target in some(targets, 8)),
            Command(
                "verify", f"{_line('verify', name, *against, *text)} --json > verify.json", _unproved(manifest, against)
            ),
            Command("selftest", _line("selftest", name)),
            Command("bench", f"{_line('bench', name, *_module(against))} --json > bench.json"),
            Command(
                "report",
                _line("report", name, "-o", "report.html", *text, "--verify", "verify.json", "--bench", "bench.json"),
            ),
        ),
    )


def _asked(manifest: Manifest) -> tuple[list[str] | None, list[str], str]:
    """What was asked for at export, what of it was in memory, and what a reader has to know of that."""
    command = manifest.provenance.get("command")
    if isinstance(command, dict):
        arguments, in_memory = _texts(command.get("arguments")), _texts(command.get("in_memory"))
        if arguments is not None and in_memory is not None and not {"-o", "--output", "--force"} & {*arguments}:
            return arguments, in_memory, ""
    source = manifest.provenance.get("source")
    named = source.get("name") if isinstance(source, dict) else None
    if not isinstance(named, str) or not _is_file(named, source):
        return None, [], FROM_RESULT
    return [as_path(_word(named)), *_from_result(manifest)], [], FROM_RESULT


def _is_file(name: str, source: Any) -> bool:
    """Whether a source is a file that a command can name: one with a hash, or FILE.py:FUNCTION."""
    return bool(source.get("sha256")) or ".py:" in name


def _from_result(manifest: Manifest) -> list[str]:
    """Options that give what the manifest says of the bundle."""
    words = [word for length in some(manifest.segment_lengths, 16) for word in ("--segment-length", str(length))]
    for batch in some((manifest.batch_size, *manifest.batch_sizes), 16):
        words += ["--batch-size", str(batch)]
    words += ["--precision", manifest.precision]
    try:
        model = manifest.transformer_xl
    except BundleError:
        return words
    dialect = model.dialect
    words += ["--memory-length", str(manifest.memory_length), "--memory", model.memory]
    words += ["--clamp-length", str(dialect.clamp_length or 0)]
    same = dialect.window is not None or dialect.segment_window
    return [*words, "--same-length" if same else "--no-same-length"]


def _reference(manifest: Manifest, arguments: Sequence[str], in_memory: Sequence[str]) -> list[str]:
    """What a verification compares with: the checkpoint, or the user's module and its weights."""
    if not arguments or "source" in in_memory:
        return []
    if adapter := _value(arguments, "--adapter"):
        weights, config = _value(arguments, "--weights"), _value(arguments, "--config")
        known = ["--adapter", adapter, "--weights", weights]
        return [*known, "--config", config] if config else known
    if manifest.family_name == "transformer_xl":
        return ["--checkpoint", arguments[0]]
    weights = _value(arguments, "--weights")
    return ["--module", arguments[0], *(["--weights", weights] if weights else [])]


def _module(against: Sequence[str]) -> Sequence[str]:
    """What `bench` compares a model of the user's own with."""
    return [] if against[:1] == ["--checkpoint"] else against


def _unproved(manifest: Manifest, against: Sequence[str]) -> str:
    """What a verification does not show where what the bundle was made from is not at hand."""
    if against:
        return ""
    if manifest.family_name == "transformer_xl":
        return "The reference is rebuilt from the bundle's own weights: the import of the checkpoint is not repeated."
    return "The bundle's own vectors are replayed: it is not compared with the module again."


def _kept(arguments: Sequence[str]) -> list[str]:
    return [word for flag in KEPT if (found := _value(arguments, flag)) for word in (flag, found)]


def _value(arguments: Sequence[str], flag: str) -> str:
    """What stands behind a flag; "" where it is not there."""
    return next((after for word, after in pairwise(arguments) if word == flag), "")


def _engine(file: str) -> bool:
    return file.startswith(ENGINES) and not file.endswith(".json")


def _texts(value: Any) -> list[str] | None:
    """A list of texts of bounded length; None where it is something else."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        return None
    return [_word(one) for one in some(value, WORDS)]


def _word(text: str) -> str:
    return short(text, 200)


def _line(verb: str, *words: str) -> str:
    """A command for a shell."""
    return shlex.join(["txl-deploy", verb, *words])
