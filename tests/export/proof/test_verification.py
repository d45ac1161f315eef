"""Verification of any step: what is right passes, and every kind of fault is found by the gate that is there for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins.step_stream import AXES, ArrayStream, B
from txl_export.proof.bits import IDLE, INDEPENDENT, KEPT, REPEATED, RESTORED
from txl_export.proof.chains import SEGMENTS
from txl_export.proof.gates import OUTPUTS, STATES
from txl_export.proof.parity import ParityError
from txl_export.proof.unusual_inputs import FAR
from txl_export.proof.verification import _warn
from txl_runtime.streaming.state import RowState
from verified_steps import Heard, MiscountedOnce, OnceWrong, failing, verified


def test_a_right_bundle_passes_every_gate():
    heard = Heard()
    parity = verified(segments=None, listener=heard)
    parity.require()
    assert parity.reference == "the test, computed in float64"
    verdicts = {gate.name: gate.verdict for gate in parity.gates}
    assert set(verdicts.values()) == {"passed"}
    drifts = {f"drift of {name}" for name in ("words", "mean", "h", "rows")}
    assert set(verdicts) == {
        *(OUTPUTS, STATES, "whole numbers differing", "shapes differing", "KL mean", FAR),
        *(IDLE, KEPT, RESTORED, REPEATED, INDEPENDENT),
        *drifts,
    }
    assert sum(chain.chain.segments for chain in parity.chains) >= SEGMENTS
    assert [total for _, total in heard.stages if total is not None] == [heard.steps]
    assert [line[:25] for line in heard.warnings] == ["state count: still counts"]
    assert 0 < next(gate.value for gate in parity.gates if gate.name == STATES) < 1e-5


class SlightlyOff(ArrayStream):
    """A state leaks a little with every step."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"h": after["h"] + np.float32(2e-5 * min(self.steps, 60) / 60)}


class Leaking(ArrayStream):
    """Something of the neighbours comes in, far below any limit."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"h": after["h"] + np.float32(1e-7) * np.roll(after["h"], 1, axis=1)}


class SwallowingNan(ArrayStream):
    """Nothing comes in but NaN: as where a neighbour is multiplied by zero."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs | {"mean": outputs["mean"] + 0 * np.roll(outputs["mean"], 1, axis=0)}, after


class IdleMoves(ArrayStream):
    """Idle sequences lose a rounding."""

    def keep(self, live, after):
        kept = super().keep(live, after)
        kept["rows"][~live] = np.nextafter(kept["rows"][~live], np.float32(9))
        return kept


class ForgetsToForget(ArrayStream):
    """A reset leaves one state as it was."""

    def reset(self, rows=None):
        held = self.held["h"]
        super().reset(rows)
        self.held["h"] = held


class MixesRows(ArrayStream):
    """A snapshot goes back to other sequences."""

    def restore(self, state):
        super().restore(state)
        self.held["h"] = np.roll(self.held["h"], 1, axis=1)


class PutsElsewhere(ArrayStream):
    """One state is put to another sequence."""

    def put(self, row: int, state: RowState) -> None:
        super().put(row, RowState(0, 0, {name: state.tensors[name] for name in ("count", "rows")}))
        self.place("h", np.array([(row + 1) % B]), np.expand_dims(state.tensors["h"], AXES["h"]))


class SelectsWrongly(ArrayStream):
    """One state is not reordered."""

    def select(self, rows):
        before = self.held["rows"]
        super().select(rows)
        self.held["rows"] = before


class Commits(ArrayStream):
    """A segment that was only looked into becomes part of the state."""

    def run(self, inputs, lengths=None, commit=True):
        return super().run(inputs, lengths, True)


class Baked(ArrayStream):
    """A value of the first segment was taken for a constant."""

    baked = None

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        Baked.baked = outputs["mean"].copy() if Baked.baked is None else Baked.baked
        return outputs | {"mean": Baked.baked}, after


class Nan(ArrayStream):
    """A single NaN in an output."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        if self.steps == 23:
            outputs["words"][0, -1, 2] = np.nan
        return outputs, after


class DrawsNumbers(ArrayStream):
    """Not twice the same."""

    draws = np.random.default_rng(0)

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs | {"mean": outputs["mean"] + np.float32(1e-6) * np.float32(self.draws.random())}, after


class Grows(ArrayStream):
    """A state has more rows than it may."""

    def state(self):
        found = super().state()
        return found | {"rows": np.concatenate([found["rows"], found["rows"][:, :1]], axis=1)}


class LacksAState(ArrayStream):
    """A state is not there."""

    def state(self):
        return {name: values for name, values in super().state().items() if name != "h"}


@pytest.mark.parametrize(
    ("stream", "gates"),
    [
        (SlightlyOff, {"drift of h"}),
        (OnceWrong, {STATES}),
        (MiscountedOnce, {"whole numbers differing"}),
        (Leaking, {INDEPENDENT}),
        (SwallowingNan, {INDEPENDENT}),
        (IdleMoves, {IDLE}),
        (ForgetsToForget, {STATES}),
        (MixesRows, {STATES, RESTORED}),
        (PutsElsewhere, {STATES, RESTORED}),
        (SelectsWrongly, {STATES}),
        (Commits, {KEPT, REPEATED}),
        (Baked, {OUTPUTS}),
        (Nan, {OUTPUTS}),
        (DrawsNumbers, {REPEATED}),
        (Grows, {"shapes differing"}),
        (LacksAState, {"shapes differing"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_fault_is_found_by_its_gate(stream, gates):
    parity = verified(stream, segments=120 if stream is SlightlyOff else 40)
    assert failing(parity) >= gates
    if stream in (SlightlyOff, Leaking, SwallowingNan, IdleMoves, DrawsNumbers):
        assert not failing(parity) & {OUTPUTS, STATES}, "found although it is within every other limit"
    with pytest.raises(ParityError, match="parity failed: ") as refused:
        parity.require()
    assert len(str(refused.value).splitlines()) == 1
    assert refused.value.details["parity"]["passed"] is False


def test_what_was_not_tried_is_named_in_one_line_each():
    """One wrong row among 50,000 of a table passes, so it is said how many were drawn; five counters are one line."""
    heard, given = Heard(), [SimpleNamespace(name="tokens", vocab=50_000), SimpleNamespace(name="x", vocab=None)]
    trial: Any = SimpleNamespace(listener=heard, begun=[], drawn={("tokens", n) for n in range(256)})
    trial.model = SimpleNamespace(manifest=SimpleNamespace(given=given))
    trial.reference = SimpleNamespace(below={"position": 64})
    longest: Any = SimpleNamespace(segments=8, filling=("rows", "cache"), counting=("n", "offset", "end", "t", "k"))
    _warn(trial, 0, longest)
    assert heard.warnings == [
        "256 of 50000 ids of tokens were tried, drawn at random",
        "position was only tried from 0 to 63, as nothing says how large it is; give real inputs",
        "state rows, cache: still filling late in the chain of 8 segments; verify again with more --segments",
        "state n, offset, end and 2 more: still counts after 8 segments; what happens later was not tried, verify with "
        "more --segments if the module does something else at some number",
    ]
