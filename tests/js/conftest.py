"""Chromium and a folder at an address for the tests of one module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import browser, served
from scripting import module, page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is served: tests put bundles beside the page."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def window(folder: Path) -> Iterator[Any]:
    """A page with the runtime and onnxruntime-web."""
    module("onnxruntime-web/package.json")
    with browser() as chrome, served(folder) as address, page(chrome, folder, address) as opened:
        yield opened
