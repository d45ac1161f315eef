"""Makes the gates of a verification: each compares an error, or a number of wrong bits, with a limit of the ladder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from txl_report.schema.verification import Gate, Text
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.ladder import Rung, chain_limit, no_drift_limit, rung

from txl_export.proof.bits import Bits
from txl_export.proof.comparing import ChainErrors, TensorErrors

OUTPUTS, STATES = "outputs max abs (relative)", "state max abs (relative)"
SMALL, APART = (5e-7, 1e-2), 0.1
"""Tensors whose root mean square lies between 5e-7 and 1e-2 may be off by at most 10 % of their standard deviation: an
error relative to 1 would hide theirs, and below 5e-7 their values may be the rounding of larger ones."""


def judge(
    manifest: Manifest,
    precision: str,
    backend: str,
    chains: Sequence[ChainErrors],
    bits: Bits,
    real: bool,
    text: Text | None = None,
) -> Iterator[Gate]:
    """Yield the gates of a verification in one precision on one backend.

    Args:
        real: whether inputs were real; in lower precisions random inputs say nothing about the distribution.
        text: a text whose likelihood both sides computed; without a text the chains' own tokens are judged.
    """
    limits = rung(precision, backend)
    logprobs = {output.name for output in manifest.outputs if output.role == "logprobs"}
    outputs = [(name, errors) for chain in chains for name, errors in chain.outputs.items()]
    states = [(name, errors) for chain in chains for name, errors in chain.states.items()]
    for name, tensors, limit in ((OUTPUTS, outputs, limits.logprobs), (STATES, states, limits.memory)):
        inexact = [errors.largest for _, errors in tensors if not errors.exact]
        if limit is not None and inexact:
            yield _gate(name, max(inexact), limit)
    if limits.deviation is not None:
        others = [(name, errors) for name, errors in outputs if name not in logprobs]
        for name, tensors in (("outputs", others), ("state", states)):
            inexact = [errors.deviation for _, errors in tensors if not errors.exact]
            if inexact:
                yield _gate(f"{name} RMS error (of the standard deviation)", max(inexact), limits.deviation)
    else:
        yield from _small([(f"output {name}", errors) for name, errors in outputs if name not in logprobs])
        yield from _small([(f"state {name}", errors) for name, errors in states])
    exact = [errors.largest for _, errors in (*outputs, *states) if errors.exact]
    if exact:
        yield _gate("whole numbers differing", sum(exact), 0.0)
    yield _gate("shapes differing", float(sum(errors.shapes for _, errors in (*outputs, *states))), 0.0)
    yield from _drifts(limits, chains, manifest.reach)
    if logprobs:
        yield from _distribution(limits, precision, chains, real, text)
    for name, count in bits.found.items():
        yield _gate(name, float(count), 0.0)


def _gate(name: str, value: float | None, limit: float, judged: bool = True) -> Gate:
    """Return a gate; an infinite value always fails, even if the limit of drift is infinite, too."""
    return Gate(name, value, limit, None if value is None or not judged else bool(value <= limit < math.inf))


def _small(tensors: Sequence[tuple[str, TensorErrors]]) -> Iterator[Gate]:
    """Yield a gate for every tensor with small values (`SMALL`), on its error in the worst chain."""
    errors_by_name: dict[str, float] = {}
    for name, errors in tensors:
        if not errors.exact and SMALL[0] < errors.usual.root_mean_square < SMALL[1]:
            errors_by_name[name] = max(errors_by_name.get(name, 0.0), errors.deviation)
    for name, value in errors_by_name.items():
        yield _gate(f"{name}, small, RMS error (of the standard deviation)", value, APART)


def drifting(manifest: Manifest, precision: str, backend: str, chain: ChainErrors) -> bool:
    """Return whether the late error of any tensor of a chain exceeds the limit of drift."""
    ends = _late_errors(rung(precision, backend), chain, manifest.reach)
    return any(pair is not None and pair[0] > pair[1] for _, pair in ends)


def _late_errors(
    limits: Rung, chain: ChainErrors, reach: int | None
) -> Iterator[tuple[str, tuple[float, float] | None]]:
    """Yield each tensor's name with (late mean error, limit); None in place of the pair if too few segments ran."""
    for name, errors, ends in chain.drifts():
        if ends is None:
            yield name, None
            continue
        early, late = ends
        # In float32, and in log-probabilities of a bounded reach, errors stop growing once memory is full.
        if limits.burst is None or (reach is not None and errors.tensor.nats):
            yield name, (late, no_drift_limit(early))
        else:
            yield name, (late, no_drift_limit(early, limits.burst * errors.spread))


def _drifts(limits: Rung, chains: Sequence[ChainErrors], reach: int | None) -> Iterator[Gate]:
    """Yield a gate of drift for every tensor, on its worst chain."""
    points: dict[str, list[tuple[float, float]]] = {}
    for chain in chains:
        for name, ends in _late_errors(limits, chain, reach):
            points.setdefault(name, []).extend([] if ends is None else [ends])
    for name, pairs in points.items():
        worst = max(pairs, key=_times_the_limit, default=None)
        yield _gate(f"drift of {name}", worst and worst[0], worst[1] if worst else 0.0)


def _times_the_limit(pair: tuple[float, float]) -> float:
    """Return late error / limit; infinity for an infinite error, even if the limit is 0.

    The limit is 0 for a state that never changes, because its spread is 0.
    """
    late, limit = pair
    return late / (limit or 1e-300) if math.isfinite(late) else math.inf


def _distribution(
    limits: Rung, precision: str, chains: Sequence[ChainErrors], real: bool, text: Text | None
) -> Iterator[Gate]:
    kl, facts = [value for chain in chains for value in chain.kl], [chain.chain for chain in chains]
    decided, agreeing = sum(chain.decided for chain in facts), sum(chain.agreeing for chain in facts)
    judged = real or limits.top1 is None  # float32 rounds little, whatever the inputs
    yield _gate("KL mean", float(np.mean(kl)) if kl else None, limits.kl, judged)
    if limits.top1 is not None:
        worst = max((float(np.mean(chain.kl)) for chain in chains if chain.kl), default=None)
        yield _gate("KL mean of one chain", worst, chain_limit(precision, real))
        differing = (decided - agreeing) / decided if decided else None
        yield _gate("top-1 differing", differing, 1 - limits.top1, real)
    targets = sum(chain.targets for chain in facts)
    if text is not None:
        yield _gate("perplexity (relative)", text.relative, limits.perplexity)
    elif targets:
        apart = sum((chain.ours or 0.0) - (chain.theirs or 0.0) for chain in facts) / targets
        relative = None if math.isnan(apart) else abs(math.expm1(apart))  # NaN: both sides exclude a token that came
        yield _gate("perplexity (relative)", relative, limits.perplexity, real)
