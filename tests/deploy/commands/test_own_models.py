"""Models of one's own on the command line: the whole way of a right one, and every wrong one in one line."""

from __future__ import annotations

import json
import signal
import warnings
from pathlib import Path

import pytest
import torch
from stand_ins import bad_models
from txl_runtime.errors import UsageError

from txl_deploy import stopping
from txl_deploy.commands import own_modules

FILE = Path(bad_models.__file__)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder but for the models' file and two files of weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(FILE.read_text())
    torch.save(bad_models.Cell().state_dict(), "good.pt")
    torch.save({"cell.weight_ih": torch.zeros(24, 4)}, "other.pt")


def test_a_model_goes_the_whole_way(run):
    made = run("export", "models.py:good", "--weights", "good.pt", "-o", "cell.txl", "--batch-size", 2, "--json")
    assert made.code == 0, made.stderr
    document = json.loads(made.stdout)
    assert document["parity"]["passed"]
    assert any("models.py is run on this machine" in line for line in made.lines)
    shown = run("inspect", "cell.txl")
    assert "models.py:good" in shown.stdout
    assert "independent" in shown.stdout
    assert run("selftest", "cell.txl").code == 0
    verified = run(
        "verify", "cell.txl", "--module", "models.py:good", "--weights", "good.pt", "--segments", 8, "--json"
    )
    assert verified.code == 0, verified.stderr
    assert json.loads(verified.stdout)["reference"].startswith("the module itself")
    replayed = run("verify", "cell.txl", "--json")
    assert "the bundle's own vectors" in json.loads(replayed.stdout)["reference"]
    for verb, option in (("generate", ("--prompt-tokens", "1")), ("score", ("models.py",))):
        refused = run(verb, "cell.txl", *option)
        assert refused.code == 2
        assert "this model reads x (feature)" in refused.lines[-1]


