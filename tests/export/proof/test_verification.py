"""Verification of any step: what is right passes, and every kind of fault is found by the gate that is there for it."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from stand_ins.step_stream import AXES, FEATURES, MANIFEST, ArrayModel, ArrayStream, B, NumpyReference
from txl_export.proof.bits import IDLE, INDEPENDENT, KEPT, REPEATED, RESTORED, Bits, differing_values
from txl_export.proof.chains import (
    LONGER,
    SAMPLED,
    SEGMENTS,
    TRIES,
    Planned,
    Trial,
    live_sequences,
    planned,
    run_chain,
)
from txl_export.proof.comparing import PIECE, ChainErrors, TensorErrors
from txl_export.proof.gates import OUTPUTS, STATES, judge
from txl_export.proof.input_source import InputSource
from txl_export.proof.parity import Parity, ParityError
from txl_export.proof.unusual_inputs import FAR, NAN
from txl_export.proof.verification import verify_model
from txl_report.schema.verification import Chain
from txl_runtime.ladder import rung
from txl_runtime.listener import Listener, Silent
from txl_runtime.streaming.state import RowState


class Heard(Listener):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.steps = 0
        self.warnings: list[str] = []

    def stage(self, title: str, total: int | None = None) -> None:
        if total is not None:
            self.totals.append(total)

    def advance(self, steps: int = 1) -> None:
        self.steps += steps

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def verified(stream: type[ArrayStream] = ArrayStream, segments: int | None = 40, **options: Any) -> Parity:
    model = ArrayModel(stream, precision=options.pop("precision", "fp32"))
    return verify_model(lambda: model, NumpyReference(), "the test", segments=segments, **options)


def failing(parity: Parity) -> set[str]:
    return {gate.name for gate in parity.gates if gate.passed is False}


# ---- what is right


def test_a_right_bundle_passes_every_gate():
    heard = Heard()
    parity = verified(segments=None, listener=heard, idle=["count"])
    parity.require()
    assert parity.reference == "the test, computed in float64"
    verdicts = {gate.name: gate.verdict for gate in parity.gates}
    assert set(verdicts.values()) == {"passed"}
    drifts = {f"drift of {name}" for name in ("words", "mean", "h", "rows")}
    assert set(verdicts) == {
        *(OUTPUTS, STATES, "whole numbers differing", "shapes differing", "KL mean", FAR, NAN),
        *(IDLE, KEPT, RESTORED, REPEATED, INDEPENDENT),
        *drifts,
    }
    assert sum(chain.chain.segments for chain in parity.chains) >= SEGMENTS
    assert heard.totals == [heard.steps]
    assert [line[:24] for line in heard.warnings] == ["state count still counts"]
    assert 0 < next(gate.value for gate in parity.gates if gate.name == STATES) < 1e-5


def test_the_chains_run_every_length_every_operation_and_one_sequence_alone():
    parity = verified()
    assert [chain.chain.name for chain in parity.chains] == [
        "segments of 4",
        "all operations, lengths mixed",
        "segments of 1",
        "one sequence alone",
    ]
    longest, mixed, single, alone = (chain.chain for chain in parity.chains)
    assert (longest.segments, longest.streams, alone.streams) == (40, B, 1)
    assert longest.full_from == 2, "six rows take two segments of four"
    assert single.full_from == 6
    assert mixed.full_from is None
    assert mixed.segments > 40, "segments that were only looked into count as well"
    assert min(mixed.rows) < max(mixed.rows)


def test_each_operation_is_done_to_the_bundle():
    done: set[str] = set()

    class Noting(ArrayStream):
        def __getattribute__(self, name: str) -> Any:
            if name in ("reset", "select", "take", "put", "snapshot", "restore"):
                done.add(name)
            return super().__getattribute__(name)

    verified(Noting)
    assert done == {"reset", "select", "take", "put", "snapshot", "restore"}


def test_of_random_inputs_the_distribution_is_judged_in_float32_alone():
    class Scaled(ArrayStream):
        def compute(self, x, states):
            outputs, after = super().compute(x, states)
            return outputs | {"words": outputs["words"] * np.float32(1.01)}, after

    assert "KL mean" in failing(verified(Scaled))
    assert next(gate for gate in verified(Scaled, precision="fp16").gates if gate.name == "KL mean").passed is None


def test_samples_are_read_on_and_on():
    seen: list[np.ndarray] = []

    class Noting(ArrayStream):
        def run(self, inputs: Any, lengths: Any = None, commit: bool = True) -> dict[str, np.ndarray]:
            seen.append(inputs["x"])
            return super().run(inputs, lengths, commit)

    samples = {"x": np.arange(2 * 50 * 3, dtype=np.float32).reshape(2, 50, 3) / 100}
    parity = verified(Noting, samples=samples)
    assert next(gate for gate in parity.gates if gate.name == "KL mean").verdict == "passed"
    first, second = (values[0, :, 0] for values in seen[:2])
    assert set(first.tolist()) <= set(samples["x"][..., 0].ravel().tolist())
    step = (second[0] - first[-1]) * 100
    assert step == pytest.approx(3, abs=1e-3) or second[0] in (0.0, 1.5), "the next segment goes on"


class Reading(NumpyReference):
    """Notes the first number of everything that it reads."""

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        self.seen |= set(np.round(inputs["x"][..., 0].ravel().astype(np.float64) * 1000).tolist())
        return super().step(inputs, states, valid)


class ElseInOneSample(ArrayStream):
    """Takes another branch where an observation is one of a thousand."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        rare = (np.round(x[..., 0] * 1000) == 777).any(1, keepdims=True)
        return outputs | {"mean": np.where(rare, outputs["mean"] + 1, outputs["mean"])}, after


