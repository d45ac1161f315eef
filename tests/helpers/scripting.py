"""The runtime in JavaScript, for tests: Node, and what `make js` installs into `.js`."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import opened

from conformance import run as runner

ROOT = Path(__file__).parents[2]
RUNTIME, FOLDER = ROOT / "runtime" / "js", ROOT / ".js"
WASM = ".js/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs"
PAGE = f"""
<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><title>a page</title>
<script type="module">
  import * as ort from "/{WASM}";
  import * as runtime from "/runtime/js/index.js";
  import {{ Driver, requestOf }} from "/runtime/js/tests/answers.js";
  ort.env.wasm.numThreads = 1;
  const driver = new Driver(ort, "0");
  Object.assign(window, {{ ort, runtime, ask: async (line) => JSON.stringify(await driver.answer(requestOf(line))) }});
</script>
"""


def node() -> str:
    """Return the path of Node; skip the test where it is missing."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("no node here; apt-get install nodejs")
    return found


def module(path: str) -> Path:
    """A file that `make js` installs; the test is skipped where it is missing."""
    found = FOLDER / "node_modules" / path
    if not found.exists():
        pytest.skip(f".js/node_modules/{path} is not installed; make js")
    return found


def driver() -> list[str]:
    """Return the command of the driver of the conformance list, over onnxruntime-node."""
    module("onnxruntime-node/package.json")
    return [node(), str(RUNTIME / "tests/driver.js"), "--modules", str(FOLDER / "node_modules")]


def script(code: str, given: Any = None) -> Any:
    """Run lines of a module in Node that have `txl` (the runtime), `ort` and `given`, and return what they `tell`."""
    engine = module("onnxruntime-node/dist/index.js")
    lines = f"""
        import * as txl from {json.dumps((RUNTIME / "index.js").as_uri())};
        import ort from {json.dumps(engine.as_uri())};
        const given = {json.dumps(given)};
        const tell = (value) => console.log(JSON.stringify(value));
        const fails = async (work) => {{
            try {{ await work(); }} catch (error) {{ return `${{error.name}}: ${{error.message}}`; }}
        }};
        {code}
    """
    command = [node(), "--input-type=module", "--eval", lines]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def page(browser: Any, folder: Path, address: str) -> Iterator[Any]:
    """A page with `ort`, `runtime` and `ask` (a driver), which is written into the folder that is served there."""
    for name in (".js", "runtime", "conformance", "samples"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    (folder / "page.html").write_text(PAGE, "utf-8")
    with opened(browser, f"{address}/page.html") as window:
        window.page.wait_for_function("window.ask")
        yield window


class Asked:
    """A driver in a page, in the place of `conformance.talking.Talk`: bundles are loaded by their addresses."""

    def __init__(self, window: Any, *_: object) -> None:
        self._page = window.page

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def ask(self, request: dict[str, Any]) -> Any:
        """The reply to a request."""
        if "path" in request:
            request = {**request, "path": f"/{Path(request['path']).relative_to(ROOT)}"}
        return json.loads(self._page.evaluate("line => window.ask(line)", json.dumps(request)))


@contextlib.contextmanager
def asking(window: Any) -> Iterator[None]:
    """The runner of the conformance list asks the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Talk", lambda *_: Asked(window))
        yield
