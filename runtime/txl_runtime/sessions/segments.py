"""A runner of segments: several sessions run side by side on a stream's rows, and only the needed part of the softmax
is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import BackendError
from txl_runtime.sessions.drafts import Drafts
from txl_runtime.sessions.jobs import Part
from txl_runtime.sessions.requests import Outputs, Prompt, Token
from txl_runtime.sessions.scoring import Best, best_of, score_rows
from txl_runtime.streaming.inputs import token_inputs
from txl_runtime.streaming.lookup import Positions
from txl_runtime.streaming.loop import Loop, Result
from txl_runtime.streaming.outputs import DrawCount, StreamSoftmax
from txl_runtime.streaming.programs import Want
from txl_runtime.streaming.sampling import Sampler, draw_from
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Array, Floats, Ids


class Segments:
    """A runner of segments, on the loop of the stream that sessions share."""

    def __init__(self, stream: Stream, manifest: Manifest) -> None:
        self.stream, self._manifest, self._b = stream, manifest, stream.batch_size
        self._count, self._drafts = DrawCount(), Drafts(manifest, self._b)
        self._short = manifest.logprobs is not None and len(manifest.outputs) == 1

    @property
    def _loop(self) -> Loop:
        return self.stream.loop  # this reads the loop each time, because closing the model replaces it

    def run(self, parts: Sequence[Part]) -> None:
        """Run one segment, and send tokens, scores and outputs to the tickets.

        Raises:
            TxlError: the engine failed. If `Job.at` has advanced, the segment was already committed to the state.
        """
        counts = np.zeros(self._b, np.int32)
        for part in parts:
            counts[part.row] = part.size
        limited = [part for part in parts if part.job.work.memory_length is not None]
        held = self._loop.fill.copy() if limited else None
        try:
            for part in limited:
                self._limit(part, part.job.work.memory_length)
            if parts[0].job.work.arrays is not None:
                self._run_arrays(parts, counts)
            else:
                run = self._run_drafts if self._drafts.find(parts) else self._run_tokens
                run(parts, counts)
                self._drafts.end(parts)
        finally:  # the limit holds only for this request: the row's next session keeps all M rows
            for part in limited:
                self._limit(part, None)
                # the segment failed, so undo the limit's effect on the memory
                if held is not None and part.job.at == part.first:
                    self._loop.fill[part.row] = held[part.row]

    def _limit(self, part: Part, most: int | None) -> None:
        """Limit the memory rows of a part's stream row to `most`; None sets the bundle's memory length."""
        self._loop.limit(np.array([part.row]), self._manifest.memory_length if most is None else most)

    def _run_tokens(self, parts: Sequence[Part], counts: Ids) -> None:
        ids = np.zeros((self._b, int(counts.max())), np.int32)
        targets, samplers = np.zeros_like(ids), list[Sampler | None]([None] * self._b)
        for part in parts:
            ids[part.row, : part.size] = part.job.ids(part.size)
            if part.scored:
                targets[part.row, : part.scored] = part.job.targets(part.scored)
            if part.job.draws_after(part.size):
                samplers[part.row] = part.job.work.sampler
        inputs, drawing = self._inputs(ids, samplers), any(samplers)
        scoring = [part for part in parts if part.scored]
        want: Want = "next" if drawing else "last"
        if scoring:
            want = "rows" if drawing or any(part.job.work.top for part in scoring) else "nll"
            inputs["targets"] = targets
        result = self._loop.run(inputs, counts, want)
        _advance(parts)
        if want == "nll":
            nll = result.nll()
            for part in scoring:
                self._tell_prompt(part, -nll[part.row, : part.scored], None, None)
        elif scoring:
            rows = result.rows()
            for part in scoring:
                top = part.job.work.top or 0
                scores = score_rows(self._loop.output, rows[part.row, : part.scored], targets[part.row], top)
                self._tell_prompt(part, *scores)
        if drawing:
            self._draw(parts, samplers, self._loop.output, result)

    def _run_drafts(self, parts: Sequence[Part], counts: Ids) -> None:
        """Run each part's next token and its draft as one segment; keep the positions that each draft predicted
        correctly.

        At each position a token is drawn, sent to the ticket and counted, as if the position were a round of its own.
        """
        ids = np.zeros((self._b, 1 + max(len(part.draft) for part in parts)), np.int32)
        samplers, before = list[Sampler | None]([None] * self._b), [part.job.session.pending for part in parts]
        fresh = [part.job.session.fresh for part in parts]
        for part in parts:
            counts[part.row] = 1 + len(part.draft)
            ids[part.row, : counts[part.row]] = [*part.job.ids(1), *part.draft]
            samplers[part.row] = part.job.work.sampler
        result = self._loop.run(self._inputs(ids, samplers), counts, "rows", commit=False)
        positions, going = Positions(self._loop.output, result, counts), parts
        try:
            self.stream.open = positions
            while going:
                _advance(going)
                self._draw(going, samplers, positions, positions.result())
                following = [part for part in going if part.goes_on()]
                # A caller's function may have ended requests; the stream has then committed the positions so far.
                still = self.stream.open is positions
                going = [part for part in following if still and not part.job.ticket.done]
                rows = [part.row for part in going]
                samplers = [sampler if row in rows else None for row, sampler in enumerate(samplers)]
                if going:
                    positions.step(np.isin(np.arange(self._b), rows))
        finally:
            try:
                if self.stream.open is positions:
                    self.stream.open = None
                    positions.keep(self._loop)
            finally:
                if positions.lost:  # the commit failed in this call, or when a caller's function read the stream
                    self.stream.half_changed = False  # the loop still has the state before the segment
                    for part, token, new in zip(parts, before, fresh, strict=True):
                        job, session = part.job, part.job.session
                        session.seen, session.pending, session.fresh = session.seen - part.fed, token, new
                        job.at = part.first
        if positions.lost:
            raise BackendError("the engine failed where a draft was to be kept, expected the state after it; ask again")

    def _inputs(self, ids: Ids, samplers: Sequence[Sampler | None]) -> dict[str, Array]:
        """Return the inputs of a segment: tokens, and the temperatures of its draws if a token is drawn."""
        inputs: dict[str, Array] = token_inputs(self._manifest, ids)
        if any(samplers):
            inputs["temperature"] = np.array([1.0 if s is None else s.heat for s in samplers], np.float32)
        return inputs

    def _run_arrays(self, parts: Sequence[Part], counts: Ids) -> None:
        columns, inputs = int(counts.max()), dict[str, Array]()
        for entry in self._manifest.given:
            whole = inputs[entry.name] = np.zeros(entry.sizes(self._b, columns), np.dtype(entry.dtype))
            for part in parts:
                assert part.job.work.arrays is not None
                window = entry.axes.window(part.first, part.first + part.size)
                place = entry.axes.window(0, part.size, slice(part.row, part.row + 1))
                whole[place] = part.job.work.arrays[entry.name][window]
        last = parts[0].job.work.last
        result = self._loop.run(inputs, counts, "last" if last and self._short else "rows")
        _advance(parts)
        telling = [part for part in parts if part.job.done or not last]
        if last and self._short:
            self._tell_last(telling, result)
            return
        outputs = result.outputs() if telling else {}
        for part in telling:
            row, positions = slice(part.row, part.row + 1), part.size - 1 if last else slice(part.size)
            arrays = {
                output.name: outputs[output.name][output.axes.at(row, positions)].copy()
                for output in self._manifest.outputs
            }
            part.job.ticket.tell(Outputs(part.first, arrays))

    def _tell_last(self, parts: Sequence[Part], result: Result) -> None:
        """Send the log-probabilities after each part's last position, without computing other positions."""
        output = self._loop.output
        logprobs = np.zeros((len(parts), output.clusters[-1][1]), np.float32)
        if parts:
            output.logprobs(result.last()[[part.row for part in parts]], logprobs)
        for place, part in enumerate(parts):
            part.job.ticket.tell(Outputs(part.first, {output.name: logprobs[place : place + 1]}))

    def _tell_prompt(self, part: Part, logprobs: Floats, ids: Ids | None, best: Floats | None) -> None:
        if np.isnan(logprobs).any():
            part.fail(BackendError(""), broken=True)
            return
        none = np.zeros((len(logprobs), 0))
        ids = none.astype(np.int32) if ids is None else ids
        best = none.astype(np.float32) if best is None else best
        first = part.first + 1 - part.job.before
        part.job.ticket.tell(Prompt(first, logprobs, ids, best))

    def _draw(
        self, parts: Sequence[Part], samplers: list[Sampler | None], output: StreamSoftmax, result: Result
    ) -> None:
        for part in parts:
            if part.error is not None:
                samplers[part.row] = None
        tokens = np.zeros(self._b, np.int32)
        failed = draw_from(samplers, output, result, tokens, self._count)
        live = [part for part in parts if samplers[part.row] is not None]
        for part in live:
            if part.row in failed:
                broken = bool(np.isnan(result.last()[part.row]).any())
                part.fail(failed[part.row], broken)
        drawn = [part for part in live if part.error is None]
        asked = [part for part in drawn if part.job.work.top is not None]
        scores: dict[int, tuple[float | None, Best]] = {}
        if asked:
            rows = [part.row for part in asked]
            best = best_of(output, result.last()[rows], tokens[rows], [part.job.work.top or 0 for part in asked])
            scores = dict(zip(rows, best, strict=True))
        for part in drawn:
            logprob, top = scores.get(part.row, (None, ()))
            if logprob is not None and math.isnan(logprob):
                part.fail(BackendError(""), broken=True)
                continue
            token = part.job.session.pending = int(tokens[part.row])
            part.drawn.append(token)
            part.job.drawn += 1
            part.job.ticket.tell(Token(token, logprob, top))


def _advance(parts: Sequence[Part]) -> None:
    """Update jobs and sessions after a segment was committed to the state."""
    for part in parts:
        job, session = part.job, part.job.session
        job.at += part.size
        session.seen += part.size
        session.fresh, session.pending = False, None  # the first token that was fed is the pending token
