"""Drafts from the text: the tokens of plain decoding in fewer runs, a state that holds what was yielded, and pauses.

A generation with drafts is compared with one without, on a model that counts tokens, whose small vocabulary repeats
itself, and on Transformer-XLs whose segments are as many steps.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from hypothesis import given
from hypothesis import strategies as st
from step_models import B, StepModel, counting
from txl_runtime import BackendError, Model, Stream, UsageError, load
from txl_runtime.streaming import lookup
from txl_runtime.streaming.lookup import MATCH, Pace, Repeats

ROUNDING = 2e-5
PROMPT = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4, 5, 4, 5], [6, 7, 8, 9, 6, 7, 8, 9]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.3},
    "top-k": {"temperature": 0.5, "top_k": 4},
    "top-p": {"temperature": 0.4, "top_p": 0.8},
    "adjusted": {"temperature": 0.4, "logit_bias": {3: 2.0}, "forbid": [7]},
}


class Eager(Pace):
    """A pace that allows every draft."""

    def allows(self) -> bool:
        return True


def lockstep(lengths: tuple[int, ...]) -> StepModel:
    """The counting model with exact segments, whose sequences all run or none."""
    model = counting(lengths)
    model.lengths, model.streams = "exact", "lockstep"
    return model


MODELS: dict[str, Callable[[], StepModel]] = {
    "counting": lambda: counting((5, 1)),
    "padded": lambda: counting((8, 1)),
    "exact": lambda: lockstep((5, 4, 3, 2, 1)),
}


@pytest.fixture(scope="module")
def placed(tmp_path_factory, make_bundle) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        if name in MODELS:
            return MODELS[name]().write(tmp_path_factory.mktemp("models") / "b.txl")
        return make_bundle(
            same_length=True, segment_length=(5, 1), batch_size=B, config={"memory_length": 25}, verify=False
        )

    return find


@pytest.fixture(scope="module")
def opened(placed) -> Callable[[str], Model]:
    return functools.cache(lambda name: load(placed(name), "cpu", threads=1))


@pytest.fixture(params=[*MODELS, "window"])
def model(request, opened) -> Model:
    return opened(request.param)


@pytest.fixture
def eager(monkeypatch) -> None:
    monkeypatch.setattr(lookup, "Pace", Eager)


def pair(model: Model, b: int) -> tuple[Stream, Stream]:
    return model.stream(b), model.stream(b)


def begun(stream: Stream, most: int = 40, **options: Any) -> Any:
    return stream.generate(PROMPT[: stream.batch_size], most, **{"seed": 5} | options)


def carried(stream: Stream) -> dict[str, np.ndarray]:
    return {"fill": stream.fill} | stream.state()


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=ROUNDING, err_msg=name)


def runs_of(stream: Stream, monkeypatch) -> list[tuple[int, bool]]:
    """Positions of each segment from now on, and whether it was part of the state at once."""
    seen: list[tuple[int, bool]] = []
    run = stream.loop.run

    def noted(inputs: Any, counts: Any, want: Any = "rows", commit: bool = True) -> Any:
        seen.append((int(counts.max()), commit))
        return run(inputs, counts, want, commit)

    monkeypatch.setattr(stream.loop, "run", noted)
    return seen


# --- the same tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("b", [1, 3])
def test_tokens_log_probabilities_and_state_are_those_of_plain_decoding(model, b, way, early, eager, monkeypatch):
    if b == 1 and not model.manifest.can.run_fewer:
        pytest.skip("needs all sequences")
    drafted, plain = pair(model, b)
    seen = runs_of(drafted, monkeypatch)
    mine = begun(drafted, lookup=4, logprobs=True, feed_last=early, **way)
    theirs = begun(plain, logprobs=True, feed_last=early, **way)
    for found, expected in zip(mine, theirs, strict=True):
        assert found.tolist() == expected.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=ROUNDING)
    assert_close(carried(drafted), carried(plain))
    assert any(not commit for _, commit in seen), "no draft ran"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_sure_sequence_takes_a_run_for_each_draft_and_one_more_token(opened, most, early, eager, monkeypatch):
    stream = opened("counting").stream(1)
    seen = runs_of(stream, monkeypatch)
    assert {int(token[0]) for token in begun(stream, 41, temperature=0.0, lookup=most, feed_last=early)} == {2}
    assert {size for size, commit in seen if not commit} <= {*range(2, most + 2)}
    assert sum(not commit for _, commit in seen) <= 40 // (most + 1) + 3
    prompt = 2 if len(PROMPT[0]) > 5 else 1
    assert sum(size for size, _ in seen[prompt:]) == 40 + early, "no draft is longer than the tokens that are left"


def test_drafts_that_pay_go_on_and_those_that_do_not_pause(opened, monkeypatch):
    found = []
    for cost in (4.5, 5.5):
        stream = opened("counting").stream(1)
        seen = runs_of(stream, monkeypatch)
        clock = functools.partial(lambda ran, cost: sum(1.0 if commit else cost for _, commit in ran), seen, cost)
        monkeypatch.setattr(lookup, "Pace", functools.partial(Pace, clock))
        assert len(list(begun(stream, 101, temperature=0.0, lookup=4))) == 101
        found.append(sum(not commit for _, commit in seen))
    assert found[0] >= 18, "five steps are longer than 4.5"
    assert found[1] <= 8, "and shorter than 5.5: two that are not judged, one more, and 1 % of the time"


@pytest.mark.parametrize("way", [WAYS["greedy"], WAYS["drawn"]])
@pytest.mark.parametrize("early", [False, True])
def test_a_caller_who_stops_or_looks_finds_a_state_with_what_was_yielded(model, way, early, eager):
    for count in (1, 2, 3, 4, 7, 11, 12, 13):
        drafted, looked, plain = (model.stream(B) for _ in range(3))
        mine, seen, theirs = (
            begun(stream, feed_last=early, lookup=most, logprobs=True, **way)
            for stream, most in ((drafted, 4), (looked, 4), (plain, 0))
        )
        found = [token.tolist() for token in itertools.islice(mine, count)]
        mine.close()
        for _ in range(count):
            token = next(seen).tolist()
            assert token == next(theirs).tolist() == found.pop(0)
            assert_close(carried(looked), carried(plain))
            np.testing.assert_allclose(seen.logprobs, theirs.logprobs, rtol=0, atol=ROUNDING)
        for stream in (drafted, looked):
            assert_close(carried(stream), carried(plain))
        assert [next(seen).tolist() for _ in range(9)] == [next(theirs).tolist() for _ in range(9)]


@pytest.mark.parametrize("at", range(20, 26))
def test_a_sequence_that_stops_stays_where_it_is(model, at, eager):
    def cycling(tokens: np.ndarray) -> list[int]:
        if len(tokens) >= at and tokens[0] == 4:
            return [10]
        return [int(tokens[-3 if tokens[0] == 1 else -2 if tokens[0] == 4 else -4])]

    way: dict[str, Any] = {"allow": cycling, "stop_tokens": [10]}
    drafted, plain = pair(model, B)
    mine, theirs = (list(begun(stream, 40, lookup=most, **way)) for stream, most in ((drafted, 4), (plain, 0)))
    assert np.array_equal(mine, theirs)
    assert len({tuple(token) for token in mine}) > 9
    assert_close(carried(drafted), carried(plain))


def test_a_failing_function_leaves_a_state_with_what_was_yielded(model, eager):
    def failing(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if len(tokens) == len(PROMPT[0]) + 13:
            raise KeyboardInterrupt
        return row

    streams, found = pair(model, B), []
    for stream, most in zip(streams, (4, 0), strict=True):
        drawn: list[list[int]] = []
        with pytest.raises(KeyboardInterrupt):
            drawn.extend(token.tolist() for token in begun(stream, 40, temperature=0.1, adjust=failing, lookup=most))
        found.append(drawn)
    assert_close(carried(streams[0]), carried(streams[1]))


@pytest.mark.parametrize("error", [BackendError("it failed"), KeyboardInterrupt()], ids=["fails", "interrupted"])
def test_a_part_that_could_not_be_kept_leaves_no_state_to_go_on_from(opened, error, eager, monkeypatch):
    stream = opened("counting").stream(1)
    tokens = begun(stream, 60, temperature=0.8)
    tokens.close()
    tokens = begun(stream, 60, temperature=0.8, lookup=4)
    while stream.open is None or not 2 <= stream.open.counts[0] < 5:
        next(tokens)

    def fails(*given: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(stream.loop, "run", fails)
        with pytest.raises(type(error)):
            stream.state()
    for use in (stream.state, lambda: next(tokens)):
        with pytest.raises(UsageError, match=r"left half replaced when a .* draft was interrupted.*; call reset\(\)"):
            use()
    stream.reset()
    assert_close(carried(stream), carried(opened("counting").stream(1)))


def test_another_use_of_the_stream_in_between_sees_what_plain_decoding_shows(opened, eager):
    drafted, plain = pair(opened("counting"), 1)
    shown = []
    for stream, most in ((drafted, 4), (plain, 0)):
        tokens = begun(stream, 30, temperature=0.0, lookup=most)
        seen: list[Any] = [next(tokens).tolist() for _ in range(9)]
        seen.append(np.round(stream.feed([[3, 3]]), 4).tolist())
        seen += [next(tokens).tolist() for _ in range(9)]
        stream.reset()
        with pytest.raises(UsageError, match="was reset, selected or restored while generating"):
            next(tokens)
        seen.append(np.round(stream.feed([[3, 3]]), 4).tolist())
        shown.append(seen)
    assert shown[0] == shown[1]


def test_two_generations_of_one_stream_draw_what_they_draw_without_drafts(opened, eager):
    """One goes on while the other has a draft open: each ends the other's."""
    found = []
    for most in (4, 0):
        stream = opened("counting").stream(1)
        one, other = (begun(stream, 60, temperature=0.2, seed=seed, lookup=most) for seed in (5, 6))
        drawn: list[list[int]] = []
        for turn in range(1, 12):
            drawn += [next(tokens).tolist() for tokens in (one, other) for _ in range(turn % 4)]
        found.append(drawn)
        assert bool(stream.draws.kept) == bool(most)
    assert found[0] == found[1]


