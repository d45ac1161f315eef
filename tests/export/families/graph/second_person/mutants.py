"""Files that are wrong in a way that people have shipped: each is a right case with one thing changed before.

Where a thread is named, its defect is the model of the change. `fails` is what the last line of the command has to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnx import numpy_helper

from .modules import RIGHTS, Case, calling


def calls(of: str, where: str, call: Callable[..., Any]) -> tuple[str, Case]:
    """A function that is called in place of the right one, which it is given."""
    return of, dataclasses.replace(RIGHTS[of], change=calling(call), fails=tuple(where.split(", ")))


def edits(of: str, where: str, edit: Callable[[onnx.GraphProto], None]) -> tuple[str, Case]:
    """A change of the file."""
    return of, dataclasses.replace(RIGHTS[of], edit=edit, fails=(where,))


def quantised(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.ndim == 2:
            scale = abs(array).max() / 127
            tensor.CopyFrom(numpy_helper.from_array((array / scale).round() * scale, tensor.name))


def window_not_moved(m: Any, own: Any, x: Any, a: Any, b: Any) -> Any:
    y, a, after = own(m, x, a, b)
    return y, a, torch.cat([b[:, :-1], after[:, -1:]], 1)


MUTANTS = {
    # sherpa-onnx#1700: a reset leaves one of the states as it is
    "reset_of_one_state": calls(
        "policy_that_takes_done",
        "output y",
        lambda m, own, x, done, h, c: own(m, x, torch.zeros_like(done), h * (~done).float()[:, None], c),
    ),
    "window_not_moved": calls("dilated_windows", "state w1", window_not_moved),
    "weights_quantised_by_a_tool": edits("gru_cell", "output y", quantised),
}
