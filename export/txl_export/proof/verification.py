"""Verifies that a bundle is the same function as its model: runs chains and compares bits; the ladder judges both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from txl_report.schema.verification import Chain, Gate
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import some
from txl_runtime.ladder import explained, rung
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model, load
from txl_runtime.types import Ids
from txl_runtime.update_rules import usable_updates

from txl_export.proof.bits import Bits
from txl_export.proof.chains import Planned, planned, run_chain, settled
from txl_export.proof.comparing import ChainErrors
from txl_export.proof.gates import OUTPUTS, STATES, judge
from txl_export.proof.heap import give_back
from txl_export.proof.input_source import extent
from txl_export.proof.parity import AMPLIFIES, Parity, failing
from txl_export.proof.perplexity import compare_text
from txl_export.proof.references import Reference
from txl_export.proof.rounding import own_rounding, told_apart
from txl_export.proof.same_bits import compare_bits, compare_forms
from txl_export.proof.side_by_side import Trial
from txl_export.proof.threads import engine_threads, few_threads
from txl_export.proof.unusual_inputs import far_gates, hidden_nan

ADVICE = "see the table: the first segment with a large error says whether it is the outputs or the state that differ"
KINDS = {OUTPUTS: "output", STATES: "state"}
"""Gates on errors that the model's own rounding can cause, with the kind of tensors that they judge."""


def openers(
    folder: Path, manifest: Manifest, backend: str = "auto", threads: int | None = None
) -> list[Callable[[], Model]]:
    """Return a loader per update rule that runs here, or one for an engine; only the first loader checks hashes."""
    threads = engine_threads(manifest, threads)
    if backend in ("rtx", "tensorrt", "native"):
        return [partial(load, folder, backend, threads)]
    return [
        partial(load, folder, backend, threads, verify_files=number == 0, update=rule, lean=number > 0)
        for number, rule in enumerate(usable_updates(manifest.updates))
    ]


def verify_model(
    open_model: Callable[[], Model],
    reference: Reference,
    source: str,
    samples: Mapping[str, Any] | None = None,
    segments: int | None = None,
    listener: Listener | None = None,
    stand_in_for: str | None = None,
    others: Sequence[Callable[[], Model]] = (),
    text: Ids | None = None,
    advice: str = ADVICE,
    odd: bool = True,
) -> Parity:
    """Run all chains, compare bits, and judge both by the ladder.

    For example, `samples` {"x": [10000, 8]} and `text` int32 [100000].

    Args:
        open_model: loads the bundle.
        reference: the model that the bundle should equal.
        source: the origin of the reference, for the report.
        samples: real inputs by name; without them inputs are random.
        segments: number of segments of the longest chain; None for enough that every state has long been full.
        stand_in_for: the precision to judge by if the loaded model is a float32 copy that emulates it.
        others: loaders for further update rules, which run only brief chains. Models are loaded one after another,
            because each holds its weights.
        text: ids [T] of real text, whose likelihood is compared.
        advice: advice for a failed gate without more specific advice.
        odd: whether to try very large values, zeros and NaN, which graphs made by this project handle.
    """
    listener, bits = listener or Silent(), Bits()
    described, extra = f"{source}, {reference.described}", list[Gate]()
    with few_threads(reference.small), tempfile.TemporaryDirectory(prefix="txl-verify-") as place:
        model = _opened(open_model, listener)
        manifest, backend, description = model.manifest, model.backend.name, model.backend.description
        held = extent(manifest, samples)[0] if samples else 0
        precision: str = stand_in_for or model.backend.precision or manifest.precision
        trial, chains = Trial(model, reference, samples, bits, Path(place), listener), planned(manifest, segments, held)
        errors = _run(trial, chains)
        listener.stage("compare bits of sequences and snapshots")
        compare_bits(model, samples, bits, trial.folder, reference.together)
        compare_plain = compare_forms(model, samples, bits)
        compared = None if text is None else compare_text(model, reference, text, listener)
        judged = partial(judge, manifest, precision, backend, bits=bits, real=bool(samples), text=compared)
        if rung(precision, backend).deviation is not None and manifest.reach is None:
            longer = [settled(trial, precision, *pair) for pair in zip(chains, errors, strict=True)]
            chains, errors = [chain for chain, _ in longer], [ran for _, ran in longer]
        if reference.resumes:
            if failing(judged(errors)):
                errors, remark = _handed_over(trial, chains, errors)
                described += remark
            if odd and precision == "fp32" and not failing(judged(errors)):
                extra, advice = _far_gates(trial, advice)
            if odd and (fault := hidden_nan(model, reference, samples)):
                listener.warn(fault)
        _warn(trial, held, errors[0].chain)
        del model, trial
        compare_plain()
        for opener in others:
            trial = Trial(_opened(opener, listener), reference, samples, bits, Path(place), listener)
            brief = planned(manifest, segments, held, brief=True)
            errors, chains = errors + _run(trial, brief), chains + brief
            del trial
        gates = (*judged(errors), *extra)
        if not reference.resumes and (missed := [gate for gate in failing(gates) if gate.name in KINDS]):
            listener.stage("look whether rounding grows in the model itself")
            far, _ = own_rounding(manifest, reference, samples, list(zip(chains, errors, strict=True)))
            advice = _explained(missed, far) or advice
    rounded = f", in float32 rounded to {stand_in_for} (indicative)" if stand_in_for else ""
    ran_on = "the text" if text is not None else "real inputs" if samples else "random inputs"
    return Parity(
        f"{description}{rounded}",
        precision,
        described,
        tuple(errors),
        compared,
        gates,
        advice=advice,
        model_id=manifest.model_id,
        ran_on=ran_on,
    )