def numbered(*shape: int) -> dict[str, np.ndarray]:
    """Samples whose first numbers count from 0 in thousandths."""
    x = np.random.default_rng(0).normal(size=(*shape, FEATURES)).astype(np.float32)
    x[..., 0] = np.arange(x[..., 0].size).reshape(shape) / 1000
    return {"x": x}


def without_length(stream: type[ArrayStream] = ArrayStream) -> ArrayModel:
    """The same step of one position, none of whose inputs has an "L", as of a policy."""
    model = ArrayModel(stream)
    one = {
        "inputs": (msgspec.structs.replace(MANIFEST.inputs[0], shape=("B", 1, FEATURES)), MANIFEST.inputs[1]),
        "outputs": (msgspec.structs.replace(MANIFEST.outputs[0], shape=("B", 1, 5)), MANIFEST.outputs[1]),
        "programs": MANIFEST.programs[1:],
    }
    model.manifest, model.segment_lengths = msgspec.structs.replace(model.manifest, **one), (1,)
    return model


def test_every_sample_of_a_policy_is_read_and_a_fault_in_one_of_a_thousand_is_found():
    samples, reference, heard = numbered(1000, 1), Reading(), Heard()
    right, wrong = without_length(), without_length(ElseInOneSample)
    verify_model(lambda: right, reference, "the test", samples, listener=heard).require()
    assert reference.seen >= set(range(1000))
    assert not [line for line in heard.warnings if "samples" in line]
    assert OUTPUTS in failing(verify_model(lambda: wrong, NumpyReference(), "the test", samples))


def test_long_samples_are_read_to_their_end_and_of_many_each_is_begun():
    reference, model = Reading(), ArrayModel()
    verify_model(lambda: model, reference, "the test", numbered(2, 50), segments=40).require()
    assert reference.seen >= set(range(100))
    source = InputSource(MANIFEST, numbered(50, 40), np.random.default_rng(0), 20 * B)
    for _ in range(20):
        source.take(B, 4)
    assert len(source.begun) == 50


def test_that_not_all_samples_were_read_is_said():
    heard = Heard()
    verified(samples=numbered(1000, 4), segments=20, listener=heard)
    line = next(line for line in heard.warnings if "samples" in line)
    assert line.startswith("142 of 1000 samples were read, because the longest chain ends after 20 segments; verify")
    assert planned(MANIFEST, None, 1000)[0].segments == math.ceil(1000 / B)
    assert planned(MANIFEST, None, 10**6)[0].segments == SAMPLED
    large = msgspec.structs.replace(MANIFEST, parameters=10**10)
    assert planned(large, None, 10**6)[0].segments == planned(large, None)[0].segments, "it takes long as it is"


