"""The operations that a model supports, e.g. scoring or ragged segments, derived from its bundle's tables."""

from __future__ import annotations

from txl_runtime.bundle.tables import Tables

ORDERS = (("B", "L"), ("L", "B"), ("B",))
"""Shapes of a token input that a stream can feed from ids [b, T]. Log-probabilities have one more axis, V."""


class Abilities:
    """Flags that say which operations the tables allow. `streaming.inputs.refusal` makes the message for a False flag.

    Attributes:
        run_apart: each sequence can be idle, reset and moved without the others; if False, all run in lockstep.
        run_fewer: a stream may have fewer than batch_size sequences; False if sequences influence one another.
        run_ragged: sequences may have different numbers of valid positions in a segment, 0 … its length.
        run_single: a segment of one position can be run.
        count_rows: the runtime counts memory rows, so that callers can read their number and limit it.
        read_text: the model reads only token ids, and returns log-probabilities; both may have any shapes.
        pair_tokens: ids are declared as ["B", "L"] and log-probabilities as ["B", "L", V].
        feed_tokens: ids [b, T] can be fed: the model returns log-probabilities for each token that it reads.
        score: `feed_tokens` is True, and the state after each single token is known; scoring and generating need both.
        feed_freely: ids [b, T] can be cut into segments anywhere, and sequences may have different numbers of tokens.
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
