"""Is a bundle of any step the same function as its module? Chained segments, every state included, and bits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model

from txl_export.parity.report import Parity
from txl_export.parity.steps.bits import Bits
from txl_export.parity.steps.chains import planned, run_chain
from txl_export.parity.steps.judging import judge
from txl_export.parity.steps.matters import idle_states
from txl_export.parity.steps.rows import compare_bits
from txl_export.parity.steps.truth import Reference
from txl_export.parity.threads import few_threads

ADVICE = "see the table: the first segment with a large error says whether it is the outputs or the state that differ"


def verify_model(
    open_model: Callable[[], Model],
    reference: Reference,
    source: str,
    samples: Mapping[str, Any] | None = None,
    segments: int | None = None,
    listener: Listener | None = None,
    stand_in_for: str | None = None,
    idle: Collection[str] = (),
) -> Parity:
    """Run all chains, compare bits, and judge both by the ladder.

    Args:
        open_model: loads the bundle.
        reference: what it should be equal to.
        source: where the reference came from, for the report.
        samples: real inputs by name; random ones without.
        segments: of the longest chain; None for enough that there are 200 in all and every state is long full.
        listener: hears of progress.
        stand_in_for: the precision to judge by, where what is loaded is a float32 copy that rounds to it.
        idle: states that are known to change no output.
    """
    heard = listener or Silent()
    heard.stage("load the bundle")
    model = open_model()
    manifest, bits, chains = model.manifest, Bits(), planned(model.manifest, segments)
    with few_threads(reference.small), tempfile.TemporaryDirectory(prefix="txl-verify-") as place:
        heard.stage("verify against PyTorch", sum(chain.segments for chain in chains))
        found = [
            run_chain(model, reference, chain, samples, bits, Path(place), heard, seed)
            for seed, chain in enumerate(chains)
        ]
        heard.stage("compare bits of sequences and snapshots")
        compare_bits(model, samples, bits, Path(place))
    for name in idle_states(model, samples):
        if name not in idle:
            heard.warn(f"state {name} changes no output of the bundle in the segments that were tried")
    for name in found[0].filling:
        heard.warn(
            f"state {name} was still filling late in the chain of {found[0].segments} segments; "
            "verify again with more --segments"
        )
    precision: str = stand_in_for or manifest.precision
    description = model.backend.description
    if stand_in_for:
        description = f"{description}, in float32 rounded to {stand_in_for} (indicative)"
    gates = tuple(judge(manifest, precision, model.backend.name, found, bits, bool(samples)))
    return Parity(description, precision, f"{source}, {reference.described}", tuple(found), None, gates, advice=ADVICE)
