"""Describe a manifest's model in words: its kind, and the number of tokens that can influence a prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import BundleError

from txl_report.facts.plain import Missing

PAGE = "report.html"
"""Name of the page that export writes into a bundle."""
STREAMS = {
    "independent": "independent: each can be idle, reset and moved alone",
    "lockstep": "in lockstep: all of them run, or none",
}
"""Words for the values of `Manifest.streams`."""
LENGTHS = {
    "valid": "any number of positions of a segment may count",
    "exact": "exact: a segment is one of the lengths above",
}
"""Words for the values of `Manifest.lengths`."""


@dataclass(frozen=True)
class Context:
    """The context that the architecture allows, in tokens; only a measurement shows how much of this context is used.

    Attributes:
        tokens: number of tokens that can influence a prediction.
        formula: the formula by which that number is computed.
    """

    tokens: int
    formula: str


def describe_bundle(manifest: Manifest) -> dict[str, Any]:
    """Return the facts about a bundle that people ask for first, as plain data."""
    return {
        "kind": "bundle",
        "model_id": manifest.model_id,
        "family": family_of(manifest),
        "parameters": manifest.parameters,
        "batch_size": manifest.batch_size,
        "batch_sizes": manifest.batch_sizes,
        "segment_lengths": manifest.segment_lengths,
        "memory_length": memory_rows(manifest),
        "bytes_per_stream": manifest.state_bytes,
        "effective_context": manifest.reach,
        "stepwise": manifest.stepwise,
        "boundary_token": manifest.boundary_token,
        "streams": manifest.streams,
        "lengths": manifest.lengths,
        "commits": manifest.commits,
        "bytes": size_of_files(manifest),
        "precision": manifest.precision,
        "parity": manifest.parity,
    }


def family_of(manifest: Manifest) -> str:
    """Return the code base of a model; if the manifest names none, the model's family."""
    dialect = manifest.family.get("dialect")
    named = dialect.get("family") if isinstance(dialect, dict) else None
    return str(named or manifest.family_name)


def memory_rows(manifest: Manifest) -> int | None:
    """Return the number of memory rows per layer; None for a model that counts no rows."""
    return manifest.memory_length if manifest.counters else None


def steps_of(manifest: Manifest) -> str:
    """Describe the longest segment that gives the same results as single steps."""
    if manifest.stepwise is None:
        return "not known whether a segment gives what single steps give"
    if manifest.stepwise == 1:
        return "of two positions and more differ from single steps"
    return f"of up to {manifest.stepwise} positions give what single steps give"


def size_of_files(manifest: Manifest) -> int:
    """Return the bytes of a bundle's files without the manifest, and without the page, which cannot count itself."""
    return sum(record.size for name, record in manifest.files.items() if name != PAGE)


def context_of(manifest: Manifest) -> Context | Missing:
    """Return the number of tokens that can influence a prediction, and its formula."""
    if manifest.reach is None:
        return Missing(
            "The bundle does not say how many tokens can influence a prediction: a state that a step replaces may "
            "carry something of everything before."
        )
    formula = "layers × memory + segment"
    try:
        model = manifest.transformer_xl
    except BundleError:
        return Context(manifest.reach, "as the exporter says")
    layers, rows, longest = model.config.n_layer, manifest.memory_length, manifest.segment_lengths[0]
    window = model.widest(rows, longest)
    # `reach` adds a whole segment, which texts that are cut into segments need; here only one token is added
    if window is not None:
        behind = min(rows, window - 1)
        return Context(layers * behind + 1, f"layers × tokens behind in the window + 1: {layers} × {behind} + 1")
    shown = f"{layers} × {rows} + {longest}"
    # every layer except the first reaches back to its segment's beginning
    if layers * rows + longest != manifest.reach:
        formula += ", each layer back to the beginning of a whole segment"
        shown = f"more than {shown}"
    return Context(manifest.reach, f"{formula}: {shown}")
