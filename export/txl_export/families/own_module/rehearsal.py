"""Runs a graph in ONNX Runtime on real values and compares it with the network it was captured from.

A graph that loads can still compute something else: the capture may have taken a value for a constant. So the graph
runs from states that real steps have reached, with several inputs.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor
from txl_runtime.bundle.reading import WEIGHTS
from txl_runtime.bundle.tables import TensorSpec
from txl_runtime.errors import one_line
from txl_runtime.guard.graph_check import FedSizeError, Walk
from txl_runtime.guard.protobuf import RefusedError
from txl_runtime.ladder import rung
from txl_runtime.selftest import relative_difference

from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.own_code import own_code
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.sizes import States, fresh_states, random_inputs
from txl_export.families.own_module.stages import Stage, Transition
from txl_export.graphs.shared_weights import SMALL

EXAMPLES = 4
_INNER = re.compile(r" \['[^']*(?:'\]?)?")
"""Matches the graph's own name of a value in a refusal, as in "… at GatherND ['val_653']"."""
FURTHER = 3
"""Number of additional steps before a comparison, if shapes allow them, so that states differ from their initial
values."""


class Example(NamedTuple):
    """Arguments of a network (`given`), and the results that it returns for them (`wanted`)."""

    given: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]


class RehearsalError(Exception):
    """A graph does not load, does not run, or computes something else; the message says which.

    Attributes:
        elsewhere: whether the graph fails, but not for the values with which it was captured.
        fed_size: whether a size in the graph depends on values of inputs.
        inner: a text with the graph's own name of a value, such as val_653, which the message leaves out.
    """

    def __init__(self, message: str, elsewhere: bool = False, fed_size: bool = False, inner: str = "") -> None:
        super().__init__(message)
        self.elsewhere, self.fed_size, self.inner = elsewhere, fed_size, inner


def examples_for(plan: Plan, transition: Transition, network: StepNetwork, count: int = EXAMPLES) -> list[Example]:
    """Return examples of a transition, each with inputs and states of its own; every second has idle sequences."""
    eager, examples = Eager(plan.spec), []
    for number in range(count):
        draws = np.random.default_rng(number)
        states = _states_at(plan, transition.stage, eager, draws)
        inputs = random_inputs(plan.spec, plan.batch_size, transition.length, draws, plan.spec.samples)
        arguments = [inputs[entry.name] for entry in plan.spec.inputs]
        if plan.reads_valid:
            arguments.append(_counts(plan, transition.length, number, draws))
        for name in network.read:
            state = states[name]
            assert state is not None, "an absent state is no input"
            arguments.append(state)
        with torch.no_grad(), own_code(f"the module failed with a segment of {transition.length}"):
            wanted = network(*(tensor.clone() for tensor in arguments))
        examples.append(Example(tuple(arguments), tuple(tensor.detach().clone() for tensor in wanted)))
    return examples


def rehearse(model: ir.Model, network: StepNetwork, examples: Sequence[Example]) -> None:
    """Load and run a graph, and compare its results with the network's.

    Raises:
        RehearsalError: the graph differs from the network, or breaks the rules of a bundle's graphs.
    """
    with tempfile.TemporaryDirectory(prefix="txl-deploy-rehearsal-") as place:
        path = Path(place) / "rehearsal.onnx"
        ir.save(model, path, external_data=WEIGHTS, size_threshold_bytes=SMALL)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.x64quantprecision", "1")  # the runtime sets this, too
        try:
            onnx.shape_inference.infer_shapes(
                onnx.load(path, load_external_data=False), check_type=True, strict_mode=True
            )
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise RehearsalError(f"the graph does not load: {one_line(error)}") from error
        _check_structure(path)
        for number, example in enumerate(examples):
            _try_example(session, network, example, elsewhere=number > 0)


def _try_example(
    session: onnxruntime.InferenceSession, network: StepNetwork, example: Example, elsewhere: bool
) -> None:
    names = [spec.name for spec in network.inputs]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, example.given, strict=True)}
    try:
        results = session.run([spec.name for spec in network.outputs], feeds)
    except Exception as error:
        raise RehearsalError(f"the graph does not run: {one_line(error)}", elsewhere) from error
    for spec, got, tensor in zip(network.outputs, results, example.wanted, strict=True):
        if apart := _apart(spec.name, got, tensor.numpy()):
            raise RehearsalError(apart, elsewhere)


