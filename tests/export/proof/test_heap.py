"""Memory that verification gives back while it runs."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from txl_export.families.transformer_xl.parity.oracle import handed_over
from txl_export.proof.heap import give_back


class Node:
    """Something that holds itself."""

    def __init__(self):
        self.itself = self


def test_garbage_in_cycles_is_collected():
    gc.disable()
    try:
        gone = weakref.ref(Node())
        assert gone() is not None
        give_back()
        assert gone() is None
    finally:
        gc.enable()


def test_a_memory_that_is_handed_over_goes_layer_by_layer():
    memory = {f"layers.{layer:02d}": np.full((1, 2, 3), float(layer)) for layer in range(4)}
    left = [weakref.ref(rows) for rows in memory.values()]
    for number, rows in enumerate(handed_over(memory)):
        assert float(rows[0, 0, 0]) == number
        assert [ref() is not None for ref in left] == [layer >= number for layer in range(4)]