def test_a_closed_model_is_refused_in_the_middle_of_a_draft(tmp_path, eager):
    model = load(counting((5, 1)).write(tmp_path / "b.txl"), "cpu", threads=1)
    tokens = begun(model.stream(1), 30, temperature=0.0, lookup=4)
    for _ in range(10):
        next(tokens)
    model.close()
    with pytest.raises(UsageError, match="the model was closed"):
        list(tokens)


def test_a_suspended_generation_keeps_no_engine_of_a_closed_model(placed, eager):
    """Nor its softmax, which is the engine's, too."""
    model = load(placed("window"), "cpu", threads=1)
    stream = model.stream(1)
    tokens = begun(stream, 30, temperature=0.0, lookup=4)
    while stream.open is None:
        next(tokens)
    engine = weakref.ref(model.backend.engine)
    model.close()
    gc.collect()
    assert engine() is None
    tokens.close()


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 5, 1.5, "4", None, True])
def test_a_lookup_out_of_range_is_refused(opened, wrong):
    with pytest.raises(UsageError, match=r"lookup is .*, expected a whole number of 0 … 4; 0 is off"):
        begun(opened("counting").stream(1), lookup=wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stepwise": None}, "the bundle does not say that a segment is as many steps; export the model again, with"),
        ({"stepwise": 1}, "a position of a segment sees more than that of a step; export with --lookup"),
        ({"lengths": (64, 1)}, r"segments are of \[1, 64\] positions; export with --segment-length 5 besides"),
        ({"exact": (5, 1)}, r"segments are of \[1, 5\] positions; export with segments of exactly 1, 2, 3, 4 and 5"),
    ],
)
def test_a_model_that_has_no_drafts_is_refused_by_name(tmp_path, change, said):
    model = lockstep(change["exact"]) if "exact" in change else counting(change.get("lengths", (4, 1)))
    model.stepwise = change.get("stepwise", model.stepwise)
    stream = load(model.write(tmp_path / "b.txl"), "cpu", threads=1).stream()
    with pytest.raises(UsageError, match=f"lookup is 2, expected 0, because {said}"):
        begun(stream, lookup=2)


