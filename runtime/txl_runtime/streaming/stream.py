"""Streams, which run segments and carry the state from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError
from txl_runtime.streaming.carried import CarriedState
from txl_runtime.streaming.checks import (
    as_array,
    check_flag,
    check_lengths,
    check_tokens,
    cut_at,
    is_text,
    is_whole,
    shown,
    zeros,
)
from txl_runtime.streaming.feeding import feed_arrays
from txl_runtime.streaming.inputs import Segments, check_segment, require_tokens, strict_cuts, token_inputs
from txl_runtime.streaming.loop import Closed, Loop, Result
from txl_runtime.streaming.outputs import DrawCount, SegmentResult
from txl_runtime.streaming.programs import Want
from txl_runtime.types import Array, Floats, Ids

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary
    from txl_runtime.streaming.adjusting import Adjust, Allow
    from txl_runtime.streaming.generation import Ends, Generation


class Stream(CarriedState):
    """The recurrent state of b sequences that advance together, made by `Model.stream`.

    Each sequence has its own state and its own lengths, and does not influence the others, with two exceptions in the
    manifest: in lockstep all sequences run or none, and all are reset together; joint sequences influence one another.
    One stream must not be used by two threads at once; different streams of one model may be. An interrupt (Ctrl-C)
    leaves the state before a segment or the one after it.

    `run` and `feed` take arrays by name, for any model. `step`, `feed`, `score` and `generate` take token ids, for a
    model that reads nothing else and returns log-probabilities. If the bundle has a vocabulary, they also take text: a
    str for a single sequence, or a list of b.

    Attributes:
        draws: counts of the tokens that `generate` drew, and of the softmax's tails that they needed.
    """

    def __init__(
        self,
        manifest: Manifest,
        loop: Loop,
        update: str,
        batch_size: int,
        vocabulary: Callable[[], Vocabulary | None] = lambda: None,
    ) -> None:
        super().__init__(manifest, loop, update, batch_size)
        self._vocabulary = vocabulary
        self._longest, self._vocab_size = manifest.segment_lengths[0], manifest.vocab_size
        tokens = manifest.tokens
        self._fluent = tokens.name if tokens is not None and manifest.can.feed_freely else ""
        self._segments, self.draws = Segments(manifest), DrawCount()
        self._latest: Result | None = None  # a generation's; an attribute, so that closing the model releases it

    def run(
        self,
        inputs: Mapping[str, ArrayLike],
        lengths: ArrayLike | None = None,
        commit: bool = True,
        require_finite: bool = False,
    ) -> dict[str, Array]:
        """Run ONE segment of named arrays.

        Args:
            inputs: all inputs of the bundle's table by name, with b for "B", and T plus look-ahead for "L":
                ["B", "L", 80] takes [b, T, 80].
            lengths: as in `step`; if the model's lengths are exact, T is an exported segment length, and each is 0 or
                T.
            commit: whether the segment becomes part of the state; if not, the next one starts from the same state,
                unless `commit` keeps this one, or a part of it.
            require_finite: raise UsageError for NaN or infinity in an input, BackendError in an output or a state; no
                state changes then.

        Returns:
            All outputs by name, in the table's order of axes, with b and T; 0 beyond `lengths`.

        Raises:
            UsageError: an input is missing or unknown or has a wrong type or shape, or the model cannot run this T.
        """
        return self._segments.run(self._ready(), self._b, inputs, lengths, commit, require_finite)

    def commit(self, lengths: ArrayLike | None = None) -> None:
        """Keep the latest segment of `run(..., commit=False)`, or its first positions, e.g. of a draft what came true.

        Nothing happens if it is part of the state already, or if the state has changed since; a `run` whose arguments
        are refused leaves the segment before it to commit. A ring only advances; where a state is replaced, the part
        runs once more, with the same inputs.

        Args:
            lengths: int [b], positions to keep of each sequence, from 0 to those that ran; None: all that ran.

        Raises:
            UsageError: a length is larger, or the model cannot keep such a part (rolled memory, exact or whole
                segments, lockstep). Other lengths can still be given.
            BackendError: the engine failed where the part ran again; the state is the one before the segment.
        """
        loop = self._ready()
        loop.commit(None if lengths is None else check_lengths(lengths, self._b, self._longest))

    def step(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Floats:
        """Run ONE segment of tokens in the smallest program that holds it.

        Args:
            tokens: int [b, T], T at most the largest segment length; values beyond `lengths` are ignored.
            lengths: int [b], tokens that count per sequence, 0 for an idle one; None: all T count.

        Returns:
            Natural log-probabilities of the next token after each position, float32 [b, T, V]; 0 beyond `lengths`.

        Raises:
            UsageError: tokens have a wrong type, shape or range, or are more than one segment.
        """
        ids, counts = self._tokens("step", tokens, lengths, self._longest if self._fluent else None)
        if not self._fluent:
            check_segment(ids.shape[1], counts, self._manifest, "tokens")
        result = zeros((*ids.shape, self._vocab_size))
        self._logprobs(ids, counts, result)
        return result

    @overload
    def feed(
        self, tokens: Mapping[str, ArrayLike], lengths: ArrayLike | None = None, last: bool = False
    ) -> dict[str, Array]: ...

    @overload
    def feed(self, tokens: ArrayLike, lengths: ArrayLike | None = None, last: bool = False) -> Floats: ...

    def feed(
        self, tokens: Mapping[str, ArrayLike] | ArrayLike, lengths: ArrayLike | None = None, last: bool = False
    ) -> dict[str, Array] | Floats:
        """Run any number of positions, cut into segments: 20 positions with L = 8 run as 8, 8 and 4.

        If a model's lengths are exact, the rest is cut into its shorter lengths, the longest first.

        Args:
            tokens: as in `step`, with any T of at least 1; or arrays by name as in `run`, which are cut along "L".
            lengths: as in `step`.
            last: return only the last position that counts in each sequence, without an axis of positions.

        Returns:
            The result of `step` or `run` for all T; with `last`, [b, V] or arrays without "L". An output without "L" is
            of the last segment in which its sequence had a position.

        Raises:
            UsageError: as in `step` or `run`; or a model with exact lengths has none for the rest.
        """
        if last is not False:
            last = check_flag(last, "last")
        if isinstance(tokens, Mapping):
            loop = self._ready()
            found = self._segments.check(tokens, lengths, self._b)
            return feed_arrays(
                found, self._manifest, self._b, lambda arrays, counts: loop.run(arrays, counts).outputs(), last
            )
        ids, counts = self._tokens("feed", tokens, lengths)
        if last:
            features = self._feed_last(ids, counts, "last", {}).last()
            row = np.zeros((self._b, self._vocab_size), np.float32)
            live = counts > 0
            self.loop.output.counted(features[:, None], live.astype(np.int32), row[:, None])
            return row
        result = zeros((*ids.shape, self._vocab_size))
        for first, end, segment_counts in self._cuts(ids.shape[1], counts):
            self._logprobs(ids[:, first:end], segment_counts, result[:, first:end])
        return result

    def score(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Floats:
        """Return the negative log-likelihood, in nats, of each token after the first.

        It feeds tokens[:, :-1] with `feed`'s cuts, so the memory advances by T-1; the last token is only a target.

        Args:
            tokens: as in `step`, with any T of at least 1.
            lengths: int [b], tokens that count per sequence, including the last target: a sequence advances by one
                less. 0 and 1 leave it idle; None: all T count.

        Returns:
            float32 [b, T-1]: the nll of tokens[:, 1:]; 0 beyond `lengths`.

        Raises:
            UsageError: as in `step`; or the model has no state after every token.
        """
        self._require("score")
        tokens, lengths = self._encoded(tokens, lengths)
        ids, counts = check_tokens(tokens, self._b, self._vocab_size, lengths)
        steps, fed = ids.shape[1] - 1, np.maximum(counts - 1, 0)
        result, counted = zeros((self._b, steps)), np.arange(steps) < fed[:, None]
        given = ids[:, :-1] * counted  # the last token of each row is only a target: 0 is fed in its place
        for first, last, inside in self._cuts(steps, fed):
            inputs = {**self._inputs(given[:, first:last]), "targets": ids[:, first + 1 : last + 1]}
            nll = self._ready().run(inputs, inside, "nll").nll()
            np.copyto(result[:, first:last], nll, where=counted[:, first:last])
        return result

    def generate(
        self,
        prompt: ArrayLike,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop_tokens: Sequence[int] = (),
        lengths: ArrayLike | None = None,
        stop_texts: Sequence[str] = (),
        logprobs: bool = False,
        feed_last: bool = False,
        *,
        adjust: Adjust | None = None,
        logit_bias: Mapping[int, float] | None = None,
        allow: Allow | None = None,
        forbid: Iterable[int] = (),
    ) -> Generation:
        """Continue a prompt, one token per sequence at a time.

        The first `next` feeds the prompt, and every further one the token that was yielded before: if a caller stops
        early, the memory holds all yielded tokens but the last. A sequence that has yielded one of `stop_tokens`, or
        the end of one of `stop_texts`, stays idle and repeats that token until every sequence has ended; in lockstep it
        is fed until then, too.

        Args:
            prompt: int [b, T], or [T] for a single sequence, T at least 1; or text.
            max_new_tokens: the most tokens to yield.
            temperature, top_k, top_p, seed: see `txl_runtime.streaming.sampling.Sampler`; temperature 0 is greedy.
            stop_tokens: ids that end a sequence; they are yielded.
            lengths: int [b], prompt tokens that count per sequence, at least 1 each.
            stop_texts: texts that end a sequence; their tokens are yielded, but `texts` leaves them out.
            logprobs: whether to compute `Generation.logprobs`.
            feed_last: feed each token before it is yielded: the memory then always holds all yielded tokens, and each
                token comes one step later.
            adjust: a function of one sequence's whole row, float64 [V] in vocabulary order, and of its tokens so far,
                int32 [n], those of the prompt first; it returns the row to draw from, float64 or float32 [V], with -inf
                for a token that is never drawn. It comes before the temperature. The next three are done to what it
                returns, in this order.
            logit_bias: numbers, -100 … 100, to add to log-probabilities, by token id.
            allow: the only ids to draw; or a function that returns them before each draw, given a sequence's tokens so
                far.
            forbid: ids that are never drawn.

        Returns:
            An iterator of int32 [b], which also has the tokens' text and log-probabilities.

        Raises:
            UsageError: a prompt or option is wrong, or the model cannot generate; raised at once. While iterating:
                `adjust` or `allow` failed or left no token; memory then holds all that was yielded.
        """
        self._require("generate")
        prompt, lengths = self._encoded(prompt, lengths)
        found = as_array(prompt, "prompt tokens")
        if found.ndim == 1 and self._b == 1:
            found = found[None]
        ids, counts = check_tokens(found, self._b, self._vocab_size, lengths, "prompt tokens")
        if (counts < 1).any():
            raise UsageError(
                f"lengths are {counts.tolist()}, expected at least one prompt token per sequence; where only some go "
                "on, take them into a stream of their own and put them back"
            )
        if not is_whole(max_new_tokens) or max_new_tokens < 0:
            raise UsageError(f"max_new_tokens is {shown(max_new_tokens)}, expected a whole number of at least 0")
        from txl_runtime.streaming.adjusting import adjustment
        from txl_runtime.streaming.generation import Ends, Generation
        from txl_runtime.streaming.sampling import Sampler, check_stop_tokens, draw_all
        from txl_runtime.streaming.texts import check_stop_texts

        adjusted = adjustment(self._vocab_size, adjust, logit_bias, allow, forbid)
        samplers = [Sampler(temperature, top_k, top_p, seed, stream, adjusted) for stream in range(self._b)]
        for sampler, row, count in zip(samplers, ids, counts, strict=True):
            sampler.read(row[:count])
        stops, texts = check_stop_tokens(stop_tokens, self._vocab_size), check_stop_texts(stop_texts)
        ends, asked = Ends(self._b, stops, texts, self._vocabulary), check_flag(logprobs, "logprobs")
        heat = {"temperature": np.full(self._b, samplers[0].heat, np.float32)}
        early, draw = check_flag(feed_last, "feed_last"), partial(draw_all, samplers)
        return Generation(self._continue(ids, counts, int(max_new_tokens), heat, draw, ends, asked, early), ends)

    def _continue(
        self,
        ids: Ids,
        counts: Ids,
        max_new_tokens: int,
        heat: Mapping[str, Array],
        draw: Callable[..., None],
        ends: Ends,
        logprobs: bool,
        early: bool,
    ) -> Generator[Ids, None, None]:
        self._latest = self._feed_last(ids, counts, "next", heat)
        token, running, replaced = np.zeros(self._b, np.int32), np.ones(self._b, np.bool_), self._replaced
        for index in range(max_new_tokens):
            if index:
                if self._replaced != replaced:
                    raise UsageError(
                        "the stream was reset, selected or restored while generating; start generate again"
                    )
                if not early:
                    self._feed_drawn(token, running, heat)
            draw(running, self._ready().output, self._latest, token, self.draws)
            if logprobs:
                ends.logprobs = np.where(running, -self.loop.output.nll(self._latest.last(), token), np.float32(0))
            if early:
                self._feed_drawn(token, running, heat)
            ends.take(token, running, index == max_new_tokens - 1)
            yield token.copy()
            if not np.count_nonzero(running):  # faster than `any` on small arrays
                return

    def _feed_drawn(self, token: Ids, running: NDArray[np.bool_], heat: Mapping[str, Array]) -> None:
        """Feed a token of each running sequence; in lockstep, of all."""
        fed = running if self._can.run_apart else np.ones_like(running)
        self._latest = self._ready().run({**self._inputs(token[:, None]), **heat}, fed.astype(np.int32), "next")

    def _feed_last(self, ids: Ids, counts: Ids, want: Want, more: Mapping[str, Array]) -> Result:
        """Feed checked tokens; return a result whose `last` is that of each sequence's last counted position."""
        latest: Floats | None = None
        for first, last, segment_counts in self._cuts(ids.shape[1], counts):
            result = self._ready().run({**self._inputs(ids[:, first:last]), **more}, segment_counts, want)
            ending = (first < counts) & (counts <= last)
            if ending.all():
                return result
            if ending.any():
                found = result.last()
                latest = np.zeros((self._b, found.shape[1]), np.float32) if latest is None else latest
                latest[ending] = found[ending]
        latest = np.zeros((self._b, self._vocab_size), np.float32) if latest is None else latest
        return SegmentResult(latest[:, None], np.ones_like(counts), 1, None, self.loop.output)

    def _close(self) -> None:
        """Release the loop and its results; `Model.close` calls this."""
        self.loop, self._latest = cast("Loop", Closed()), None

    def _cuts(self, length: int, counts: Ids) -> Iterable[tuple[int, int, Ids]]:
        """Return (first, last, counts) of `feed`'s segments, except those in which no sequence has a position."""
        if not self._fluent:
            return strict_cuts(length, counts, self._manifest)
        return cut_at([*range(0, length, self._longest), length], counts)

    def _require(self, what: str) -> None:
        """Raise UsageError if the model was closed or does not support `what` with tokens."""
        if isinstance(self.loop, Closed):
            self.loop.refuse()
        if not self._fluent:
            require_tokens(self._manifest, what)

    def _inputs(self, ids: Ids) -> Mapping[str, Array]:
        """Return checked tokens [b, T] by the input's name and in its order of axes."""
        if self._fluent:
            return {self._fluent: ids}
        return token_inputs(self._manifest, ids)

    def _tokens(
        self, what: str, tokens: ArrayLike, lengths: ArrayLike | None, most: int | None = None
    ) -> tuple[Ids, Ids]:
        """Return checked tokens [b, T] and lengths [b], after encoding text; see `check_tokens`."""
        self._require(what)
        tokens, lengths = self._encoded(tokens, lengths)
        return check_tokens(tokens, self._b, self._vocab_size, lengths, most=most)

    def _encoded(self, tokens: ArrayLike, lengths: ArrayLike | None) -> tuple[ArrayLike, ArrayLike | None]:
        """Return token ids and lengths, after encoding text."""
        if is_text(tokens):
            from txl_runtime.streaming.texts import encoded

            ids, counts = encoded(tokens, lengths, self._vocabulary(), self._b)
            if not counts.any():
                raise UsageError("tokens are text without a token, expected at least one token; leave the call out")
            return ids, counts
        return tokens, lengths

    def _logprobs(self, ids: Ids, counts: Ids, out: Floats) -> None:
        """Run one segment of checked tokens, writing log-probabilities of counted rows into out [b, T, V] of zeros."""
        loop = self._ready()
        loop.output.counted(loop.run(self._inputs(ids), counts).rows(), counts, out)
