"""Draws on a device: from the best words of each part, with the row left where it is unless a draw needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stand_ins.driver import FakeDriver
from stand_ins.engine import StandInBackend, open_stand_in
from txl_runtime import Model, load
from txl_runtime.device import choosing
from txl_runtime.selftest import run_selftest
from txl_runtime.streaming.best_words import BestWords

pytestmark = pytest.mark.device

B, V = 6, 1500
PARTS = 2 * 4 * (257 + 120 + 257) + 4 * (3 + 2)
"""Bytes of one sequence's parts: ids and values, sums, clusters."""
both = pytest.mark.parametrize("update", ["ring", "rolled"])
Opener = Callable[..., Model]


@pytest.fixture(scope="module")
def path(make_bundle):
    config = {"vocab_size": V, "n_layer": 1, "cutoffs": (300, 420)}  # as in tests/engines/test_next.py: exported once
    return make_bundle(batch_size=B, config=config, verify=False)


@pytest.fixture
def opened(path) -> Opener:
    """The bundle on a stand-in device; `kinds` of its programs alone."""

    def open_it(update: str = "ring", **options: Any) -> Model:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choosing, "open_device", lambda name, bundle, rule: open_stand_in(bundle, rule, **options))
            return load(path, backend="rtx", update=update)

    return open_it


def driver_of(model: Model) -> FakeDriver:
    assert isinstance(model.backend, StandInBackend)
    return model.backend.driver


def drawn(model: Model, columns: int, count: int, lengths: Any = None, **options: Any) -> list[list[int]]:
    prompt = np.random.default_rng(columns).integers(0, V, (B, columns))
    found = model.stream().generate(prompt, count, lengths=lengths, **{"seed": 3, **options})
    return [token.tolist() for token in found]


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top-k": {"top_k": 50},
    "top-p": {"temperature": 0.5, "top_p": 0.5},
    "both": {"temperature": 0.8, "top_k": 256, "top_p": 0.9},
    "flat top-p": {"temperature": 1.5, "top_p": 0.95},
    "plain": {},
    "hot": {"temperature": 1.3},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@options
@both
def test_what_is_drawn_from_parts_is_what_rows_give(opened, update, options):
    """Prompts that end in the longest segment, in the shortest, and each somewhere else; idle sequences in the end."""
    ours, theirs = opened(update, driver=FakeDriver(seed=1)), opened(update, kinds=("logprobs",))
    for columns, lengths in ((4, None), (5, None), (9, [2, 9, 4, 8, 1, 5]), (1, None)):
        expected = drawn(theirs, columns, 6, lengths, **options)
        assert drawn(ours, columns, 6, lengths, **options) == expected
        stops = (expected[1][0],)
        assert drawn(ours, columns, 6, lengths, stop_tokens=stops, **options) == drawn(
            theirs, columns, 6, lengths, stop_tokens=stops, **options
        )


@options
@both
def test_what_is_forbidden_is_not_drawn_from_parts_either(opened, update, options):
    ours, theirs = opened(update, driver=FakeDriver(seed=1)), opened(update, kinds=("logprobs",))
    never = [*{token for tokens in drawn(theirs, 4, 6, **options) for token in tokens}]
    found = drawn(ours, 4, 6, forbid=never, **options)
    assert found == drawn(theirs, 4, 6, forbid=never, **options)
    assert not {token for tokens in found for token in tokens} & {*never}


@options
@both
def test_log_probabilities_beside_parts_are_those_of_rows(opened, update, options):
    prompt, found = np.arange(B * 5).reshape(B, 5), []
    for model in (opened(update, driver=FakeDriver(seed=1)), opened(update, kinds=("logprobs",))):
        generation = model.stream().generate(prompt, 5, seed=3, logprobs=True, feed_last=True, **options)
        found.append([(token.tolist(), generation.logprobs.tolist()) for token in generation])
    ours, theirs = found
    assert ours == theirs
    assert all(value < 0 for _, logprobs in ours for value in logprobs)


@options
@both
def test_no_token_is_computed_twice_and_the_row_comes_where_a_draw_needs_it_alone(opened, update, options):
    model = opened(update)
    driver, stream = driver_of(model), model.stream()
    ring, fields = ("-ring", 5) if update == "ring" else ("", 4)
    copied, runs = [], []
    for _ in stream.generate(np.full((B, 4), 7), 8, seed=3, **options):
        copied.append(driver.bytes_copied)
        runs.append([entry for entry in driver.log if entry.startswith("run ")])
        driver.log.clear()
    assert [[entry.partition(" (")[0] for entry in run] for run in runs] == [
        [f"run next{ring}-4"],
        *([f"run next{ring}-1"] for _ in copied[1:]),
    ]
    small = fields * 256 + B * PARTS
    for more in np.diff(copied).tolist():
        rows = more >= B * V * 4
        assert small <= more - rows * B * V * 4 < small + 2048, "and what lies between the parts"
        if "top_k" in options or options == OPTIONS["greedy"]:
            assert not rows
        elif "top_p" not in options:
            assert rows


@both
def test_whoever_asks_for_rows_gets_them_from_the_same_programs(opened, update):
    model, theirs = opened(update), load(opened(update).bundle.path, backend="cpu", update=update)
    tokens = np.random.default_rng(0).integers(0, V, (B, 9))
    found, expected = (one.stream().feed(tokens, [9, 4, 0, 1, 8, 5], last=True) for one in (model, theirs))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    log = driver_of(model).log
    assert any("next" in entry for entry in log)


@both
@pytest.mark.parametrize("spoil", [None, "sums", "values", "ids"])
def test_the_self_test_holds_parts_against_rows(opened, update, spoil, monkeypatch):
    class Spoiled(BestWords):
        def __init__(self, clusters: Any, given: Any) -> None:
            super().__init__(clusters, given)
            self.own = clusters, given

        def against(self, row: Any, temperature: float) -> Any:
            clusters, given = self.own
            given = {name: array.copy() for name, array in given.items()}
            for name, array in given.items():
                if spoil is not None and name.endswith(spoil):
                    array[0, -1] += 1
            return BestWords(clusters, given).against(row, temperature)

    monkeypatch.setattr("txl_runtime.device.loop.BestWords", Spoiled)
    assert run_selftest(opened(update)).passed == (spoil is None)
