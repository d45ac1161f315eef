"""The table of verbs, what is imported when, and a command line without its own packages."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from txl_deploy import main as entry
from txl_deploy import verbs

ROOT = Path(__file__).parents[2]
COMMANDS = Path(verbs.__file__).parent / "commands"

ANSWERED = """
import sys
from txl_deploy.main import main
sys.argv = ["txl-deploy", *{arguments!r}]
try:
    main()
except SystemExit as stop:
    print(*sorted(name for name in sys.modules if name.startswith(("txl_", "numpy", "rich", "torch"))), file=sys.stderr)
    sys.exit(stop.code)
"""


def modules_after(*arguments: str, code: int = 0) -> set[str]:
    """Return the modules that are imported when `txl-deploy` has answered."""
    program = ANSWERED.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_the_table_says_what_the_function_says(verb: str) -> None:
    said = inspect.getdoc(import_module(f"txl_deploy.commands.{verb}").run)
    assert said is not None
    assert verbs.VERBS[verb] == said.partition("\n\n")[0].replace("\n", " ")


def test_every_module_with_a_verb_is_in_the_table() -> None:
    written = {path.stem for path in COMMANDS.glob("*.py") if "\ndef run(" in path.read_text()}
    assert written == set(verbs.VERBS)


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ()], ids=" ".join)
def test_no_verb_is_imported_to_be_listed(arguments: tuple[str, ...]) -> None:
    loaded = modules_after(*arguments)
    assert "txl_deploy.verbs" in loaded
    assert not {name for name in loaded if name.startswith(("txl_deploy.commands", "txl_runtime", "numpy"))}


def test_the_verb_that_is_called_is_imported_and_no_other() -> None:
    loaded = modules_after("score", "--help")
    called = {name for name in loaded if name.startswith("txl_deploy.commands.")}
    assert called == {"txl_deploy.commands.score", "txl_deploy.commands.options"}
    assert not {name for name in loaded if name.startswith(("txl_export", "txl_engines", "torch"))}


@pytest.mark.parametrize("arguments", [("inspct",), ("--verion",)], ids=" ".join)
def test_a_wrong_verb_imports_none(arguments: tuple[str, ...]) -> None:
    assert not {name for name in modules_after(*arguments, code=2) if name.startswith("txl_deploy.commands")}


@pytest.mark.parametrize("absent", [("typer",), ("rich",), ("typer", "rich")], ids=" and ".join)
def test_a_command_line_that_is_not_installed_says_so(
    absent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["txl-deploy", "inspect", "model.txl", "--json"])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert err.startswith(f"error: the command line needs {' and '.join(absent)}, not installed here; pip install ")
    assert json.loads(out) == {"error": err.strip().removeprefix("error: "), "exit_code": 2}


@pytest.mark.parametrize(
    ("package", "source", "said"),
    [
        (
            "msgspec",
            "raise SystemError('core 1 is not core 2')",
            "msgspec cannot be imported: SystemError: core 1 is not",
        ),
        ("numpy", "", "numpy cannot be imported: ModuleNotFoundError: No module named 'numpy."),
    ],
)
def test_a_package_that_is_broken_is_named_and_is_no_defect_of_this_project(
    package: str, source: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(source)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "txl_deploy", "generate", "samples/tiny.txl", "--prompt", "a"]
    kept = {name: value for name, value in os.environ.items() if name != entry.TRACEBACK}
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the package {said}")
    assert done.stderr.count("\n") == 1
    assert "defect" not in done.stderr