def test_rolled_memory_is_refused_with_the_rule_that_helps(placed):
    stream = load(placed("window"), "cpu", threads=1, update="rolled").stream()
    with pytest.raises(UsageError, match=r'lookup is 4, expected 0, because the memory is rolled.*update="ring"'):
        begun(stream, lookup=4)


def test_a_stream_that_keeps_fewer_rows_is_refused(opened):
    model = opened("window")
    with pytest.raises(UsageError, match=r"lookup is 4, expected 0 in a stream of fewer than 25 memory rows, whose"):
        begun(model.stream(B, memory_length=3), lookup=4)
    assert len([*begun(model.stream(B, memory_length=25), lookup=4)]) == 40


def test_a_bundle_of_before_says_to_export_it_again():
    with pytest.raises(UsageError, match=r"because the bundle does not say .*; export the model again"):
        load(frozen("ring"), "cpu", threads=1).stream().generate([[1], [2], [3]], 4, lookup=4)


@pytest.mark.parametrize(
    ("lengths", "asked", "longest"),
    [((5, 4, 3, 2, 1), 4, 4), ((3, 2, 1), 4, 2), ((5, 3, 2, 1), 4, 2), ((2, 1), 4, 1), ((5, 4, 3, 2, 1), 2, 2)],
)
def test_exact_segments_take_drafts_of_every_shorter_length(tmp_path, lengths, asked, longest):
    loaded = load(lockstep(lengths).write(tmp_path / "b.txl"), "cpu", threads=1)
    assert lookup.longest_draft(asked, loaded.manifest, loaded.stream().loop.parts) == longest


