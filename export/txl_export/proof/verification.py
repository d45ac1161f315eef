"""Is a bundle of any step the same function as its module? Chained segments, every state included, and bits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from txl_runtime.ladder import rung
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model

from txl_export.proof.bits import Bits
from txl_export.proof.chains import Trial, planned, run_chain, settled
from txl_export.proof.gates import judge
from txl_export.proof.input_source import extent
from txl_export.proof.parity import Parity
from txl_export.proof.references import Reference
from txl_export.proof.rounding import own_rounding, told_apart
from txl_export.proof.same_bits import compare_bits
from txl_export.proof.tensor_errors import StepChain
from txl_export.proof.threads import few_threads
from txl_export.proof.unused_states import idle_states
from txl_export.proof.unusual_inputs import far_gates, nan_gates

NAN_ADVICE = "docs/own-models.md has a row on hidden NaN in its table of failures, with what to write in the module"
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
    manifest, backend, held = model.manifest, model.backend, extent(model.manifest, samples)[0] if samples else 0
    chains = planned(manifest, segments, held)
    precision: str = stand_in_for or manifest.precision
    described, advice = f"{source}, {reference.described}", ADVICE

    def run(trial: Trial) -> list[StepChain]:
        heard.stage("verify against PyTorch", sum(chain.segments for chain in chains))
        return [run_chain(trial, chain, seed) for seed, chain in enumerate(chains)]

    with few_threads(reference.small), tempfile.TemporaryDirectory(prefix="txl-verify-") as place:
        trial = Trial(model, reference, samples, Bits(), Path(place), heard)
        found = run(trial)
        heard.stage("compare bits of sequences and snapshots")
        compare_bits(model, samples, trial.bits, Path(place))
        gates = tuple(judge(manifest, precision, backend.name, found, trial.bits, bool(samples)))
        if rung(precision, backend.name).deviation is not None:
            found = [
                settled(trial, precision, *pair, seed) for seed, pair in enumerate(zip(chains, found, strict=True))
            ]
            gates = tuple(judge(manifest, precision, backend.name, found, trial.bits, bool(samples)))
        if any(gate.passed is False for gate in gates):
            heard.stage("look whether rounding grows in the module itself")
            growing = own_rounding(manifest, reference, samples, list(zip(chains, found, strict=True)))
            if growing:
                most, names = max(growing.far.values()), ", ".join(growing.far)
                described += (
                    f"; in float32 it is {most:.1e} away from that itself, because it amplifies rounding, so every "
                    f"segment begins with its state for {names}"
                )
                heard.warn(
                    f"the module amplifies rounding: in float32 it is {most:.1e} away from itself in float64 in a "
                    f"chain; segments are compared one by one, each from the module's own state, for {names}"
                )
                handed = run(replace(trial, bits=Bits(), handing_over=True))
                found = [told_apart(manifest, *pair, growing) for pair in zip(found, handed, strict=True)]
                gates = tuple(judge(manifest, precision, backend.name, found, trial.bits, bool(samples)))
        if precision == "fp32" and all(gate.passed is not False for gate in gates):
            heard.stage("try inputs far from the usual ones")
            far, place = far_gates(model, reference, samples)
            gates, advice = gates + tuple(far), place or ADVICE
            if place and far[0].passed is None:
                heard.warn(place)
        hiding = nan_gates(model, reference, samples)
        gates, advice = gates + tuple(hiding), NAN_ADVICE if any(gate.passed is False for gate in hiding) else advice
    if len(trial.begun) < held:
        heard.warn(
            f"{len(trial.begun)} of {held} samples were read, because the longest chain ends after "
            f"{found[0].segments} segments; verify with more --segments to have them all read"
        )
    for name in idle_states(model, samples):
        if name not in idle:
            heard.warn(f"state {name} changes no output of the bundle in the segments that were tried")
    for name in found[0].filling:
        heard.warn(
            f"state {name} was still filling late in the chain of {found[0].segments} segments; "
            "verify again with more --segments"
        )
    for name in found[0].counting:
        heard.warn(
            f"state {name} still counts after {found[0].segments} segments; what happens later was not tried, "
            "verify with more --segments if the module does something else at some number"
        )
    rounded = f", in float32 rounded to {stand_in_for} (indicative)" if stand_in_for else ""
    description = f"{backend.description}{rounded}"
    ran_on = "real inputs" if samples else "random inputs"
    identity = manifest.model_id
    return Parity(
        description, precision, described, tuple(found), None, gates, advice=advice, model_id=identity, ran_on=ran_on
    )
