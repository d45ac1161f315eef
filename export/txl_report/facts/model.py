"""What a model is: its kind, its sizes, its tables, and how many tokens can influence a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import BundleError

from txl_report.facts.plain import Missing, Row, some
from txl_report.facts.tables import Tables, tables_of

STREAMS = {
    "independent": "independent: each can be idle, reset and moved alone",
    "lockstep": "in lockstep: all of them run, or none",
}
LENGTHS = {
    "valid": "any number of positions of a segment may count",
    "exact": "exact: a segment is one of the lengths above",
}


@dataclass(frozen=True)
class Context:
    """The context that the architecture allows, in tokens; how much of it is used can only be measured.

    Attributes:
        tokens: that can influence a prediction.
        formula: how that number comes about, in words.
    """

    tokens: int
    formula: str


@dataclass(frozen=True)
class ModelFacts:
    """What a bundle's model is.

    Attributes:
        model_id: which function it computes: a SHA-256.
        family: the code base or the kind of model that it is of.
        precision: of weights and arithmetic.
        parameters: trained values.
        described: what the exporter knows of the architecture.
        batch_sizes: B, the most sequences of a stream, then smaller ones that engines are built for.
        segment_lengths: L, largest first.
        memory_length: M, memory rows per layer; None for a model whose rows are not counted.
        vocab_size: V; 0 for a model that reads no token ids.
        vocabulary: whether text can be read and written.
        boundary_token: the id that separates texts, where there is one.
        streams, lengths: how sequences and segments may differ, in words.
        state_bytes: of one sequence.
        file_bytes: of all files.
        context: the theoretical context, or why it is not known.
        attention: whether the bundle has a program that shows what is attended to.
        tables: what a step reads, returns and carries.
    """

    model_id: str
    family: str
    precision: str
    parameters: int
    described: tuple[Row, ...]
    batch_sizes: tuple[int, ...]
    segment_lengths: tuple[int, ...]
    memory_length: int | None
    vocab_size: int
    vocabulary: bool
    boundary_token: int | None
    streams: str
    lengths: str
    state_bytes: int
    file_bytes: int
    context: Context | Missing
    attention: bool
    tables: Tables


def model_facts(manifest: Manifest, described: Mapping[str, str]) -> ModelFacts:
    """What a manifest says of its model; `described` is what the family that exported it says beside that."""
    facts = describe_bundle(manifest)
    return ModelFacts(
        model_id=manifest.model_id,
        family=str(facts["family"]),
        precision=manifest.precision,
        parameters=manifest.parameters,
        described=some(Row(name, text) for name, text in described.items()),
        batch_sizes=some((manifest.batch_size, *manifest.batch_sizes)),
        segment_lengths=some(manifest.segment_lengths),
        memory_length=facts["memory_length"],
        vocab_size=manifest.vocab_size,
        vocabulary=manifest.vocabulary is not None,
        boundary_token=manifest.boundary_token,
        streams=STREAMS[manifest.streams],
        lengths=LENGTHS[manifest.lengths],
        state_bytes=manifest.state_bytes,
        file_bytes=facts["bytes"],
        context=context_of(manifest),
        attention=manifest.attention,
        tables=tables_of(manifest),
    )


def describe_bundle(manifest: Manifest) -> dict[str, Any]:
    """The facts about a bundle that people ask for first, as plain data."""
    dialect = manifest.family.get("dialect")
    named = dialect.get("family") if isinstance(dialect, dict) else None
    return {
        "kind": "bundle",
        "model_id": manifest.model_id,
        "family": named or manifest.family_name,
        "parameters": manifest.parameters,
        "batch_size": manifest.batch_size,
        "batch_sizes": manifest.batch_sizes,
        "segment_lengths": manifest.segment_lengths,
        "memory_length": manifest.memory_length if manifest.counters else None,
        "bytes_per_stream": manifest.state_bytes,
        "effective_context": manifest.reach,
        "boundary_token": manifest.boundary_token,
        "streams": manifest.streams,
        "lengths": manifest.lengths,
        "commits": manifest.commits,
        "bytes": sum(record.size for record in manifest.files.values()),
        "precision": manifest.precision,
        "parity": manifest.parity,
    }


def context_of(manifest: Manifest) -> Context | Missing:
    """How many tokens can influence a prediction, and by which formula."""
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
    window = model.dialect.window
    if window is not None:  # `reach` counts a whole segment, as those need it who cut a text
        behind = min(rows, window - 1)
        return Context(layers * behind + 1, f"layers × tokens behind in the window + 1: {layers} × {behind} + 1")
    shown = f"{layers} × {rows} + {longest}"
    if layers * rows + longest != manifest.reach:  # every layer but the first reaches back to the begin of a segment
        formula += ", each layer back to the beginning of a whole segment"
        shown = f"more than {shown}"
    return Context(manifest.reach, f"{formula}: {shown}")
