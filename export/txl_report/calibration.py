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


def record(tokens: Ids) -> dict[str, Any]:
    """Return the record of tokens int32 [T], e.g. {"tokens": 200000, "sha256": "…"}."""
    return {"tokens": len(tokens), "sha256": _digest(tokens)}


def fitted(manifest: Manifest) -> int:
    """Return the number of tokens that the bundle's matrices were fitted to; 0 if they were not."""
    noted = manifest.provenance.get(RECORD)
    count = noted.get("tokens") if isinstance(noted, dict) else 0
    return count if isinstance(count, int) and count > 0 else 0  # people may have written anything there


def unfitted(manifest: Manifest, tokens: Ids) -> tuple[Ids, int]:
    """Return a text without the tokens that the bundle's matrices were fitted to, and how many those are.

    They are left out if the text begins with all of them and goes on: text int [T] → [T - count], count.
    """
    count = fitted(manifest)
    if not count or len(tokens) < count + 2 or _digest(tokens[:count]) != manifest.provenance[RECORD].get("sha256"):
        return tokens, 0
    return tokens[count:], count


def _digest(tokens: Ids) -> str:
    return hashlib.sha256(tokens.astype(np.dtype("<i4")).tobytes()).hexdigest()
