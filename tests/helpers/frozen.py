"""Bundles that are kept in this repository, so that a test of the runtime needs neither PyTorch nor an exporter."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = (ROOT / "conformance" / "bundles", ROOT / "tests" / "fixtures" / "release_0_8")


def frozen(name: str) -> Path:
    """A bundle of the conformance list (`ring`, `clusters`, `policy-16` …) or, behind `0.8/`, of that release.

    The folder is the repository's own: whoever changes a file in it copies the bundle first.
    """
    place = PLACES[name.startswith("0.8/")] / name.removeprefix("0.8/")
    assert (place / "manifest.json").is_file(), place
    return place
