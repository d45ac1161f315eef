"""A step that cannot be captured is refused after one attempt, with the user's line, and with what to do."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from torch import nn
from txl_export.families.own_module import capture as capturing
from txl_export.families.own_module import own_code
from txl_export.families.own_module.building import write_step
from txl_export.families.own_module.diagnosis import CaptureError, reason_of
from txl_export.families.own_module.own_code import in_the_step, is_users, place_of
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.errors import UsageError
from txl_runtime.guard import graph_check
from txl_runtime.guard.protobuf import RefusedError
from txl_runtime.listener import Silent

X, H = [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))]


def refused(module, tmp_path, states=H, **options):
    """Return the message on a module that no route captures, and the number of attempts by torch.export."""
    spec = StepSpec(module, X, states, ["y"], **options)
    with pytest.raises(CaptureError) as caught:
        write_step(tmp_path, make_plan(spec, 2, (), Silent()), "fp32", "auto", Silent())
    said = str(caught.value)
    assert "\n" not in said
    assert "report this" not in said
    return said


@pytest.fixture
def attempts(monkeypatch):
    """The routes by which a graph was made."""
    tried = []
    convert = capturing._to_onnx

    def counted(exported, network, route):
        tried.append(route)
        return convert(exported, network, route)

    monkeypatch.setattr(capturing, "_to_onnx", counted)
    return tried


class Bessel(nn.Module):
    def forward(self, x, h):
        return torch.special.bessel_j0(x), h * 0.5 + x


def test_an_operator_that_onnx_lacks_is_told_with_the_users_line(tmp_path, attempts):
    said = refused(Bessel(), tmp_path)
    assert "ONNX lacks the operator prims.bessel_j0 (test_diagnosis.py:" in said
    assert ": return torch.special.bessel_j0(x), h * 0.5 + x)" in said
    assert attempts == ["export"], "what torch takes apart has it still"


def test_the_line_is_that_of_a_function_of_any_name_and_a_packages_follows(tmp_path, monkeypatch):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "a_package.py").write_text("import torch\n\ndef rotated(x):\n    return torch.special.bessel_j0(x)\n")
    monkeypatch.syspath_prepend(package)
    rotated = importlib.import_module("a_package").rotated
    monkeypatch.delitem(sys.modules, "a_package")

    def step(module, inputs, states):
        return {"y": rotated(inputs["x"])}, {"h": states["h"] * 0.5 + inputs["x"]}

    said = refused(nn.Identity(), tmp_path, step=step)
    assert re.search(
        r"\(test_diagnosis.py:\d+: .*rotated.*, in a_package.py:4: return torch.special.bessel_j0\(x\)\)", said
    )


class Descends(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, h):
        with torch.enable_grad():
            at = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad((self.inner(at) * x).sum(), at)
        return x - slope, h - 0.1 * slope


def test_gradients_in_a_step_are_named(tmp_path, attempts):
    said = refused(Descends(), tmp_path)
    assert "it computes gradients (test_diagnosis.py:" in said
    assert ": with torch.enable_grad():), and a graph computes none; write them as a formula" in said
    assert attempts == []


class Rotates(nn.Module):
    """As a diagonal state space model does, by complex numbers."""

    def __init__(self, polar):
        super().__init__()
        self.polar, self.angle = polar, nn.Parameter(torch.linspace(0, 1, 4))

    def forward(self, x, h):
        one = torch.complex(torch.zeros(4), self.angle)
        turn = torch.polar(torch.ones(4), self.angle) if self.polar else torch.exp(one)
        turned = torch.complex(x, h * 0.5) * turn
        return turned.real.clone(), turned.imag.clone()


def test_complex_numbers_that_onnx_lacks_are_named(tmp_path, attempts):
    said = refused(Rotates(polar=False), tmp_path)
    assert "ONNX lacks the operator aten.exp for complex numbers (test_diagnosis.py:" in said
    assert "turn = " in said
    assert "compute with real and imaginary parts" in said
    assert attempts == ["export"]


def test_complex_numbers_inside_a_step_may_be_exported(tmp_path):
    result = txl_export.export(StepSpec(Rotates(polar=True), X, H, ["y"]), tmp_path / "a.txl", batch_size=2)
    assert result.parity.passed


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_torchscript_has_no_python_to_capture(whole, tmp_path, attempts):
    module = torch.jit.script(Adds()) if whole else nn.Sequential()
    if not whole:
        module = Wraps(torch.jit.script(Adds()))
    said = refused(module, tmp_path)
    assert ("the module is TorchScript" if whole else "the part inner of the module is TorchScript") in said
    assert "make it from its class, and load its state dict into that" in said
    assert attempts == []


class Adds(nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor):
        return x + h, h * 0.5 + x


class Wraps(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, h):
        return self.inner(x, h)


def test_what_torch_jit_traced_is_exported(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(Adds(), (torch.zeros(2, 4), torch.zeros(2, 4)))
    assert txl_export.export(StepSpec(traced, X, H, ["y"]), tmp_path / "a.txl", batch_size=2).parity.passed


class Transforms(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, h):
        if self.kind == "fft":
            return torch.fft.rfft(x, 8192).abs().sum(1, keepdim=True) + h, h * 0.5 + x
        return x * torch.linalg.det(x.T @ x), h * 0.5 + x


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("fft", "DFT with matrices of 67125248 numbers, expected at most 40000000; take shorter frames"),
        ("det", "Det, which no graph of a bundle may have"),
    ],
)
def test_an_operator_that_no_bundle_may_have_is_refused_after_one_attempt_with_its_line(
    kind, found, tmp_path, attempts
):
    said = refused(Transforms(kind), tmp_path)
    assert f"it becomes the operator {found} (test_diagnosis.py:" in said
    assert f"torch.{'fft' if kind == 'fft' else 'linalg'}." in said
    assert attempts == ["export"]


class Chooses(nn.Module):
    """As an attention does that scales what its mask chooses, in one of several forms."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x, h):
        score = h[:, None, None] + x[:, None, :, None]
        if self.form == "as many":
            score[score > 1] = score[score > 1] * 2
        elif self.form == "one place":
            score[..., (x > 0).sum() % 4] = x[:, None]
        else:
            score = score + x.sin().sum()
        return score.sum((1, 2)), h * 0.5 + x


