"""The tokens that a bundle's matrices were fitted to: their record in its manifest, and a text without them.

A figure on tokens that matrices were fitted to flatters the bundle, so whoever measures one on a text leaves them out.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.types import Ids

RECORD = "calibration"
"""Name of the record in a manifest's provenance."""

MOST = 2**31
"""Largest number of tokens that a record is believed."""

LEAST = 256
"""Fewest tokens that judge a bundle when those that it is fitted to are left out."""


def record(tokens: Ids) -> dict[str, Any]:
    """Return the record of tokens int32 [T], e.g. {"tokens": 200000, "sha256": "…"}."""
    return {"tokens": len(tokens), "sha256": _digest(tokens)}


def fitted(manifest: Manifest) -> int:
    """Return the number of tokens that the bundle's matrices were fitted to; 0 if they were not."""
    noted = manifest.provenance.get(RECORD)
    count = noted.get("tokens") if isinstance(noted, dict) and manifest.precision == "int4" else 0
    # A manifest from elsewhere had {"tokens": true} and {"tokens": 10**30} there.
    return count if type(count) is int and 0 < count <= MOST else 0


def begins_with_fitted(manifest: Manifest, tokens: Ids) -> bool:
    """Return True if a text, int [T], begins with all tokens that the bundle's matrices were fitted to."""
    count = fitted(manifest)
    return 0 < count <= len(tokens) and _digest(tokens[:count]) == manifest.provenance[RECORD].get("sha256")


def unfitted(manifest: Manifest, tokens: Ids) -> tuple[Ids, int]:
    """Return a text without the tokens that the bundle's matrices were fitted to, and how many those are.

    They are left out if the text begins with all of them and at least `LEAST` others follow: text int [T] →
    [T - count], count. Any other text stays whole, and count is 0.
    """
    count = fitted(manifest)
    if len(tokens) < count + LEAST or not begins_with_fitted(manifest, tokens):
        return tokens, 0
    return tokens[count:], count


def _digest(tokens: Ids) -> str:
    return hashlib.sha256(tokens.astype(np.dtype("<i4")).tobytes()).hexdigest()
