"""Facts of a dialect that an importer takes from the code base, unless the user gives others.

A fork may have the same tensor names as the original and still start its memory, order its clusters or scale its
embedding in another way. Every override is told in one line, and recorded in the manifest so that it can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import msgspec
from msgspec import Struct
from txl_runtime.errors import UsageError

from txl_export.checkpoints.imported import ClusterOrder, Imported, MemoryStart


class Overrides(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for; None where the importer decides.

    Attributes:
        initial_memory: what a stream attends to before its first token, `Dialect.memory_start`.
        cluster_order: how the file's columns for whole clusters of the adaptive softmax stand.
        embedding_scale: the factor on the embedding.
    """

    initial_memory: Literal["empty", "zeros"] | None = None
    cluster_order: Literal["ascending", "reversed"] | None = None
    embedding_scale: float | None = None


def ask_overrides(initial_memory: str | None, cluster_order: str | None, embedding_scale: float | None) -> Overrides:
    """The overrides of an export's options.

    Raises:
        UsageError: a value that means nothing.
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
    return Overrides(
        initial_memory=cast(MemoryStart | None, initial_memory),
        cluster_order=cast(ClusterOrder | None, cluster_order),
        embedding_scale=None if scale is None else float(scale),
    )


def apply_overrides(imported: Imported, asked: Overrides) -> tuple[Imported, dict[str, Any]]:
    """The model with what was asked for, a note for each fact that changed, and what those facts were before.

    Raises:
        UsageError: an order of clusters for a model that has none.
    """
    before: dict[str, Any] = {}
    notes = []

    def changes(name: str, own: Any, wanted: Any) -> bool:
        if wanted is None or wanted == own:
            return False
        flag, before[name] = f"--{name.replace('_', '-')}", own
        notes.append(f"{flag} overrides what {imported.family} checkpoints have: {wanted} instead of {own}")
        return True

    changed = imported
    if changes("initial_memory", imported.memory_start, asked.initial_memory):
        changed = replace(changed, memory_start=cast(MemoryStart, asked.initial_memory))
    if asked.cluster_order is not None and len(imported.config.clusters) == 1:
        raise UsageError(
            f"--cluster-order is {asked.cluster_order}, expected none for a softmax of one cluster; leave it out"
        )
    if changes("cluster_order", imported.cluster_order, asked.cluster_order):
        columns = {name: t.flip(0) for name, t in changed.weights.items() if name.startswith("softmax.cluster.")}
        order = cast(ClusterOrder, asked.cluster_order)
        changed = replace(changed, weights=changed.weights | columns, cluster_order=order)
    if changes("embedding_scale", imported.config.embedding_scale, asked.embedding_scale):
        scaled = msgspec.structs.replace(changed.config, embedding_scale=cast(float, asked.embedding_scale))
        changed = replace(changed, config=scaled)
    return replace(changed, notes=(*changed.notes, *notes)), before


def recorded_overrides(provenance: Mapping[str, Any]) -> Overrides:
    """The overrides a bundle was made with, from its manifest's provenance; none where it says nothing of them.

    Raises:
        UsageError: what stands there is something else.
    """
    source = provenance.get("source")
    recorded = source.get("overrides") if isinstance(source, Mapping) else None
    try:
        return msgspec.convert(recorded or {}, Overrides)
    except msgspec.ValidationError as error:
        raise UsageError(f"the manifest's provenance: overrides: {error}; export the model again") from None
