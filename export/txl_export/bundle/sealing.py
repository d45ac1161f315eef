"""Writes the manifest, with sizes and hashes of the folder's files, which completes a bundle."""

from __future__ import annotations

from pathlib import Path

import msgspec
from txl_runtime.bundle.derived import completed
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.manifest import FORMAT_VERSION, Manifest
from txl_runtime.bundle.reading import MANIFEST, open_bundle
from txl_runtime.bundle.tables import FileRecord
from txl_runtime.guard.graph_check import check_graph, imported_opset
from txl_runtime.guard.protobuf import RefusedError


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest with sizes and hashes of the folder's files; return the manifest as read back.

    Fields that the manifest's tables imply (`derived`) and each graph's opsets, e.g. {"ai.onnx": 18}, are filled in.

    Raises:
        BundleError: runtimes would refuse a graph or the manifest.
    """
    files = {
        path.relative_to(folder).as_posix(): FileRecord(size=path.stat().st_size, sha256=file_sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    graphs = {file: _opset(folder / file) for file in {program.file for program in manifest.programs}}
    programs = tuple(msgspec.structs.replace(program, opset=graphs[program.file]) for program in manifest.programs)
    sealed = completed(msgspec.structs.replace(manifest, format_version=FORMAT_VERSION, files=files, programs=programs))
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(sealed)))
    bundle = open_bundle(folder)
    for file, program in {program.file: program for program in bundle.manifest.programs}.items():
        check_graph(bundle.read(file), file, program, bundle.manifest, "report this")
    return bundle.manifest


def _opset(graph: Path) -> dict[str, int]:
    """Return the opsets that a graph imports; {} for a missing or damaged graph: later checks of `seal` refuse it."""
    try:
        return imported_opset(graph.read_bytes())
    except (OSError, RefusedError):
        return {}