def test_the_document_names_every_output_and_state_with_its_curve():
    document = json.loads(msgspec.json.encode(verified().document()))
    longest = document["chains"][0]
    assert set(longest["outputs"]) == {"words", "mean"}
    assert set(longest["states"]) == {"count", "h", "rows"}
    assert len(longest["states"]["h"]["mean"]) == len(longest["outputs"]["words"]["most"]) == longest["segments"]
    assert longest["states"]["count"]["exact"] is True
    assert document["kl"]["mean"] < 1e-8
    assert document["text"] is None


def test_the_document_counts_errors_divergence_and_ranks_over_all_chains():
    parity = verified()
    document = json.loads(msgspec.json.encode(parity.document()))
    spread, positions = document["spread"], len([value for chain in parity.chains for value in chain.kl])
    assert (spread["ran_on"], len(spread["kl_edges"]) + 1) == ("random inputs", len(spread["kl"]))
    assert {name: found["unit"] for name, found in spread["errors"].items()} == {
        "words": "nats",
        "mean": "relative",
        "all states": "relative",
    }
    assert sum(spread["kl"]) == spread["ranks"]["positions"] == positions
    assert sum(spread["errors"]["words"]["counts"]) % positions == 0, "every column of every position"
    assert len(spread["edges"]) + 1 == len(spread["errors"]["mean"]["counts"])
    assert sum(spread["errors"]["mean"]["counts"][5:]) == 0, "nothing from 1e-5 on"
    assert spread["ranks"]["within"]["1"] > 0.99 * positions
    assert not {"kl", "ranks", "errors"} & set(document["chains"][0])
    assert len(json.dumps(spread)) < 1000


# ---- faults, and what finds them


class SlightlyOff(ArrayStream):
    """A state leaks a little with every step."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"h": after["h"] + np.float32(2e-5 * min(self.steps, 60) / 60)}


class OnceWrong(ArrayStream):
    """One element of one state after one segment."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        if self.steps == 17:
            after["rows"][1, 3, 2] += 1e-2
        return outputs, after


class MiscountedOnce(ArrayStream):
    """A counter is one too many after one segment."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"count": after["count"] + np.int32(self.steps == 17)}


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


def steady(segments: int) -> tuple[ChainErrors, TensorErrors]:
    """A chain with one state that was full from the beginning, and what compares that."""
    facts = Chain(name="segments of 1", streams=4, segments=segments, positions=0, rows=[64] * segments, full_from=0)
    errors = TensorErrors()
    return ChainErrors(facts, states={"h": errors}), errors


@pytest.mark.parametrize("reach", [None, 8])
@pytest.mark.parametrize(("share", "found"), [(0.5, set()), (3.0, {"drift of h"})])
def test_in_half_precision_bursts_below_a_hundredth_of_the_limit_are_no_drift(share: float, found: set[str], reach):
    random, burst = np.random.default_rng(0), rung("fp16", "cpu").burst
    assert burst is not None
    chain, errors = steady(40)
    for segment in range(40):
        values = random.normal(size=(64, 8))
        errors.add((values, values + (share * burst if segment >= 30 else 0)))
    gates = list(judge(msgspec.structs.replace(MANIFEST, reach=reach), "fp16", "cpu", [chain], Bits(), real=False))
    assert {gate.name for gate in gates if gate.passed is False} == found


def test_a_state_without_spread_has_no_limit_to_be_divided_by():
    chain, errors = steady(40)
    for _ in range(40):
        errors.add((np.zeros((64, 8)), np.zeros((64, 8))))
    gates = {gate.name: gate for gate in judge(MANIFEST, "fp16", "cpu", [chain], Bits(), real=False)}
    assert (gates["drift of h"].value, gates["drift of h"].passed) == (0.0, True)


class Settling(ArrayStream):
    """A state is off by what its weights were rounded by, and takes some dozen segments to get there."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        off = 1e-3 * (1 - np.exp(-states["count"] / 250))
        return outputs, after | {"h": after["h"] + off[None, :, None].astype(np.float32)}


