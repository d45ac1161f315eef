"""The runtime in JavaScript in Chromium, over onnxruntime-web in WebAssembly."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from scripting import asking
from txl_runtime import StreamState
from txl_runtime.listener import Silent

from conformance.driver import PROMISES
from conformance.run import FOLDER, Conformance

PROMPT = "def main(arguments):\n"


def test_it_keeps_every_promise_that_needs_no_ring(window: Any) -> None:
    names = [path.stem for path in (FOLDER / "vectors").iterdir()]
    conformance = Conformance(FOLDER, ("page",), only=names)
    with asking(window):
        found = list(conformance.run(Silent()))
    assert [failure for tally in found for failure in tally.failures] == []
    assert sum(tally.passed for tally in found) >= 220
    assert {name for tally in found for name in tally.kept} == {*conformance.hello.supports}
    assert {*PROMISES} - {*conformance.hello.supports} == {"spill", "strangers"}
    assert window.faults() == []


@pytest.fixture(scope="module")
def letters(folder: Path, make_bundle: Callable[..., Path]) -> Path:
    """A bundle in float32 whose tokens are bytes, beside the page: int8 is rounded differently in WebAssembly."""
    found = make_bundle(config={"vocab_size": 256}, vocabulary=True, batch_size=2)
    (folder / "letters").symlink_to(found)
    return found


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 2}])
def test_200_greedy_and_200_drawn_tokens_are_the_text_that_python_writes(
    window: Any, letters: Path, options: dict[str, Any]
) -> None:
    code = """async ([prompt, options]) => {
        const stream = (await runtime.load("/letters", { ort })).stream(1);
        let said = "";
        for await (const [text] of stream.generate(prompt, 200, options).texts()) said += text;
        return said;
    }"""
    stream = txl_runtime.load(letters, "cpu", threads=1, update="rolled").stream(1)
    expected = "".join(text for (text,) in stream.generate(PROMPT, 200, **options).texts())
    assert window.page.evaluate(code, [PROMPT, options]) == expected


def test_a_state_of_python_goes_on_in_the_page_and_back(window: Any, letters: Path) -> None:
    code = """async ([bytes, tokens]) => {
        const stream = (await runtime.load("/letters", { ort })).stream(1);
        stream.restore(runtime.StreamState.fromBytes(Uint8Array.from(atob(bytes), (sign) => sign.charCodeAt(0))));
        await stream.feed(tokens);
        return btoa(Array.from(stream.snapshot().toBytes(), (byte) => String.fromCharCode(byte)).join(""));
    }"""
    model = txl_runtime.load(letters, "cpu", threads=1)
    stream, whole = model.stream(1), model.stream(1)
    first, second, third = "import os\n\n", "def f(a):\n", "    return a\n"
    stream.feed(first)
    for text in (first, second):
        whole.feed(text)
    saved = base64.b64encode(stream.snapshot().to_bytes()).decode()
    stream.restore(StreamState.from_bytes(base64.b64decode(window.page.evaluate(code, [saved, second]))))
    np.testing.assert_array_equal(stream.fill, whole.fill)
    np.testing.assert_allclose(stream.feed(third), whole.feed(third), rtol=0, atol=1e-4)


def load(window: Any, address: str) -> str:
    """Load a bundle in the page, and return what is said."""
    return window.page.evaluate(
        "address => runtime.load(address, { ort }).then(() => 'loaded', error => `${error.name}: ${error.message}`)",
        address,
    )


def test_a_page_refuses_what_is_not_the_bundle_in_one_line_each(window: Any, folder: Path) -> None:
    origin = window.page.url.removesuffix("/page.html")
    for name in ("altered", "short", "rings"):
        shutil.copytree(frozen("ring"), folder / name)
    weights = bytearray((folder / "altered/weights.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "altered/weights.safetensors").write_bytes(weights)
    (folder / "short/weights.safetensors").write_bytes(weights[:-9])
    manifest = json.loads((folder / "rings/manifest.json").read_text("utf-8"))
    for table in ("programs", "states"):
        manifest[table] = [row for row in manifest[table] if row["update"] != "rolled"]
    (folder / "rings/manifest.json").write_text(json.dumps(manifest), "utf-8")
    assert load(window, "/altered") == (
        f"BundleError: {origin}/altered/weights.safetensors: its SHA-256 is not the manifest's, the file was altered; "
        "export the model again, or copy the bundle again"
    )
    assert load(window, "/short") == (
        f"BundleError: {origin}/short/weights.safetensors: {len(weights) - 9} bytes, expected {len(weights)}; "
        "export the model again, or copy the bundle again"
    )
    assert load(window, "/rings") == (
        f"BackendError: {origin}/rings/manifest.json: this bundle has memory in a ring alone, and a ring is written in "
        "place, which ONNX Runtime 1.30.0 (onnxruntime-web, wasm) cannot do, expected programs of rolled memory; "
        "export the model again with these"
    )
    assert load(window, "/nowhere").startswith(
        f"BundleError: {origin}/nowhere/manifest.json: status 404, expected a file"
    )


def test_files_that_a_page_has_are_a_bundle_and_only_what_is_used_is_fetched(window: Any) -> None:
    code = """async () => {
        const asked = [];
        const { fetch } = window;
        window.fetch = (address) => (asked.push(new URL(address).pathname.split("/").at(-1)), fetch(address));
        const model = await runtime.load("/samples/tiny.txl", { ort });
        const manifest = await (await fetch("/samples/tiny.txl/manifest.json")).json();
        const names = ["manifest.json", ...Object.keys(manifest.files)];
        const blobOf = async (name) => [name, await (await fetch(`/samples/tiny.txl/${name}`)).blob()];
        const blobs = await Promise.all(names.map(blobOf));
        window.fetch = fetch;
        const again = await runtime.load(new Map(blobs), { ort });
        const own = asked.filter((name) => !name.startsWith("ort-"));  // the engine, in whichever test comes first
        return [own.sort(), again.update, (await model.selftest()).passed, (await again.selftest()).passed];
    }"""
    asked, *told = window.page.evaluate(code)
    assert asked == ["logprobs-1.onnx", "logprobs-8.onnx", "manifest.json", "vocabulary.json", "weights.safetensors"]
    assert told == ["rolled", True, True]


def test_the_query_of_an_address_goes_with_every_file(window: Any) -> None:
    code = """async () => {
        const asked = [];
        const { fetch } = window;
        window.fetch = (address) => (asked.push(String(address)), fetch(address));
        await runtime.load("/samples/tiny.txl?v=2", { ort });
        window.fetch = fetch;
        const files = asked.filter((address) => address.includes("tiny.txl"));
        const said = await runtime.load("http://[", { ort }).catch((error) => `${error.name}: ${error.message}`);
        return [files.map((address) => new URL(address).search), said];
    }"""
    asked, said = window.page.evaluate(code)
    assert asked == ["?v=2"] * 5
    assert said == "UsageError: the bundle is given as 'http://[', expected the URL of its folder"


def test_webgpu_is_refused_where_it_is_not_instead_of_wasm_in_its_name(window: Any) -> None:
    code = """() => runtime.load("/samples/tiny.txl", { ort, backend: "webgpu" })
        .then((model) => model.engine.description, (error) => `${error.name}: ${error.message}`)"""
    said = window.page.evaluate(code)
    assert said.startswith("BackendError: ")
    assert "; expected WebGPU in this browser and ort of onnxruntime-web/webgpu; use these" in said


def test_a_page_without_web_crypto_says_so(window: Any) -> None:
    window.page.evaluate("Object.defineProperty(globalThis.crypto, 'subtle', { value: undefined, configurable: true })")
    try:
        assert "this page has no WebCrypto, expected it to compare the SHA-256; serve the page over https" in load(
            window, "/samples/tiny.txl"
        )
        assert window.page.evaluate("runtime.load('/samples/tiny.txl', { ort, verifyFiles: false }).then(() => 1)") == 1
    finally:
        window.page.evaluate("delete globalThis.crypto.subtle")
