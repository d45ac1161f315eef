"""Compare a compiled step with its bundle: both run the same segments, and the ladder judges outputs and states.

The compiled step runs in a separate process, which a fault in generated code may end, and on a stack of its own, whose
use the process reports.
"""

from __future__ import annotations

import signal
import struct
import subprocess
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from txl_export.proof.bits import IDLE, Bits
from txl_export.proof.comparing import ChainErrors, TensorErrors
from txl_export.proof.distributions import Distributions
from txl_export.proof.gates import OUTPUTS, STATES, judge
from txl_export.proof.input_source import poisoned
from txl_export.proof.side_by_side import CHEAP_STATE, SPARSE
from txl_report.schema.verification import Chain, Gate
from txl_runtime.bundle.tables import Output, StateTensor
from txl_runtime.errors import CheckError
from txl_runtime.model import Model
from txl_runtime.starting import APART, environment
from txl_runtime.types import Array, Ids

from txl_deploy.plain_c.segments import MIXED, Segment, expected, filling, segments
from txl_deploy.plain_c.step import PlainStep

UNCOUNTED = "outputs of what does not count (bits)"
COUNTER = "counter "
"""Prefix of a counter's role in the dictionary of states, e.g. "counter fill"."""
FILL = COUNTER + "fill"
WHOLE = 64
"""The size of the stack is rounded up to a multiple of this number of bytes."""


class Verified(NamedTuple):
    """The result of a comparison: a sentence, and the number of bytes of stack that a step took."""

    said: str
    stack: int


