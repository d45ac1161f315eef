"""Describe a bundle's tables in the form that Triton's clients use: one sequence per request, the batch axis first."""

from __future__ import annotations

from txl_runtime.bundle.manifest import Manifest

LAST, NEXT = "last", "next"
"""Names of two more outputs of token models: log-probabilities after the last position, and the most probable token."""


def speaks(manifest: Manifest) -> bool:
    """Return True if a model reads only tokens and returns only their log-probabilities."""
    can, names = manifest.can, [output.name for output in manifest.outputs]
    return can.feed_tokens and can.pair_tokens and len(names) == 1 and names[0] not in (LAST, NEXT)


def together(manifest: Manifest) -> bool:
    """Return True if several sequences can run in one step; if not, each step runs one sequence."""
    return manifest.can.run_apart and all(entry.shape.count("B") == 1 for entry in manifest.interface)


def ragged(manifest: Manifest) -> bool:
    """Return True if requests of different lengths can run in one step."""
    return manifest.can.run_ragged and not any(entry.lookahead for entry in manifest.given)
