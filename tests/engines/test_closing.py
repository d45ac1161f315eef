"""Engines of steps that leave B open: B is fixed again, and for the bundle's B they are built of what was captured."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
import torch
import txl_export
from stand_ins.small_steps import ahead, cell, policy
from torch import nn
from txl_engines.bundles import build_bundle
from txl_engines.composing import compose, whole_programs
from txl_export.families.own_module import building
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.bundle.reading import Bundle, open_bundle

pytestmark = pytest.mark.device

B = 3


class Gate(nn.Module):
    """Its parameter has a name that is much like those of opened constants."""

    def __init__(self) -> None:
        super().__init__()
        self.open = nn.Parameter(torch.rand(8))


class Attending(nn.Module):
    """Reshapes with sizes that are kept and left, a table for each sequence, and rows of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate = nn.Linear(8, 24), Gate()

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat([torch.zeros(x.shape[0], 2, 8), x], 1)
        q, k, v = (part.reshape(x.shape[0], -1, 2, 4).transpose(1, 2) for part in self.mix(rows).chunk(3, -1))
        mask = torch.ones(x.shape[0], 1, rows.shape[1], rows.shape[1], dtype=torch.bool).tril()
        y = (q @ k.transpose(2, 3)).masked_fill(~mask, -1e4).softmax(-1) @ v
        y = y.transpose(1, 2).reshape(x.shape[0], -1, 8)[:, 2:]
        return y * self.gate.open + h[:, None], torch.tanh(h + y.mean(1))


def attending() -> StepSpec:
    torch.manual_seed(0)
    return StepSpec(Attending(), [InputSpec("x", ("B", "L", 8))], [StateSpec("h", ("B", 8))], ["y"])


MADE = {"policy": policy, "cell": cell, "ahead": ahead, "attending": attending}
every = pytest.mark.parametrize("kind", MADE)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A step's bundle with B open, and the same with B fixed."""
    made: dict[tuple[str, bool], Bundle] = {}

    def export(kind: str, opened: bool, batch_size: int) -> Bundle:
        path = tmp_path_factory.mktemp("closing") / "step.txl"
        spec = MADE[kind]()
        lengths = (3, 1) if any("L" in entry.shape for entry in spec.inputs) else ()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(building, "may_be_open", lambda plan: opened)
            txl_export.export(spec, path, batch_size=batch_size, segment_length=lengths, verify=False)
        bundle = open_bundle(path)
        assert {program.open_batch for program in bundle.manifest.programs} == {opened}
        return bundle

    def one(kind: str, opened: bool, batch_size: int = B) -> Bundle:
        key = (f"{kind} {batch_size}", opened)
        if key not in made:
            made[key] = export(kind, opened, batch_size)
        return made[key]

    return one


def with_shapes_said(content: bytes) -> onnx.ModelProto:
    """A graph in which each Reshape says all sizes: with B open, what a pass made says -1 for B, which is the same."""
    model = onnx.shape_inference.infer_shapes(onnx.load_from_string(content))
    known = {value.name: str(value.type.tensor_type.shape.dim) for value in model.graph.value_info}
    constants, said = {value.name: value for value in model.graph.initializer}, set[str]()
    for node in model.graph.node:
        if node.op_type == "Reshape" and node.input[1] in constants and node.output[0] in known:
            said.add(node.input[1])
            node.input[1] = known[node.output[0]]
    read = {name for node in model.graph.node for name in node.input}
    for name in said - read:
        model.graph.initializer.remove(constants[name])
    del model.graph.value_info[:]
    return model


@every
def test_what_engines_are_built_of_is_to_the_byte_what_it_is_of_a_bundle_that_was_never_open(both, kind):
    opened, fixed = both(kind, True), both(kind, False)
    programs = whole_programs(opened.manifest, "replace")
    assert programs == whole_programs(fixed.manifest, "replace") == fixed.manifest.programs
    for program in programs:
        found, expected = (with_shapes_said(compose(bundle, program)) for bundle in (opened, fixed))
        assert found.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    assert opened.manifest.model_id == fixed.manifest.model_id


def test_the_library_is_given_the_same_for_both(both, tmp_path):
    """Its result depends on the process that it is in, so the engines themselves are not compared."""
    made = []
    for opened in (True, False):
        path = Path(shutil.copytree(both("attending", opened).path, tmp_path / str(opened) / "step.txl"))
        engines = build_bundle(path, "rtx", gpus=(86,)).engines
        made.append([engine.sidecar.identity for engine in engines])
    assert made[0] == made[1]