class Gathering(ArrayStream):
    """A state is off by a little more after every segment."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"h": after["h"] + (1e-6 * states["count"])[None, :, None].astype(np.float32)}


@pytest.mark.parametrize(("stream", "found"), [(Settling, set()), (Gathering, {"drift of h"})])
def test_in_half_precision_an_error_may_settle_and_not_grow_on(stream: type[ArrayStream], found: set[str]):
    parity = verified(stream, segments=40, precision="fp16")
    assert {name for name in failing(parity) if name != "drift of words"} == found
    longest = parity.chains[0].chain
    assert longest.segments == 40 * LONGER**TRIES if found else longest.segments > 40
    assert longest.full_from == longest.segments // LONGER, "judged from where the chain before it ended"
    assert "drift of h" in failing(verified(stream, segments=40)), "in float32 nothing settles"


def test_one_wrong_element_is_shown_where_it_was():
    parity = verified(OnceWrong)
    states = parity.chains[0].found().states
    assert next(number for number, value in enumerate(states["rows"].most) if value > 1e-4) == 17
    assert states["h"].largest < 1e-4 or states["h"].most[17] < 1e-5


def test_a_state_that_changes_nothing_is_warned_of():
    heard = Heard()

    class Unread(ArrayStream):
        def compute(self, x, states):
            return super().compute(x, states | {"rows": np.zeros_like(states["rows"])})

    verified(Unread, listener=heard)
    assert [line for line in heard.warnings if line.startswith("state rows changes no output")]
    assert [line for line in heard.warnings if line.startswith("state count changes no output")]
    assert not [line for line in heard.warnings if line.startswith("state h ")]


@pytest.mark.parametrize("end", [lambda count: np.minimum(count, 30), lambda count: count % 60], ids=["stays", "ring"])
def test_a_counter_that_has_come_to_its_end_is_not_warned_of(end):
    class Ending(NumpyReference):
        def step(self, inputs: Any, states: Any, valid: Any) -> Any:
            outputs, after = super().step(inputs, states, valid)
            return outputs, after | {"count": end(after["count"])}

    class EndingStream(ArrayStream):
        def compute(self, x, states):
            outputs, after = super().compute(x, states)
            return outputs, after | {"count": end(after["count"])}

    heard, model = Heard(), ArrayModel(EndingStream)
    verify_model(lambda: model, Ending(), "the test", segments=29, listener=heard).require()
    assert not [line for line in heard.warnings if "still counts" in line]


class ElseIfLarge(ArrayStream):
    """Does something else with inputs that the chains never show."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs | {"mean": np.clip(outputs["mean"], -20, 20)}, after


