"""Whether a competitor computes what the bundle computes: only then does it make sense to time it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from txl_report.schema.measurement import Agreement
from txl_runtime.errors import CheckError
from txl_runtime.ladder import competitor_limit
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.types import Ids

from txl_deploy.bench.competitor import Competitor, Maker, filling
from txl_deploy.bench.timing import random_tokens
from txl_deploy.bench.works import TokenWorks


def compared(
    works: TokenWorks, makers: Mapping[str, Maker], heard: Listener
) -> tuple[list[Competitor], dict[str, Agreement]]:
    """Competitors that were compared with the bundle, the memories of all of them full, and how they agree.

    Each is made when its turn comes.

    Raises:
        CheckError: one does not compute what the bundle computes.
    """
    others: list[Competitor] = []
    agreement: dict[str, Agreement] = {}
    heard.stage("check that competitors agree", len(makers))
    for name, make in makers.items():
        other, precision = make()
        agreement[name] = agree(works.ours, other, works.model, precision)
        others.append(other)
        heard.advance()
    return others, agreement


def agree(bundle: Competitor, other: Competitor, model: Model, precision: str = "fp32") -> Agreement:
    """Compare a competitor with the bundle over chained segments: while memory is empty, and when it is full.

    Both start anew, and are left with full memories. `precision` is the competitor's; the bundle's own counts too.

    Raises:
        CheckError: they do not compute the same function, so timing them would compare nothing.
    """
    measure, limit = competitor_limit({precision, str(model.manifest.precision)})
    longest = model.segment_lengths[0]

    def tokens(length: int, seed: int) -> Ids:
        return random_tokens(model.manifest.vocab_size, (model.batch_size, length), seed)

    bundle.reset()
    other.reset()
    found = [_difference(bundle, other, tokens(length, 100 + i)) for i, length in enumerate([longest, 1])]
    for segment in filling(model, seed=200):
        bundle.next_token(segment)
        other.next_token(segment)
    late = [longest] * 2 + [1] * 3 + [longest, 1]
    found += [_difference(bundle, other, tokens(length, 300 + i)) for i, length in enumerate(late)]
    largest, divergences = zip(*found, strict=True)
    max_abs, kl = float(np.max(largest)), float(np.maximum(np.mean(divergences), 0))
    reached = kl if measure == "kl" else max_abs
    if not reached <= limit:  # NaN is no agreement either
        raise CheckError(
            f"{other.name}: differs from the bundle by {measure} {reached:.3g} over {len(found)} chained segments, "
            f"expected at most {limit:g}; it computes something else, so it is not timed: leave it out of --against"
        )
    return Agreement(segments=len(found), max_abs=max_abs, kl=kl, limit=limit, measure=measure)


def _difference(bundle: Competitor, other: Competitor, tokens: Ids) -> tuple[float, float]:
    """Largest difference and mean divergence of one segment; taken row by row, since large vocabularies are large."""
    ours, theirs = bundle.logprobs(tokens), other.logprobs(tokens)
    worst, divergences = 0.0, []
    for row in np.ndindex(*tokens.shape):
        p, q = ours[row].astype(np.float64), theirs[row].astype(np.float64)
        worst = float(np.fmax(worst, np.abs(p - q).max())) if np.isfinite(p).all() else np.nan
        divergences.append(float((np.exp(q) * (q - p)).sum()))
    return worst, float(np.mean(divergences))
