"""Serve a model that is stepped: a request brings positions of a sequence, whose memory continues in the next request.

Every request belongs to a sequence, named by its correlation id. START empties the sequence's memory, even in the
middle of a sequence; END frees its place. Requests that the server delivers together run in one step if the model
allows it, even with different lengths. A refused request leaves its sequence's memory unchanged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import txl_runtime
from numpy.typing import NDArray
from txl_runtime.bundle.tables import Input
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.streaming.inputs import check_inputs, strict_cuts

from txl_deploy.triton.inside import tables
from txl_deploy.triton.inside.conversations import flag_of
from txl_deploy.triton.inside.rows import Rows

MOST_POSITIONS = 1 << 20
"""Maximum number of positions of one request."""
MOST_BYTES = 1 << 30
"""Maximum size of a step's results in bytes, 1 GiB: the result of a position may be as long as the vocabulary."""
GONE = " The sequence's memory is gone: start it again."
"""Ending of the message of an error that leaves a sequence's memory undefined."""


def open_model(bundle: Path, parameters: Mapping[str, str], server: Any) -> Stepping:
    """Load a bundle and serve it.

    Raises:
        TxlError: the bundle cannot be loaded on this machine.
    """
    model = txl_runtime.load(bundle, backend=parameters["backend"], threads=int(parameters["threads"]))
    return Stepping(model, int(parameters["sequences"]), server)


@dataclass(frozen=True)
class Step:
    """A request, read and checked.

    Attributes:
        place: the request's index among the requests that came together.
        name: name of the request's sequence.
        start, end: the request's flags START and END.
        arrays: the inputs by name for one sequence, in the declared order of axes.
        length: number of positions.
        wanted: names of the outputs that the client wants.
        every: True if the results of every position are needed, False if only those of the last position are.
    """

    place: int
    name: Hashable
    start: bool
    end: bool
    arrays: dict[str, NDArray[Any]]
    length: int
    wanted: frozenset[str]
    every: bool


