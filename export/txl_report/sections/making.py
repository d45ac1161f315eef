"""Show the bundle's files, its source, the command that exported it, and the versions that made it."""

from __future__ import annotations

from txl_runtime.bundle.reading import MANIFEST

from txl_report.blocks import Block, Cell, Code, Gap, Pairs, Section
from txl_report.facts.gathering import Facts
from txl_report.facts.plain import Missing, some
from txl_report.numbers import size, whole
from txl_report.sections.common import gap, table, titled


def files_section(facts: Facts) -> Section:
    """List every file with its size and hash."""
    files = some((name, file) for name, file in sorted(facts.manifest.files.items()) if name != MANIFEST)
    rows: list[tuple[Cell, ...]] = [(name, whole(file.size), Code(file.sha256)) for name, file in files]
    source = facts.source
    blocks: list[Block] = []
    if isinstance(source, Missing):
        blocks.append(gap("Source", source))
    else:
        origin: list[tuple[str, Cell]] = [("Made from", source.name)]
        origin += [("SHA-256 of it", Code(source.sha256))] if source.sha256 else []
        origin += [("Exported by", Code(facts.command))] if facts.command else []
        blocks.append(Pairs([*origin, *((titled(name), text) for name, text in source.said)]))
    caption = f"{len(files)} files, {size(sum(file.size for _, file in files))}, and the manifest, which lists them"
    blocks.append(table(caption, ("File", "Bytes", "SHA-256"), (1,), rows))
    return Section(
        "files", "Size and files", "What the bundle consists of; a file that was altered has another hash.", blocks
    )


def versions_section(facts: Facts) -> Section:
    """List the versions with which the bundle was exported."""
    blocks: list[Block]
    if facts.versions:
        blocks = [table("Versions at export", ("Package", "Version"), (), facts.versions)]
    else:
        blocks = [Gap("Versions", "The bundle does not say with which versions it was exported.")]
    return Section("versions", "Versions", "What made this bundle.", blocks)
