"""The row of each sequence, whatever fails; the stream is a stand-in whose states are names."""

from __future__ import annotations

import numpy as np
import pytest
from txl_runtime.errors import BackendError, UsageError

from txl_deploy.triton.inside.rows import Rows


class Stream:
    """Rows that hold what was written there; a call fails, half-way, where `fails` says so."""

    batch_size = 3

    def __init__(self):
        self.held = ["nobody"] * 3
        self.fails = lambda: False

    def take(self, row):
        self.fail()
        return self.held[row]

    def put(self, row, state):
        self.held[row] = "torn"
        self.fail()
        self.held[row] = state

    def reset(self, rows):
        for row in rows:
            self.held[row] = "torn"
            self.fail()
            self.held[row] = "fresh"

    def fail(self):
        if self.fails():
            raise BackendError("the device failed")


def check(rows):
    """Every row is free or one sequence's, and a state is aside for each sequence without a row, and for no other."""
    taken = [row for row in rows._rows.values() if row is not None]
    assert sorted([*taken, *rows._free]) == [0, 1, 2]
    assert rows._aside.keys() == {name for name, row in rows._rows.items() if row is None}
    assert len(rows) <= 7


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_no_row_and_no_state_is_lost_whatever_fails(share):
    stream, draws, known, failed = Stream(), np.random.default_rng(0), {}, 0
    stream.fails = lambda: draws.random() < share
    rows = Rows(stream, 7)
    for step in range(4000):
        name, what = int(draws.integers(0, 9)), draws.random()
        try:
            if what < 0.2:
                rows.end(name)
                known.pop(name, None)
            elif what < 0.4 and (name in known or len(known) < 7):
                row = rows.begin(name)
                assert stream.held[row] == "fresh"
                stream.held[row] = known[name] = f"{name} at {step}"
            elif name in known:
                row = rows.resume(name)
                assert stream.held[row] == known[name]
                stream.held[row] = known[name] = f"{name} at {step}"
            else:
                with pytest.raises(UsageError, match="is not known"):
                    rows.resume(name)
        except BackendError:
            known.pop(name, None)
            failed += 1
        check(rows)
    assert (failed > 0) == (share > 0)


def test_a_sequence_that_ends_without_a_row_leaves_nothing():
    stream = Stream()
    rows = Rows(stream, 7)
    for name in range(4):
        stream.held[rows.begin(name)] = name
    rows.end(0)
    check(rows)
    assert len(rows) == 3