class Stepping:
    """The sequences of one model; each call advances some of them."""

    def __init__(self, model: txl_runtime.Model, sequences: int, server: Any) -> None:
        self._server, self._manifest = server, model.manifest
        alone = not tables.together(model.manifest)
        self._stream = model.stream(1 if alone else None)
        self._rows = Rows(self._stream, sequences)
        self._speaks, self._ragged = tables.speaks(model.manifest), tables.ragged(model.manifest)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests; return one answer for each."""
        answers: list[Any] = [None] * len(requests)
        waiting: list[Step] = []
        for request in requests:  # first, so that no new sequence takes the place of a sequence with a request
            self._rows.touch(request.correlation_id())
        for place, request in enumerate(requests):
            name = request.correlation_id()
            start, end = flag_of(request, "START", self._server), flag_of(request, "END", self._server)
            try:
                waiting.append(Step(place, name, start, end, *self._read(request)))
            except TxlError as error:
                answers[place] = self._refusal(error)
                if start:
                    with contextlib.suppress(TxlError):  # if this fails, the sequence is forgotten
                        self._rows.begin(name)
                if end:
                    self._rows.end(name)
        while waiting:
            wave = self._wave(waiting)
            waiting = [step for step in waiting if step not in wave]
            for step, answer in zip(wave, self._answer(wave), strict=True):
                answers[step.place] = answer
        return answers

    def close(self) -> None:
        """Do nothing, because nothing runs between calls."""

    def _read(self, request: Any) -> tuple[dict[str, NDArray[Any]], int, frozenset[str], bool]:
        wanted, inputs_by_name = frozenset(request.requested_output_names()), {}
        every = not self._speaks or self._manifest.outputs[0].name in wanted
        for entry in self._manifest.given:
            tensor = self._server.get_input_tensor_by_name(request, entry.name).as_numpy()[0]
            inputs_by_name[entry.name] = entry.axes.joined([tensor])
        arrays, counts, columns = check_inputs(inputs_by_name, None, self._manifest, 1)
        sizes = [output.sizes(self._rows.count, 1) for output in self._manifest.outputs]
        # bytes per position: every served type has at most 4 bytes per value
        size = sum(4 * math.prod(axes) for axes in sizes)
        most = min(MOST_POSITIONS, max(1, MOST_BYTES // size)) if every else MOST_POSITIONS
        if columns > most:
            raise UsageError(
                f"the request has {columns} positions, expected at most {most} with the outputs that it asks for; "
                "send it in parts, one request after the other"
            )
        strict_cuts(columns, counts, self._manifest)
        return arrays, columns, wanted, every

    def _wave(self, waiting: Sequence[Step]) -> list[Step]:
        """Choose the steps that run together next: from different sequences, and of one length if lengths are exact.

        Steps that need the results of every position run apart from all other steps, because the result of such a step
        has room for every position of all rows.
        """
        wave: list[Step] = []
        first, names = waiting[0], set[Hashable]()
        for step in waiting:
            fits = (self._ragged or step.length == first.length) and step.every == first.every
            if fits and len(wave) < self._rows.count and step.name not in names:
                wave.append(step)
            names.add(step.name)  # a step that does not fit keeps later steps of its sequence waiting
        return wave

    def _answer(self, wave: Sequence[Step]) -> list[Any]:
        live: dict[int, Step] = {}
        answers: dict[int, Any] = {}
        for step in wave:
            keep = [other.name for other in live.values()]
            try:
                live[(self._rows.begin if step.start else self._rows.resume)(step.name, keep)] = step
            except TxlError as error:
                answers[step.place] = self._refusal(error, "" if isinstance(error, UsageError) else GONE)
        try:
            results = self._run(live) if live else {}
        except TxlError as error:
            for step in live.values():  # some segments may have run, so the sequences' memory is undefined
                self._rows.end(step.name)
                answers[step.place] = self._refusal(error, GONE)
        else:
            for row, step in live.items():
                outputs = [self._server.Tensor(name, array[None]) for name, array in results[row].items()]
                answers[step.place] = self._server.InferenceResponse(output_tensors=outputs)
        for step in wave:
            if step.end:
                self._rows.end(step.name)
        return [answers[step.place] for step in wave]

    def _run(self, live: Mapping[int, Step]) -> dict[int, dict[str, NDArray[Any]]]:
        """Run one step of several rows, and return the wanted outputs of each row."""
        longest = max(step.length for step in live.values())
        lengths = np.zeros(self._rows.count, np.int32)
        for row, step in live.items():
            lengths[row] = step.length
        inputs = {entry.name: self._stacked(entry, live, longest) for entry in self._manifest.given}
        if not self._speaks:
            results = self._stream.feed(inputs, lengths)
            return {
                row: {
                    output.name: np.ascontiguousarray(results[output.name][output.axes.window(0, step.length, row)])
                    for output in self._manifest.outputs
                    if output.name in step.wanted
                }
                for row, step in live.items()
            }
        (ids,), (logprobs,) = inputs.values(), self._manifest.outputs
        every = any(step.every for step in live.values())
        rows = self._stream.feed(ids, lengths, last=not every)
        shares = {}
        for row, step in live.items():
            last = rows[row, step.length - 1] if every else rows[row]
            share: dict[str, NDArray[Any]] = {tables.LAST: last, tables.NEXT: np.array([last.argmax()], np.int32)}
            if every:
                share[logprobs.name] = rows[row, : step.length]
            shares[row] = {name: array for name, array in share.items() if name in step.wanted}
        return shares

    def _stacked(self, entry: Input, live: Mapping[int, Step], longest: int) -> NDArray[Any]:
        """Stack one input over all rows, with zeros elsewhere: [1, l] per row → [B, longest]."""
        axes = entry.axes
        if axes.batch is None:
            (only,) = live.values()
            return only.arrays[entry.name]
        whole = np.zeros(entry.sizes(self._rows.count, longest), np.dtype(entry.dtype))
        for row, step in live.items():
            whole[axes.window(0, step.length, row)] = axes.one(step.arrays[entry.name], 0)
        return whole

    def _refusal(self, error: TxlError, more: str = "") -> Any:
        return self._server.InferenceResponse(
            output_tensors=[], error=self._server.TritonError(f"{error}{more}", self._server.TritonError.INVALID_ARG)
        )
