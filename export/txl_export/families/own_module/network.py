"""Turns the user's step into a function of a flat list of tensors: the inputs and outputs of a bundle's program.

    inputs    the declared inputs · valid int32 [B] · the states that exist before the step
    outputs   the declared outputs · all states

If sequences are independent, a sequence with valid 0 keeps its states.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from txl_runtime.bundle.tables import Input, Output, TensorSpec

from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.sizes import TORCH
from txl_export.families.own_module.spec import VALID
from txl_export.families.own_module.stages import Transition

ROWS = "rows"
"""Stands for the size of an open axis in a shape."""


class StepNetwork(nn.Module):
    """One program's step, ready to be captured.

    Args:
        plan: the step.
        transition: the shapes before and after, and the segment length.
        open_rows: whether the number of rows of growing states stays open; such states are inputs even if they have no
            rows.

    Attributes:
        inputs, outputs: the program's inputs and outputs.
        read: names of the states that are inputs.
        module: the user's module, whose parameters are this network's.
        length: the segment length L.
    """

    def __init__(self, plan: Plan, transition: Transition, open_rows: bool = False) -> None:
        super().__init__()
        self.module = plan.spec.module
        self._plan, self._transition, self._eager = plan, transition, Eager(plan.spec)
        self.length = transition.length
        self._states = {state.name: state for state in plan.states}
        before, after = transition.stage.shapes, transition.after.shapes
        self._axes = {name: state.row_axis for name, state in self._states.items()} if open_rows else {}
        self.read = tuple(name for name in self._states if _is_input(before[name], open_rows))
        self.inputs = (
            *(self._spec(entry) for entry in plan.inputs),
            *(self._state_spec(name, self._states[name].input, before[name]) for name in self.read),
        )
        self.outputs = (
            *(self._spec(entry) for entry in plan.results),
            *(self._state_spec(name, self._states[name].output, after[name]) for name in self._states),
        )

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Run one step on tensors in the order of the table at the top of this file.

        For example, x [2, 8] and h [2, 32] give y [2, 4] and h [2, 32].
        """
        plan, names = self._plan, [entry.name for entry in self._plan.inputs]
        tensors = dict(zip(names, flat, strict=False))
        valid = tensors.pop(VALID, None)
        held = dict(zip(self.read, flat[len(names) :], strict=True))
        states = {name: held.get(name, self._without_rows(name)) for name in self._states}
        outputs, after = self._eager.traced(tensors, states, valid if plan.spec.lengths else None)
        for entry in plan.outputs:
            if entry.role == "logits":
                outputs[entry.name] = F.log_softmax(outputs[entry.name].float(), dim=-1)
        if plan.streams == "independent":
            assert valid is not None
            after = {name: self._state_after(name, valid, after[name], held[name]) for name in self._states}
        return (*(outputs[entry.name] for entry in plan.outputs), *(after[name] for name in self._states))

    @property
    def batch_axes(self) -> dict[str, int]:
        """The batch axes of the program's inputs and outputs, by name; tensors without a batch axis are left out."""
        axes = {entry.name: entry.axes.batch for entry in self._plan.inputs}
        axes |= {entry.name: entry.axes.batch for entry in self._plan.results}
        for state in self._states.values():
            axes |= {state.input: state.batch_axis, state.output: state.batch_axis}
        return {name: axis for name, axis in axes.items() if axis is not None}

    @property
    def open_axes(self) -> list[dict[int, object]]:
        """For each input, the axes that `torch.export` must leave open."""
        axes: list[dict[int, object]] = [{} for _ in self.inputs]
        first = len(self.inputs) - len(self.read)
        for index, name in enumerate(self.read, first):
            axis = self._axes.get(name)
            if axis is not None:
                axes[index] = {axis: torch.export.Dim.AUTO}
        return axes

    def _without_rows(self, name: str) -> Tensor | None:
        """Return the value of a state that is no input: a tensor without rows, or None if the state is absent."""
        shape = self._transition.stage.shapes[name]
        return None if shape is None else torch.zeros(shape, dtype=TORCH[self._states[name].dtype])

    def _state_after(self, name: str, valid: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """Return the new state for sequences that run, and the old state for idle sequences."""
        axis = self._states[name].batch_axis
        assert axis is not None
        live = valid > 0
        return torch.where(live.reshape([-1 if one == axis else 1 for one in range(old.ndim)]), new, old)

    def _spec(self, entry: Input | Output) -> TensorSpec:
        sizes = entry.sizes(self._plan.batch_size, self.length)
        return TensorSpec(name=entry.name, dtype=entry.dtype, shape=sizes)

    def _state_spec(self, name: str, value: str, shape: tuple[int, ...] | None) -> TensorSpec:
        assert shape is not None, "only a state that was never there is absent"
        axis = self._axes.get(name)
        sizes = tuple(ROWS if at == axis else size for at, size in enumerate(shape))
        return TensorSpec(name=value, dtype=self._states[name].dtype, shape=sizes)  # type: ignore[arg-type]


def _is_input(shape: tuple[int, ...] | None, open_rows: bool) -> bool:
    return shape is not None and (open_rows or 0 not in shape)
