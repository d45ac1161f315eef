"""Compares a text's likelihood by reference and bundle: one sequence, cut into the same segments for both."""

from __future__ import annotations

import math

import numpy as np
from txl_report.schema.verification import Text
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.types import Ids

from txl_export.proof.decades import counts_of
from txl_export.proof.references import Reference, ReferenceStreams, in_pieces

TEXT_SEGMENTS, TEXT_TOKENS = 256, 2048
"""Perplexity is compared on the first 256 segments of a text, or on its first 2048 tokens if these are more."""


def compare_text(model: Model, reference: Reference, text: Ids, listener: Listener) -> Text:
    """Compare the likelihood of the beginning of a text, ids [T]: mean negative log-likelihoods in nats per token.

    For example, ids [10000] give 2.31 nats per token on both sides.
    """
    tokens, logprobs = model.manifest.tokens, model.manifest.logprobs
    assert tokens is not None, "a text is for a model that reads tokens"
    assert logprobs is not None, "a text is for a model that returns log-probabilities"
    longest = model.segment_lengths[0]
    text = text[: max(TEXT_SEGMENTS * longest, TEXT_TOKENS) + 1]
    listener.stage("perplexity of the text", math.ceil((len(text) - 1) / longest))
    stream, truth = model.stream(1), ReferenceStreams(model.manifest, reference, 1)
    theirs, ours, errors = 0.0, 0.0, counts_of([])
    for first in range(0, len(text) - 1, longest):
        piece = text[None, first : first + longest + 1]
        counts = np.array([piece.shape[1] - 1], np.int32)
        ((_, outputs),) = truth.run({tokens.name: piece[:, :-1]}, counts)
        known = [
            -some[np.arange(len(some)), piece[0, 1 + begin : 1 + end]].astype(np.float64)
            for begin, end, some in in_pieces(logprobs, outputs[logprobs.name], 0, int(counts[0]))
        ]
        nll, losses = np.concatenate(known), stream.score(piece)[0].astype(np.float64)
        theirs, ours = theirs + float(nll.sum()), ours + float(losses.sum())
        with np.errstate(invalid="ignore"):  # inf - inf is NaN where both sides exclude a token
            errors += counts_of(np.abs(nll - losses))
        listener.advance()
    positions = len(text) - 1
    theirs, ours = theirs / positions, ours / positions
    relative = abs(math.expm1(ours - theirs))
    return Text(
        tokens=len(text), reference_nll=theirs, runtime_nll=ours, errors=tuple(errors.tolist()), relative=relative
    )
