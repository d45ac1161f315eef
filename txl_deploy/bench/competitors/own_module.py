"""Competitors for the bundle of a user's own model: the model's module in PyTorch, as people usually run it.

    torch          eager, in float32
    torch-compile  torch.compile of the same module

Both competitors are compared with the bundle before they are timed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from txl_export.families.own_module.adapted import Adapted
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import TORCH, fresh_states, measured
from txl_export.families.own_module.sources import read_source, whose_code
from txl_export.families.own_module.spec import VALID, StepSpec
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays

from txl_deploy.bench.competitor import Competitor, Maker
from txl_deploy.bench.driving import random_inputs
from txl_deploy.bench.floor import state_bytes

NAMES = ("torch", "torch-compile")
"""Names of the competitors of a user's own model, as --against takes them."""

States = dict[str, Tensor | None]
"""States of a module by name; None for a state that does not exist yet."""
Step = Callable[[dict[str, Tensor], States, Tensor | None], tuple[dict[str, Tensor], Any]]
"""A function (inputs, states, valid positions or None) → (outputs, new states)."""


class TorchSteps(Competitor):
    """The competitor that calls the module in eager mode, as a user would, and carries its state from step to step.

    Raises:
        UsageError: the module is not the one from which the bundle was exported, or its code failed.
    """

    name = "torch"
    description = "PyTorch eager, float32"

    def __init__(self, spec: StepSpec, model: Model) -> None:
        _check_same(spec, model.manifest)
        held = [*spec.module.parameters(), *spec.module.buffers()]
        weights = sum(tensor.numel() * tensor.element_size() for tensor in held)
        self._bytes: int = weights + state_bytes(model.manifest)
        self._spec, self._batch_size = spec, model.batch_size
        self._logits = [entry.name for entry in spec.output_specs if entry.role == "logits"]
        eager = Eager(spec)
        for length in model.segment_lengths:  # so that errors in the module's code show here, in one line
            inputs = _tensors(random_inputs(model.manifest, length))
            eager(inputs, fresh_states(spec, model.batch_size), self._valid(inputs))
        attributes = any(entry.attribute is not None for entry in spec.states)
        self._step: Step = eager.traced if attributes else _by_hand(spec)
        self.reset()

    def reset(self) -> None:
        fresh = fresh_states(self._spec, self._batch_size)
        kinds = {entry.name: TORCH[entry.dtype] for entry in self._spec.states}
        self._states: States = {
            name: None if tensor is None else tensor.to(kinds[name]) for name, tensor in fresh.items()
        }

    @torch.inference_mode()
    def run(self, inputs: Arrays) -> Mapping[str, Array]:
        tensors = _tensors(inputs)
        outputs, self._states = self._advance(tensors, self._states, self._valid(tensors))
        for name in self._logits:
            outputs[name] = torch.log_softmax(outputs[name], dim=-1)
        return {name: tensor.numpy() for name, tensor in outputs.items()}

    def step_bytes(self, length: int) -> int:
        return self._bytes

    def _advance(
        self, inputs: dict[str, Tensor], states: States, valid: Tensor | None
    ) -> tuple[dict[str, Tensor], Any]:
        return self._step(inputs, states, valid)

    def _valid(self, inputs: dict[str, Tensor]) -> Tensor | None:
        if not self._spec.lengths:
            return None
        return torch.full((self._batch_size,), measured(self._spec, inputs)[1], dtype=torch.int32)


class CompiledSteps(TorchSteps):
    """The step of `TorchSteps` with torch.compile; while states grow it is eager, so one graph per length suffices."""

    name = "torch-compile"
    description = "torch.compile (inductor), float32"

    def __init__(self, spec: StepSpec, model: Model) -> None:
        super().__init__(spec, model)
        torch._dynamo.config.allow_rnn = True  # without this, torch runs recurrent layers eagerly, between two graphs
        self._compiled: Step = torch.compile(self._step, dynamic=False)

    def reset(self) -> None:
        super().reset()
        self._full = False

    def _advance(
        self, inputs: dict[str, Tensor], states: States, valid: Tensor | None
    ) -> tuple[dict[str, Tensor], Any]:
        if self._full:
            return self._compiled(inputs, states, valid)
        outputs, after = self._step(inputs, states, valid)
        self._full = _shapes(after) == _shapes(states)
        return outputs, after


