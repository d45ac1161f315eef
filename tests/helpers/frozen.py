"""Bundles that are kept in this repository, so that a test of the runtime needs neither PyTorch nor an exporter."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from txl_runtime import Model, load

ROOT = Path(__file__).parents[2]
PLACES = (ROOT / "conformance" / "bundles", ROOT / "tests" / "fixtures" / "release_0_8")


def frozen(name: str) -> Path:
    """A bundle of the conformance list (`ring`, `clusters`, `policy-16` …) or, behind `0.8/`, of that release.

    The folder is the repository's own: whoever changes a file in it copies the bundle first.
    """
    place = PLACES[name.startswith("0.8/")] / name.removeprefix("0.8/")
    assert (place / "manifest.json").is_file(), place
    return place


FORMS = {
    "ring": ("ring", "ring"),
    "rolled": ("ring", "rolled"),
    "hidden": ("hidden", "rolled"),
    "zeros": ("zeros", "ring"),
    "zeros, rolled": ("zeros", "rolled"),
    "clusters": ("clusters", "ring"),
    "int8": ("int8", "ring"),
    "int8, rolled": ("int8", "rolled"),
    "fp16": ("half", "ring"),
}
"""Bundles of Transformer-XLs, and the update rule that each is run with."""
KEPT = ("ring", "rolled", "hidden", "zeros")
"""Every way of keeping memory, once."""


@cache
def opened(form: str) -> Model:
    """A model of `FORMS` on the CPU with one thread, the same one for all tests of a process."""
    name, update = FORMS[form]
    return load(frozen(name), "cpu", threads=1, update=update)