def test_a_program_that_is_much_longer_than_a_draft_takes_none(tmp_path):
    loaded = load(counting((64, 3, 1)).write(tmp_path / "b.txl"), "cpu", threads=1)
    assert lookup.longest_draft(4, loaded.manifest, loaded.stream().loop.parts) == 2


# --- where the latest tokens stood before -------------------------------------------------------------------------


def likeliest(tokens: list[int], most: int) -> list[int]:
    """The same as `Repeats.find`, by looking at every place."""
    for at in range(len(tokens) - 1, MATCH - 1, -1):
        if tokens[at - MATCH : at] == tokens[len(tokens) - MATCH :]:
            return [tokens[at:][i % (len(tokens) - at)] for i in range(most)]
    return []


@given(tokens=st.lists(st.integers(0, 2), max_size=40), split=st.integers(0, 40), most=st.integers(1, 4))
def test_a_draft_is_what_followed_the_latest_place(tokens, split, most):
    repeats = Repeats(tokens[:split])
    repeats.add(tokens[split:])
    assert repeats.find(most) == likeliest(tokens, most)


def test_old_tokens_are_forgotten(monkeypatch):
    monkeypatch.setattr(lookup, "KEPT", 10)
    tokens = [7, 7, 7, 8, *range(20, 37)]
    repeats = Repeats(tokens[:20])
    repeats.add((7, 7, 7))
    assert repeats.find(1) == []
    assert len(repeats._read) <= 20


# --- pauses -------------------------------------------------------------------------------------------------------


class Times:
    """A clock that is set forward by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def steps(pace: Pace, clock: Times, count: int, seconds: float = 1.0, draft: bool = False, saved: float = 1) -> None:
    for _ in range(count):
        pace.start()
        clock.now += seconds
        pace.count(draft, saved)
        clock.now += 50  # what the caller does with the token


@pytest.fixture
def pace() -> Iterator[tuple[Pace, Times]]:
    clock = Times()
    made = Pace(clock)
    steps(made, clock, 2, seconds=40)  # engines prepare
    steps(made, clock, 5)
    steps(made, clock, 2, seconds=40, draft=True)
    steps(made, clock, 2, draft=True, saved=2)
    made._spent = 4.0
    return made, clock


def test_the_first_steps_are_without_drafts():
    clock = Times()
    made = Pace(clock)
    allowed = []
    for _ in range(9):
        allowed.append(made.allows())
        steps(made, clock, 1)
    assert allowed == [False] * 7 + [True] * 2


def test_a_draft_that_loses_waits_until_its_loss_is_a_small_part(pace):
    made, clock = pace
    steps(made, clock, 1, seconds=1.5, draft=True)
    assert not made.allows()
    steps(made, clock, 40)
    assert not made.allows()
    steps(made, clock, 10)
    assert made.allows(), "0.5 of more than 50 is within 1 %"


def test_a_draft_that_pays_goes_on(pace):
    made, clock = pace
    for _ in range(100):
        assert made.allows()
        steps(made, clock, 1, seconds=1.5, draft=True, saved=2)


def test_gains_are_not_saved_up_for_losses(pace):
    made, clock = pace
    steps(made, clock, 100, seconds=1.5, draft=True, saved=5)
    made._spent = 4.0
    steps(made, clock, 1, seconds=4, draft=True)
    assert not made.allows()


def test_a_draft_that_waited_for_a_processor_counts_as_two(pace):
    made, clock = pace
    steps(made, clock, 1, seconds=50, draft=True)
    assert not made.allows()
    steps(made, clock, 90)
    assert not made.allows()
    steps(made, clock, 10)
    assert made.allows(), "2 seconds less 1 of more than 100 is within 1 %"


def test_a_step_that_waited_is_no_time_to_lose(pace):
    made, clock = pace
    steps(made, clock, 1, seconds=1.5, draft=True)
    steps(made, clock, 1)
    steps(made, clock, 2, seconds=500)
    assert not made.allows()


def test_a_draft_has_lost_what_the_step_after_it_takes_longer(pace):
    made, clock = pace
    steps(made, clock, 1, draft=True)
    assert made.allows()
    steps(made, clock, 1, seconds=1.5)
    assert not made.allows()


def test_drafts_that_never_come_true_lose_no_more_than_a_share(pace):
    made, clock = pace
    spent = lost = 0.0
    for _ in range(3000):
        draft = made.allows()
        steps(made, clock, 1, seconds=2.0 if draft else 1.0, draft=draft)
        spent, lost = spent + 1, lost + draft
    assert 0 < lost <= lookup.SHARE * 1.1 * spent + 1