class Replay:
    """A process that runs the compiled step."""

    def __init__(self, command: list[str], context: Mapping[str, Any]) -> None:
        self._context = context
        self._process = subprocess.Popen(  # noqa: S603
            command, cwd=APART, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, segment: Segment, wanted: bool) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run a segment; return two dictionaries by name: its outputs, and states and counters if `wanted`.

        For example, ({"y": [2, 5, 8]}, {"h": [2, 32]}).
        """
        context = self._context
        parts = [bytes([wanted]), segment.which.astype(np.uint8).tobytes(), segment.counts.tobytes()]
        parts += [np.ascontiguousarray(segment.inputs[each["table"].name]).tobytes() for each in context["inputs"]]
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(b"".join(parts))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        outputs = {each["table"].name: self._read(each["shape"], each["table"].dtype) for each in context["outputs"]}
        states: dict[str, Array] = {}
        if wanted:
            states = {each["table"].name: self._read(each["shape"], each["table"].dtype) for each in context["states"]}
            states |= {
                COUNTER + each["role"]: self._read((context["batch_size"],), "int32") for each in context["counters"]
            }
        return outputs, states

    def finish(self) -> int:
        """End the process, and return the bytes of stack that the steps took."""
        rest = self._process.communicate()[0]
        if self._process.returncode or len(rest) != 16:
            raise self._ended()
        return -(-int(struct.unpack("=QQ", rest)[0]) // WHOLE) * WHOLE

    def _read(self, shape: tuple[int, ...], dtype: str) -> Array:
        array = np.zeros(shape, np.dtype(dtype))
        assert self._process.stdout is not None, "it is a pipe"
        data = self._process.stdout.read(array.nbytes)
        if len(data) != array.nbytes:
            raise self._ended()
        return np.frombuffer(data, array.dtype).reshape(shape)

    def _ended(self) -> CheckError:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return CheckError(f"the compiled step ended with {how}, expected results; this model does not run as plain C")


def verify(model: Model, step: PlainStep, replay: Replay) -> Verified:
    """Compare the compiled step with the bundle.

    Raises:
        CheckError: outputs or states differ by more than the ladder allows.
    """
    manifest, length = step.manifest, step.program.segment_length
    facts = Chain(name=f"segments of {length}", streams=manifest.batch_size, segments=0, positions=0, rows=[])
    facts.every = 1 if manifest.state_bytes * manifest.batch_size <= CHEAP_STATE // SPARSE else SPARSE
    errors, bits, stream = ChainErrors(facts), Bits(), model.stream(manifest.batch_size)
    exact = {"int32", "bool"}
    errors.outputs = {
        entry.name: TensorErrors(entry.dtype in exact, entry.role == "logprobs") for entry in manifest.outputs
    }
    errors.states = {state.name: TensorErrors(state.dtype in exact) for state in step.states}
    distributions = {
        entry.name: Distributions(errors, errors.outputs[entry.name], int(entry.shape[-1]))
        for entry in manifest.outputs
        if entry.role == "logprobs"
    }
    whole, before = filling(manifest, length), dict[str, Array]()
    for number, segment in enumerate(segments(step, whole, MIXED, 0), 1):
        if segment.which.any():
            stream.reset(np.flatnonzero(segment.which))
            before = {}
        wanted = expected(stream, step, segment)
        poison = segment._replace(inputs=poisoned(manifest, segment.inputs, segment.counts))
        outputs, states = replay.run(poison, number % facts.every == 0 or number >= whole)
        for entry in manifest.outputs:
            _compare(entry, errors, distributions, (wanted[entry.name], outputs[entry.name]), segment.counts)
            cleared = outputs[entry.name].copy()
            entry.axes.clear_uncounted(cleared, segment.counts)
            bits.compare(UNCOUNTED, {entry.name: cleared}, {entry.name: outputs[entry.name]})
        if states:
            held, fill = stream.state(), stream.fill
            for state in step.states:
                _compare_state(state, errors.states[state.name], held[state.name], states[state.name], fill)
            if before:
                _compare_idle(step, bits, before, states, segment.counts)
            if FILL in states:
                bits.compare("memory rows (bits)", {FILL: fill}, {FILL: states[FILL]})
        before = states
        facts.segments, facts.positions = number, facts.positions + int(segment.counts.sum())
        facts.rows.append(int(segment.counts.sum()))
    gates = list(judge(manifest, manifest.precision, "cpu", [errors], bits, real=False))
    failed = [gate for gate in gates if gate.passed is False]
    if failed:
        raise CheckError(
            f"the C of this model is not the model: {'; '.join(map(_gate_text, failed))}; use the library for C and "
            "C++ (docs/embedding.md), or export the model in fp32"
        )
    shown = [gate for gate in gates if gate.name in (OUTPUTS, STATES, "KL mean of one chain")]
    sentence = ", ".join(map(_gate_text, shown or gates[:1]))
    return Verified(f"{facts.segments} chained segments with resets and idle steps: {sentence}", replay.finish())


def _compare(entry: Output, errors: ChainErrors, distributions: Any, pair: tuple[Array, Array], counts: Ids) -> None:
    """Compare one output of a segment; of log-probabilities, only the valid positions are compared."""
    tensor = errors.outputs[entry.name]
    if entry.dtype == "float32" and (same := np.isnan(pair[0]) & np.isnan(pair[1])).any():
        pair = np.where(same, 0, pair[0]), np.where(same, 0, pair[1])  # NaN on both sides is agreement
    if entry.name in distributions:
        for row in np.flatnonzero(counts).tolist():
            expected, found = (entry.axes.rows(side)[row][: counts[row]] for side in pair)
            distributions[entry.name].compare(expected, found)
    else:
        tensor.compare(pair)
    tensor.end_segment()


def _compare_state(state: StateTensor, errors: TensorErrors, expected: Array, found: Array, fill: Ids) -> None:
    """Compare one state after a segment; of memory, only the filled rows are compared."""
    if not state.counted:
        errors.add((expected, found))
        return
    sides = [state.axes.rows(side) for side in (expected, found)]
    rows = [[side[row][len(side[row]) - count :] for side in sides] for row, count in enumerate(fill.tolist()) if count]
    errors.add(*((one, other) for one, other in rows))


def _compare_idle(
    step: PlainStep, bits: Bits, before: Mapping[str, Array], after: Mapping[str, Array], counts: Ids
) -> None:
    """Check that the states of idle sequences have the same bits after the segment as before it."""
    for row in np.flatnonzero(counts == 0).tolist():
        sides = (
            {state.name: state.axes.one(held[state.name], row) for state in step.states} for held in (before, after)
        )
        bits.compare(IDLE, *sides)


def _gate_text(gate: Gate) -> str:
    return f"{gate.name} {gate.value:.2g} (limit {gate.limit:.2g})"
