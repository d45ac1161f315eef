"""The last step of writing a bundle: its manifest, over the files that are there."""

from __future__ import annotations

from pathlib import Path

import msgspec
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import MANIFEST, open_bundle
from txl_runtime.bundle.tables import FileRecord
from txl_runtime.guard.graph_check import Budget, check_graph


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest over the files that are there, and read the bundle back as a user would.

    Raises:
        BundleError: a graph is not what runtimes take; what exports must find, loading never has to.
    """
    files = {
        path.relative_to(folder).as_posix(): FileRecord(size=path.stat().st_size, sha256=file_sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    sealed = msgspec.structs.replace(manifest, files=files)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(sealed)))
    bundle = open_bundle(folder)
    budget = Budget(bundle.manifest.weight_bytes)
    for file, program in {program.file: program for program in bundle.manifest.programs}.items():
        check_graph(bundle.read(file), file, program, bundle.manifest, "report this", budget)
    return bundle.manifest
