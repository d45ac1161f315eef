"""Name the source from which a bundle was made, and the versions that made it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txl_runtime.bundle.manifest import Manifest

from txl_report.facts.plain import Fact, Missing, some
from txl_report.schema.reading import short

MOST_WORDS = 200
"""Maximum number of words of a command that are shown: a stranger's manifest may have any number of them."""


@dataclass(frozen=True)
class Source:
    """The source from which a bundle was made.

    Attributes:
        name: name of the file or of the module.
        sha256: SHA-256 of the file; "" if the manifest has none.
        said: further notes of the exporter, such as the file's format.
    """

    name: str
    sha256: str
    said: tuple[Fact, ...]


def versions_of(manifest: Manifest) -> tuple[Fact, ...]:
    """Return the versions with which the bundle was exported; empty if the manifest has none."""
    return _rows(manifest.provenance.get("versions"))


def source_of(manifest: Manifest) -> Source | Missing:
    """Return the source from which the bundle was made."""
    source = manifest.provenance.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("name"), str):
        return Missing("The bundle does not say what it was made from.")
    digest = source.get("sha256")
    known = {name: source.get(name) for name in ("container", "recognised", "weights")}
    return Source(short(source["name"]), short(digest, 64) if isinstance(digest, str) else "", _rows(known))


def command_of(manifest: Manifest) -> str:
    """Return the shell command that exported the bundle; "" if the model was in memory, or no command was recorded."""
    noted = manifest.provenance.get("command")
    words, in_memory = (noted.get("arguments"), noted.get("in_memory")) if isinstance(noted, dict) else (None, None)
    if not isinstance(words, list) or not isinstance(in_memory, list) or "source" in in_memory:
        return ""
    return shlex.join(["txl-deploy", "export", *(short(str(word)) for word in some(words, MOST_WORDS))])


def _rows(values: Any) -> tuple[Fact, ...]:
    pairs: Mapping[Any, Any] = values if isinstance(values, dict) else {}
    return some((short(name, 80), short(text)) for name, text in pairs.items() if isinstance(text, str) and text)
