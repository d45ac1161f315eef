"""Record in the manifest the tokens to which int4 matrices were fitted, and leave these tokens out of texts.

A loss on tokens to which the matrices were fitted flatters the bundle, so measurements on a text leave them out.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.types import Ids

RECORD = "calibration"
"""Name of this record in a manifest's provenance."""

MOST = 2**31
"""Largest number of tokens that a record may state; larger numbers are not believed."""

LEAST = 256
"""Minimum number of tokens that must remain for a measurement when the fitted tokens are left out."""


def record(tokens: Ids) -> dict[str, Any]:
    """Return the manifest's record of the tokens int32 [T], e.g. {"tokens": 200000, "sha256": "…"}."""
    return {"tokens": len(tokens), "sha256": _digest(tokens)}


def fitted(manifest: Manifest) -> int:
    """Return the number of tokens to which the bundle's matrices were fitted; 0 if they were not fitted."""
    noted = manifest.provenance.get(RECORD)
    count = noted.get("tokens") if isinstance(noted, dict) and manifest.precision == "int4" else 0
    # A stranger's manifest had {"tokens": true} and {"tokens": 10**30} here.
    return count if type(count) is int and 0 < count <= MOST else 0


def begins_with_fitted(manifest: Manifest, tokens: Ids) -> bool:
    """Return True if a text, int [T], begins with all tokens to which the bundle's matrices were fitted.

    For example, [5, 9, 2, …] begins with the fitted [5, 9].
    """
    count = fitted(manifest)
    return 0 < count <= len(tokens) and _digest(tokens[:count]) == manifest.provenance[RECORD].get("sha256")


def unfitted(manifest: Manifest, tokens: Ids) -> tuple[Ids, int]:
    """Return a text without the tokens to which the bundle's matrices were fitted, and the number of tokens left out.

    The fitted tokens are left out if the text begins with all of them and at least `LEAST` more tokens follow: text
    int [T] → ([T - count], count). Any other text stays whole, and the number is 0. For example, 100,000 tokens whose
    first 20,000 were fitted become 80,000, and the number is 20,000.
    """
    count = fitted(manifest)
    if len(tokens) < count + LEAST or not begins_with_fitted(manifest, tokens):
        return tokens, 0
    return tokens[count:], count


def _digest(tokens: Ids) -> str:
    return hashlib.sha256(tokens.astype(np.dtype("<i4")).tobytes()).hexdigest()
