"""What a model may be asked for, worked out once from the tables of its bundle."""

from __future__ import annotations

from msgspec import Struct

from txl_runtime.bundle.tables import Tables

ORDERS = (("B", "L"), ("L", "B"), ("B",))
"""How tokens may be declared where streams speak [b, T]; log-probabilities have one axis more."""


class Abilities(Struct, frozen=True, kw_only=True):
    """What the tables allow. `streaming.inputs.refusal` says in words why a model of no such tokens is refused.

    Attributes:
        run_apart: each sequence can be idle, reset and moved alone; otherwise all of them run in lockstep.
        run_fewer: a stream may have fewer than B sequences; otherwise they influence one another.
        run_ragged: a segment may hold fewer positions than its program has, and others for each sequence.
        run_single: a segment of one position can be run.
        count_rows: memory rows are counted, so that their number can be asked for and limited.
        read_text: it reads token ids and nothing else, and returns log-probabilities, whatever the shapes.
        feed_tokens: it does so one token after the other, so that a stream takes ids [b, T].
        score: besides, there is a state after every token, which scoring and generating need.
        pair_tokens: it declares ids as ["B", "L"] and log-probabilities as ["B", "L", V].
        feed_freely: any number of any sequence's tokens [b, T] can be run in any segment, as they are given.
    """

    run_apart: bool
    run_fewer: bool
    run_ragged: bool
    run_single: bool
    count_rows: bool
    read_text: bool
    feed_tokens: bool
    score: bool
    pair_tokens: bool
    feed_freely: bool


def abilities(tables: Tables) -> Abilities:
    """What a model of these tables may be asked for."""
    tokens, logprobs = tables.tokens, tables.logprobs
    apart, ragged, rows = tables.streams == "independent", tables.lengths == "valid", tables.commits == "rows"
    text = fed = paired = False
    if tokens is not None and logprobs is not None:
        text, follows = True, logprobs.shape == (*tokens.shape, tables.vocab_size)
        fed = follows and tokens.shape in ORDERS and not tokens.lookahead
        paired = follows and tokens.axes.plain
    return Abilities(
        run_apart=apart,
        run_fewer=not tables.joint,
        run_ragged=ragged,
        run_single=ragged or 1 in tables.segment_lengths,
        count_rows="fill" in tables.counters,
        read_text=text,
        feed_tokens=fed,
        score=fed and rows,
        pair_tokens=paired,
        feed_freely=fed and paired and apart and ragged and rows,
    )
