"""Is the bundle the same function as PyTorch's? Chained segments, memory included, judged by the ladder.

`chains` says what is run and `comparing` what is compared: after every segment all log-probabilities of the rows that
count AND the memory, so that an error which only grows through the recurrence cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.ladder import EXPLAINED, no_drift_limit, rung
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model, load
from txl_runtime.types import Ids
from txl_runtime.update_rules import usable_updates

from txl_export.families.transformer_xl.parity.chains import Plan, compare_text, memory_every, plans, run_chain
from txl_export.families.transformer_xl.parity.looking import farthest_look
from txl_export.families.transformer_xl.parity.rounding import own_rounding
from txl_export.families.transformer_xl.reference import Reference
from txl_export.proof.heap import give_back
from txl_export.proof.parity import AMPLIFIES, ChainResult, Gate, Parity, TextResult
from txl_export.proof.threads import few_threads

LOGPROBS, MEMORY = "log-probs max abs", "memory max abs (relative)"
MEASURED: Mapping[str, tuple[int, Callable[[ChainResult], float]]] = {
    LOGPROBS: (0, attrgetter("max_logprobs")),
    MEMORY: (1, attrgetter("max_memory")),
}
"""Gates on what rounding changes: its place in what `own_rounding` returns, and where it stands in a chain."""


def openers(
    folder: Path, manifest: Manifest, backend: str = "auto", threads: int | None = None
) -> list[Callable[[], Model]]:
    """What loads a bundle for each update rule that runs here; hashes are checked once. Engines have one rule."""
    if backend in ("rtx", "tensorrt"):
        return [partial(load, folder, backend, threads)]
    return [
        partial(load, folder, backend, threads, verify_files=number == 0, update=rule, lean=number > 0)
        for number, rule in enumerate(usable_updates(manifest.updates))
    ]


def verify_models(
    openers: Sequence[Callable[[], Model]],
    reference: Reference,
    source: str,
    text: Ids | None = None,
    segments: int | None = None,
    listener: Listener | None = None,
    stand_in_for: str | None = None,
) -> Parity:
    """Run the chains and the text, and judge them by the ladder.

    Args:
        openers: what loads the bundle, once per way to run it (update rule); one is open at a time, because each holds
            its weights. The first is the one users get: it alone runs the long chains and the text.
        reference: the model it should be equal to.
        source: where the reference's weights came from, for the report.
        text: token ids [T] of real text; without it tokens are random and distribution gates are not judged.
        segments: of the longest chain; None for enough to roll the memory over.
        listener: hears of progress.
        stand_in_for: the precision to judge by, where what is loaded is a float32 copy that rounds to it.
    """
    listener = listener or Silent()
    ran: list[tuple[Plan, ChainResult]] = []
    compared: TextResult | None = None
    looked: float | None = None
    with few_threads(reference.dtype == torch.float64):
        for number, opener in enumerate(openers):
            listener.stage("load the bundle")
            give_back()
            model = opener()
            planned = list(plans(model, segments, text, brief=number > 0))
            listener.stage(f"verify against PyTorch, {model.update} memory", sum(len(plan.calls) for plan in planned))
            ran += [(plan, run_chain(model, reference, plan, listener)) for plan in planned]
            if not number:
                first = model.manifest, model.backend.name, model.backend.description
                if text is not None:
                    compared = compare_text(model, reference, text, listener)
                if model.manifest.attention:
                    looked = farthest_look(model, reference, listener)
            del model
    manifest, backend, description = first
    dtype = str(reference.dtype).removeprefix("torch.")
    precision: str = stand_in_for or manifest.precision
    if stand_in_for:
        description = f"{description}, in float32 rounded to {stand_in_for} (indicative)"
    chains = tuple(chain for _, chain in ran)
    gates = tuple(_judge(manifest, precision, backend, chains, compared, looked))
    parity = Parity(
        description,
        precision,
        f"{source}, computed in {dtype}",
        chains,
        compared,
        gates,
        model_id=manifest.model_id,
        ran_on="random tokens" if text is None else "the text",
    )
    with few_threads(reference.dtype == torch.float64):
        return _explained(parity, manifest, reference, ran, listener)


def _explained(
    parity: Parity,
    manifest: Manifest,
    reference: Reference,
    ran: Sequence[tuple[Plan, ChainResult]],
    listener: Listener,
) -> Parity:
    """The same, with what there is to say where the model itself is as far from itself in float32 as the bundle is."""
    own = 0.0
    failing = {gate.name for gate in parity.gates if gate.passed is False} & MEASURED.keys()
    if failing:
        listener.stage("look whether rounding grows in the model itself")
    for name in failing:
        place, found = MEASURED[name]
        plan, chain = max(ran, key=lambda pair: found(pair[1]))
        rounding = own_rounding(reference, plan.calls, manifest.transformer_xl.memory, memory_every(manifest))
        if rounding is None or found(chain) > EXPLAINED * rounding[place]:
            return parity
        own = max(own, rounding[place])
    if not own:
        return parity
    return replace(parity, advice=f"in float32 the model is {own:.0e} from itself in the same segments: {AMPLIFIES}")


def _judge(
    manifest: Manifest,
    precision: str,
    backend: str,
    chains: Sequence[ChainResult],
    text: TextResult | None,
    looked: float | None,
) -> Iterator[Gate]:
    """The gates of this precision and backend, in the ladder's order."""
    limits = rung(precision, backend)

    def gate(name: str, value: float | None, limit: float, judged: bool = True) -> Gate:
        passed = None if value is None or not judged else bool(value <= limit)
        return Gate(name, value, limit, passed)

    if limits.logprobs is not None:
        yield gate(LOGPROBS, max(chain.max_logprobs for chain in chains), limits.logprobs)
    if limits.memory is not None:
        worst = max(chain.max_memory for chain in chains) if manifest.memory_length else None
        yield gate(MEMORY, worst, limits.memory)
    drifts = [chain.early_and_late for chain in chains]
    ratios = [(late, no_drift_limit(early)) for early, late in (d for d in drifts if d)]
    worst_drift = max(ratios, key=lambda pair: pair[0] / pair[1], default=None)
    yield gate("drift (late mean abs)", worst_drift and worst_drift[0], worst_drift[1] if worst_drift else 0.0)
    kl = float(np.mean([value for chain in chains for value in chain.kl]))
    yield gate("KL mean", kl, limits.kl, text is not None)
    decided, agreeing = sum(chain.decided for chain in chains), sum(chain.agreeing for chain in chains)
    if limits.top1 is not None:
        differing = (decided - agreeing) / decided if decided else None
        yield gate("top-1 differing", differing, 1 - limits.top1, text is not None)
    yield gate("perplexity (relative)", None if text is None else text.relative, limits.perplexity)
    if looked is not None and limits.attention is not None:
        yield gate("attention max abs", looked, limits.attention)
    elif looked is not None:
        yield Gate("attention max abs", looked, None, None)
