"""The operations that a model supports, e.g. scoring or ragged segments, derived once from its bundle's tables."""

from __future__ import annotations

from txl_runtime.bundle.tables import Tables

ORDERS = (("B", "L"), ("L", "B"), ("B",))
"""Declared axes of tokens that a stream can feed from ids [b, T]; log-probabilities have one more axis, V."""


class Abilities:
    """The flags of operations that the tables allow. `streaming.inputs.refusal` puts a missing one into words.

    Attributes:
        run_apart: each sequence can be idle, reset and moved alone; otherwise all of them run in lockstep.
        run_fewer: a stream may have fewer than B sequences; otherwise they influence one another.
        run_ragged: each sequence may have its own number of valid positions in a segment, from 0 to the program's L.
        run_single: a segment of one position can be run.
        count_rows: the runtime counts memory rows, so that callers can read their number and limit it.
        read_text: it reads token ids and nothing else, and returns log-probabilities, in any shapes.
        pair_tokens: it declares ids as ["B", "L"] and log-probabilities as ["B", "L", V].
        feed_tokens: it reads and returns one token after the other, so that a stream takes ids [b, T].
        score: `feed_tokens`, and there is a state after every token, which scoring and generating need.
        feed_freely: ids [b, T] run in segments of any split, with a different number of tokens for each sequence.
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
