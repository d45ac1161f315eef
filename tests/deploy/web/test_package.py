"""Folders to serve to browsers: what is in them, what is refused, and the page in Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import txl_runtime
from browsing import WIDTHS, accessibility, browser, opened, served, too_wide
from frozen import frozen
from scripting import FOLDER, module
from support import call_main
from txl_runtime.errors import BackendError, UsageError

from txl_deploy.web import package, single
from txl_deploy.web.package import package_web
from txl_deploy.web.single import package_single

LIBRARY = FOLDER / "node_modules" / "onnxruntime-web"
PROMPT = "def main("


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder that looks like onnxruntime-web."""
    folder = tmp_path / "onnxruntime-web"
    (folder / "dist").mkdir(parents=True)
    for name in package.ENGINE:
        (folder / "dist" / name).write_text(name)
    return folder


@pytest.fixture(scope="module")
def letters(make_bundle: Callable[..., Path]) -> Path:
    return make_bundle(config={"vocab_size": 256}, vocabulary=True, batch_size=2)


def without_rolled(path: Path) -> None:
    """Take the programs and states of rolled memory out of a manifest."""
    manifest = json.loads(path.read_text("utf-8"))
    for table in ("programs", "states"):
        manifest[table] = [row for row in manifest[table] if row["update"] != "rolled"]
    path.write_text(json.dumps(manifest), "utf-8")


