"""The microphone of a page of steps, in Chromium: a sound of which each sample follows from the one before it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browsing import Window, accessibility, browser, opened, served
from listening import CHUNK, FACTOR, MORE, PERIOD, RATE, listener, write_sound
from scripting import FOLDER, module

from txl_deploy.web.package import package_web
from txl_deploy.web.single import package_single

LIBRARY = FOLDER / "node_modules" / "onnxruntime-web"
MINUTE = 60

WATCH = """
const watched = URL.createObjectURL(new Blob([`
    const own = registerProcessor;
    globalThis.registerProcessor = (name, kind) => own(name, class extends kind {
        constructor(options) {
            super(options);
            Object.assign(this, { gaps: {}, all: [], breaks: 0, heard: 0, before: 0 });
            const post = this.port.postMessage.bind(this.port);
            this.port.postMessage = (chunk, ...rest) => (this.count(chunk), post(chunk, ...rest));
            this.port.onmessage = ({ data }) => (this.told = data);
        }
        count(chunk) {
            let fits = 0;
            for (const value of chunk) {
                const number = Math.round(value * PERIOD / 2 + PERIOD / 2);
                fits += (FACTOR * this.before + MORE) % PERIOD === number;
                this.before = number;
            }
            if (this.heard) this.breaks += chunk.length - fits;
            if (fits) this.heard = 1;
            this.all.push(this.breaks);
            this.told?.postMessage({ gaps: this.gaps, all: this.all.splice(0) });
        }
        process(...given) {
            const now = Date.now();
            if (this.last) this.gaps[now - this.last] = (this.gaps[now - this.last] ?? 0) + 1;
            this.last = now;
            return super.process(...given);
        }
    });
`], { type: "text/javascript" }));
const add = AudioWorklet.prototype.addModule;
AudioWorklet.prototype.addModule = async function (address) {
    await add.call(this, watched);
    return add.call(this, address);
};
window.heard = { gaps: {}, breaks: [] };
window.AudioWorkletNode = class extends AudioWorkletNode {
    constructor(...given) {
        super(...given);
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = ({ data: { gaps, all } }) => {
            window.heard.gaps = gaps;
            window.heard.breaks.push(...all);
        };
        this.port.postMessage(port2, [port2]);
    }
};
"""
for name, value in {"FACTOR": FACTOR, "MORE": MORE, "PERIOD": PERIOD}.items():
    WATCH = WATCH.replace(name, str(value))
"""Counts, in the audio thread, the milliseconds between its calls, and of the chunks that it hands over what the model
counts, too. A machine that is busy may lose sound before it comes there: then both count the same breaks.
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """A package in a Chromium whose microphone hears the sound: `with pages("page") as window`."""
    module("onnxruntime-web/package.json")
    folder = tmp_path_factory.mktemp("microphone")
    bundle = listener(folder / "listener.txl")
    package_web(bundle, folder / "page", engine=LIBRARY)
    package_single(bundle, folder / "single.html", engine=LIBRARY)
    sound = write_sound(folder / "sound.wav", MINUTE + 30)
    flags = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    with browser(*flags, f"--use-file-for-fake-audio-capture={sound}") as chrome, served(folder) as address:

        def page(name: str, **options: Any) -> Any:
            file = (folder / "single.html").as_uri()
            return opened(chrome, file if name == "single" else f"{address}/{name}/index.html", **options)

        yield page


def listening(window: Window) -> None:
    """Press the button, once the model is there."""
    window.page.locator("#listen").wait_for()
    window.page.fill("#rate", str(RATE))
    window.page.click("#listen")


def counted(window: Window, least: int) -> tuple[float, float]:
    """Wait for chunks, end the listening, and return what the model counted: chunks, and breaks between samples."""
    window.page.wait_for_function(
        "least => Number(document.querySelector('#latest td')?.textContent) >= least", arg=least, timeout=500_000
    )
    window.page.click("#listen")
    window.page.locator("#begin:enabled").wait_for()
    told = window.page.locator("#latest td:not(.course)").all_text_contents()
    chunks, breaks, hears = map(float, told)
    assert hears == 1, "neighbours of the sound were among what was heard"
    return chunks, breaks


@pytest.mark.parametrize("name", ["page", "single"])
def test_a_page_hears_the_microphone_until_it_is_told_to_stop(pages: Any, name: str) -> None:
    with pages(name) as window:
        listening(window)
        chunks, _ = counted(window, 30)
        assert re.fullmatch(rf"{chunks:.0f} chunks of {CHUNK} samples in [\d.]+ s", window.page.text_content("#heard"))
        assert name == "single" or accessibility(window.page) == []
        assert window.faults() == []