class NothingIfZero(ArrayStream):
    """Does something else where there is nothing to read."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | ({} if x.any() else {"h": states["h"]})


@pytest.mark.parametrize("stream", [ElseIfLarge, NothingIfZero])
def test_what_shows_with_inputs_far_from_the_usual_alone_is_found(stream):
    samples = {"x": np.random.default_rng(0).normal(size=(2, 50, 3)).astype(np.float32)}
    for given in (None, samples):
        parity = verified(stream, samples=given)
        assert failing(parity) == {FAR}
        with pytest.raises(
            ParityError, match=r"with x (100 times as large|all zero).* (output mean|state h) is .* where"
        ):
            parity.require()


# ---- models in which rounding grows


class Doubling(NumpyReference):
    """A state that differs a little differs more with every segment, as in a model that nobody has trained."""

    def __init__(self, single: bool = False) -> None:
        self._single = single

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        outputs, after = super().step(inputs, states, valid)
        return outputs, after | {"h": doubled(after["h"], np.float32 if self._single else np.float64)}

    def in_single(self) -> Any:
        return None if self._single else Doubling(single=True)


def doubled(h: np.ndarray, dtype: Any) -> np.ndarray:
    """A fraction of a multiple: the digits behind the point move to the front."""
    return (9 * h.astype(dtype)) % dtype(1)


class DoublingStream(ArrayStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"h": doubled(after["h"], np.float32)}


class DoublingWrongOnce(DoublingStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        if self.steps == 17:
            outputs["mean"][0, 1] += 1e-2
        return outputs, after


class DoublingForgetsToForget(DoublingStream):
    def reset(self, rows=None):
        held = self.held["h"]
        super().reset(rows)
        self.held["h"] = held


@pytest.mark.parametrize(
    ("stream", "gates"),
    [(DoublingStream, set()), (DoublingWrongOnce, {OUTPUTS}), (DoublingForgetsToForget, {STATES})],
)
def test_where_rounding_grows_in_the_model_itself_segments_are_compared_one_by_one(stream, gates):
    heard = Heard()
    model = ArrayModel(stream)
    parity = verify_model(lambda: model, Doubling(), "the test", segments=40, listener=heard)
    assert failing(parity) >= gates
    assert bool(failing(parity)) == bool(gates)
    assert [line for line in heard.warnings if line.startswith("the module amplifies rounding: in float32 it is ")]
    assert "so every segment begins with its state for output words, state h" in parity.reference


class DoublingLeaking(DoublingStream):
    """Another state than the one that rounding grows in leaks a little with every step."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"rows": after["rows"] + np.float32(4e-5)}


def test_rounding_that_grows_in_one_state_does_not_hide_what_leaks_from_another():
    model = ArrayModel(DoublingLeaking)
    parity = verify_model(lambda: model, Doubling(), "the test", segments=40)
    assert "state rows" not in parity.reference
    assert failing(parity) == {OUTPUTS}, "mean, which reads the rows, by itself far from the module"


def slowly_doubled(h: np.ndarray, rows: np.ndarray, x: np.ndarray, dtype: Any) -> dict[str, np.ndarray]:
    """A state whose errors become a quarter larger with every segment, and another to which a little of it is added."""
    h = (dtype(1.25) * h.astype(dtype) + x.astype(dtype).mean((1, 2))[None, :, None]) % dtype(1)
    return {"h": h, "rows": rows.astype(dtype) + dtype(3e-5) * h.mean((0, 2))[:, None, None]}


class DriftingBeside(NumpyReference):
    """Rounding grows in one state along the whole chain, and shows a little in another."""

    def __init__(self, single: bool = False) -> None:
        self._single = single

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        outputs, after = super().step(inputs, states, valid)
        dtype = np.float32 if self._single else np.float64
        return outputs, after | slowly_doubled(states["h"], after["rows"], inputs["x"], dtype)

    def in_single(self) -> Any:
        return None if self._single else DriftingBeside(single=True)


