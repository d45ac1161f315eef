"""Streams: segments in, log-probabilities out, memory carried in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import as_array, check_lengths, check_rows, check_stop_tokens, check_tokens, is_whole
from txl_runtime.streaming.loop import Loop, Resident
from txl_runtime.streaming.memory import RowState
from txl_runtime.streaming.outputs import DrawCount
from txl_runtime.streaming.snapshot import StreamState, check_fits
from txl_runtime.types import Floats, Ids

if TYPE_CHECKING:
    from txl_runtime.streaming.sampling import Sampler


class Stream:
    """The recurrent state of b sequences that advance together, made by `Model.stream`.

    Each sequence has its own memory and its own lengths; none can influence another. A stream is not for use by two
    threads at once; different streams of one model are. An interrupt in mid-call (Ctrl-C) leaves the state as it was
    before a segment or as it is after it.

    Where the memory lies on a device, `step` and `feed` also take tokens that are on that device already (DLPack, int32
    [b, T]). Those are not brought to the host to be checked: the graph takes an id beyond the vocabulary for the
    nearest one.

    Attributes:
        draws: what `generate` drew so far, and how many tails of the softmax that took.
        loop: what it runs on, for whoever measures or tests an engine.
    """

    def __init__(self, manifest: Manifest, loop: Loop, update: str, batch_size: int) -> None:
        self._manifest, self.loop, self._b = manifest, loop, batch_size
        self._states = manifest.states_of(update)
        self._longest, self._vocab_size = manifest.segment_lengths[0], manifest.vocab_size
        self.draws = DrawCount()
        self._replaced = 0  # how often the memory was replaced from outside: a running `generate` must not go on then
        self._half_changed = False  # an interrupt came while the memory was being replaced

    def __repr__(self) -> str:
        return f"<Stream of {self._b} sequences, fill {self.fill.tolist()} of {self._manifest.memory_length}>"

    @property
    def batch_size(self) -> int:
        """b, the number of sequences."""
        return self._b

    @property
    def fill(self) -> Ids:
        """Memory rows that exist, int32 [b], 0 … M each."""
        return self.loop.fill[: self._b].copy()

    def step(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Floats:
        """Run ONE segment in the smallest program that holds it.

        Args:
            tokens: int [b, T], T at most the largest segment length; what stands beyond `lengths` is ignored.
            lengths: int [b], tokens that count per sequence, 0 for one that stays idle; all without it.

        Returns:
            Natural log-probabilities of the next token after each position, float32 [b, T, V]; 0 beyond `lengths`.

        Raises:
            UsageError: tokens of the wrong kind, shape or range, or more than one segment of them.
        """
        ids, counts = self._tokens(tokens, lengths)
        columns, longest = ids.shape[1], self._longest
        if columns > longest:
            raise UsageError(
                f"tokens have {columns} columns, expected at most one segment of {longest}; use feed for more"
            )
        result = np.zeros((*ids.shape, self._vocab_size), np.float32)
        self._logprobs(ids, counts, result)
        return result

    def feed(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Floats:
        """Run any number of tokens: as many segments of the largest length as they fill, then one with the rest.

        Args, returns and errors as `step`, for any T of at least 1.
        """
        ids, counts = self._tokens(tokens, lengths)
        result = np.zeros((*ids.shape, self._vocab_size), np.float32)
        for first, last, segment_counts in self._cuts(ids.shape[1], counts):
            self._logprobs(ids[:, first:last], segment_counts, result[:, first:last])
        return result

    def score(self, tokens: ArrayLike) -> Floats:
        """Negative log-likelihoods, in nats, of each token after the first.

        Feeds tokens[:, :-1] with `feed`'s cuts, so the memory advances by T-1; the last token is only a target.

        Returns:
            float32 [b, T-1]: the nll of tokens[:, 1:].

        Raises:
            UsageError: as `step`.
        """
        ids, _ = check_tokens(self._on_host(tokens), self._b, self._vocab_size, None)
        steps = ids.shape[1] - 1
        result = np.empty((self._b, steps), np.float32)
        for first, last, counts in self._cuts(steps, check_lengths(None, self._b, steps)):
            inputs = {"tokens": ids[:, first:last], "targets": ids[:, first + 1 : last + 1]}
            result[:, first:last] = self._ready().run(inputs, counts, "nll").nll()
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
    ) -> Iterator[Ids]:
        """Continue a prompt, one token per sequence at a time.

        The prompt is fed when the first token is asked for, and a yielded token when the next one is: a caller that
        stops early leaves a memory that holds exactly what was yielded before. A sequence that has yielded one of
        `stop_tokens` stays idle and repeats it until every sequence has.

        Args:
            prompt: int [b, T], or [T] for a single sequence, T at least 1.
            max_new_tokens: how many to yield at most.
            temperature, top_k, top_p, seed: see `txl_runtime.streaming.sampling.Sampler`; temperature 0 is greedy.
            stop_tokens: ids that end a sequence; they are yielded.
            lengths: int [b], prompt tokens that count per sequence, at least 1 each.

        Returns:
            An iterator of int32 [b].

        Raises:
            UsageError: at once, for a bad prompt or option.
        """
        found = as_array(self._on_host(prompt), "prompt tokens")
        if found.ndim == 1 and self._b == 1:
            found = found[None]
        ids, counts = check_tokens(found, self._b, self._vocab_size, lengths, "prompt tokens")
        if (counts < 1).any():
            raise UsageError(f"lengths are {counts.tolist()}, expected at least one prompt token per sequence")
        if not is_whole(max_new_tokens) or max_new_tokens < 0:
            raise UsageError(f"max_new_tokens is {max_new_tokens}, expected a whole number of at least 0")
        from txl_runtime.streaming.sampling import Sampler  # whoever only feeds or scores needs none

        sampler = Sampler(temperature, top_k, top_p, seed, self._b)
        stops = check_stop_tokens(stop_tokens, self._vocab_size)
        return self._continue(ids, counts, int(max_new_tokens), sampler, stops)

    def _continue(
        self,
        ids: Ids,
        counts: Ids,
        max_new_tokens: int,
        sampler: Sampler,
        stop_tokens: frozenset[int],
    ) -> Iterator[Ids]:
        latest: Floats | None = None  # [b, F], of each sequence's last position
        for first, last, segment_counts in self._cuts(ids.shape[1], counts):
            found = self._ready().run({"tokens": ids[:, first:last]}, segment_counts, "last").last()
            if latest is None:
                latest = np.zeros((self._b, found.shape[1]), np.float32)
            counted = segment_counts > 0
            latest[counted] = found[counted]
        assert latest is not None
        token = np.zeros(self._b, np.int32)
        running, replaced, loop = np.ones(self._b, np.bool_), self._replaced, self.loop
        for index in range(max_new_tokens):
            if index:
                if self._replaced != replaced:
                    raise UsageError(
                        "the stream was reset, selected or restored while generating; start generate again"
                    )
                latest = loop.run({"tokens": token[:, None]}, running.astype(np.int32), "last").last()
            sampler.draw(loop.output, latest, running, token, self.draws)
            yield token.copy()
            running &= ~np.isin(token, list(stop_tokens))
            if not running.any():
                return

    def memory(self) -> dict[str, Floats]:
        """The memory, one entry per layer and role: copies, unscaled, oldest row first.

        Returns:
            "layers.00.hidden": float32 [b, rows, D], or "layers.00.key" and "layers.00.value": [b, rows, H, d_head];
            rows is the largest fill, shorter sequences are zero-padded on the left.
        """
        return dict(self.iter_memory())

    def iter_memory(self) -> Iterator[tuple[str, Floats]]:
        """As `memory`, name and rows of one tensor at a time: all together can be larger than the weights."""
        fill = self.fill
        rows = int(fill.max(initial=0))
        for group in [(state,) for state in self._states] if self.loop.piecewise else [self._states]:
            taken = {state.name: np.zeros((self._b, rows, *state.row_shape), np.float32) for state in group}
            for row, count in enumerate(fill.tolist()):
                if count:
                    for name, newest in self.loop.take(row, tuple(taken)).tensors.items():
                        taken[name][row, rows - count :] = newest
            yield from taken.items()

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Forget everything, in all sequences or in those named: indices, or one bool per sequence."""
        if rows is not None:
            self._ready()
        which = np.arange(self._manifest.batch_size) if rows is None else check_rows(rows, self._b)
        with self._changing():
            self.loop.clear(which)

    def select(self, rows: ArrayLike) -> None:
        """Make sequence i continue what sequence rows[i] was: reorder, drop or duplicate, as beam search needs.

        Afterwards the stream has len(rows) sequences, at most the bundle's batch size.
        """
        self._ready()
        which = check_rows(rows, self._b)
        if not 1 <= len(which) <= self._manifest.batch_size:
            raise UsageError(f"rows name {len(which)} sequences, expected 1 … {self._manifest.batch_size}")
        with self._changing():
            self.loop.reorder(which)
            self._b = len(which)

    def snapshot(self) -> StreamState:
        """A copy of the state, to go back to or to save."""
        heads = self._ready().heads[: self._b]
        return StreamState(self._manifest.model_id, self.fill, self.memory(), heads)

    def restore(self, state: StreamState) -> None:
        """Continue from a snapshot, bit for bit as if nothing had happened since.

        Everything is checked before anything is changed.

        Raises:
            UsageError: the snapshot is of another model, form of memory or number of sequences.
        """
        check_fits(state, self._manifest, self._states, self._b)
        rows = int(state.fill.max(initial=0))
        with self._changing():
            self.loop.clear(np.arange(self._manifest.batch_size))
            for row, count in enumerate(state.fill.tolist()):
                newest = {name: memory[row, rows - count :] for name, memory in state.memory.items()}
                head = 0 if state.head is None else int(state.head[row])
                self.loop.put(row, RowState(count, head, newest))

    def _cuts(self, length: int, counts: Ids) -> Iterator[tuple[int, int, Ids]]:
        """Segments [first, last) of `feed`, with the lengths that count in each; segments nobody has are left out."""
        longest = self._longest
        for first in range(0, length, longest):
            last = min(first + longest, length)
            inside = np.clip(counts - first, 0, last - first).astype(np.int32)
            if inside.any():
                yield first, last, inside

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Replace memory from outside; what interrupts this in the middle is remembered until all of it is replaced."""
        self._replaced += 1
        self._half_changed = True
        yield
        self._half_changed = False

    def _ready(self) -> Loop:
        """The loop, unless its memory was left half replaced.

        Raises:
            UsageError: it was.
        """
        if self._half_changed:
            raise UsageError(
                "the stream's memory was left half replaced when a reset, select or restore was interrupted, expected "
                "whole memory; call reset() or restore(...)"
            )
        return self.loop

    def _tokens(self, tokens: ArrayLike, lengths: ArrayLike | None) -> tuple[Ids | Resident, Ids]:
        """Checked tokens [b, T] and lengths [b]; tokens that are on the loop's device stay there."""
        there = self.loop.resident(tokens)
        if there is None:
            return check_tokens(tokens, self._b, self._vocab_size, lengths)
        if there.shape[0] != self._b or there.shape[1] < 1:
            raise UsageError(
                f"tokens have shape {list(there.shape)}, expected [{self._b}, T] with T at least 1; one row per stream"
            )
        return there, check_lengths(lengths, self._b, there.shape[1])

    def _on_host(self, tokens: ArrayLike) -> ArrayLike:
        """Tokens that the host can read; those on the loop's device are brought here."""
        there = self.loop.resident(tokens)
        return tokens if there is None else self.loop.fetch(there)

    def _logprobs(self, ids: Ids | Resident, counts: Ids, out: Floats) -> None:
        """One segment of checked tokens; log-probabilities of counted rows into out [b, T, V], which holds zeros."""
        loop = self._ready()
        rows = loop.run({"tokens": ids}, counts).rows()
        for row, count in enumerate(counts.tolist()):
            if count:
                loop.output.logprobs(rows[row, :count], out[row, :count])