def heard(window: Window, least: int) -> tuple[float, float, dict[str, Any]]:
    """Let the model hear chunks while the audio thread counts, too; what each of them counted."""
    window.page.evaluate(f"() => {{ {WATCH} }}")
    listening(window)
    window.page.locator("#latest tr").first.wait_for()
    window.page.evaluate("const end = performance.now() + 300; while (performance.now() < end);")
    chunks, breaks = counted(window, least)
    return chunks, breaks, window.page.evaluate("window.heard")


def test_the_model_hears_every_chunk_in_order_though_the_page_is_busy_at_times(pages: Any) -> None:
    with pages("page", bypass_csp=True) as window:
        chunks, breaks, there = heard(window, 60)
    assert there["breaks"][int(chunks) - 1] == breaks


def test_the_audio_thread_hands_over_all_samples_in_order(pages: Any) -> None:
    """Half a minute, as fast as the thread can: it waits for nobody, and chunks need not be a multiple of its 128."""
    code = """async ([rate, size, factor, more, period]) => {
        const context = new OfflineAudioContext(1, 30 * rate, rate);
        const sound = context.createBuffer(1, 30 * rate, rate);
        const samples = sound.getChannelData(0);
        for (let at = 0, number = 0; at < samples.length; at += 1) {
            samples[at] = (number - period / 2) / (period / 2);
            number = (factor * number + more) % period;
        }
        await context.audioWorklet.addModule("./worklet.js");
        const node = new AudioWorkletNode(context, "chunks", { numberOfOutputs: 0, processorOptions: { size } });
        const whole = Math.floor(samples.length / size);
        const all = new Promise((done) => {
            const found = [];
            node.port.onmessage = ({ data }) => found.push(data) === whole && done(found);
        });
        const source = new AudioBufferSourceNode(context, { buffer: sound });
        source.connect(node);
        source.start();
        await context.startRendering();
        const isNext = (chunk, at) => chunk.every((value, i) => value === samples[at * size + i]);
        return (await all).every((chunk, at) => chunk.length === size && isNext(chunk, at));
    }"""
    with pages("page") as window:
        assert window.page.evaluate(code, [RATE, CHUNK + 1, FACTOR, MORE, PERIOD]) is True
        assert window.faults() == []


FAILING = {
    "navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('Permission denied'))": (
        "the browser gives no microphone (Permission denied), expected its leave; allow it for this page"
    ),
    "Object.defineProperty(navigator, 'mediaDevices', { value: undefined })": (
        "this page may not ask for a microphone, expected one of https or localhost; serve it so"
    ),
    """window.AudioWorkletNode = class extends AudioWorkletNode {
        constructor(...given) {
            super(...given);
            const many = Array.from({ length: 1100 }, () => new Float32Array(480));
            setTimeout(() => many.forEach((data) => this.port.onmessage({ data })));
        }
    }""": "10 s of sound wait for the model, expected steps that take less time than the sound",
    """const own = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (wanted) => {
        const sound = await own(wanted);
        setTimeout(() => {
            const [track] = sound.getTracks();
            track.stop();
            track.dispatchEvent(new Event("ended"));
        }, 100);
        return sound;
    }""": "the microphone has ended, expected one that stays connected; connect it and listen again",
}
"""Scripts that make something go wrong in the page, and the beginning of what it says."""


def test_what_ends_the_listening_is_said_in_one_line(pages: Any) -> None:
    for wrong, said in FAILING.items():
        with pages("page") as window:
            window.page.evaluate(f"() => {{ {wrong}; }}")
            listening(window)
            window.page.locator("#problem", has_text=said).wait_for()
            window.page.locator("#begin:enabled").wait_for()
            assert window.page.text_content("#listen") == "Microphone"


@pytest.mark.slow(keep=0)
@pytest.mark.timeout(600)
def test_no_chunk_of_a_minute_is_lost(pages: Any) -> None:
    """Prints the milliseconds between the audio thread's calls, and how often there were as many."""
    with pages("page", bypass_csp=True) as window:
        chunks, breaks, there = heard(window, MINUTE * RATE // CHUNK)
    print(f"\n{chunks:.0f} chunks, {breaks:.0f} breaks; ms between calls of the audio thread: {there['gaps']}")
    assert there["breaks"][int(chunks) - 1] == breaks


def test_a_microphone_is_given_back_where_the_browser_does_not_have_the_rate(pages: Any) -> None:
    script = """() => {
        const own = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
        navigator.mediaDevices.getUserMedia = async (wanted) => (window.sound = await own(wanted));
        window.AudioContext = class { constructor() { throw new DOMException("no such rate", "NotSupportedError"); } };
    }"""
    with pages("page") as window:
        window.page.evaluate(script)
        listening(window)
        window.page.wait_for_function("() => window.sound?.getTracks().every((one) => one.readyState === 'ended')")
        window.page.locator("#begin:enabled").wait_for()
        window.page.locator("#problem", has_text="no such rate").wait_for()
