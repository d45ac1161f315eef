"""A model of the user's own in PyTorch, as people run it: the competitors of its bundle.

    torch          eager, in float32
    torch-compile  torch.compile of the same

Both are compared with the bundle before they are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from txl_export.families.own_module.running import Eager
from txl_export.families.own_module.sizes import TORCH, fresh_states, measured, output_specs
from txl_export.families.own_module.sources import Adapted, read_source, whose_code
from txl_export.families.own_module.spec import VALID, StepSpec
from txl_export.proof.comparing import TensorErrors
from txl_report.schema.measurement import Agreement
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import CheckError, TxlError, UsageError, one_line
from txl_runtime.ladder import competitor_step_limit
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays

from txl_deploy.bench.competitor import BundleSteps, StepCompetitor
from txl_deploy.bench.competitors import no_compiler
from txl_deploy.bench.driving import random_inputs, until_full
from txl_deploy.bench.floor import bytes_of_any_step
from txl_deploy.bench.works import StepWorks

NAMES = ("torch", "torch-compile")

States = dict[str, Tensor | None]
Step = Callable[[dict[str, Tensor], States, Tensor | None], tuple[dict[str, Tensor], Any]]


class TorchSteps(StepCompetitor):
    """The module in eager mode, called as one would by hand, its state carried along.

    Raises:
        UsageError: the module is not the bundle's, or its own code failed.
    """

    name = "torch"
    description = "PyTorch eager, float32"

    def __init__(self, spec: StepSpec, model: Model) -> None:
        _check_same(spec, model.manifest)
        held = [*spec.module.parameters(), *spec.module.buffers()]
        weights = sum(tensor.numel() * tensor.element_size() for tensor in held)
        self._bytes: int = weights + bytes_of_any_step(model.bundle).state
        self._spec, self._batch_size = spec, model.batch_size
        self._logits = [entry.name for entry in output_specs(spec) if entry.role == "logits"]
        eager = Eager(spec)
        for length in model.segment_lengths:  # what is wrong with the module is said here, in one line
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
        given = _tensors(inputs)
        outputs, self._states = self._advance(given, self._states, self._valid(given))
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
    """torch.compile of the same step. While states grow it runs eagerly, so that there is one graph per length."""

    name = "torch-compile"
    description = "torch.compile (inductor), float32"

    def __init__(self, spec: StepSpec, model: Model) -> None:
        super().__init__(spec, model)
        torch._dynamo.config.allow_rnn = True  # else a recurrent layer of torch runs eagerly, between two graphs
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


def make_competitors(
    names: tuple[str, ...],
    source: str | Adapted,
    weights: str | None,
    works: StepWorks,
    threads: int,
    heard: Listener,
) -> tuple[list[StepCompetitor], dict[str, Agreement], dict[str, str]]:
    """Some of `NAMES`, compared with the bundle, the states of all of them full; how they agree; why others cannot run.

    Torch is set to `threads` too.

    Raises:
        UsageError: nothing is called that, or the user's file or module is not what it has to be.
        CheckError: the module does not compute what the bundle computes.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise UsageError(
            f"--against has {unknown[0]!r}, expected some of {', '.join(NAMES)}, or none, for a model of your own"
        )
    torch.set_num_threads(threads)
    if whose := whose_code(source):
        heard.warn(f"{whose} is run on this machine")
    spec, _ = read_source(source, weights)
    model = works.model
    others: list[StepCompetitor] = []
    agreement: dict[str, Agreement] = {}
    left_out: dict[str, str] = {}
    for name in names:
        heard.stage(f"check that {name} agrees")
        if name == "torch":
            others.append(TorchSteps(spec, model))
        elif why := no_compiler():
            left_out[name] = why
            continue
        else:
            others.append(CompiledSteps(spec, model))
        try:
            agreement[name] = agree(works.ours, others[-1], model)
        except TxlError:
            raise
        except Exception as error:  # each of a compiler's parts raises its own kinds
            if name == "torch":
                raise
            left_out[name] = f"it fails on this module: {type(error).__name__}: {one_line(error)}"
            others.pop()
    return others, agreement, left_out


def agree(ours: BundleSteps, other: StepCompetitor, model: Model) -> Agreement:
    """Compare a competitor with the bundle over chained segments: new streams, states that fill, full ones.

    Raises:
        CheckError: they do not compute the same function, so timing them would compare nothing.
    """
    manifest, segments, started = model.manifest, 0, time.monotonic()
    measure, limit = competitor_step_limit(manifest.precision)
    errors = {output.name: TensorErrors(output.dtype in ("int32", "bool")) for output in manifest.outputs}

    def compare(inputs: Arrays) -> None:
        nonlocal segments
        segments += 1
        found, expected = ours.run(inputs), other.run(inputs)
        for name, tensor in errors.items():
            tensor.add((expected[name], found[name]))

    ours.reset()
    other.reset()
    for seed, length in enumerate(model.segment_lengths):
        compare(random_inputs(manifest, length, 100 + seed))
    for inputs in until_full(ours.stream, manifest, seed=200):
        compare(inputs)
    for seed, length in enumerate(3 * model.segment_lengths):
        compare(random_inputs(manifest, length, 300 + seed))
    found = {
        name: tensor.deviation if measure == "deviation" and not tensor.exact else tensor.largest
        for name, tensor in errors.items()
    }
    for name, tensor in errors.items():
        if tensor.shapes or not found[name] <= (0 if tensor.exact else limit):
            what = "shape" if tensor.shapes else f"{measure} {found[name]:.3g}"
            raise CheckError(
                f"{other.name}: {name} differs from the bundle's by {what} over {segments} chained segments, expected "
                f"at most {0 if tensor.exact else limit:g}; it computes something else, so it is not timed: give the "
                "module and the weights that the bundle was exported from"
            )
    took = time.monotonic() - started
    return Agreement(segments=segments, found={**found}, limit=limit, measure=measure, seconds=took)


def _by_hand(spec: StepSpec) -> Step:
    """The call that one would write: none of what an exporter checks and casts costs time."""
    module, step = spec.module, spec.step
    names, held = [entry.name for entry in output_specs(spec)], [entry.name for entry in spec.states]
    kinds = {entry.name: TORCH[entry.module_dtype] for entry in spec.inputs}

    def by_name(inputs: dict[str, Tensor], states: States, valid: Tensor | None) -> tuple[dict[str, Tensor], Any]:
        assert step is not None
        given = {name: inputs[name].to(kind) for name, kind in kinds.items()}
        outputs, after = step(module, given if valid is None else {**given, VALID: valid}, dict(states))
        return dict(outputs), after

    def in_order(inputs: dict[str, Tensor], states: States, valid: Tensor | None) -> tuple[dict[str, Tensor], Any]:
        given = (inputs[name].to(kind) for name, kind in kinds.items())
        results = module(*given, *states.values(), *(() if valid is None else (valid,)))
        flat = (results,) if isinstance(results, Tensor) else results
        return dict(zip(names, flat, strict=False)), dict(zip(held, flat[len(names) :], strict=True))

    return in_order if step is None else by_name


def _check_same(spec: StepSpec, manifest: Manifest) -> None:
    """Refuse a module whose tables are not the bundle's."""
    batch = manifest.batch_size
    for what, found, expected in (
        ("inputs", {e.name: tuple(e.shape) for e in spec.inputs}, {e.name: e.shape for e in manifest.given}),
        ("outputs", {e.name: () for e in output_specs(spec)}, {e.name: () for e in manifest.outputs}),
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
