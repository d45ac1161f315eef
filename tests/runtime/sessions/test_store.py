"""Parked states, and names in the order of their use."""

from __future__ import annotations

import numpy as np
import pytest
from txl_runtime import TxlError
from txl_runtime.sessions import Limits
from txl_runtime.sessions.store import Recent, Store
from txl_runtime.streaming.state import RowState

SIZE = 64
"""Bytes of a state."""


def marked(mark: int) -> RowState:
    """A state of which every number is the mark."""
    return RowState(4, 0, {"rows": np.full((4, 4), mark, np.float32)})


def test_what_is_parked_comes_back_once_and_what_is_parked_again_replaces_it():
    store = Store(Limits(), SIZE)
    for number in range(3):
        store.park(f"s{number}", marked(number))
    store.park("s0", marked(10))
    assert store.host_bytes == 3 * SIZE
    assert store.look("s0").tensors["rows"].tolist() == [[10] * 4] * 4
    assert [store.fetch(f"s{number}").tensors["rows"][0, 0] for number in (2, 0, 1)] == [2, 10, 1]
    assert (store.host_bytes, store.lost) == (0, 0)
    assert not any(f"s{number}" in store for number in range(3))


def test_a_state_that_is_lost_says_so_until_it_is_fetched():
    store = Store(Limits(), SIZE)
    store.park("s0", marked(0))
    store.lose("s0", "session 's0' is lost")
    assert "s0" in store
    for read in (store.look, store.fetch):
        with pytest.raises(TxlError, match="'s0' is lost"):
            read("s0")
    assert "s0" not in store
    assert (store.host_bytes, store.lost) == (0, 1)


def test_there_are_as_many_sessions_as_have_room():
    assert Store(Limits(100, host_bytes=10 * SIZE), SIZE).capacity(4) == 14
    assert Store(Limits(7, host_bytes=10 * SIZE), SIZE).capacity(4) == 7
    assert Store(Limits(7, host_bytes=0), 0).capacity(1) == 7


def test_names_in_the_order_of_their_use():
    now = [0.0]
    recent = Recent(lambda: now[0])
    for name in "abc":
        recent.touch(name)
        now[0] += 1
    recent.touch("a")
    assert list(recent) == ["b", "c", "a"]
    assert recent.since("b") == 2
    assert recent.idle(1.5) == ["b"]
    assert recent.idle(0.5) == ["b", "c"]
    assert recent.idle(2) == []
    recent.forget("b")
    recent.forget("nobody")
    assert (len(list(recent)), "b" in recent, "c" in recent) == (2, False, True)