def _opened(open_model: Callable[[], Model], listener: Listener) -> Model:
    listener.stage("load the bundle")
    give_back()
    return open_model()


def _run(trial: Trial, chains: Sequence[Planned]) -> list[ChainErrors]:
    """Run chains; if the bundle has several update rules, add the rule to the chains' names."""
    model, listener = trial.model, trial.listener
    rule = f", {model.update}" if len(model.manifest.updates) > 1 else ""
    memory = f", {model.update} memory" if model.manifest.can.count_rows else ""
    listener.stage(f"verify against PyTorch{memory}", sum(chain.segments for chain in chains))
    return [run_chain(trial, replace(chain, name=chain.name + rule)) for chain in chains]


def _handed_over(trial: Trial, chains: Sequence[Planned], errors: list[ChainErrors]) -> tuple[list[ChainErrors], str]:
    """Replace errors that the module's own growing rounding explains; return the errors and a clause for the report.

    Outputs and states in which rounding grows are compared again segment by segment, each from the module's own state.
    All others keep their errors along whole chains.
    """
    manifest, listener = trial.model.manifest, trial.listener
    listener.stage("look whether rounding grows in the module itself")
    far, drifting = own_rounding(manifest, trial.reference, trial.samples, list(zip(chains, errors, strict=True)))
    if not far:
        return errors, ""
    most, names = max(far.values()), ", ".join(far)
    listener.warn(
        f"the module amplifies rounding: in float32 it is {most:.1e} away from itself in float64 in a chain; segments "
        f"are compared one by one, each from the module's own state, for {names}"
    )
    handed = _run(replace(trial, bits=Bits(), handing_over=True), chains)
    return [told_apart(manifest, *pair, far, drifting) for pair in zip(errors, handed, strict=True)], (
        f"; in float32 it is {most:.1e} away from that itself, because it amplifies rounding, so every segment begins "
        f"with its state for {names}"
    )


def _far_gates(trial: Trial, advice: str) -> tuple[list[Gate], str]:
    """Return the gates of `unusual_inputs`, and their advice if one failed, else `advice`."""
    trial.listener.stage("try inputs far from the usual ones")
    gates, remark = far_gates(trial.model, trial.reference, trial.samples)
    if remark and gates[0].passed is None:
        trial.listener.warn(remark)
    return gates, remark or advice


def _explained(missed: Sequence[Gate], far: Mapping[str, float]) -> str:
    """Return advice if the model's own float32 error is at least half of the bundle's error, else ""."""
    own = [max((far[n] for n in far if n.startswith(KINDS[gate.name])), default=0.0) for gate in missed]
    if any((gate.value or 0.0) > explained(itself) for gate, itself in zip(missed, own, strict=True)):
        return ""
    return f"in float32 the model is {max(own):.0e} from itself in the same segments: {AMPLIFIES}"


def _warn(trial: Trial, held: int, longest: Chain) -> None:
    """Warn about samples, ids, integers and full states that the chains did not reach."""
    listener, segments = trial.listener, longest.segments
    if len(trial.begun) < held:
        listener.warn(
            f"{len(trial.begun)} of {held} samples were read, because the longest chain ends after {segments} "
            "segments; verify with more --segments to have them all read"
        )
    for entry in trial.model.manifest.given:
        count = sum(name == entry.name for name, _ in trial.drawn)
        if 0 < count < (entry.vocab or 0):
            listener.warn(f"{count} of {entry.vocab} ids of {entry.name} were tried, drawn at random")
    for name, most in trial.reference.below.items():
        listener.warn(f"{name} was only tried from 0 to {most - 1}, as nothing says how large it is; give real inputs")
    if longest.filling:
        listener.warn(
            f"state {some(longest.filling)}: still filling late in the chain of {segments} segments; verify again with "
            "more --segments"
        )
    if longest.counting:
        listener.warn(
            f"state {some(longest.counting)}: still counts after {segments} segments; what happens later was not "
            "tried, verify with more --segments if the module does something else at some number"
        )
