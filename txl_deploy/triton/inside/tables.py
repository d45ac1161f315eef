"""How a bundle's tables look to clients of Triton: one sequence per request, the batch first."""

from __future__ import annotations

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Input
from txl_runtime.errors import UsageError
from txl_runtime.streaming.inputs import require_tokens

LAST, NEXT = "last", "next"
"""Outputs that models of tokens have besides: log-probabilities after the last position, and their best token."""


def given(manifest: Manifest) -> tuple[Input, ...]:
    """The inputs that clients give; counts are the runtime's."""
    return tuple(entry for entry in manifest.inputs if entry.role in ("tokens", "feature"))


def speaks(manifest: Manifest) -> bool:
    """Whether a model reads tokens and returns their log-probabilities, and nothing else."""
    tokens, logprobs = manifest.tokens, manifest.logprobs
    return (
        tokens is not None
        and logprobs is not None
        and (len(manifest.outputs), tokens.shape, tokens.lookahead) == (1, ("B", "L"), 0)
        and logprobs.shape == ("B", "L", manifest.vocab_size)
        and logprobs.name not in (LAST, NEXT)
    )


def generates(manifest: Manifest) -> bool:
    """Whether the runtime can draw tokens one after the other from a model."""
    try:
        require_tokens(manifest, "generate")
    except UsageError:
        return False
    return manifest.lengths == "valid" or 1 in manifest.segment_lengths


def together(manifest: Manifest) -> bool:
    """Whether several sequences can run in one step; else each runs alone, in a stream of one."""
    shapes = [entry.shape for entry in given(manifest)] + [output.shape for output in manifest.outputs]
    return manifest.streams == "independent" and all(shape.count("B") == 1 for shape in shapes)


def ragged(manifest: Manifest) -> bool:
    """Whether requests of different lengths can run in one step."""
    return manifest.lengths == "valid" and not any(entry.lookahead for entry in given(manifest))
