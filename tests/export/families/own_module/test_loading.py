"""The user's own file: found, run, and told of in one line where it fails."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from txl_export.families.own_module.family import prepare
from txl_export.families.own_module.loading import load_spec
from txl_export.families.own_module.own_code import OwnCodeError
from txl_export.options import ExportOptions
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent
from verified_steps import Heard

GOOD = """
import torch
from torch import nn
from txl_export import InputSpec, StateSpec, StepSpec, read_weights

class Cell(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.cell = nn.GRUCell(3, width)

    def forward(self, x, h):
        h = self.cell(x, h)
        return h * 1, h

def build(weights):
    module = Cell()
    if weights is not None:
        module.load_state_dict(read_weights(weights))
    return StepSpec(module, [InputSpec("x", ("B", 3))], [StateSpec("h", ("B", 4))], ["y"])

def plain():
    return build(None)

def many(weights, size, depth=2):
    return build(weights)

def wrong(weights):
    return build(weights).module

width = 4
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes a user's file under a name that no other test has."""
    kept, path = dict(sys.modules), list(sys.path)

    def write(text=GOOD, name="own_step_file.py"):
        place = tmp_path / name
        place.write_text(text)
        return place

    yield write
    for name in set(sys.modules) - set(kept):
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):  # torch's own are imported once
            del sys.modules[name]
    assert sys.path == path


def refusal(target, weights=None, kind=UsageError):
    with pytest.raises(kind) as caught:
        load_spec(str(target), weights)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_function_is_called_with_the_path_of_the_weights(file, tmp_path):
    path = file()
    torch.manual_seed(7)
    cell = nn.ModuleDict({"cell": nn.GRUCell(3, 4)})
    torch.save(cell.state_dict(), tmp_path / "model.pt")
    spec = load_spec(f"{path}:build", str(tmp_path / "model.pt"))
    assert torch.equal(spec.module.cell.weight_hh, cell["cell"].weight_hh)


def test_a_function_without_arguments_is_called_without_any(file):
    path = file()
    assert load_spec(f"{path}:plain", None).outputs == ["y"]
    assert "plain takes no weights, and model.pt was given" in str(refusal(f"{path}:plain", "model.pt"))


def test_the_file_keeps_its_name_and_its_source(file):
    module = load_spec(f"{file()}:build", None).module
    assert type(module).__module__ == "own_step_file"
    assert "self.cell(x, h)" in inspect.getsource(type(module).forward)


def test_a_file_named_as_another_module_leaves_that_alone(file):
    import random

    path = file(name="random.py")
    assert load_spec(f"{path}:build", None)
    assert sys.modules["random"] is random
    assert "self.cell" in inspect.getsource(type(load_spec(f"{path}:build", None).module))


