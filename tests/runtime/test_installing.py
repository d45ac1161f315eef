"""The line that adds an extra names where this package came from, and never a name that an index is asked for."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from txl_runtime.installing import pip_line


def noted(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    """Let pip have written this of how the package was installed."""
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: said))


def test_a_folder_that_was_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noted(monkeypatch, json.dumps({"url": tmp_path.as_uri(), "dir_info": {}}))
    assert pip_line("serve") == f"pip install '{tmp_path}[serve]'"
    noted(monkeypatch, json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}}))
    assert pip_line("export") == f"pip install -e '{tmp_path}[export]'"


def test_a_wheel_that_was_installed_is_named_as_a_shell_reads_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "it's a folder" / "txl_deploy-1-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    noted(monkeypatch, json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    assert shlex.split(pip_line("report")) == ["pip", "install", f"{wheel}[report]"]


@pytest.mark.parametrize(
    "said",
    [
        None,
        "no JSON",
        "[]",
        '{"url": 3}',
        '{"url": "file:///not/there/any/more.whl"}',
        '{"url": "https://files.example/txl_deploy.whl"}',
    ],
)
def test_elsewhere_a_checkout_is_where_to_type_it(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    noted(monkeypatch, said)
    assert pip_line("cpu") == "pip install '.[cpu]' in a checkout of the project"


def test_a_package_that_is_not_installed_at_all_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(()))
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", classmethod(lambda *_, **__: iter(())))
    assert pip_line("cpu") == "pip install '.[cpu]' in a checkout of the project"
