"""States that change nothing."""

from __future__ import annotations

import numpy as np
from stand_ins.step_stream import ArrayStream
from verified_steps import Heard, verified


def test_a_state_that_changes_nothing_is_warned_of():
    heard = Heard()

    class Unread(ArrayStream):
        def compute(self, x, states):
            return super().compute(x, states | {"rows": np.zeros_like(states["rows"])})

    verified(Unread, listener=heard)
    assert [line for line in heard.warnings if line.startswith("state rows changes no output")]
    assert [line for line in heard.warnings if line.startswith("state count changes no output")]
    assert not [line for line in heard.warnings if line.startswith("state h ")]
