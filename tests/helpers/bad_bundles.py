"""The shared corpus of bad bundles (conformance/bad_bundles), as its README tells to build them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from txl_deploy.conformance import bad_bundles

CORPUS = Path(__file__).parents[2] / "conformance" / "bad_bundles"


@cache
def index() -> dict[str, Any]:
    """The list of cases."""
    return bad_bundles.index(CORPUS)


def build(case: dict[str, Any], into: Path) -> Path:
    """A case's bundle, in a folder that is not there yet."""
    return bad_bundles.build(CORPUS, case, into)