def own_competitors(
    names: tuple[str, ...], source: str | Adapted, weights: str | None, model: Model, threads: int, listener: Listener
) -> tuple[dict[str, Maker], dict[str, str]]:
    """Return makers of the competitors in `names`, and the reason for each competitor that cannot run here.

    PyTorch is set to `threads` threads.

    Raises:
        UsageError: a name is unknown, or the user's file or module has the wrong form.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise UsageError(
            f"--against has {unknown[0]!r}, expected some of {', '.join(NAMES)}, or none, for a model of your own"
        )
    torch.set_num_threads(threads)
    if whose := whose_code(source):
        listener.warn(f"{whose} is run on this machine")
    spec, _ = read_source(source, weights)
    why = no_compiler() if "torch-compile" in names else None
    makers: dict[str, Maker] = {
        "torch": lambda: TorchSteps(spec, model),
        "torch-compile": lambda: CompiledSteps(spec, model),
    }
    left_out = {} if why is None else {"torch-compile": why}
    return {name: makers[name] for name in names if name not in left_out}, left_out


def no_compiler() -> str | None:
    """Return the reason why torch.compile cannot run here; None if it can."""
    own = os.environ.get("CXX")
    names = (own,) if own else ("g++", "clang++", "c++")
    if any(shutil.which(name) for name in names):
        return None
    return f"torch.compile needs a C++ compiler, none of {', '.join(names)} was found"


def _by_hand(spec: StepSpec) -> Step:
    """Return the step as a user would call it, without the checks and casts of the exporter, which take time."""
    module, step = spec.module, spec.step
    names, held = [entry.name for entry in spec.output_specs], [entry.name for entry in spec.states]
    kinds = {entry.name: TORCH[entry.module_dtype] for entry in spec.inputs}

    def by_name(inputs: dict[str, Tensor], states: States, valid: Tensor | None) -> tuple[dict[str, Tensor], Any]:
        assert step is not None
        tensors = {name: inputs[name].to(kind) for name, kind in kinds.items()}
        outputs, after = step(module, tensors if valid is None else {**tensors, VALID: valid}, dict(states))
        return dict(outputs), after

    def in_order(inputs: dict[str, Tensor], states: States, valid: Tensor | None) -> tuple[dict[str, Tensor], Any]:
        tensors = (inputs[name].to(kind) for name, kind in kinds.items())
        results = module(*tensors, *states.values(), *(() if valid is None else (valid,)))
        flat = (results,) if isinstance(results, Tensor) else results
        return dict(zip(names, flat, strict=False)), dict(zip(held, flat[len(names) :], strict=True))

    return in_order if step is None else by_name


def _check_same(spec: StepSpec, manifest: Manifest) -> None:
    """Refuse a module whose inputs, outputs or states differ from those in the bundle's tables."""
    batch = manifest.batch_size
    for what, found, expected in (
        ("inputs", {e.name: tuple(e.shape) for e in spec.inputs}, {e.name: e.shape for e in manifest.given}),
        ("outputs", {e.name: () for e in spec.output_specs}, {e.name: () for e in manifest.outputs}),
        ("states", {e.name: e.axes.sizes(batch, 0) for e in spec.states}, {e.name: e.shape for e in manifest.states}),
    ):
        if found != expected:
            raise UsageError(
                f"--module has the {what} {_listed(found)}, expected {_listed(expected)}, the bundle's; give the "
                "module that it was exported from"
            )


def _listed(table: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" if shape else name for name, shape in table.items()) or "none"


def _tensors(inputs: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in inputs.items()}


def _shapes(states: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.shape for name, tensor in states.items()}
