"""Make the ways in which users run a step today, each a competitor of the step's bundle.

torch          PyTorch eager
torch-compile  the module by torch.compile
onnx           the file of torch.onnx.export without options, in ONNX Runtime, with states fed back by hand
onnx-tracer    the file of PyTorch's older exporter, which traces (`dynamo=False`), run as onnx
published      the file that the model's publisher gives away, run as onnx
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from timed_step import Step
from torch import Tensor, nn
from txl_export import StepSpec
from txl_export.families.own_module.sizes import TORCH, fresh_states
from txl_runtime.listener import Silent
from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays

from txl_deploy.bench.competitor import Competitor, Maker
from txl_deploy.bench.competitors.own_module import NAMES as TORCH_WAYS
from txl_deploy.bench.competitors.own_module import own_competitors
from txl_deploy.bench.floor import state_bytes

__all__ = ["BY_HAND", "NAMES", "TORCH_WAYS", "HandDriven", "makers"]

EXPORTED = {"onnx": True, "onnx-tracer": False}
"""The ways that run an exported file: True for PyTorch's newer exporter, False for its older one."""
BY_HAND = (*EXPORTED, "published")
"""The ways that run ONNX Runtime by hand."""
NAMES = (*TORCH_WAYS, *BY_HAND)
AFTER = "_out"
"""The suffix that a state's name has as an output."""
NUMPY = {
    "tensor(float)": np.float32,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


class HandDriven(Competitor):
    """An ONNX file that is run by hand: `session.run` with a dictionary, which gets the new states back.

    Args:
        name: the way's name.
        path: the ONNX file.
        model: the step's bundle, opened.
        first: initial values of states by name; a missing state begins with zeros.
        threads: the number of threads of the session.
        after: the name of a state's output, by the state's name; a missing name is the state's with `AFTER`.
    """

    def __init__(
        self, name: str, path: Path, model: Model, first: Mapping[str, Array], threads: int, after: Mapping[str, str]
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        self.name, self.description = name, "ONNX Runtime by hand"
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs = {entry.name: entry for entry in self._session.get_inputs()}
        self._kinds = {entry.name: NUMPY[inputs[entry.name].type] for entry in model.manifest.given}
        results = [entry.name for entry in self._session.get_outputs()]
        self._outputs = [(entry.name, results.index(entry.name)) for entry in model.manifest.outputs]
        self._fed = [
            (state, results.index(after.get(state, state + AFTER))) for state in inputs if state not in self._kinds
        ]
        self._first: dict[str, Array] = {
            state: np.array(
                first[state] if state in first else np.zeros(inputs[state].shape), NUMPY[inputs[state].type]
            )
            for state, _ in self._fed
        }
        self._bytes = path.stat().st_size + state_bytes(model.manifest)
        self.reset()

    def reset(self) -> None:
        self._states = dict(self._first)

    def run(self, inputs: Arrays) -> Mapping[str, Array]:
        feed: dict[str, Any] = dict(self._states)
        for name, kind in self._kinds.items():
            array = inputs[name]
            feed[name] = array if array.dtype == kind else array.astype(kind)
        result = self._session.run(None, feed)
        self._states = {state: result[place] for state, place in self._fed}
        return {name: result[place] for name, place in self._outputs}

    def step_bytes(self, length: int) -> int:
        return self._bytes


class _Positional(nn.Module):
    """A step as a module of positional tensors, as exporters need it."""

    def __init__(self, spec: StepSpec) -> None:
        super().__init__()
        self.module, self._spec = spec.module, spec

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        spec = self._spec
        assert spec.step is not None
        inputs = {entry.name: tensor for entry, tensor in zip(spec.inputs, tensors, strict=False)}
        states = {entry.name: tensor for entry, tensor in zip(spec.states, tensors[len(inputs) :], strict=True)}
        outputs, after = spec.step(self.module, inputs, states)
        return *outputs.values(), *(after[name] for name in states)


def makers(names: tuple[str, ...], step: Step, model: Model, folder: Path, threads: int) -> dict[str, Maker]:
    """Return functions, by name, that make the named ways to run a step; ways that a step does not have are left out.

    Args:
        names: some of `NAMES`.
        step: the step to time.
        model: the step's bundle, opened.
        folder: the folder that keeps exported files for later runs.
        threads: the number of threads of PyTorch and of ONNX Runtime.
    """
    results: dict[str, Maker] = {}
    torch.set_num_threads(threads)
    if isinstance(step.source, StepSpec):
        spec = step.source
        torch_ways = tuple(name for name in names if name in TORCH_WAYS)
        results |= own_competitors(torch_ways, spec, None, model, threads, Silent())[0]  # type: ignore[arg-type]
        first = _first_states(step)
        for name, dynamo in EXPORTED.items():
            if name in names:
                results[name] = _exported(name, spec, step, model, folder, first, threads, dynamo)
    else:
        first = {}
    if step.published is not None and "published" in names:
        file, after = step.published, _paired(model)
        results["published"] = lambda: HandDriven("published", file, model, first, threads, after)
    return results


def _exported(
    name: str,
    spec: StepSpec,
    step: Step,
    model: Model,
    folder: Path,
    first: dict[str, Array],
    threads: int,
    dynamo: bool,
) -> Maker:
    def make() -> Competitor:
        path = folder / f"{name}.onnx"
        if not path.exists():
            _export(spec, step, path, dynamo)
        return HandDriven(name, path, model, first, threads, {})

    return make


def _export(spec: StepSpec, step: Step, path: Path, dynamo: bool) -> None:
    """Export a step by `torch.onnx.export` with names of inputs and outputs, and no other options."""
    states = [entry.name for entry in spec.states]
    examples = [
        torch.zeros(entry.axes.sizes(step.batch, step.length), dtype=TORCH[entry.module_dtype]) for entry in spec.inputs
    ]
    examples += [torch.from_numpy(array) for array in _first_states(step).values()]
    module = spec.module if spec.step is None else _Positional(spec).eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # hides the warning that torchvision is absent
    with warnings.catch_warnings(), torch.no_grad(), _silence():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(examples),
            str(path),
            input_names=[entry.name for entry in spec.inputs] + states,
            output_names=[entry.name for entry in spec.output_specs] + [name + AFTER for name in states],
            dynamo=dynamo,
        )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Send standard output to nowhere inside the block: the tracer's C++ code prints whole graphs."""
    with Path(os.devnull).open("w") as nothing:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(nothing.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)


def _first_states(step: Step) -> dict[str, Array]:
    """Return the initial values of a step's states by name, in the types that the module takes."""
    assert isinstance(step.source, StepSpec)
    fresh = fresh_states(step.source, step.batch)
    results: dict[str, Array] = {}
    for entry in step.source.states:
        tensor = fresh[entry.name]
        assert tensor is not None, f"state {entry.name} is absent at first"
        results[entry.name] = tensor.to(TORCH[entry.dtype]).numpy()
    return results


def _paired(model: Model) -> dict[str, str]:
    """Return for each state the output that is fed back to it, if the bundle was made from an ONNX file; else {}."""
    pairs = (model.manifest.family or {}).get("states")
    return {str(state): str(names) for state, names in pairs.items()} if isinstance(pairs, dict) else {}
