"""The documents: links lead somewhere, commands are real, figures of speech aside."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from frozen import frozen
from support import FIXTURES, cli, typed
from txl_export.adapters.table import ADAPTERS
from txl_export.families.own_module.plan import make_plan
from txl_runtime.device.gpu import shows_gpu
from txl_runtime.listener import Silent
from txl_runtime.sessions import SessionInfo

from txl_deploy.serve.app import ENDPOINTS
from txl_deploy.serve.bodies import BODY_BYTES, BODY_SECONDS
from txl_deploy.serve.completions import REQUEST_SECONDS
from txl_deploy.serve.server import CONNECTIONS, HEADER_BYTES, KEEP_ALIVE
from txl_deploy.serve.settings import MAX_TOKENS, PROMPT_TOKENS
from txl_deploy.verbs import VERBS, command

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name / "README.md" for name in ("tests", "benchmarks", "samples", "conformance")),
]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_no_page_message_or_sample_asks_an_index_for_the_project() -> None:
    """It is on none, and anyone may register its name there."""
    named = re.compile(r"""pip install(?!.*--no-index)[^\n`]*['"= ]txl-deploy(?![\w-])(?!\[\w+\] @)""")
    assert named.search("pip install 'txl-deploy[serve]'")
    assert named.search("/opt/x/bin/pip install -U txl-deploy")
    folders = ("txl_deploy", "export", "runtime", "samples", "docs")
    written = [ROOT / "README.md", *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    texts = {path: path.read_bytes().decode(errors="replace") for path in written if path.is_file()}
    assert len(texts) > 300
    assert [path for path, text in texts.items() if path.suffix != ".pyc" and named.search(text)] == []


def anchors(document: Path) -> set[str]:
    """Return the names that links may have in a page: its headings, in small letters, with hyphens for spaces."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_into_pages_lead_to_headings_in_documents_and_in_messages() -> None:
    for source in (
        *DOCUMENTS,
        *(file for name in ("txl_deploy", "export", "runtime") for file in (ROOT / name).rglob("*.py")),
    ):
        text = source.read_text()
        found = re.findall(r"\]\(([^)#:]*)#([^)]*)\)", text) if source.suffix == ".md" else []
        found += [(f"/{page}", name) for page, name in re.findall(r"\b(docs/[\w/-]+\.md)#([\w-]+)", text)]
        for target, name in found:
            page = ROOT / target[1:] if target.startswith("/") else source.parent / target if target else source
            if page.suffix == ".md":
                assert name in anchors(page), f"{source.name} links to {target}#{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_have_the_options_they_are_shown_with(document: Path) -> None:
    for line in re.findall(r"^(?:[ \t]+\$? ?|\$ ?)txl-deploy (.+)$", document.read_text(), flags=re.MULTILINE):
        verb, *words = shlex.split(line.split("#")[0].replace("…", ""))
        if verb.startswith("-") or "|" in verb:
            continue
        assert verb in VERBS, f"{document.name}: txl-deploy {line}"
        known = {
            option for parameter in command(verb).params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        unknown = [word for word in words if word.startswith("-") and word.split("=")[0] not in known]
        assert not unknown, f"{document.name}: txl-deploy {line}"


@pytest.mark.slow
def test_the_page_on_engines_is_typed_as_it_stands_in_a_folder_elsewhere(tmp_path: Path) -> None:
    """As far as a machine without a GPU goes: what runs engines says what it lacks."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform")
    shutil.copy(FIXTURES / "release_0_8" / "tokens.pt", tmp_path / "model.pt")
    shutil.copy(FIXTURES / "release_0_8" / "text.txt", tmp_path / "heldout.txt")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    lines = typed((ROOT / "docs" / "engines.md").read_text())
    assert {line.split()[1] for line in lines} == {"export", "build", "inspect", "selftest", "verify"}
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "XDG_CACHE_HOME": str(tmp_path)},
        )
        if "--backend rtx" in line and not shows_gpu():
            assert (done.returncode, "no usable CUDA driver" in done.stderr) == (2, True), line + done.stderr
        elif "--precision int8" in line:  # this model's matrices are too small to be rounded
            assert (done.returncode, "has no matrix of 16384 bytes" in done.stderr) == (2, True), line + done.stderr
        else:
            assert done.returncode == 0, line + done.stderr


def test_a_wheelhouse_is_made_by_the_command_that_the_page_on_jetsons_shows() -> None:
    def options(text: str) -> list[str]:
        (command,) = re.findall(r"pip download ((?:.*\\\n)*.*)", text)
        return [word for word in shlex.split(command.replace("$(PYTHON_VERSION)", "3.10")) if word[0] != "."]

    assert options((ROOT / "Makefile").read_text()) == options((ROOT / "docs" / "jetson.md").read_text())


@pytest.mark.parametrize("document", ["SECURITY.md", "docs/reliability.md"])
def test_what_holds_a_promise_is_there(document: str) -> None:
    """Files, tests by their names, and targets of `make fuzz`."""
    text = (ROOT / document).read_text()
    for name, test in re.findall(r"`((?:tests|benchmarks|docs)/[\w./-]+)(?:::(\w+))?", text):
        assert (ROOT / name).exists(), f"{document} names {name}"
        assert not test or f"def {test}(" in (ROOT / name).read_text(), f"{document} names {name}::{test}"
    for targets in re.findall(r"Fuzzed: ([^.]*)", text):
        for target in re.findall(r"`(\w+)`", targets):
            assert f'"{target}"' in (ROOT / "tests/fuzz/targets/__init__.py").read_text(), f"{document} names {target}"


def test_every_promise_names_what_holds_it() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    promises = re.findall(r"^\*\*\d+\. (.*?)(?=^\*\*\d|^## )", text, re.DOTALL | re.MULTILINE)
    assert len(promises) == 10
    for promise in promises:
        assert re.search(r"Tests:\s+`tests/", promise), promise


def test_the_design_names_every_module() -> None:
    """Its trees are indented by four; the first word of a line is a file, or a folder that ends with a slash.

    Adapters stand in their own table.
    """
    named: list[str] = []
    for tree in re.findall(
        r"^```text\n(\S+/ .*?)^```", (ROOT / "docs" / "design.md").read_text(), re.DOTALL | re.MULTILINE
    ):
        folders: list[str] = []
        for line in tree.splitlines():
            name = line.split()[0]
            folders[(len(line) - len(line.lstrip())) // 4 :] = [name]
            named += ["".join(folders)] if name.endswith(".py") else []
    packages = [
        *(ROOT / "export" / name for name in ("txl_export", "txl_engines", "txl_report")),
        ROOT / "runtime/txl_runtime",
        ROOT / "txl_deploy",
    ]
    modules = {str(path.relative_to(ROOT)) for package in packages for path in package.rglob("*.py")}
    modules -= {f"export/txl_export/adapters/{adapter.module}.py" for adapter in ADAPTERS.values()}
    assert len(named) == len(set(named))
    assert {name for name in named if not name.endswith("__init__.py")} == {
        name for name in modules if not name.endswith("__init__.py")
    }


def test_every_function_that_the_page_on_travel_follows_exists() -> None:
    """Named as `function` (`module`), with the method's class before a dot."""
    page = " ".join((ROOT / "docs" / "travel.md").read_text().split())
    followed = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`", page)
    assert len(followed) > 40
    for name, module in followed:
        found: list[ast.AST] = [ast.parse((ROOT / module).read_text("utf-8"))]
        for part in name.split("."):
            inside = (node for parent in found for node in ast.iter_child_nodes(parent))
            found = [node for node in inside if isinstance(node, DEFINITIONS) and node.name == part]
        assert found, f"docs/travel.md names {name} of {module}"
    for path in re.findall(r"`((?:runtime|export|txl_deploy)/[\w/]+\.py)`", page):
        assert (ROOT / path).is_file(), f"docs/travel.md names {path}"


def test_the_page_on_tests_lists_every_helper_and_every_stand_in() -> None:
    _, _, page = (ROOT / "tests" / "README.md").read_text().partition("## Helpers")
    for part, folder in zip(page.split("## Stand-ins"), ("helpers", "stand_ins"), strict=True):
        listed = re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)
        found = {path.stem for path in (ROOT / "tests" / folder).glob("*.py")}
        assert sorted(listed) == sorted(name for name in found if not name.startswith(("__", "test_")))
    beside = {path.name for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")}
    assert beside == {"conftest.py"}, "a module that tests share belongs into tests/helpers"


def test_the_page_on_benchmarks_names_every_script() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE)
    assert all((ROOT / "benchmarks" / name).is_file() for name in listed)
    scripts = [path for path in (ROOT / "benchmarks").rglob("*.py") if "__main__" in path.read_text()]
    assert [path.name for path in scripts if f"{path.name}`" not in page] == []


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "self"}


def test_the_page_on_the_runtime_has_every_function_as_it_is() -> None:
    places = {
        "txl_runtime": txl_runtime,
        "model": txl_runtime.Model,
        "stream": txl_runtime.Stream,
        "state": txl_runtime.StreamState,
    }
    (overview, *_) = python_blocks("docs/runtime.md")
    overview = re.sub(r"\n +", " ", overview)  # a signature may go on in the next line
    shown = re.findall(r"^(?:\w+ = )?(\w+)\.([\w.]+)\((.*?)\)(?: +#.*)?$", overview, re.MULTILINE)
    for place, name, signature in shown:
        function: Any = places[place]
        for part in name.split("."):
            function = getattr(function, part)
        assert defaults(eval(f"lambda {signature}: None")) == defaults(function), f"{place}.{name}"
    public = {
        name for name, _ in inspect.getmembers(txl_runtime.Stream, inspect.isfunction) if not name.startswith("_")
    }
    assert {name for place, name, _ in shown if place == "stream"} == public - {"iter_memory"}


def test_the_snippets_for_embedders_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "model.txl").symlink_to(frozen("clusters"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    names: dict[str, Any] = {}
    for block in python_blocks("docs/first-steps.md"):
        exec(block, names)
        if block.startswith("# policy.py"):
            (tmp_path / "policy.py").write_text(block)
            torch.save(names["Policy"]().state_dict(), "policy.pt")
            txl_export.export("policy.py:build", "policy.txl", weights="policy.pt", batch_size=16, verify=False)
    assert sys.stdout.getvalue()
    assert names["logprobs"].shape == (1, 2, 256)
    assert names["action"].shape == (16, 3)
    names |= {"np": np, "logging": logging}
    log = logging.getLogger("txl_runtime")
    handlers, level = list(log.handlers), log.level
    with contextlib.ExitStack() as after:
        after.callback(setattr, log, "handlers", handlers)
        after.callback(log.setLevel, level)
        for block in python_blocks("docs/runtime.md")[1:]:
            exec(block, names)
    assert names["following"].shape == (2, 256)
    assert names["result"].passed
    tries, real = list[object](), txl_runtime.load

    def disturbed(path: object) -> txl_runtime.Model:
        tries.append(path)
        if len(tries) < 3:
            raise txl_runtime.BundleError("was replaced")
        return real("demo/model.txl")

    monkeypatch.setattr(txl_runtime, "load", disturbed)
    assert names["loaded"]("demo/model.txl").batch_size == 2
    assert len(tries) == 3


def test_the_snippets_on_own_models_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is exported as a file and streamed; of the others the module is run as an export runs it."""
    monkeypatch.chdir(tmp_path)
    first, *others = python_blocks("docs/own-models.md") + python_blocks("docs/own-models-reference.md")
    (tmp_path / "my_model.py").write_text(first)
    names: dict[str, Any] = {}
    exec(first, names)
    torch.save(names["Policy"]().state_dict(), "policy.pt")
    txl_export.export("my_model.py:build", "policy.txl", weights="policy.pt", batch_size=4, verify=False)
    tried = 0
    for block in others:
        exec(block, names)
        if "def build(" in block:
            make_plan(names["build"](None), 2, (), Silent())
            tried += 1
    assert tried == 6
    assert names["action"].shape == names["preview"].shape == (4, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "options"), [("docs/first-steps.md", "--batch-size 16"), ("docs/own-models.md", "--batch-size 4")]
)
def test_the_export_of_a_policy_prints_the_size_that_its_page_shows(page: str, options: str, tmp_path: Path) -> None:
    """Reports hold measured figures, whose digits differ between machines."""
    block = next(block for block in python_blocks(page) if "class Policy" in block)
    (tmp_path / "policy.py").write_text(block)
    names: dict[str, Any] = {}
    exec(block, names)
    torch.save(names["Policy"]().state_dict(), tmp_path / "policy.pt")
    typed = f"export policy.py:build --weights policy.pt -o policy.txl {options}"
    assert f"txl-deploy {typed}" in (ROOT / page).read_text().replace("my_model.py", "policy.py")
    done = cli(*typed.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown, printed = (
        float(re.findall(r"policy\.txl: ([\d.]+) kB, verified", text)[0])
        for text in ((ROOT / page).read_text(), done.stdout)
    )
    assert printed == pytest.approx(shown, rel=0.03)


@pytest.mark.slow
def test_a_bundle_of_the_demo_has_the_size_that_the_first_page_shows(tmp_path: Path) -> None:
    """An untrained one, without the part of its report that a verification fills."""
    sample = [sys.executable, ROOT / "samples/train_char_lm.py", "--out", "demo", "--steps", "1", "--eval-bytes", "600"]
    subprocess.run(sample, cwd=tmp_path, check=True, capture_output=True, timeout=250)
    done = cli("export", "demo/model.pt", "--no-verify", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown, printed = (
        float(re.findall(r"demo/model\.txl: ([\d.]+) MB, (?:NOT )?verified", text)[0])
        for text in ((ROOT / "docs" / "first-steps.md").read_text(), done.stdout)
    )
    assert printed == pytest.approx(shown, rel=0.05)


def test_the_snippets_for_sessions_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "model.txl").symlink_to(frozen("clusters"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in python_blocks("docs/serving-reference.md"):
        exec(block, names)
    assert len(names["drawn"]) == 8
    assert [len(text) for text in names["texts"]] == [8, 8]


def test_the_page_on_serving_lists_every_endpoint_and_every_field_of_a_session() -> None:
    endpoints, _, rest = (ROOT / "docs" / "serving-reference.md").read_text().partition("### A session\n")
    cells = re.findall(r"^\| (.*?) \| ", endpoints, re.MULTILINE)
    listed = set(re.findall(r"(?<= )/[\w/]*", " ".join(cells)))
    assert listed == {path.format(name="NAME", file="FILE") for path in ENDPOINTS}
    session, _, _ = rest.partition("\n## ")
    cells = re.findall(r"^\| (`.*?) \| ", session, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(cells)) == [field.name for field in fields(SessionInfo)]


def test_the_page_on_serving_names_limits_as_they_are() -> None:
    text = (ROOT / "docs" / "serving-reference.md").read_text()
    flags = {option: parameter.default for parameter in command("serve").params for option in parameter.opts}
    for flag in re.findall(r"`(--(?:max|session|idle|drain|checkpoint)-[\w-]+)`", text):
        assert flag in flags, flag
    for flag, shown in {
        "--max-sessions": "1,024",
        "--max-waiting": "256",
        "--session-bytes": "1 GiB",
        "--idle-seconds": "1 hour",
    }.items():
        number = float(shown.split()[0].replace(",", ""))
        number *= {"MiB": 1 << 20, "GiB": 1 << 30, "hour": 3600}.get(shown.split()[-1], 1)
        assert flags[flag] == number, flag
        assert any(f"`{flag}`" in line and shown in line for line in text.splitlines()), flag
    for row, number in {
        "| body | 1 MiB": BODY_BYTES / (1 << 20),
        "| prompt | 262,144 tokens |": PROMPT_TOKENS,
        "| `max_tokens` | 16,384 |": MAX_TOKENS,
        "| a request's line and headers, while they are incomplete | 32 KiB |": HEADER_BYTES / (1 << 10),
        "| the body, within | 20 s |": BODY_SECONDS,
        "| a whole request | 600 s |": REQUEST_SECONDS,
        "| connections | 511 |": CONNECTIONS - 1,
        "| a connection without a request, after an answer | 30 s |": KEEP_ALIVE,
    }.items():
        assert row in text
        assert float(re.findall(r"\d+", row.replace(",", ""))[0]) == number, row