def test_a_file_named_as_a_module_that_is_not_imported_yet_leaves_the_name_free(file, monkeypatch):
    for name in ("profile", "mypy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        load_spec(f"{file(name=f'{name}.py')}:build", None)
        assert name not in sys.modules


@pytest.mark.parametrize(
    "line", ["import msgpack_twin.parts", "from msgpack_twin import Packer", "msgpack_twin.Packer"]
)
def test_a_file_that_imports_the_package_of_its_own_name_is_told_to_have_another(line, file, tmp_path):
    package = tmp_path / "installed" / "msgpack_twin"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("Packer = 3\n")
    path = file(f"import msgpack_twin\n{line}\n{GOOD}", "msgpack_twin.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(package.parent))
        error = str(refusal(f"{path}:build", kind=OwnCodeError))
    assert error.endswith("; rename msgpack_twin.py, which hides msgpack_twin")


def test_a_step_may_import_a_module_beside_its_file(file):
    file("GAIN = 2\n", "beside_the_step.py")
    path = file(GOOD.replace("return h * 1, h", "import beside_the_step\n        return h * beside_the_step.GAIN, h"))
    assert prepare(f"{path}:build", ExportOptions(), Silent()).plan.batch_size == 1


def test_a_file_that_was_changed_is_read_again(file):
    load_spec(f"{file()}:build", None)
    changed = load_spec(f"{file(GOOD.replace('h * 1', 'h + 1'))}:build", None).module
    assert "h + 1" in inspect.getsource(type(changed).forward)


def test_modules_beside_the_file_can_be_imported(file):
    file("SIZE = 3\n", "beside_the_file.py")
    path = file("import beside_the_file\n" + GOOD)
    assert load_spec(f"{path}:build", None)


def test_a_path_may_have_colons(file, tmp_path):
    (tmp_path / "a:b").mkdir()
    path = file(name="a:b/own_step_file.py")
    assert load_spec(f"{path}:build", None)


def test_what_is_not_there_is_named(file, tmp_path):
    path = file()
    assert "none.py: no such file; expected FILE.py:FUNCTION" in str(refusal(f"{tmp_path}/none.py:build"))
    assert "is a folder" in str(refusal(f"{tmp_path}:build"))
    assert "names no function" in str(refusal(path))
    assert "has no bild; its functions are build, plain, many, wrong;" in str(refusal(f"{path}:bild"))
    assert "width of own_step_file.py is a int" in str(refusal(f"{path}:width"))
    assert "needs the arguments (weights, size, depth=2), expected one" in str(refusal(f"{path}:many"))
    assert "wrong returned a Cell, expected a txl_export.StepSpec" in str(refusal(f"{path}:wrong"))


def test_an_exception_in_the_users_code_names_its_place_and_keeps_its_frames(file):
    path = file(
        GOOD.replace("module = Cell()", "module = Cell(width=helper())") + "\ndef helper():\n    return {}['w']\n"
    )
    error = refusal(f"{path}:build", kind=OwnCodeError)
    assert "own_step_file.py:build failed: KeyError: 'w' (own_step_file.py:" in str(error)
    assert "return {}['w'])" in str(error)
    assert [line.split(" in ")[1] for line in error.frames.splitlines() if "File " in line] == ["build", "helper"]


def test_an_exception_in_a_library_is_told_at_the_users_line(file):
    error = refusal(f"{file(GOOD.replace('module = Cell()', 'module = Cell(-1)'))}:build", kind=OwnCodeError)
    assert "self.cell = nn.GRUCell(3, width)" in str(error)
    assert "torch" not in error.frames


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def build(:\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("1 / 0\n", "ZeroDivisionError: division by zero (own_step_file.py:1: 1 / 0)"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why_and_is_forgotten(file, text, told):
    path = file(text)
    error = str(refusal(f"{path}:build", kind=OwnCodeError))
    assert "own_step_file.py cannot be imported" in error
    assert told in error
    assert "own_step_file.py:" in error
    assert "own_step_file" not in sys.modules


def test_weights_that_do_not_fit_are_named(file, tmp_path):
    path, model = file(), tmp_path / "model.pt"
    state = nn.ModuleDict({"cell": nn.GRUCell(3, 4)}).state_dict()
    del state["cell.bias_hh"]
    torch.save({**state, "cell.weight_ih": torch.zeros(12, 5), "head.weight": torch.zeros(1)}, model)
    error = str(refusal(f"{path}:build", str(model), OwnCodeError))
    assert "the weights do not fit" in error
    assert 'Missing key(s) in state_dict: "cell.bias_hh". Unexpected key(s) in state_dict: "head.weight". ' in error
    assert "mismatch for cell.weight_ih: " in error
    assert "give this module's own weights" in error


def test_weights_that_were_forgotten_are_told(file):
    text = GOOD.replace("if weights is not None", "if True").replace("read_weights(weights)", "torch.load(weights)")
    path = file(text)
    error = str(refusal(f"{path}:build", kind=OwnCodeError))
    assert error.startswith("own_step_file.py:build failed: AttributeError: ")
    assert error.endswith("; no --weights were given")
    assert "no --weights" not in str(refusal(f"{path}:build", "model.pt", OwnCodeError))
    path = file(GOOD.replace("return build(None)", "return build[0]"))
    assert "no --weights" not in str(refusal(f"{path}:plain", kind=OwnCodeError))


def test_the_file_sees_no_arguments_but_its_own_name(file, monkeypatch):
    monkeypatch.setattr(sys, "argv", given := ["txl-deploy", "export", "--json"])
    path = file("import sys\nassert sys.argv == [__file__]\n" + GOOD.replace("Cell()", "Cell(len(sys.argv) + 3)"))
    assert load_spec(f"{path}:build", None).module.cell.hidden_size == 4
    assert sys.argv is given
    assert "1 / 0" in str(refusal(f"{file('1 / 0')}:build", kind=OwnCodeError))
    assert sys.argv is given


def test_a_file_is_said_to_run_where_there_is_one(file, tmp_path):
    heard = Heard()
    with pytest.raises(UsageError, match="no such file"):
        prepare(f"{tmp_path}/polcy.py:build", ExportOptions(), heard)
    assert heard.warnings == []
    assert prepare(f"{file()}:build", ExportOptions(), heard)
    assert "is run on this machine" in heard.warnings[0]


def test_what_the_users_code_prints_is_no_result(file, capsys):
    load_spec(f"{file('print(1)' + GOOD)}:build", None)
    assert capsys.readouterr() == ("", "1\n")


def test_a_file_that_changes_the_folder_does_not_move_the_bundle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "wandering.py").write_text("import os\nos.chdir('elsewhere')\ndef build(weights): return None\n")
    with pytest.raises(UsageError, match="returned a NoneType"):
        load_spec("wandering.py:build", None)
    assert Path.cwd() == tmp_path
