"""Streams, which run segments and carry the state from each segment to the next."""

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
from txl_runtime.streaming.outputs import DrawCount, SegmentResult, StreamSoftmax
from txl_runtime.streaming.programs import Want
from txl_runtime.types import Array, Floats, Ids

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary
    from txl_runtime.streaming.adjusting import Adjust, Allow
    from txl_runtime.streaming.datastore import Datastore
    from txl_runtime.streaming.generation import Ends, Generation
    from txl_runtime.streaming.lookup import Lookup, Positions

REPLACED = "the stream was reset, selected or restored while generating; start generate again"


class Stream(CarriedState):
    """The recurrent state of b sequences that advance together, made by `Model.stream`.

    Each sequence has its own state and its own lengths, and does not influence other sequences, with two exceptions in
    the manifest: in lockstep all sequences run or none, and all are reset together; joint sequences influence one
    another. Two threads must not use one stream at once, but may use different streams of one model. An interrupt
    (Ctrl-C) leaves either the state before a segment or the state after it.

    `run` and `feed` take arrays by name, for any model. `step`, `feed`, `score` and `generate` take token ids, for a
    model that reads nothing else and returns log-probabilities. If the bundle has a vocabulary, they also take text: a
    str for a single sequence, or a list of b.

    Attributes:
        draws: counters of the tokens that `generate` drew, of softmax tails computed for them, and of drafts.
        limited: True if sequences keep fewer than M memory rows; a segment then sees more rows than single steps do.
        open: an uncommitted segment, whose first `open.counts` positions are committed before the state is next read or
            changed; None if there is none.
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
        # Values of a running `generate` are attributes, so that closing the model releases them.
        self._latest: tuple[StreamSoftmax, Result] | None = None
        self.open: Positions | None = None
        self.limited = False

    def run(
        self,
        inputs: Mapping[str, ArrayLike],
        lengths: ArrayLike | None = None,
        commit: bool = True,
        require_finite: bool = False,
    ) -> dict[str, Array]:
        """Run ONE segment of named arrays.

        Args:
            inputs: all inputs of the bundle's table by name. "B" stands for b sequences and "L" for T positions plus
                look-ahead: ["B", "L", 80] takes [b, T, 80].
            lengths: as in `step`; if the model's lengths are exact, T must be an exported segment length, and each
                length 0 or T.
            commit: whether the segment becomes part of the state; if not, the next segment starts from the same state,
                unless the method `commit` is called before it.
            require_finite: raise UsageError for NaN or infinity in an input, BackendError in an output or a state; no
                state changes then.

        Returns:
            All outputs by name, in the table's order of axes, with b and T; 0 beyond `lengths`.

        Raises:
            UsageError: an input is missing or unknown or has a wrong type or shape, or the model cannot run this T.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> stream.run({"tokens": [[84, 104, 101]]})["logprobs"].shape
            (1, 3, 256)
        """
        return self._segments.run(self._ready(), self._b, inputs, lengths, commit, require_finite)

    def commit(self, lengths: ArrayLike | None = None) -> None:
        """Commit the latest segment of `run(..., commit=False)`, or its first positions, e.g. the right part of a
        draft.

        Nothing happens if it is part of the state already, or if the state has changed since. A `run` that refuses its
        arguments changes nothing: the earlier segment can still be committed. A ring only advances; for a state that
        steps replace, the part runs once more with the same inputs.

        Args:
            lengths: int [b], number of positions to keep of each sequence, 0 … the number that ran; None keeps all.

        Raises:
            UsageError: a length is larger than the positions that ran, or the model cannot keep this part (rolled
                memory, exact or whole segments, lockstep). `commit` can be called again with other lengths.
            BackendError: the engine failed while the part ran again; the state before the segment stays.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> found = stream.run({"tokens": [[84, 104, 101]]}, commit=False)
            >>> stream.commit([2])
            >>> stream.fill
            array([2], dtype=int32)
        """
        loop = self._ready()
        loop.commit(None if lengths is None else check_lengths(lengths, self._b, self._longest))

    def step(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Floats:
        """Run ONE segment of tokens in the smallest program that holds it.

        Args:
            tokens: int [b, T], T at most the largest segment length; values beyond `lengths` are ignored.
            lengths: int [b], number of tokens that count in each sequence, 0 for an idle sequence; None: all T count.

        Returns:
            Natural log-probabilities of the next token after each position, float32 [b, T, V]; 0 beyond `lengths`.

        Raises:
            UsageError: tokens have a wrong type, shape or range, or are more than one segment.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> logprobs = stream.step([[84, 104, 101]])
            >>> logprobs.shape, np.allclose(np.exp(logprobs).sum(axis=-1), 1, atol=1e-4)
            ((1, 3, 256), True)
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
        """Run any number of positions, cut into segments: 20 positions run as 8, 8 and 4 if segments have 8.

        If the model's segment lengths are exact, positions that are left over are cut into shorter exported lengths,
        the longest first.

        Args:
            tokens: as in `step`, with any T of at least 1; or arrays by name as in `run`, which are cut along "L".
            lengths: as in `step`.
            last: return only the last position that counts in each sequence, without an axis of positions.

        Returns:
            The result of `step` or `run` for all T; with `last`, [b, V] or arrays without "L". An output without "L" is
            of the last segment in which its sequence had a position.

        Raises:
            UsageError: as in `step` or `run`; or the positions that are left do not fit the exact segment lengths.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> stream.feed("a text of 28 bytes, with L 8").shape, stream.fill
            ((1, 28, 256), array([28], dtype=int32))
            >>> stream.feed([[32, 97]], last=True).shape
            (1, 256)
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

    def features(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Floats:
        """Feed tokens as `feed` does; return the rows that enter the softmax, float32 [b, T, F]; 0 beyond `lengths`.

        Raises:
            UsageError: as in `step`; or the model's programs return only log-probabilities.
        """
        from txl_runtime.streaming.datastore import check_features

        self._require("features")
        check_features("features", self.loop.output)
        ids, counts = self._tokens("features", tokens, lengths)
        result: Floats | None = None
        for first, end, inside in self._cuts(ids.shape[1], counts):
            rows = self._ready().run(self._inputs(ids[:, first:end]), inside).rows()
            result = zeros((*ids.shape, rows.shape[2])) if result is None else result
            np.copyto(result[:, first:end], rows, where=(np.arange(end - first) < inside[:, None])[:, :, None])
        return zeros((*ids.shape, 0)) if result is None else result

    def score(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, *, datastore: Datastore | None = None
    ) -> Floats:
        """Return the negative log-likelihood, in nats, of each token after the first.

        The call feeds tokens[:, :-1] in the segments of `feed`, so the memory advances by T-1. The last token is only a
        target.

        Args:
            tokens: as in `step`, with any T of at least 1.
            lengths: int [b], number of tokens that count in each sequence, including the last target: the sequence
                advances by one less. 0 and 1 leave it idle; None: all T count.
            datastore: a store that is searched at each position, and whose neighbours are mixed in.

        Returns:
            float32 [b, T-1]: the nll of tokens[:, 1:]; 0 beyond `lengths`.

        Raises:
            UsageError: as in `step`; or the model has no state after every token, or no features for `datastore`.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> nll = stream.score("The licence")
            >>> nll.shape, bool(nll.min() > 0)
            ((1, 10), True)
        """
        self._require("score")
        if datastore is not None:
            from txl_runtime.streaming.datastore import check_datastore, mixed_nll, searched

            check_datastore(datastore, self.loop.output)
        tokens, lengths = self._encoded(tokens, lengths)
        ids, counts = check_tokens(tokens, self._b, self._vocab_size, lengths)
        steps, fed = ids.shape[1] - 1, np.maximum(counts - 1, 0)
        result, counted = zeros((self._b, steps)), np.arange(steps) < fed[:, None]
        fed_ids = ids[:, :-1] * counted  # the last token of each row is only a target: 0 is fed in its place
        for first, last, inside in self._cuts(steps, fed):
            inputs = {**self._inputs(fed_ids[:, first:last]), "targets": ids[:, first + 1 : last + 1]}
            ran, inner = (
                self._ready().run(inputs, inside, "nll" if datastore is None else "rows"),
                counted[:, first:last],
            )
            nll = ran.nll()
            if datastore is not None:
                neighbours = searched(datastore, ran.rows()[inner], self.loop.output)
                nll[inner] = mixed_nll(nll[inner], inputs["targets"][inner], *neighbours)
            np.copyto(result[:, first:last], nll, where=inner)
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
        lookup: int = 0,
        datastore: Datastore | None = None,
    ) -> Generation:
        """Continue a prompt, one token per sequence at a time.

        The first `next` feeds the prompt, and every later `next` feeds the token that was yielded before. So if a
        caller stops early, the memory holds all yielded tokens but the last. A sequence that has yielded one of
        `stop_tokens`, or the end of one of `stop_texts`, stays idle and repeats that token until every sequence has
        ended; in lockstep its repeated tokens are still fed.

        Args:
            prompt: int [b, T], or [T] for a single sequence, T at least 1; or text.
            max_new_tokens: maximum number of tokens to yield.
            temperature, top_k, top_p, seed: see `txl_runtime.streaming.sampling.Sampler`; temperature 0 is greedy.
            stop_tokens: ids that end a sequence; they are yielded.
            lengths: int [b], number of prompt tokens that count in each sequence, at least 1.
            stop_texts: texts that end a sequence; their tokens are yielded, but `texts` leaves them out.
            logprobs: whether to compute `Generation.logprobs`.
            feed_last: feed each token before it is yielded: the memory then always holds all yielded tokens, and each
                token comes one step later.
            adjust: a function of one sequence's whole row, float64 [V] in vocabulary order, and of its tokens so far,
                int32 [n], the prompt's tokens first; it returns the row to draw from, float64 or float32 [V], with -inf
                for a token that is never drawn. The function is applied before the temperature. `logit_bias`, `allow`
                and `forbid` are then applied to the returned row, in this order.
            logit_bias: numbers, -100 … 100, to add to log-probabilities, by token id.
            allow: the only ids to draw; or a function that returns them before each draw, given a sequence's tokens so
                far.
            forbid: ids that are never drawn.
            lookup: maximum number of tokens of a draft, 0 … 4; 0 is off. A draft consists of the tokens that followed
                the latest tokens at an earlier place of the sequence. A draft runs as one segment, of which the
                correctly predicted positions are kept: fewer runs for the same tokens, up to rounding of logits. Drafts
                pause while they lose time. With several sequences, the first wrong token ends the draft of all.
            datastore: a store that is searched before each draw, and whose neighbours are mixed into the row, before
                `adjust`.

        Returns:
            An iterator of int32 [b], which also has the tokens' text and log-probabilities.

        Raises:
            UsageError: raised by this call: a prompt or option is wrong, the model cannot generate, or `lookup` is
                given and a segment does not equal single steps. Raised while iterating: `adjust` or `allow` failed or
                left no token; memory then holds all yielded tokens.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> drawn = [int(token[0]) for token in stream.generate("The ", 5, seed=1, allow=[97, 98])]
            >>> len(drawn), {97, 98}.issuperset(drawn)
            (5, True)
        """
        self._require("generate")
        prompt, lengths = self._encoded(prompt, lengths)
        array = as_array(prompt, "prompt tokens")
        if array.ndim == 1 and self._b == 1:
            array = array[None]
        ids, counts = check_tokens(array, self._b, self._vocab_size, lengths, "prompt tokens")
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
        if datastore is not None:
            from txl_runtime.streaming.datastore import check_datastore

            check_datastore(datastore, self.loop.output)
        samplers = [Sampler(temperature, top_k, top_p, seed, stream, adjusted, datastore) for stream in range(self._b)]
        for sampler, row, count in zip(samplers, ids, counts, strict=True):
            sampler.read(row[:count])
        stops, texts = check_stop_tokens(stop_tokens, self._vocab_size), check_stop_texts(stop_texts)
        ends, asked = Ends(self._b, stops, texts, self._vocabulary), check_flag(logprobs, "logprobs")
        heat = {"temperature": np.full(self._b, samplers[0].heat, np.float32)}
        early, draw, guesses = check_flag(feed_last, "feed_last"), partial(draw_all, samplers), None
        if lookup != 0:
            from txl_runtime.streaming.lookup import Lookup, Pace, longest_draft

            prompts = [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
            longest = longest_draft(lookup, self._manifest, self.loop.parts)
            if self.limited:
                rows = self._manifest.memory_length
                raise UsageError(
                    f"lookup is {lookup}, expected 0 in a stream of fewer than {rows} memory rows, "
                    "whose segments see more than single steps do; leave lookup or memory_length out"
                )
            guesses = Lookup(longest, prompts, Pace())
        drawn = self._continue(
            self._selected, ids, counts, int(max_new_tokens), heat, draw, ends, asked, early, guesses
        )
        return Generation(drawn, ends)

    def _continue(
        self,
        selected: int,
        ids: Ids,
        counts: Ids,
        max_new_tokens: int,
        heat: Mapping[str, Array],
        draw: Callable[..., None],
        ends: Ends,
        logprobs: bool,
        early: bool,
        lookup: Lookup | None,
    ) -> Generator[Ids, None, None]:
        if self._selected != selected:
            raise UsageError(REPLACED)
        self._latest = self.loop.output, self._feed_last(ids, counts, "next", heat)
        token, running, replaced = np.zeros(self._b, np.int32), np.ones(self._b, np.bool_), self._replaced
        for index in range(max_new_tokens):
            if lookup is not None:
                lookup.pace.start()
            if index and self._replaced != replaced:
                raise UsageError(REPLACED)
            if index and not early:
                self._feed_drawn(token, running, heat, lookup, max_new_tokens - index)
            self._draw(draw, token, running, ends if logprobs else None)
            if early:
                self._feed_drawn(token, running, heat, lookup, max_new_tokens - index - 1)
            if lookup is not None:
                lookup.pace.stop()
            ends.take(token, running, index == max_new_tokens - 1)
            yield token.copy()
            if not np.count_nonzero(running):  # `count_nonzero` is faster than `any` for small arrays
                return

    def _draw(self, draw: Callable[..., None], token: Ids, running: NDArray[np.bool_], ends: Ends | None) -> None:
        """Draw from the latest result into token [b]; a separate method, so that `_continue` references no engine."""
        loop = self._whole()
        # if the model is closed, `loop.output` raises the error
        output, result = self._latest or (loop.output, cast("Result", None))
        draw(running, output, result, token, self.draws)
        if ends is not None:
            ends.logprobs = np.where(running, -output.nll(result.last(), token), np.float32(0))

    def _feed_drawn(
        self, token: Ids, running: NDArray[np.bool_], heat: Mapping[str, Array], lookup: Lookup | None, left: int
    ) -> None:
        """Feed the drawn token of each running sequence; in lockstep, of all sequences.

        Args:
            left: number of tokens that are still to be drawn after this token.
        """
        fed = running if self._can.run_apart else np.ones_like(running)
        if lookup is not None:
            lookup.add(token)
            opened = self.open
            if opened is not None and lookup.follows(opened, token, fed):
                self.draws.kept += int(np.count_nonzero(fed))
                self._latest = opened, opened.result()
                return
            self._settle()
            drafts = lookup.find(fed, left - 1)
            if drafts is not None:
                ids = np.concatenate([token[:, None], drafts], axis=1)
                inputs, counts = {**self._inputs(ids), **heat}, fed.astype(np.int32) * ids.shape[1]
                result = self._whole().run(inputs, counts, "rows", commit=False)
                self.open = draft = lookup.begin(self.loop.output, result, ids, fed)
                self.draws.drafts += 1
                self.draws.drafted += drafts.shape[1] * int(np.count_nonzero(fed))
                self._latest = draft, draft.result()
                return
        loop = self._ready()
        result = loop.run({**self._inputs(token[:, None]), **heat}, fed.astype(np.int32), "next")
        self._latest = loop.output, result

    def _settle(self) -> None:
        """Commit the correctly predicted positions of an open segment; do nothing if no segment is open.

        Raises:
            BackendError: the engine failed while the part ran again; tokens of the open segment are not in the state.
        """
        opened, self.open = self.open, None
        if opened is not None:
            self.half_changed = True
            opened.keep(self.loop)
            self.half_changed = False

    def _feed_last(self, ids: Ids, counts: Ids, want: Want, more: Mapping[str, Array]) -> Result:
        """Feed checked tokens; return a result whose `last` is the row at each sequence's last counted position."""
        latest: Floats | None = None
        for first, last, segment_counts in self._cuts(ids.shape[1], counts):
            result = self._ready().run({**self._inputs(ids[:, first:last]), **more}, segment_counts, want)
            ending = (first < counts) & (counts <= last)
            if ending.all():
                return result
            if ending.any():
                features = result.last()
                latest = np.zeros((self._b, features.shape[1]), np.float32) if latest is None else latest
                latest[ending] = features[ending]
        latest = np.zeros((self._b, self._vocab_size), np.float32) if latest is None else latest
        return SegmentResult(latest[:, None], np.ones_like(counts), 1, None, self.loop.output)

    def _close(self) -> None:
        """Release the loop and its results; `Model.close` calls this."""
        self.loop, self._latest, self.open = cast("Loop", Closed()), None, None

    def _cuts(self, length: int, counts: Ids) -> Iterable[tuple[int, int, Ids]]:
        """Return (first, last, counts) of `feed`'s segments, without segments in which all counts are 0."""
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
        """Return token ids and lengths; text is encoded first."""
        if is_text(tokens):
            from txl_runtime.streaming.texts import encoded

            ids, counts = encoded(tokens, lengths, self._vocabulary(), self._b)
            if not counts.any():
                raise UsageError("tokens are text without a token, expected at least one token; leave the call out")
            return ids, counts
        return tokens, lengths

    def _logprobs(self, ids: Ids, counts: Ids, out: Floats) -> None:
        """Run one segment of checked tokens; write log-probabilities where positions count into zeros out [b, T, V]."""
        loop = self._ready()
        loop.output.counted(loop.run(self._inputs(ids), counts).rows(), counts, out)
