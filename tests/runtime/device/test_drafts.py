"""Drafts from the text on a device: the tokens of plain decoding, and a ring that advances by what came true."""

from __future__ import annotations

import numpy as np
import pytest
from stand_ins.engine import open_stand_in
from txl_runtime import Model, load
from txl_runtime.device import choosing
from txl_runtime.streaming import lookup
from txl_runtime.streaming.lookup import Pace

pytestmark = pytest.mark.device

B, V = 3, 40
ROUNDING = 2e-5
PROMPT = np.arange(9).reshape(1, 9) % 3 + np.array([[1], [4], [7]])


@pytest.fixture(scope="module")
def model(make_bundle) -> Model:
    config = {"vocab_size": V, "n_layer": 2, "memory_length": 6}
    path = make_bundle(batch_size=B, config=config, lookup=True, segment_length=(5, 1), verify=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "open_device", lambda name, bundle, rule: open_stand_in(bundle, rule))
        return load(path, backend="rtx", update="ring")


def cycling(tokens: np.ndarray) -> list[int]:
    """Three tokens in turn, and a different one after every seven."""
    return [int(tokens[-3])] if len(tokens) % 7 else [int(tokens[-2])]


@pytest.mark.parametrize("b", [1, B])
def test_tokens_and_state_are_those_of_plain_decoding(model, b, monkeypatch):
    monkeypatch.setattr(Pace, "allows", lambda self: True)
    drafted, plain = model.stream(b), model.stream(b)
    begun = [stream.generate(PROMPT[:b], 60, allow=cycling, lookup=most) for stream, most in ((drafted, 4), (plain, 0))]
    kept: list[int] = []
    commit = drafted.loop.commit

    def noted(counts: np.ndarray) -> None:
        kept.append(int(counts[0]))
        commit(counts)

    monkeypatch.setattr(drafted.loop, "commit", noted)
    mine, theirs = (np.array(list(tokens)) for tokens in begun)
    assert np.array_equal(mine, theirs)
    assert {1, 5} < set(kept) <= {1, 2, 3, 4, 5}, "drafts that came true, and parts of them"
    assert drafted.fill.tolist() == plain.fill.tolist() == [6] * b
    for name, rows in plain.memory().items():
        np.testing.assert_allclose(drafted.memory()[name], rows, rtol=0, atol=ROUNDING, err_msg=name)


def test_a_draft_s_program_is_one_of_five_positions(model):
    assert lookup.longest_draft(4, model.manifest, model.stream(1).loop.parts) == 4
