"""Both sides of a chain: where an error was, and which states still count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stand_ins.step_stream import ArrayModel, ArrayStream, NumpyReference
from txl_export.proof.verification import verify_model
from verified_steps import Heard, OnceWrong, verified


def test_one_wrong_element_is_shown_where_it_was():
    parity = verified(OnceWrong)
    states = parity.chains[0].row().states
    assert next(number for number, value in enumerate(states["rows"].most) if value > 1e-4) == 17
    assert states["h"].largest < 1e-4 or states["h"].most[17] < 1e-5


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