class DriftingBesideStream(ArrayStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | slowly_doubled(states["h"], after["rows"], x, np.float32)


class DriftingBesideAndLeaking(DriftingBesideStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"rows": after["rows"] + np.float32(4e-5)}


@pytest.mark.parametrize(("stream", "gates"), [(DriftingBesideStream, set()), (DriftingBesideAndLeaking, {OUTPUTS})])
def test_what_only_drifts_with_growing_rounding_is_held_to_the_limits_and_not_to_its_drift(stream, gates):
    model = ArrayModel(stream)
    parity = verify_model(lambda: model, DriftingBeside(), "the test", segments=80)
    assert "output words, state h" in parity.reference
    assert "state rows" not in parity.reference
    assert failing(parity) == gates


def test_a_fault_in_a_model_in_which_nothing_grows_is_not_taken_for_rounding():
    class Beside(NumpyReference):
        def in_single(self) -> Any:
            return NumpyReference()

    model = ArrayModel(OnceWrong)
    parity = verify_model(lambda: model, Beside(), "the test", segments=40)
    assert STATES in failing(parity)
    assert parity.reference == "the test, computed in float64"


# ---- lower precisions


class Rounded(ArrayStream):
    """As fp16 computes: outputs and states lose bits, each by itself."""

    bits = 1e-3

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        draws = np.random.default_rng(self.steps)
        return (
            {name: self._rounded(values, draws) for name, values in outputs.items()},
            {name: self._rounded(values, draws) for name, values in after.items()},
        )

    def _rounded(self, values: np.ndarray, draws: np.random.Generator) -> np.ndarray:
        if values.dtype != np.float32:
            return values
        same = draws.uniform(-1, 1, values.shape[1:])  # for all sequences alike
        return (values * (1 + self.bits * same)).astype(np.float32)


def test_half_precision_is_judged_by_the_deviation_and_whole_numbers_stay_exact():
    parity = verified(Rounded, precision="fp16")
    assert OUTPUTS not in {gate.name for gate in parity.gates}
    values = {gate.name: gate for gate in parity.gates}
    for name in ("outputs", "state"):
        gate = values[f"{name} RMS error (of the standard deviation)"]
        assert gate.passed
        assert gate.limit == 1e-2
        assert gate.value is not None
        assert 1e-5 < gate.value < 5e-3
    assert values["whole numbers differing"].passed
    assert values["top-1 differing"].verdict == "not judged"
    assert verified(MiscountedOnce, precision="bf16").passed is False


def test_nan_from_the_first_segment_on_is_found_in_half_precision_without_a_text():
    class Lost(ArrayStream):
        """Log-probabilities that are no numbers, which only a text would judge by their distribution."""

        def compute(self, x, states):
            outputs, after = super().compute(x, states)
            return outputs | {"words": outputs["words"] * np.float32(np.nan)}, after

    assert "drift of words" in failing(verified(Lost, precision="fp16"))


def test_too_coarse_an_arithmetic_fails_by_the_deviation():
    class Coarse(Rounded):
        bits = 0.1

    found = failing(verified(Coarse, precision="fp16"))
    assert "outputs RMS error (of the standard deviation)" in found
    assert "state RMS error (of the standard deviation)" in found


# ---- the numbers themselves


def errors(expected: list[float], found: list[float], nats: bool = False) -> TensorErrors:
    result = TensorErrors(nats=nats)
    result.add((np.array(expected), np.array(found, np.float32)))
    return result


def test_errors_are_relative_to_the_largest_value_so_far_from_one_on():
    small, large = errors([0.1, 0.2], [0.1, 0.3]), errors([10, -100], [10, -101])
    assert small.largest == pytest.approx(0.1, rel=1e-6)
    assert large.largest == pytest.approx(0.01, rel=1e-6)
    large.add((np.array([1.0]), np.array([2.0])))
    assert large.tensor.most == pytest.approx([0.01, 0.01])
    assert large.tensor.mean == pytest.approx([0.005, 0.01])


def test_values_that_stand_for_never_say_nothing_of_the_size_and_are_compared_with_themselves():
    found = errors([-1e30, 0.5], [-1e30, 0.5001])
    assert found.largest == pytest.approx(1e-4, rel=1e-3)
    assert errors([-1e30], [-2e30]).largest == pytest.approx(1)
    assert errors([-math.inf, 1], [-math.inf, 1]).largest == 0
    assert errors([-math.inf], [0]).largest == math.inf


@pytest.mark.parametrize("masked", [-1e4, -65504, -1e8])
def test_one_large_value_does_not_hide_errors_beside_it(masked):
    found = errors([masked, 0.5], [masked, 0.51])
    assert found.largest == pytest.approx(1e-2, rel=1e-3)
    found.add((np.array([0.5]), np.array([0.51])))
    assert found.tensor.most[1] == pytest.approx(1e-2), "nor later on"
    assert errors([masked, 0.5], [masked * 1.01, 0.5]).largest == pytest.approx(1e-2, rel=1e-3)
    half = errors([masked, 0.5, -0.5], [masked, 0.51, -0.49])
    assert half.deviation == pytest.approx(0.02, rel=1e-3)


def test_where_most_values_are_large_they_are_what_the_deviation_is_relative_to():
    values = np.random.default_rng(0).normal(0, 1e5, 10_000)
    found = TensorErrors()
    found.add((values, values + 100))
    assert found.deviation == pytest.approx(1e-3, rel=0.02)


def test_log_probabilities_differ_by_nats_except_where_they_mean_never():
    assert errors([-50, -0.1], [-50, -0.2], nats=True).largest == pytest.approx(0.1, rel=1e-4)
    assert errors([-1e4, -0.1], [-1.1e4, -0.1], nats=True).largest == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_infinitely_far(value):
    found = errors([0.0, 1.0], [0.0, value])
    assert found.largest == found.deviation == math.inf


def test_another_shape_is_infinitely_far():
    found = errors([0.0, 1.0], [0.0])
    assert found.shapes == 1
    assert found.largest == math.inf


def test_many_values_are_compared_some_at_a_time_and_as_one():
    draws = np.random.default_rng(0)
    expected = draws.standard_normal((3, PIECE // 2))
    found = expected + 1e-3
    found[2, 7] += 1
    whole, parts = TensorErrors(), TensorErrors()
    whole.add((expected, found))
    parts.add(*zip(expected, found, strict=True))
    for attribute in ("largest", "deviation", "spread"):
        assert getattr(whole, attribute) == pytest.approx(getattr(parts, attribute), rel=1e-12)
    assert whole.tensor.mean == pytest.approx(parts.tensor.mean, rel=1e-12)
    assert whole.largest == pytest.approx(1.001 / np.abs(expected).max())


def test_the_deviation_is_relative_to_the_spread_of_the_values():
    draws = np.random.default_rng(0)
    values = draws.normal(5, 2, 10_000)
    found = TensorErrors()
    for part in np.split(values, 10):
        found.add((part, part + 0.02))
    assert found.deviation == pytest.approx(0.01, rel=0.02)
    assert errors([3, 3], [3.03, 3.03]).deviation == pytest.approx(0.01, rel=1e-3), "all alike: of their size"
    assert errors([0, 0], [0, 0]).deviation == 0


@pytest.mark.parametrize(
    ("expected", "found", "differing"),
    [
        (np.zeros((2, 0)), np.zeros((2, 0)), 0),
        (np.zeros(3, np.float32), np.array([0, -0.0, 1], np.float32), 2),
        (np.full(2, np.nan), np.full(2, np.nan), 0),
        (np.zeros(3, np.float32), np.zeros(3), 3),
        (np.zeros((0, 2)), np.zeros((1, 2)), 2),
        (np.array(7, np.int32), np.array(8, np.int32), 1),
    ],
    ids=["no rows", "a sign and a value", "NaN", "dtype", "shape", "a scalar"],
)
def test_bits_are_compared_and_not_values(expected, found, differing):
    assert differing_values(expected, found) == differing


# ---- how much is run


def test_there_are_two_hundred_segments_however_the_bundle_was_exported():
    manifest = ArrayModel().manifest
    for change in ({}, {"batch_size": 1}, {"streams": "lockstep"}, {"parameters": 10**10}):
        chains = planned(msgspec.structs.replace(manifest, **change), None)
        assert sum(chain.segments for chain in chains) >= SEGMENTS
    assert planned(manifest, 7)[0].segments == 7, "unless fewer are asked for"


@pytest.mark.parametrize(("parameters", "live"), [(100, 3), (10**9, 2), (10**11, 1)])
def test_large_models_have_fewer_sequences_per_segment(parameters, live):
    assert live_sequences(msgspec.structs.replace(ArrayModel().manifest, parameters=parameters)) == live


def test_a_chain_goes_on_until_every_state_was_full_for_as_long_again(tmp_path):
    for most, segments, filling in ((16, 12, ()), (8, 8, ("rows",))):
        planned_chain = Planned("segments of 1", streams=1, lengths=(1,) * 4, most=most)
        trial = Trial(ArrayModel(), NumpyReference(), None, Bits(), tmp_path, Silent())
        chain = run_chain(trial, planned_chain).chain
        assert (chain.segments, chain.full_from, chain.filling) == (segments, 6, filling), "six rows, one by one"