def _check_structure(path: Path) -> None:
    """Refuse a graph that the rules of a bundle's graphs forbid."""
    weights = path.with_name(WEIGHTS)
    try:
        Walk(path.read_bytes(), "step", WEIGHTS, weights.stat().st_size if weights.exists() else 0)
    except RefusedError as refused:
        structure, expected = refused.args
        text = f"its graph has {_INNER.sub('', structure)}, expected {expected}"
        raise RehearsalError(text, fed_size=isinstance(refused, FedSizeError), inner=structure) from None


def first_sequences(example: Example, network: StepNetwork, count: int) -> Example:
    """Return an example with only the first `count` sequences: results of independent sequences stay the same."""
    axes = network.batch_axes

    def cut(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pairs = zip(specs, tensors, strict=True)
        return tuple(
            tensor.narrow(axes[spec.name], 0, count).contiguous() if spec.name in axes else tensor
            for spec, tensor in pairs
        )

    return Example(cut(network.inputs, example.given), cut(network.outputs, example.wanted))


def _apart(name: str, values: NDArray[np.generic], wanted: NDArray[np.generic]) -> str:
    """Return a sentence on how a result of the graph differs from the module's; "" if it does not."""
    if values.shape != wanted.shape or values.dtype != wanted.dtype:
        kinds = [f"{one.dtype} {list(one.shape)}" for one in (values, wanted)]
        return f"the graph's {name} is {kinds[0]}, the module's {kinds[1]}"
    if not np.issubdtype(wanted.dtype, np.floating):
        same = np.array_equal(values, wanted)
        return "" if same else f"the graph computes another {name} than the module; a value was taken for a constant"
    finite, limit = np.isfinite(wanted), rung("fp32", "cpu").memory
    assert limit is not None
    far = relative_difference(values[finite], wanted[finite])
    if far <= limit and np.array_equal(values[~finite], wanted[~finite], equal_nan=True):
        return ""
    return (
        f"the graph's {name} is {far:.1g} away from the module's; a value was taken for a constant, or an operator "
        "computes something else"
    )


def _counts(plan: Plan, length: int, number: int, draws: np.random.Generator) -> Tensor:
    """Return `valid` int32 [B]: all positions are valid; in every second example fewer are, or sequences are idle."""
    counts = np.full(plan.batch_size, length, np.int32)
    if number % 2:
        least = 0 if plan.streams == "independent" else 1
        if plan.spec.lengths:
            counts = draws.integers(least, length + 1, plan.batch_size).astype(np.int32)
        elif least == 0:
            idle = [-1] if number == 1 else draws.permutation(plan.batch_size)[: -(-plan.batch_size // 2)]
            counts[idle] = 0
    return torch.from_numpy(counts)


def _states_at(plan: Plan, stage: Stage, eager: Eager, draws: np.random.Generator) -> States:
    """Return states of a stage that real steps have reached, by the transitions that `_way` returns."""
    states = fresh_states(plan.spec, plan.batch_size)
    for transition in _way(plan, stage):
        inputs = random_inputs(plan.spec, plan.batch_size, transition.length, draws, plan.spec.samples)
        counts = torch.full((plan.batch_size,), transition.length, dtype=torch.int32)
        _, after = eager(inputs, states, counts if plan.spec.lengths else None)
        states = dict(after)
    return states


def _way(plan: Plan, stage: Stage) -> list[Transition]:
    """Return the fewest transitions from the start to a stage, then up to `FURTHER` that stay at this stage."""
    came: dict[int, Transition] = {}
    # transitions are in the order of the search, so the first that leads to a stage is on the shortest way
    for one in plan.transitions:
        came.setdefault(one.after.number, one)
    way: list[Transition] = []
    number = stage.number
    while number:
        way.append(came[number])
        number = came[number].stage.number
    staying = [one for one in plan.transitions if one.stage.number == one.after.number == stage.number]
    return way[::-1] + staying[:1] * FURTHER