@pytest.mark.parametrize("form", ["as many", "one place"])
def test_a_choice_by_values_is_told_after_one_attempt_with_its_line_and_what_to_write(form, tmp_path, attempts):
    said = refused(Chooses(form), tmp_path)
    assert "(test_diagnosis.py:" in said
    assert ": score[" in said
    assert "; write torch.where(mask, new, old) or x.masked_fill(mask, value) for a choice by if or x[mask]" in said
    assert attempts == ["export"] * (form == "as many")


def test_a_node_that_no_graph_may_have_is_told_with_the_line_that_it_comes_from(tmp_path, monkeypatch):
    real = graph_check._returned

    def returned(op: str, *rest: Any) -> Any:
        if op == "Sin":
            raise RefusedError("no good reason", "one")
        return real(op, *rest)

    monkeypatch.setattr(graph_check, "_returned", returned)
    said = refused(Chooses("a sine"), tmp_path)
    assert "its graph has no good reason at Sin, expected one (test_diagnosis.py:" in said, "without a name of its own"
    assert "(test_diagnosis.py:" in said
    assert "x.sin().sum())" in said


def test_a_package_of_the_system_is_no_code_of_the_users():
    """An environment may read the system's packages besides its own, torch among them."""
    assert not is_users("/usr/lib/python3/dist-packages/torch/_dynamo/eval_frame.py")
    assert is_users("/home/me/model.py")


def test_the_script_that_exports_is_no_place_in_its_model():
    ours = Path(own_code.__file__).parent
    script, model = ("/home/me/export.py", 4, "main"), ("/home/me/model.py", 9, "forward")
    call, later = (str(ours / "module_call.py"), 163, "called"), (str(ours / "network.py"), 71, "forward")
    frames = [FrameSummary(*frame) for frame in (script, later, call, model)]
    assert place_of(in_the_step(frames)).startswith(" (model.py:9")
    assert place_of(in_the_step(frames[:2])) == "", "an operator behind the step, such as the softmax of its logits"


class Grows(nn.Module):
    def forward(self, x, h):
        seen = torch.cat([h, x[:, None]], 1)
        return torch.where(x > 1e6, torch.rand_like(x), seen.sum(1)), seen[:, -3:]


def test_a_cause_of_the_step_itself_is_not_tried_again_with_other_sizes(tmp_path, attempts):
    said = refused(Grows(), tmp_path, [StateSpec("h", ("B", 3, 4), grows=1)])
    assert "(test_diagnosis.py:" in said
    assert attempts == ["export"]


class Scales(nn.Module):
    """As models of Gemma's kind do: a number of the model is kept in bfloat16."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, size).to(torch.bfloat16))

    def forward(self, x, h):
        return x * self.scale[:4].type_as(x) + self.scale.float().sum(), h * 0.5 + x


def test_a_buffer_of_bfloat16_is_exported(tmp_path):
    spec = StepSpec(Scales(600), X, H, ["y"])
    assert txl_export.export(spec, tmp_path / "a.txl", batch_size=2).parity.passed
    stream = txl_runtime.load(tmp_path / "a.txl", "cpu").stream(2)
    x = np.ones((2, 4), np.float32)
    expected = spec.module(torch.from_numpy(x), torch.zeros(2, 4))[0]
    np.testing.assert_allclose(stream.run({"x": x})["y"], expected.numpy(), rtol=1e-5)


def test_a_sparse_buffer_is_refused_with_what_to_keep_instead():
    module = Adds()
    module.register_buffer("edges", torch.eye(4).to_sparse())
    with pytest.raises(
        UsageError, match=r"edges is torch.sparse_coo, expected a dense tensor; keep edges.to_dense\(\)"
    ):
        make_plan(StepSpec(module, X, H, ["y"]), 2, (), Silent())


def test_a_long_error_of_another_library_keeps_its_cause():
    error = ValueError(f"the cause {'word ' * 200} the place")
    reason, _ = reason_of(error, Adds())
    assert reason.startswith("ValueError: the cause word")
    assert reason.endswith("the place")
    assert len(reason) < 400


def test_what_the_exporter_could_not_convert_is_told_by_its_cause():
    from torch.onnx.errors import OnnxExporterError

    error = OnnxExporterError("Failed to convert; see the stack trace above")
    error.__cause__ = ValueError("axis 3 is out of range")
    assert reason_of(error, Adds())[0] == "ValueError: axis 3 is out of range"
