"""Streams: segments in, log-probabilities out, memory carried in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from txl_runtime.bundle.tables import Program
from txl_runtime.errors import UsageError
from txl_runtime.host.memory import Memory, open_memory
from txl_runtime.streaming.checks import as_array, check_lengths, check_rows, check_stop_tokens, check_tokens
from txl_runtime.streaming.loop import Call
from txl_runtime.streaming.outputs import open_output
from txl_runtime.streaming.sampling import DrawCount, Sampler
from txl_runtime.streaming.snapshot import StreamState

if TYPE_CHECKING:
    from txl_runtime.model import Model

__all__ = ["Stream"]

Logprobs = NDArray[np.float32]


class Stream:
    """The recurrent state of b sequences that advance together, made by `Model.stream`.

    Each sequence has its own memory and its own lengths; none can influence another. Arrays are bound to programs once
    and the memory is never copied between segments (`txl_runtime.host.memory`). Not for use by two threads at once;
    different streams of one model are.
    """

    def __init__(self, model: Model, batch_size: int) -> None:
        self._model, self._manifest, self._backend = model, model.manifest, model.backend
        self._b = batch_size
        full = self._manifest.batch_size
        self._memory = self._open_memory()
        self._output = open_output(model.kind, self._manifest, self._backend)
        self._fill = np.zeros(full, np.int32)
        self._valid = np.zeros(full, np.int32)
        self._tokens: dict[str, NDArray[np.int32]] = {}
        self._features: dict[str, NDArray[np.float32]] = {}
        self._calls: dict[tuple[str, int], Call] = {}
        self._fresh_fill = self._manifest.memory_length if self._manifest.dialect.memory_start == "zeros" else 0
        self.draws = DrawCount()  # what `generate` drew so far, and how many tails of the softmax that took
        self._replaced = 0  # how often the memory was replaced from outside: a running `generate` must not go on then
        self.reset()

    def __repr__(self) -> str:
        return f"<Stream of {self._b} sequences, fill {self.fill.tolist()} of {self._manifest.memory_length}>"

    @property
    def batch_size(self) -> int:
        """b, the number of sequences."""
        return self._b

    @property
    def fill(self) -> NDArray[np.int32]:
        """Memory rows that exist, int32 [b], 0 … M each."""
        return self._fill[: self._b].copy()

    def step(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Logprobs:
        """Run ONE segment in the smallest program that holds it.

        Args:
            tokens: int [b, T], T at most the largest segment length; what stands beyond `lengths` is ignored.
            lengths: int [b], tokens that count per sequence, 0 for one that stays idle; all without it.

        Returns:
            Natural log-probabilities of the next token after each position, float32 [b, T, V]; 0 beyond `lengths`.

        Raises:
            UsageError: tokens of the wrong kind, shape or range, or more than one segment of them.
        """
        ids, counts = check_tokens(tokens, self._b, self._manifest.config.vocab_size, lengths)
        longest = self._manifest.segment_lengths[0]
        if ids.shape[1] > longest:
            raise UsageError(
                f"tokens have {ids.shape[1]} columns, expected at most one segment of {longest}; use feed for more"
            )
        result = np.zeros((*ids.shape, self._manifest.config.vocab_size), np.float32)
        self._logprobs(ids, counts, result)
        return result

    def feed(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Logprobs:
        """Run any number of tokens: as many segments of the largest length as they fill, then one with the rest.

        Args, returns and errors as `step`, for any T of at least 1.
        """
        ids, counts = check_tokens(tokens, self._b, self._manifest.config.vocab_size, lengths)
        result = np.zeros((*ids.shape, self._manifest.config.vocab_size), np.float32)
        for first, last, segment_counts in self._cuts(ids.shape[1], counts):
            self._logprobs(ids[:, first:last], segment_counts, result[:, first:last])
        return result

    def score(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Negative log-likelihoods, in nats, of each token after the first.

        Feeds tokens[:, :-1] with `feed`'s cuts, so the memory advances by T-1; the last token is only a target.

        Returns:
            float32 [b, T-1]: the nll of tokens[:, 1:].

        Raises:
            UsageError: as `step`.
        """
        ids, _ = check_tokens(tokens, self._b, self._manifest.config.vocab_size, None)
        steps = ids.shape[1] - 1
        result = np.empty((self._b, steps), np.float32)
        for first, last, counts in self._cuts(steps, check_lengths(None, self._b, steps)):
            result[:, first:last] = self._nll(ids[:, first:last], ids[:, first + 1 : last + 1], counts)
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
    ) -> Iterator[NDArray[np.int32]]:
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
        found = as_array(prompt, "prompt tokens")
        if found.ndim == 1 and self._b == 1:
            found = found[None]
        ids, counts = check_tokens(found, self._b, self._manifest.config.vocab_size, lengths, "prompt tokens")
        if (counts < 1).any():
            raise UsageError(f"lengths are {counts.tolist()}, expected at least one prompt token per sequence")
        whole = isinstance(max_new_tokens, int | np.integer) and not isinstance(max_new_tokens, bool)
        if not whole or max_new_tokens < 0:
            raise UsageError(f"max_new_tokens is {max_new_tokens}, expected a whole number of at least 0")
        sampler = Sampler(temperature, top_k, top_p, seed, self._b)
        stops = check_stop_tokens(stop_tokens, self._manifest.config.vocab_size)
        return self._continue(ids, counts, int(max_new_tokens), sampler, stops)

    def _continue(
        self,
        ids: NDArray[np.int32],
        counts: NDArray[np.int32],
        max_new_tokens: int,
        sampler: Sampler,
        stop_tokens: frozenset[int],
    ) -> Iterator[NDArray[np.int32]]:
        latest: NDArray[np.float32] | None = None  # [b, F], of each sequence's last position
        for first, last, segment_counts in self._cuts(ids.shape[1], counts):
            found = self._last(ids[:, first:last], segment_counts)
            if latest is None:
                latest = np.zeros((self._b, found.shape[1]), np.float32)
            counted = segment_counts > 0
            latest[counted] = found[counted]
        assert latest is not None
        token = np.zeros(self._b, np.int32)
        running, replaced = np.ones(self._b, np.bool_), self._replaced
        for index in range(max_new_tokens):
            if index:
                if self._replaced != replaced:
                    raise UsageError(
                        "the stream was reset, selected or restored while generating; start generate again"
                    )
                latest = self._run(token[:, None], running.astype(np.int32))[:, 0]
            sampler.draw(self._output, latest, running, token, self.draws)
            yield token.copy()
            running &= ~np.isin(token, list(stop_tokens))
            if not running.any():
                return

    def memory(self) -> dict[str, NDArray[np.float32]]:
        """The memory, one entry per layer and role: copies, unscaled, oldest row first.

        Returns:
            "layers.00.hidden": float32 [b, rows, D], or "layers.00.key" and "layers.00.value": [b, rows, H, d_head];
            rows is the largest fill, shorter sequences are zero-padded on the left.
        """
        return dict(self.iter_memory())

    def iter_memory(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """As `memory`, name and rows of one tensor at a time: all together can be larger than the weights."""
        rows = int(self._fill[: self._b].max(initial=0))
        states = self._manifest.states_of(self._model.update)
        for group in [(state,) for state in states] if self._memory.piecewise else [states]:
            taken = {}
            for state in group:
                shape = tuple(size for axis, size in enumerate(state.shape) if axis not in (0, state.axis))
                taken[state.name] = np.zeros((self._b, rows, *shape), np.float32)
            for row, count in enumerate(self._fill[: self._b].tolist()):
                if count:
                    for name, newest in self._memory.newest(row, count, tuple(taken)).items():
                        taken[name][row, rows - count :] = newest
            yield from taken.items()

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Forget everything, in all sequences or in those named: indices, or one bool per sequence."""
        which = np.arange(self._manifest.batch_size) if rows is None else check_rows(rows, self._b)
        self._replaced += 1
        self._memory.clear(which)
        self._fill[which] = self._fresh_fill

    def select(self, rows: ArrayLike) -> None:
        """Make sequence i continue what sequence rows[i] was: reorder, drop or duplicate, as beam search needs.

        Afterwards the stream has len(rows) sequences, at most the bundle's batch size.
        """
        which = check_rows(rows, self._b)
        if not 1 <= len(which) <= self._manifest.batch_size:
            raise UsageError(f"rows name {len(which)} sequences, expected 1 … {self._manifest.batch_size}")
        fill = self._fill[which]
        self._replaced += 1
        self._memory.reorder(which)
        self._b = len(which)
        self._valid[:] = 0  # of sequences that are gone: a shorter program could not hold what counted last
        self._fill[:] = self._fresh_fill
        self._fill[: self._b] = fill

    def snapshot(self) -> StreamState:
        """A copy of the state, to go back to or to save."""
        return StreamState(self._manifest.model_id, self.fill, self.memory(), self._memory.heads[: self._b])

    def restore(self, state: StreamState) -> None:
        """Continue from a snapshot, bit for bit as if nothing had happened since.

        Raises:
            UsageError: the snapshot is of another model, form of memory or number of sequences.
        """
        m = self._manifest
        if not isinstance(state, StreamState):
            raise UsageError(
                f"the state is a {type(state).__name__}, expected a StreamState; StreamState.load reads one"
            )
        if state.model_id != m.model_id:
            raise UsageError(
                f"the state belongs to model {state.model_id[:12] or 'unknown'}, this bundle is {m.model_id[:12]}; "
                "restore it in the model it was taken from"
            )
        if state.batch_size != self._b:
            raise UsageError(
                f"the state holds {state.batch_size} sequences, this stream has {self._b}; "
                f"open it with model.stream({state.batch_size})"
            )
        fill = state.fill
        if (fill < 0).any() or (fill > m.memory_length).any():
            raise UsageError(f"the state's fill is {fill.tolist()}, expected 0 … {m.memory_length}; take it again")
        head = state.head
        if head is not None and (head.shape != fill.shape or not np.issubdtype(head.dtype, np.integer)):
            raise UsageError(
                f"the state's head is {head.dtype} {list(head.shape)}, expected int32 {list(fill.shape)}; take it again"
            )
        rows = int(fill.max(initial=0))
        for spec in m.states_of(self._model.update):
            found = state.memory.get(spec.name)
            expected = [self._b, rows, *(size for axis, size in enumerate(spec.shape) if axis not in (0, spec.axis))]
            if found is None or list(found.shape) != expected or found.dtype != np.float32:
                what = "absent" if found is None else f"{found.dtype} {list(found.shape)}"
                raise UsageError(
                    f"the state's {spec.name} is {what}, expected float32 {expected}; "
                    f"this bundle keeps {m.memory} memory, restore a state of the same form"
                )
        self.reset()
        for row, count in enumerate(fill.tolist()):
            newest = {name: memory[row, rows - count :] for name, memory in state.memory.items()}
            self._memory.place(row, 0 if head is None else int(head[row]), newest)
        self._fill[: self._b] = fill

    def _cuts(self, length: int, counts: NDArray[np.int32]) -> Iterator[tuple[int, int, NDArray[np.int32]]]:
        """Segments [first, last) of `feed`, with the lengths that count in each; segments nobody has are left out."""
        longest = self._manifest.segment_lengths[0]
        for first in range(0, length, longest):
            last = min(first + longest, length)
            inside = np.clip(counts - first, 0, last - first).astype(np.int32)
            if inside.any():
                yield first, last, inside

    def _open_memory(self) -> Memory:
        return open_memory(self._model.update, self._manifest, self._model.initial)

    def _logprobs(self, ids: NDArray[np.int32], counts: NDArray[np.int32], out: Logprobs) -> None:
        """One segment of checked tokens; log-probabilities of counted rows into out [b, T, V], which holds zeros."""
        features = self._run(ids, counts)
        for row, count in enumerate(counts.tolist()):
            if count:
                self._output.logprobs(features[row, :count], out[row, :count])

    def _nll(
        self, ids: NDArray[np.int32], targets: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """One segment; negative log-likelihoods of its targets, [b, T] → [b, T]. All rows count."""
        features = self._run(ids, counts)
        return self._output.nll(features.reshape(targets.size, -1), targets.ravel()).reshape(targets.shape)

    def _last(self, ids: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.float32]:
        """One segment; what its program returned for the last counted position of each sequence, [b, F]."""
        features = self._run(ids, counts)
        last: NDArray[np.float32] = features[np.arange(self._b), np.maximum(counts, 1) - 1]
        return last

    def _run(self, ids: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.float32]:
        """One segment of checked tokens; a view [b, T, F] of what its program returned, good until its next run."""
        length = ids.shape[1]
        program = self._model.program(length)
        call = self._calls.get((program.name, self._memory.side))
        if call is None:
            call = self._bind(program)
        self._tokens[program.name][: self._b, :length] = ids
        self._valid[: self._b] = counts
        call()
        self._memory.advance(self._valid)
        np.minimum(self._fill + self._valid, self._manifest.memory_length, out=self._fill)
        return self._features[program.name][: self._b, :length]

    def _bind(self, program: Program) -> Call:
        """Tie a program to this stream's arrays and to its memory as it lies now; once per side of the memory."""
        tokens, *_ = program.inputs
        features, *_ = program.outputs
        if program.name not in self._tokens:
            self._tokens[program.name] = np.zeros(tokens.fixed, np.int32)
            self._features[program.name] = np.zeros(features.fixed, np.float32)
        memory, after = self._memory.bound()
        counts: dict[str, NDArray[Any]] = {"valid": self._valid, "fill": self._fill}
        inputs = {tokens.name: self._tokens[program.name], **counts, **memory}
        outputs = {features.name: self._features[program.name], **after}
        call = self._calls[program.name, self._memory.side] = self._backend.bind(program, inputs, outputs)
        return call