@pytest.fixture(scope="module")
def pages(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """A package in Chromium: `with pages("tokens") as window`."""
    module("onnxruntime-web/package.json")
    folder = tmp_path_factory.mktemp("pages")
    package_web(letters, folder / "tokens", engine=LIBRARY)
    package_web(frozen("policy-1"), folder / "steps", engine=LIBRARY)
    package_single(letters, folder / "single.html", engine=LIBRARY)
    for name in ("ring", "table"):
        package_web(frozen(name), folder / name, engine=LIBRARY)
    for name in ("altered", "short", "rings"):
        package_web(frozen("ring"), folder / name, engine=LIBRARY)
    weights = bytearray((folder / "short/model/weights.safetensors").read_bytes())
    (folder / "short/model/weights.safetensors").write_bytes(weights[:-9])
    weights[-1] ^= 1
    (folder / "altered/model/weights.safetensors").write_bytes(weights)
    without_rolled(folder / "rings/model/manifest.json")
    with browser() as chrome, served(folder) as address:

        def page(name: str, **options: Any) -> Any:
            file = (folder / "single.html").as_uri()
            return opened(chrome, file if name == "single" else f"{address}/{name}/index.html", **options)

        yield page


def test_a_package_has_what_a_page_reads_and_nothing_else(letters: Path, library: Path, tmp_path: Path) -> None:
    made = package_web(letters, tmp_path / "out", engine=library)
    found = {path.name for path in made.folder.iterdir()}
    pages = {path.name for path in package.page_files()} | {"index.html"}
    assert found == {*pages, "model", "txl-runtime", "onnxruntime-web", "txl-package.json"}
    kept = {path.name for path in (made.folder / "model").iterdir()}
    assert {"manifest.json", "weights.safetensors", "vocabulary.json", "selftest.safetensors"} < kept
    assert not [name for name in kept if "ring" in name or "report" in name]
    told = json.loads((made.folder / "txl-package.json").read_text("utf-8"))
    assert (told["target"], told["models"]) == ("web", [letters.stem])
    assert made.engine_bytes == sum(map(len, package.ENGINE))
    assert made.bundle_bytes == sum(
        path.stat().st_size for path in (made.folder / "model").iterdir() if "selftest" not in path.name
    )


def test_what_is_refused_leaves_nothing_behind(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    words = ["package", frozen("ring"), "--target", "web", "-o", tmp_path / "out"]
    code, _, said = call_main(words, monkeypatch, capfd)
    assert code == 2
    assert "expected the npm package onnxruntime-web; npm install onnxruntime-web, or give --onnxruntime-web" in said
    code, _, said = call_main([*words, "--sequences", "3"], monkeypatch, capfd)
    assert code == 2
    assert "--sequences is for --target triton, not for web" in said
    with pytest.raises(UsageError, match="lies in"):
        package_web(frozen("ring"), frozen("ring") / "out", engine=library)
    rings = tmp_path / "rings"
    shutil.copytree(frozen("ring"), rings)
    without_rolled(rings / "manifest.json")
    with pytest.raises(BackendError, match="memory in a ring alone"):
        package_web(rings, tmp_path / "out", engine=library)
    assert sorted(tmp_path.iterdir()) == sorted([*before, rings])
    with pytest.raises(UsageError, match=r"no ort\.wasm\.bundle\.min\.mjs in it"):
        package_single(frozen("policy-1"), tmp_path / "one.html", engine=library)
    (tmp_path / "one.html").write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        package_single(frozen("policy-1"), tmp_path / "one.html", engine=library)
    with pytest.raises(UsageError, match="not a page that this command wrote"):
        package_single(frozen("policy-1"), tmp_path / "one.html", force=True, engine=library)
    assert (tmp_path / "one.html").read_text() == "mine"


def test_the_command_says_what_a_page_downloads(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["package", frozen("policy-1"), "--target", "web", "-o", tmp_path / "out", "--onnxruntime-web", library]
    code, said, _ = call_main(words, monkeypatch, capfd)
    assert code == 0
    assert "policy-1 for browsers, as a folder to serve" in said
    assert "a page downloads bundle 1" in said
    code, said, _ = call_main([*words, "--force", "--json"], monkeypatch, capfd)
    assert json.loads(said)["target"] == "web"
    (library / "dist" / single.ENGINE[0]).write_text("")
    words[5] = tmp_path / "one.html"
    code, said, _ = call_main([*words, "--single"], monkeypatch, capfd)
    assert code == 0
    assert re.search(r"policy-1 for browsers, as one file of [\d.]+ kB\nit holds bundle", said)
    code, _, _ = call_main([*words, "--single", "--force"], monkeypatch, capfd)
    assert code == 0


def written(window: Any) -> list[dict[str, Any]]:
    """The tokens of the page's text, as it keeps them for a reload."""
    return window.page.evaluate(
        "() => (dispatchEvent(new Event('pagehide')), JSON.parse(sessionStorage.playground).tokens)"
    )


def generate(window: Any, count: int, prompt: str = PROMPT) -> list[dict[str, Any]]:
    """Give a prompt, the text or ids, to the model and let it go on; the tokens of the text."""
    page = window.page
    page.get_by_role("status").filter(has_text="Ready").wait_for()
    page.set_checked("#by-id", prompt != PROMPT)
    page.fill("#draft", prompt)
    page.fill("#count", str(count))
    page.fill("#top-p", "0.95")
    page.click("#generate")
    page.get_by_role("status").filter(has_text=f"Generated {count} tokens").wait_for()
    return written(window)


def test_text_goes_on_as_in_python_and_shows_alternatives_and_memory(pages: Any, letters: Path) -> None:
    stream = txl_runtime.load(letters, "cpu", threads=1, update="rolled").stream(1)
    drawn = stream.generate(PROMPT, 40, temperature=0.8, top_p=0.95, seed=1, logprobs=True)
    expected = [(int(token[0]), float(drawn.logprobs[0])) for token in drawn]
    more = [int(token[0]) for token in stream.generate([[expected[-1][0]]], 15, temperature=0.8, top_p=0.95, seed=1)]
    fill = stream.fill[0]
    stream.reset()
    read = -stream.score(PROMPT)[0]
    with pages("tokens") as window:
        page = window.page
        found = generate(window, 40)
        assert bytes(token["id"] for token in found[: len(PROMPT)]).decode() == PROMPT
        assert [token["id"] for token in found[len(PROMPT) :]] == [token for token, _ in expected]
        told = [token["logprob"] for token in found]
        assert told[0] is None
        np.testing.assert_allclose(told[1:], [*read, *(logprob for _, logprob in expected)], rtol=0, atol=1e-4)
        assert page.locator("#meter").get_attribute("aria-valuenow") == str(fill)
        page.fill("#count", "15")
        page.click("#generate")
        page.get_by_role("status").filter(has_text="Generated 15 tokens").wait_for()
        assert [token["id"] for token in written(window)[len(found) :]] == more
        page.locator("#text [role=option]").nth(12).click()
        assert page.locator("#choices-list li").count() in (10, 11)
        assert page.locator("#choices-list li", has_text="stands there").count() == 1
        page.click("#anew")
        page.get_by_role("status").filter(has_text="Started anew").wait_for()
        assert written(window) == []
        assert page.locator("#meter").get_attribute("aria-valuenow") == "0"
        assert window.faults() == []


@pytest.mark.parametrize("name", ["ring", "table"])
def test_token_ids_go_on_as_in_python_with_memory_in_rows_and_with_a_replaced_state(pages: Any, name: str) -> None:
    stream = txl_runtime.load(frozen(name), "cpu", threads=1).stream(1)
    expected = [
        int(token[0]) for token in stream.generate([[1, 2, 3, 4, 5, 6]], 12, seed=1, temperature=0.8, top_p=0.95)
    ]
    with pages(name) as window:
        found = generate(window, 12, "1 2, 3\n4 5 6")
        assert [token["id"] for token in found] == [1, 2, 3, 4, 5, 6, *expected]
        assert window.page.locator("#meter").is_visible() == (name == "ring")
        assert window.faults() == []


WRONG = {
    "1,2,3\n": "row 1 of the file has 3 values",
    "1,2,3,4,5,6\n1,2,,4,5,6\n": 'row 2 of the file has "" as value 3',
    "a,b,c,d,e,f\n1,2,3,4,5,0x10\n": 'row 2 of the file has "0x10" as value 6',
    "1e400,2,3,4,5,6\n": 'row 1 of the file has "1e400" as value 1',
    "Infinity,2,3,4,5,6\n": 'row 1 of the file has "Infinity" as value 1',
    "\n": "the file has no rows",
}
"""Texts of files that are refused, and the beginning of what is said."""


def test_steps_come_from_sliders_and_from_rows_of_a_file(pages: Any, tmp_path: Path) -> None:
    model = txl_runtime.load(frozen("policy-1"), "cpu", threads=1)
    stream, rows = model.stream(1), np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6)
    for row in (np.zeros(6, np.float32), *rows):
        expected = stream.feed({"obs": np.tile(row, (1, 1, 1))}, last=True)
    (tmp_path / "rows.csv").write_text("\n".join(",".join(map(str, row.tolist())) for row in rows), "utf-8")
    with pages("steps") as window:
        page = window.page
        page.click("#step")
        page.get_by_text("1 steps drawn").wait_for()
        page.set_input_files("#file", tmp_path / "rows.csv")
        page.get_by_text("6 steps drawn").wait_for()
        shown = [float(text) for text in page.locator("#latest td:not(.course)").all_text_contents()]
        np.testing.assert_allclose(shown, [*expected["action"][0], *expected["value"][0]], rtol=1e-4, atol=1e-5)
        assert page.locator("#latest polyline").count() == 4
        page.set_input_files("#file", tmp_path / "rows.csv")
        page.get_by_text("11 steps drawn").wait_for()
        for text, said in WRONG.items():
            (tmp_path / "wrong.csv").write_text(text, "utf-8")
            page.set_input_files("#file", tmp_path / "wrong.csv")
            page.locator("#problem", has_text=f"{said}, expected 6 numbers: obs[0], obs[1]").wait_for()
        page.set_input_files("#file", [])
        page.locator("#file").dispatch_event("change")
        assert page.locator("#problem").is_hidden()
        (tmp_path / "named.csv").write_text("a,b,c,d,e,f\n1,2,3,.5,-1e-3,+6.\n", "utf-8")
        page.set_input_files("#file", tmp_path / "named.csv")
        page.get_by_text("12 steps drawn").wait_for()
        assert accessibility(page) == []
        assert window.faults() == []


def test_a_single_file_runs_from_a_disk_without_a_network(pages: Any, letters: Path) -> None:
    stream = txl_runtime.load(letters, "cpu", threads=1, update="rolled").stream(1)
    expected = [int(token[0]) for token in stream.generate(PROMPT, 20, temperature=0.8, top_p=0.95, seed=1)]
    with pages("single") as window:
        assert [token["id"] for token in generate(window, 20)[len(PROMPT) :]] == expected
        assert window.faults() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokens", "steps"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window_in_both_themes(pages: Any, name: str, width: int, scheme: str) -> None:
    with pages(name, width=width, scheme=scheme) as window:
        window.page.wait_for_selector({"tokens": "#meter svg", "steps": "#steps:not([hidden])"}[name])
        assert too_wide(window.page) == []
        assert accessibility(window.page) == []


SPOILED = {
    "altered": "its SHA-256 is not the manifest's, the file was altered; export the model again, or copy",
    "short": "bytes, expected",
    "rings": "this bundle has memory in a ring alone, and a ring is written in place, which ONNX Runtime",
}
"""Beginnings of what a page says of bundles that it cannot use."""


def test_a_bundle_that_a_page_cannot_use_is_told_in_one_line(pages: Any) -> None:
    for name, said in SPOILED.items():
        with pages(name) as window:
            window.page.locator("#problem", has_text=said).wait_for()
            assert "\n" not in window.page.text_content("#problem")
            assert window.page.locator("#ask").is_hidden()
            assert window.faults() == []
