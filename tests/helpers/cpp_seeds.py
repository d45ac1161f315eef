"""First inputs of the fuzz targets in runtime/cpp/fuzz, from the conformance list and the corpus of bad bundles."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import txl_runtime

from conformance import spoiling
from conformance.driver import unpacked_bytes
from conformance.run import FOLDER

BUNDLES = sorted(path.parent for path in (FOLDER / "bundles").glob("*/manifest.json"))
SUFFIXES = {
    "manifest": "manifest.json",
    "weights": "weights.safetensors",
    "vectors": "selftest.npz",
    "snapshot": ".state",
}
"""The targets, and how the files end that the corpus of bad bundles has for them."""


def write(target: str, into: Path) -> int:
    """Write a target's seeds, each a file, and return how many of them there are."""
    found = [*_good(target), *_bad(target)]
    for number, data in enumerate(found):
        (into / f"{number:04}").write_bytes(data)
    return len(found)


def _good(target: str) -> Iterator[bytes]:
    if target == "manifest":
        yield from ((path / "manifest.json").read_bytes() for path in BUNDLES)
    elif target == "snapshot":
        for path in BUNDLES:
            model = txl_runtime.load(path, "cpu", threads=1)
            yield model.stream(model.batch_size).snapshot().to_bytes()
        for path in sorted((FOLDER / "vectors").glob("*.jsonl")):
            for line in path.read_text("utf-8").splitlines():
                requests = [step["request"] for step in json.loads(line)["steps"]]
                kept = [each["bytes"] for each in requests if each["do"] in ("restore", "put") and each["bytes"]]
                yield from map(unpacked_bytes, kept)
    else:
        names = ("weights.safetensors",) if target == "weights" else ("selftest.safetensors", "selftest.npz")
        for path in BUNDLES:
            yield from ((path / name).read_bytes() for name in names if (path / name).is_file())


def _bad(target: str) -> Iterator[bytes]:
    """Yield the contents that the corpus of bad bundles has for such a file."""
    suffix = SUFFIXES[target]
    for case in spoiling.index()["cases"]:
        wanted = {change["file"] for change in case["changes"] if change["file"].endswith(suffix)}
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            made = spoiling.build(case, Path(folder) / "bundle")
            for name in wanted:
                if (made / name).is_file() and not (made / name).is_symlink():
                    yield (made / name).read_bytes()
