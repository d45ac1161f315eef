"""What a model may be asked for, worked out once from the tables of its bundle."""

from __future__ import annotations

from txl_runtime.bundle.tables import Tables

ORDERS = (("B", "L"), ("L", "B"), ("B",))
"""How tokens may be declared where streams speak [b, T]; log-probabilities have one axis more."""


class Abilities:
    """What the tables allow. `streaming.inputs.refusal` says in words why a model of no such tokens is refused.

    Attributes:
        run_apart: each sequence can be idle, reset and moved alone; otherwise all of them run in lockstep.
        run_fewer: a stream may have fewer than B sequences; otherwise they influence one another.
        run_ragged: a segment may hold fewer positions than its program has, and others for each sequence.
        run_single: a segment of one position can be run.
        count_rows: memory rows are counted, so that their number can be asked for and limited.
        read_text: it reads token ids and nothing else, and returns log-probabilities, whatever the shapes.
        pair_tokens: it declares ids as ["B", "L"] and log-probabilities as ["B", "L", V].
        feed_tokens: it reads and returns one token after the other, so that a stream takes ids [b, T].
        score: besides, there is a state after every token, which scoring and generating need.
        feed_freely: any number of any sequence's tokens [b, T] can be run in any segment, as they are given.
    """

    def __init__(self, tables: Tables) -> None:
        self.run_apart, self.run_fewer = tables.streams == "independent", not tables.joint
        self.run_ragged = tables.lengths == "valid"
        self.run_single = self.run_ragged or 1 in tables.segment_lengths
        self.count_rows = "fill" in tables.counters
        self.read_text = self.pair_tokens = self.feed_tokens = False
        tokens, logprobs = tables.tokens, tables.logprobs
        if tokens is not None and logprobs is not None:
            follows = logprobs.shape == (*tokens.shape, tables.vocab_size)
            self.read_text, self.pair_tokens = True, follows and tokens.axes.plain
            self.feed_tokens = follows and tokens.shape in ORDERS and not tokens.lookahead
        self.score = self.feed_tokens and tables.commits == "rows"
        self.feed_freely = self.score and self.pair_tokens and self.run_apart and self.run_ragged
