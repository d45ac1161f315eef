"""Hashes a user's step to a `model_id`, which is the same for every batch size, segment length and precision."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import onnx_ir as ir
import torch
from torch import Tensor, nn
from txl_runtime.bundle.derived import DERIVED
from txl_runtime.bundle.tables import Input, Output

from txl_export.families.own_module.attributes import leaves
from txl_export.families.own_module.sizes import in_bundle, initial_value
from txl_export.families.own_module.spec import StepSpec

_PLAIN = """
Add And Cast Clip Concat Constant ConstantOfShape Div Einsum Equal Expand Flatten Gather GatherElements GatherND Gemm
Greater GreaterOrEqual Identity Less LessOrEqual MatMul Max Min Mul Neg Not Or Pad Pow Range Reciprocal ReduceMean
ReduceSum Reshape Shape Size Slice Split Sqrt Squeeze Sub Tile Transpose Trilu Unsqueeze Where Xor
"""
PLAIN = frozenset(_PLAIN.split())
"""Operators that are left out of the hash, because B and L also decide whether a graph needs them."""


def model_id(spec: StepSpec, inputs: Sequence[Input], outputs: Sequence[Output], graphs: Iterable[ir.Graph]) -> str:
    """Return SHA-256 over the tables without B and L, the module's tensors and numbers, and its graphs' operators.

    B and L appear in a graph's constants and decide some of its operators. So only operators outside `PLAIN`, e.g. Tanh
    or LSTM, are hashed, if they compute with the inputs. Numbers in the module's attributes, such as the number of
    heads, are hashed in place of the graphs' constants.

    Args:
        spec: the specification.
        inputs, outputs: the tables with "B" and "L" in their shapes; `valid` is not hashed.
        graphs: the graphs of all programs.
    """
    facts = {
        "inputs": [_row(entry) for entry in inputs if entry.role != "valid"],
        "outputs": [_row(entry) for entry in outputs],
        "states": [
            [entry.name, list(entry.shape), in_bundle(entry.dtype), entry.grows, entry.initial is None]
            for entry in spec.states
        ],
        "lengths": spec.lengths,
        "numbers": _numbers(spec),
        "operators": sorted({name for graph in graphs for name in _computing(graph)} - PLAIN),
    }
    return _digest(spec, msgspec.json.encode(facts, order="deterministic"))


def tensors_id(spec: StepSpec) -> str:
    """Return SHA-256 over the module's tensors, without graphs: it is equal for modules with equal weights."""
    return _digest(spec, b"")


def _row(entry: Input | Output) -> msgspec.Raw:
    """Return a table's row in the form of format 2.0: fields that later formats derive are left out of the hash."""
    implied = {name for names in DERIVED.values() for name in names}
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__ if name not in implied}
    return msgspec.Raw(msgspec.json.encode(fields))


def _digest(spec: StepSpec, facts: bytes) -> str:
    digest = hashlib.sha256(facts)
    for name, tensor in sorted(_tensors(spec).items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {list(values.shape)} {values.dtype}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data if values.numel() else b"")
    return digest.hexdigest()


def _computing(graph: ir.Graph) -> Iterator[str]:
    """Yield the operators that compute with the step's inputs; others compute constants or sizes."""
    inputs = set(graph.inputs)
    for node in graph:
        if node.op_type not in ("Shape", "Size") and any(value in inputs for value in node.inputs):
            inputs.update(node.outputs)
            yield node.op_type


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's parameters and buffers by name; a shared tensor is listed once.

    For example, {"rnn.weight_ih": a tensor [96, 8]}.
    """
    return dict(module.named_parameters()) | dict(module.named_buffers())


def parameter_count(module: nn.Module) -> int:
    """Return the number of values in the module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _numbers(spec: StepSpec) -> dict[str, float]:
    """Return the plain numbers in the module's attributes by path, without training modes and states."""
    states = {entry.attribute for entry in spec.states}
    return {
        path: value
        for path, value in sorted(leaves(spec.module).items())
        if isinstance(value, bool | int | float) and path.rpartition(".")[2] != "training" and path not in states
    }


def _tensors(spec: StepSpec) -> Mapping[str, Tensor]:
    """Return the parameters, buffers and initial values on which the step's results depend, by name.

    A buffer that a `StateSpec` declares is a state, so only its initial value is included.
    """
    states = {entry.attribute for entry in spec.states}
    tensors = {name: tensor for name, tensor in own_tensors(spec.module).items() if name not in states}
    for entry in spec.states:
        value = None if entry.grows is not None else initial_value(spec, entry)
        if value is not None:
            tensors[f"initial {entry.name}"] = torch.as_tensor(value)
    return tensors
