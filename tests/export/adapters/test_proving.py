"""A step beside the package's own call: which of its forms is taken, and what is told where none computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from txl_export.adapters.proving import proven
from txl_export.families.own_module.own_code import OwnCodeError
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.errors import UsageError

ROWS = 3
LENGTHS = (2, 1, 2, 2)


class Mean(nn.Module):
    """y = x + the mean of the last rows; `rows` has as many as there were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        self.calls += 1
        rows = x if rows is None else torch.cat((rows, x), 1)
        return x + rows[:, -ROWS:].mean(1, keepdim=True), rows[:, -ROWS:]


def own(module: Mean, inputs: Mapping[str, Tensor], carried: Any) -> Any:
    y, rows = module(inputs["x"], carried)
    return {"y": y}, {"rows": rows}, rows


def counted(module: Any, inputs: Any, states: Any) -> Any:
    """The same in fixed rows and a counter."""
    x, fill, valid = inputs["x"], states["fill"], inputs.get("valid")
    new = torch.full_like(fill, x.shape[1]) if valid is None else valid
    places = new[:, None] + torch.arange(ROWS)
    rows = torch.cat((states["rows"], x), 1).gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))
    fill = torch.clamp(fill + new, max=ROWS)
    return {"y": x + rows.sum(1, keepdim=True) / fill[:, None, None]}, {"rows": rows, "fill": fill}


def uncounted(module: Any, inputs: Any, states: Any) -> Any:
    """As if all rows were filled."""
    rows = torch.cat((states["rows"], inputs["x"]), 1)[:, -ROWS:]
    return {"y": inputs["x"] + rows.mean(1, keepdim=True)}, {"rows": rows, "fill": states["fill"]}


def shared(module: Any, inputs: Any, states: Any) -> Any:
    """As if both sequences had begun together."""
    return counted(module, inputs, {**states, "fill": states["fill"][:1].expand(2)})


def forgetful(module: Any, inputs: Any, states: Any) -> Any:
    """Right outputs, other rows."""
    outputs, after = counted(module, inputs, states)
    return outputs, {**after, "rows": after["rows"].roll(1, 1)}


def spec(step: Any, lengths: bool = False) -> StepSpec:
    states = [StateSpec("rows", ("B", ROWS, 4)), StateSpec("fill", ("B",), dtype="int32")]
    return StepSpec(Mean().train(), [InputSpec("x", ("B", "L", 4))], states, ["y"], step=step, lengths=lengths)


@pytest.mark.parametrize("lengths", [False, True])
def test_a_form_that_computes_the_same_is_taken(lengths: bool) -> None:
    form = spec(counted, lengths)
    assert proven([form], own, LENGTHS) is form


def test_the_module_is_left_as_it_was() -> None:
    form = spec(counted)
    proven([form], own, LENGTHS)
    assert (form.module.training, form.module.calls) == (True, 0)


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (uncounted, "output y of segment 1 "),
        (shared, "output y of segment 2 "),
        (forgetful, "state rows after segment 1 "),
    ],
)
def test_a_form_that_computes_something_else_is_refused(step: Any, told: str) -> None:
    form = spec(step)
    with pytest.raises(UsageError, match=f"{told}is not what Mean itself computes"):
        proven([form], own, LENGTHS)


def test_the_first_form_that_agrees_is_taken() -> None:
    wrong, form = spec(uncounted), spec(counted)
    assert proven([replace(wrong, module=form.module), form], own, LENGTHS) is form


def test_padding_that_reaches_the_state_is_noticed() -> None:
    def careless(module: Any, inputs: Any, states: Any) -> Any:
        return counted(module, {"x": inputs["x"]}, states)

    form = spec(careless, lengths=True)
    with pytest.raises(UsageError, match="of segment 2"):
        proven([form], own, LENGTHS)
    exact = replace(form, lengths=False)
    assert proven([form, exact], own, LENGTHS) is exact


def test_a_package_that_fails_by_itself_is_named() -> None:
    def failing(module: Any, inputs: Mapping[str, Tensor], carried: Any) -> Any:
        raise ValueError("no memory here")

    with pytest.raises(OwnCodeError, match="Mean itself fails with its memory: ValueError: no memory here"):
        proven([spec(counted)], failing, LENGTHS)
