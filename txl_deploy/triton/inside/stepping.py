"""A model whose memory goes on from request to request: the positions of one request in, what follows them out.

Every request is of a sequence, which its correlation id names, and which is a session of the model
(`txl_runtime.sessions`). START empties the sequence's memory, also in mid-sequence; END frees its place. Requests that
the server hands over together run side by side where the model allows it. A request that is refused leaves its
sequence's memory as it was.

The server forgets a sequence that was idle for too long and tells nobody. But it never lets more than so many sequences
be: so when one begins beyond these, the longest idle one is gone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import txl_runtime
from numpy.typing import NDArray
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.sessions import Limits, Outputs, Request, Sessions, Ticket, joined
from txl_runtime.streaming.checks import shown

from txl_deploy.triton.inside import tables
from txl_deploy.triton.inside.conversations import flag_of, id_of

MOST_POSITIONS = 1 << 20
"""Of one request."""
MOST_BYTES = 1 << 30
"""Of all positions' results in one step: a row of the vocabulary for each token is some hundred times what was sent."""
FOREVER = 1e9
"""Seconds: the server is who forgets idle sequences."""
GONE = " The sequence's memory is gone: start it again."


def open_model(bundle: Path, parameters: Mapping[str, str], server: Any) -> Stepping:
    """Load a bundle and serve it.

    Args:
        bundle: its folder.
        parameters: of the model's configuration.
        server: the module `triton_python_backend_utils`.

    Raises:
        TxlError: it cannot be loaded here.
    """
    model = txl_runtime.load(bundle, backend=parameters["backend"], threads=int(parameters["threads"]))
    return Stepping(model, int(parameters["sequences"]), server)


@dataclass(eq=False)
class Step:
    """One request that was taken in.

    Attributes:
        name: of its sequence's session.
        end: whether the sequence ends with it.
        wanted: the outputs that it asks for.
        every: whether results of every position are needed.
        ticket: of its session.
        error: why it failed.
    """

    name: str
    end: bool
    wanted: frozenset[str]
    every: bool
    ticket: Ticket
    error: TxlError | None = None


class Stepping:
    """Sequences of one model, some of them advanced by each call."""

    def __init__(self, model: txl_runtime.Model, sequences: int, server: Any) -> None:
        self._server, self._manifest, self._given = server, model.manifest, model.manifest.given
        rows = model.batch_size if tables.together(model.manifest) else 1
        self._most, self._speaks = max(sequences, rows), tables.speaks(model.manifest)
        limits = Limits(
            sessions=self._most,
            waiting=sys.maxsize,
            host_bytes=sys.maxsize,
            input_bytes=sys.maxsize,
            idle_seconds=FOREVER,
            positions=MOST_POSITIONS,
        )
        self._sessions = Sessions(model, rows, limits)
        sizes = [output.sizes(rows, 1) for output in model.manifest.outputs]
        size = sum(4 * math.prod(axes) for axes in sizes)  # bytes of a position; nothing served has wider values
        self._positions = {True: min(MOST_POSITIONS, max(1, MOST_BYTES // size)), False: MOST_POSITIONS}

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests, one answer for each."""
        names = [id_of(request) for request in requests]
        taken, running = list[Step | TxlError](), set[str]()
        for request, name in zip(requests, names, strict=True):
            if name in running:  # the server sends one of a sequence at a time; nothing may overtake another
                self._finish(taken)
                running.clear()
            running.add(name)
            try:
                taken.append(self._take_in(request, name, names))
            except TxlError as error:
                taken.append(error)
                if flag_of(request, "END", self._server) and name in self._sessions:
                    self._sessions.close(name)
        self._finish(taken)
        return [self._answer(step) if isinstance(step, Step) else self._refusal(str(step)) for step in taken]

    def close(self) -> None:
        """Nothing runs between calls."""
        self._sessions.shut()

    def _take_in(self, request: Any, name: str, names: Collection[str]) -> Step:
        """Submit a request to its sequence's session.

        Args:
            request: of the server.
            name: of the session.
            names: of all sessions that this call has requests of: none of them is gone for another.

        Raises:
            TxlError: the request is refused.
        """
        if flag_of(request, "START", self._server):
            known = self._sessions.names()
            if name not in self._sessions and len(known) >= self._most:  # a call has fewer than that besides
                self._sessions.close(next(other for other in known if other not in names))
            self._sessions.begin(name)
        wanted = frozenset(request.requested_output_names())
        every = not self._speaks or self._manifest.outputs[0].name in wanted
        inputs = self._read(request, every)
        if name not in self._sessions:
            raise UsageError(
                f"sequence {shown(request.correlation_id())} is not known here, expected START with its first request; "
                "it was idle for too long or the model was started again, so start it again with what its memory "
                "should hold"
            )
        ticket = self._sessions.submit(Request(inputs=inputs, last=not every), name)
        return Step(name, flag_of(request, "END", self._server), wanted, every, ticket)

    def _read(self, request: Any, every: bool) -> dict[str, NDArray[Any]]:
        """What a request gives, in the table's axes with one sequence.

        Raises:
            UsageError: its results would be too large.
        """
        found, columns, most = dict[str, NDArray[Any]](), 1, self._positions[every]
        for entry in self._given:
            array = self._server.get_input_tensor_by_name(request, entry.name).as_numpy()
            found[entry.name] = array if entry.axes.batch == 0 else entry.axes.joined([array[0]])
            columns = max(columns, entry.axes.length(found[entry.name]))
        if columns > most:
            raise UsageError(
                f"the request has {columns} positions, expected at most {most} with the outputs that it asks for; "
                "send it in parts, one request after the other"
            )
        return found

    def _finish(self, taken: Sequence[Step | TxlError]) -> None:
        """Run all that was taken in, and close the sessions of sequences that end or failed.

        Where a request failed some segments of it may have run: nobody can tell what the memory holds.
        """
        running, broken = [step for step in taken if isinstance(step, Step) and not step.ticket.done], None
        try:
            while self._sessions.unfinished and self._sessions.round():
                pass
        except TxlError as error:  # the stream cannot be begun anew
            broken = error
        for step in running:
            step.error = step.ticket.error if step.ticket.done else broken
            if (step.end or step.error is not None) and step.name in self._sessions:
                self._sessions.close(step.name)

    def _answer(self, step: Step) -> Any:
        if step.error is not None:
            return self._refusal(f"{step.error}{GONE}")
        segments = [event for event in step.ticket.events() if isinstance(event, Outputs)]
        found = joined(segments, self._manifest.outputs)
        if self._speaks:
            (logprobs,) = found.values()
            last = logprobs[:, -1] if step.every else logprobs
            found |= {tables.LAST: last, tables.NEXT: last.argmax(1).astype(np.int32)[:, None]}
        else:
            for output in self._manifest.outputs:
                found[output.name] = np.ascontiguousarray(output.axes.one(found[output.name], 0))[None]
        tensors = [self._server.Tensor(name, array) for name, array in found.items() if name in step.wanted]
        return self._server.InferenceResponse(output_tensors=tensors)

    def _refusal(self, said: str) -> Any:
        error = self._server.TritonError(said, self._server.TritonError.INVALID_ARG)
        return self._server.InferenceResponse(output_tensors=[], error=error)