class Policy(torch.nn.Module):
    """A GRU with its state in a buffer, as policies for robots are exported."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = torch.nn.GRU(4, 8), torch.nn.Linear(8, 2)
        self.register_buffer("hidden_state", torch.ones(1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, h = self.rnn(x.unsqueeze(0), self.hidden_state)
        self.hidden_state[:] = h
        return self.head(out.squeeze(0))


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_an_archive_of_torchscript_becomes_a_file_and_the_file_a_bundle(run, tmp_path):
    torch.jit.save(torch.jit.script(Policy()), "policy.pt")
    refused = run("export", "policy.pt")
    assert refused.code == 2
    assert "policy.pt: this is a TorchScript archive, whose module is code that is not run here" in refused.lines[-1]
    assert "txl-deploy inspect policy.pt --skeleton > FILE.py" in refused.lines[-1]
    quiet = run("export", "policy.pt", "--json")
    assert "TorchScript archive" in json.loads(quiet.stdout)["error"]
    shown = run("inspect", "policy.pt")
    assert "nn.GRU(4, 8)" in shown.stdout
    assert "--skeleton" in " ".join(shown.stdout.split())
    printed = run("inspect", "policy.pt", "--skeleton")
    assert printed.stdout == refused.stdout == json.loads(run("inspect", "policy.pt", "--json").stdout)["skeleton"]
    assert not (tmp_path / "policy.txl").exists()
    (tmp_path / "made.py").write_text(printed.stdout)
    made = run("export", "made.py:build", "--weights", "policy.pt", "-o", "policy.txl", "--batch-size", 2, "--json")
    assert made.code == 0, made.stderr
    assert json.loads(made.stdout)["parity"]["passed"]
    for other in ("good.pt", "policy.txl"):
        said = run("inspect", other, "--skeleton")
        assert (said.code, said.stdout) == (2, "")
        assert "leave out --skeleton" in said.lines[-1] or "leave them out" in said.lines[-1]


def exported_by_torch(cell: torch.nn.Module, path: str, inputs: list[str], outputs: list[str]) -> None:
    given = (torch.zeros(1, 4), torch.zeros(1, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(cell.eval(), given, path, dynamo=False, input_names=inputs, output_names=outputs)


def test_a_bundle_is_held_against_a_file_from_elsewhere(run, tmp_path):
    """A cell exported by torch itself: its own weights, then others."""
    assert run("export", "models.py:good", "--weights", "good.pt", "-o", "cell.txl", "--no-verify").code == 0
    cell = bad_models.Cell()
    for change, code in ((0.0, 0), (0.01, 1)):
        cell.load_state_dict({name: tensor + change for name, tensor in torch.load("good.pt").items()})
        exported_by_torch(cell, "cell.onnx", ["x", "h"], ["y", "h_out"])
        found = run("verify", "cell.txl", "--checkpoint", "cell.onnx", "--segments", 20, "--json")
        assert found.code == code, found.stderr
        assert json.loads(found.stdout)["passed"] == (code == 0)
    assert "they part first at y in segment 1 of 20" in found.lines[-1]
    for wrong in (("--state", "h_out"), ("--rename", "x"), ("--text", "models.py"), ("--bisect", "--rename", "x=x")):
        refused = run("verify", "cell.txl", "--checkpoint", "cell.onnx", *wrong)
        assert (refused.code, refused.stdout) == (2, "")


def test_a_file_from_elsewhere_is_held_against_its_module(run, tmp_path):
    """The same table, document and exit codes as of a bundle, and a line for what cannot be compared."""
    cell = bad_models.Cell()
    for name, change in (("right", 0.0), ("other", 0.01)):
        cell.load_state_dict({key: tensor + change for key, tensor in torch.load("good.pt").items()})
        exported_by_torch(cell, f"{name}.onnx", ["in.1", "in.2"], ["out.1", "out.2"])
    (tmp_path / "none.onnx").write_bytes(b"nothing")
    asked = ("--module", "models.py:good", "--weights", "good.pt", "--segments", 8)
    refused = run("verify", "right.onnx", *asked)
    assert refused.code == 2
    pasted = refused.lines[-1].partition("; give ")[2].split()
    assert pasted == ["--rename", "in.1=x", "--rename", "in.2=h", "--rename", "out.1=y", "--state", "in.2=out.2"]
    asked = (*asked, *pasted)
    found = run("verify", "right.onnx", *asked, "--json")
    assert (found.code, json.loads(found.stdout)["passed"]) == (0, True), found.stderr
    shown = run("verify", "right.onnx", *asked)
    assert shown.code == 0
    for part in ("fp32 on right.onnx, by ONNX Runtime on the CPU, against models.py:good", "outputs max abs", "passed"):
        assert part in " ".join(shown.stdout.split())
    failed = run("verify", "other.onnx", *asked)
    assert failed.code == 1
    assert "FAILED" in failed.stdout
    assert "they part first in segment 1 of segments of 1, at output y, state h: a single step" in failed.lines[-1]
    for arguments, said in (
        (("right.onnx",), "right.onnx: is an ONNX file, expected the module to compare it with; give --module"),
        (("right.onnx", *asked, "--text", "models.py"), "is an ONNX file, which has no use for --text"),
        (("none.onnx", *asked), "none.onnx: 7 bytes that are no ONNX model"),
    ):
        refused = run("verify", *arguments)
        assert (refused.code, refused.stdout) == (2, "")
        assert said in refused.lines[-1]


WRONG = {
    "no such file": ("nowhere.py:build", (), "nowhere.py: no such file"),
    "wrong return type": ("models.py:wrong_type", (), "returned a Cell, expected a txl_export.StepSpec"),
    "an exception": ("models.py:raises", (), "the module failed: KeyError: 'no such thing'"),
    "weights that do not fit": ("models.py:good", ("--weights", "other.pt"), "the weights do not fit"),
    "int8": ("models.py:good", ("--precision", "int8"), "expected fp32, fp16 or bf16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_is_one_line_and_exit_code_2_and_leaves_nothing(run, tmp_path, case):
    target, options, words = WRONG[case]
    before = {path.name for path in tmp_path.iterdir()}
    ended = run("export", target, *options, "-o", "out.txl")
    assert ended.code == 2, ended.stderr
    assert ended.lines[-1].startswith("error: ")
    assert words in ended.lines[-1]
    assert not any("Traceback" in line for line in ended.lines)
    assert {path.name for path in tmp_path.iterdir()} - before <= {"__pycache__"}


def test_of_an_exception_the_users_own_frames_are_shown(run):
    ended = run("export", "models.py:raises", "-o", "out.txl")
    frames = "\n".join(ended.lines[:-1])
    assert 'models.py", line' in frames
    assert "in forward" in frames
    assert "site-packages" not in frames
    assert "txl_export" not in frames


def test_of_a_signal_that_ended_a_call_no_frames_are_shown(monkeypatch):
    error, printed = UsageError("the module failed"), list[str]()
    error.frames = "models.py, line 1"  # type: ignore[attr-defined]
    monkeypatch.setattr(own_modules.stderr, "print", lambda text, **_: printed.append(text))
    for signals in ([], [signal.SIGTERM]):
        monkeypatch.setattr(stopping, "_received", signals)
        with pytest.raises(UsageError), own_modules.own_frames():
            raise error
    assert printed == ["models.py, line 1"]


FORGETFUL = """
import torch
from txl_export import InputSpec, StepSpec

class Forgetful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h, self.calls = torch.zeros(1, 4), 0

    def forward(self, x):
        self.h, self.calls = torch.tanh(self.h + x), self.calls + 1
        return self.h * self.calls

def build(weights):
    return StepSpec(Forgetful(), [InputSpec("x", ("B", 4))], [], ["y"])
"""


def test_undeclared_state_is_one_line_and_then_the_lines_that_declare_it(run, tmp_path):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    ended = run("export", "forgetful.py:build", "-o", "out.txl", "--json")
    line, *declared = ended.lines[-6:]
    assert line.startswith("error: a call changes calls, h of the module, which no state declares")
    assert declared == [f"    {one}" for one in json.loads(ended.stdout)["declare"]]
    assert declared == [
        "    model.calls = torch.tensor(0, dtype=torch.int32)  # forward sets it to tensors, too",
        "    states=[  # beside those that are declared",
        '        StateSpec("calls", (), dtype="int32", attribute="calls"),',
        '        StateSpec("h", ("B", 4), attribute="h"),',
        "    ]",
    ]
