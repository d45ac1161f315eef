"""Gather all known facts about a bundle from its files and from measurements, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle

from txl_report.facts.byte_shares import ByteShares, read_parts
from txl_report.facts.engines import Engines, read_engines
from txl_report.facts.model import Context, context_of
from txl_report.facts.plain import Fact, Missing, some
from txl_report.facts.results import measurement_of_file, verification_of_bundle, verification_of_file
from txl_report.facts.source import Source, command_of, source_of, versions_of
from txl_report.facts.tables import Tables, tables_of
from txl_report.schema.measurement import Measurement
from txl_report.schema.verification import Verification

NOT_REPEATED = Missing("No later verification was given.", "txl-deploy verify BUNDLE --json > verify.json")
"""Shown in place of a later verification if no file of a verification is given."""
NOT_MEASURED = Missing("No measurement of speed was given.", "txl-deploy bench BUNDLE --json > bench.json")
"""Shown in place of a measurement of speed if no file of a measurement is given."""


@dataclass(frozen=True)
class Facts:
    """The facts about a bundle.

    Attributes:
        name: name of the bundle's folder.
        manifest: the manifest; its texts may be a stranger's, and of any length.
        described: the exporter's facts about the architecture.
        context: the theoretical context, or the reason why it is unknown.
        tables: the tensors that a step reads, returns and carries.
        parts: number of bytes of each part of the weight file.
        exported: the verification that the export made.
        repeated: a later verification, read from a file.
        engines: the engines for GPUs.
        speed: a measurement, read from a file.
        source: the file or module from which the bundle was made.
        versions: versions of the packages that made the bundle.
        command: the shell command that exported the bundle; "" if the bundle does not state it.
        verify_file, bench_file: the names of the files that `repeated` and `speed` were read from.
    """

    name: str
    manifest: Manifest
    described: tuple[Fact, ...]
    context: Context | Missing
    tables: Tables
    parts: ByteShares | Missing
    exported: Verification | Missing
    repeated: Verification | Missing
    engines: Engines | Missing
    speed: Measurement | Missing
    source: Source | Missing
    versions: tuple[Fact, ...]
    command: str
    verify_file: str = ""
    bench_file: str = ""


def gather(
    bundle: Bundle,
    described: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    verify: Path | None = None,
    bench: Path | None = None,
) -> Facts:
    """Gather all known facts about a bundle without running it.

    Args:
        described: the exporting family's facts about its architecture (`facts_of_bundle` of the exporter); this package
            imports no exporter.
        name: the bundle's name; None for its folder's name.
        verify: a file that `txl-deploy verify --json` wrote.
        bench: a file that `txl-deploy bench --json` wrote.

    Raises:
        UsageError: a file is not such a document, or belongs to a different model.
    """
    manifest = bundle.manifest
    return Facts(
        name=name or bundle.path.resolve().name,
        manifest=manifest,
        described=some((described or {}).items()),
        context=context_of(manifest),
        tables=tables_of(manifest),
        parts=read_parts(bundle),
        exported=verification_of_bundle(bundle),
        repeated=NOT_REPEATED if verify is None else verification_of_file(verify, bundle),
        engines=read_engines(bundle),
        speed=NOT_MEASURED if bench is None else measurement_of_file(bench, bundle),
        source=source_of(manifest),
        versions=versions_of(manifest),
        command=command_of(manifest),
        verify_file="" if verify is None else verify.name,
        bench_file="" if bench is None else bench.name,
    )
