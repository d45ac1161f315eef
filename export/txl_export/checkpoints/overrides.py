"""Defines the facts about a checkpoint that its importer assumes for the code base, and that the user can override.

A fork may have the original's tensor names and still start memory, order clusters or scale the embedding differently.
Each override adds a note, and the manifest records the override so that the export can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import msgspec
from msgspec import Struct
from txl_runtime.errors import UsageError

from txl_export.checkpoints.imported import Imported
from txl_export.options import ClusterOrder, MemoryStart


class Overrides(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts that the user gave; a fact that is None keeps the importer's value.

    Attributes:
        initial_memory: the memory before a stream's first token, "zeros" or "empty" (`Dialect.memory_start`).
        cluster_order: the order in which the file stores the adaptive softmax's columns for clusters.
        embedding_scale: the factor by which embedding rows are multiplied.
    """

    initial_memory: MemoryStart | None = None
    cluster_order: ClusterOrder | None = None
    embedding_scale: float | None = None


def ask_overrides(
    initial_memory: MemoryStart | None, cluster_order: ClusterOrder | None, embedding_scale: float | None
) -> Overrides:
    """Check three options of an export and return them as overrides.

    Raises:
        UsageError: a value is unknown or out of range.
    """
    for flag, value, known in (
        ("--initial-memory", initial_memory, get_args(MemoryStart)),
        ("--cluster-order", cluster_order, get_args(ClusterOrder)),
    ):
        if value is not None and value not in known:
            raise UsageError(f"{flag} is {value!r}, expected {' or '.join(known)}; check it")
    scale = embedding_scale
    if scale is not None and (not isinstance(scale, int | float) or not math.isfinite(scale) or scale <= 0):
        raise UsageError(f"--embedding-scale is {scale}, expected a number above 0 such as sqrt(d_model); check it")
    scale = None if scale is None else float(scale)
    return Overrides(initial_memory=initial_memory, cluster_order=cluster_order, embedding_scale=scale)


def apply_overrides(imported: Imported, asked: Overrides) -> tuple[Imported, dict[str, Any]]:
    """Apply overrides; return the model with a note for each changed fact, and the former values by name.

    Raises:
        UsageError: an order of clusters was given for a model with one cluster.
    """
    if asked.cluster_order is not None and len(imported.config.clusters) == 1:
        raise UsageError(
            f"--cluster-order is {asked.cluster_order}, expected none for a softmax of one cluster; leave it out"
        )
    own: dict[str, Any] = {
        "initial_memory": imported.memory_start,
        "cluster_order": imported.cluster_order,
        "embedding_scale": imported.config.embedding_scale,
    }
    fields = msgspec.structs.asdict(asked)
    wanted = {name: value for name, value in fields.items() if value not in (None, own[name])}
    facts, weights = own | wanted, imported.weights
    if "cluster_order" in wanted:
        weights = weights | {name: t.flip(0) for name, t in weights.items() if name.startswith("softmax.cluster.")}
    notes = (
        f"--{name.replace('_', '-')} overrides what {imported.family} checkpoints have: {value} instead of {own[name]}"
        for name, value in wanted.items()
    )
    changed = replace(
        imported,
        config=msgspec.structs.replace(imported.config, embedding_scale=facts["embedding_scale"]),
        weights=weights,
        memory_start=facts["initial_memory"],
        cluster_order=facts["cluster_order"],
        notes=(*imported.notes, *notes),
    )
    return changed, {name: own[name] for name in wanted}


def recorded_overrides(provenance: Mapping[str, Any]) -> Overrides:
    """Return the overrides that a bundle's manifest records; all None if it records none.

    Raises:
        UsageError: the record is malformed.
    """
    source = provenance.get("source")
    recorded = source.get("overrides") if isinstance(source, Mapping) else None
    try:
        return msgspec.convert(recorded or {}, Overrides)
    except msgspec.ValidationError as error:
        raise UsageError(f"the manifest's provenance: overrides: {error}; export the model again") from None
