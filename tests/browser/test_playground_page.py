"""The playground in Chromium: by keyboard alone, beside `Stream`, attacked, and when a browser or a server dies.

What needs no server is tested over both back ends of the page.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import txl_runtime
from browsing import (
    SCHEMES,
    WIDTHS,
    Window,
    accessibility,
    opened,
    reached_by_tab,
    served,
    to_reach,
    too_wide,
)
from frozen import frozen
from hostile import HOSTILE
from playing import Playground, playing
from resealing import copied, reseal
from scripting import FOLDER, module
from serving import serving

from txl_deploy.retrieval.building import build
from txl_deploy.web.package import package_web

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
TEXT = "def main(arguments):\n    return arguments"
LINE = "is the input of the next one. "


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that reads bytes: M = 6 and segments of 4."""
    return reseal(copied(frozen("clusters"), tmp_path_factory.mktemp("letters") / "small.txl"), boundary_token=10)


@pytest.fixture(scope="module")
def server(letters: Path) -> Iterator[Playground]:
    """A playground for one tab; a page that is closed gives its place back at once."""
    with playing(letters) as started:
        yield started
        assert started.process.poll() is None


@dataclass
class Packed:
    """A package for browsers, whose page runs the model itself."""

    address: str


@pytest.fixture(scope="module")
def packed(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Packed]:
    """A package of the same bundle."""
    module("onnxruntime-web/package.json")
    folder = tmp_path_factory.mktemp("packed")
    package_web(letters, folder / "page", engine=FOLDER / "node_modules/onnxruntime-web")
    with served(folder) as address:
        yield Packed(f"{address}/page/index.html")


@pytest.fixture(params=["server", "packed"])
def place(request: pytest.FixtureRequest) -> Playground | Packed:
    """A server, or the page itself: where the model runs."""
    return request.getfixturevalue(request.param)


@contextlib.contextmanager
def at_desk(chrome: Any, server: Playground | Packed, **options: Any) -> Iterator[Window]:
    """The page, once it is ready."""
    for _ in range(20):
        with opened(chrome, server.address, **options) as window:
            window.page.locator("#status:not(:empty), #lost:not([hidden])").first.wait_for()
            if window.page.locator("#lost").is_hidden():
                yield window
                return
        time.sleep(0.1)  # the place of a page that was closed just now
    raise AssertionError(window.page.locator("#lost").inner_text())


def reach(window: Window, role: str, name: str, **options: Any) -> Any:
    """Press Tab until a control has the focus; the control."""
    wanted = window.page.get_by_role(role, name=name, **options)
    for _ in range(200):
        if wanted.count() and wanted.first.evaluate("element => element === document.activeElement"):
            return wanted.first
        window.page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {role} {name!r}")


def write(window: Window, text: str, **settings: object) -> None:
    """Fill in the text to add and numbers, by keyboard."""
    reach(window, "textbox", "Text to add")
    window.page.keyboard.press("Control+A")
    window.page.keyboard.insert_text(text)
    if settings and window.page.locator("#settings:not([open])").count():
        window.page.locator("#settings > summary").press("Enter")
    for name, value in settings.items():
        reach(window, "spinbutton", name.replace("_", " ").replace("Top ", "Top-"))
        window.page.keyboard.press("Control+A")
        window.page.keyboard.type(str(value))


def press(window: Window, name: str, told: str = "") -> None:
    """Press a button by keyboard and wait for what the page tells."""
    reach(window, "button", name, exact=name != "Go back to")
    window.page.keyboard.press("Enter")
    if told:
        window.page.get_by_role("status").filter(has_text=told).wait_for()
        drawn(window)


def drawn(window: Window) -> None:
    """Wait until the page is drawn as it stands: it tells what it did one frame before it shows it."""
    window.page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
    )


def tokens(window: Window) -> list[str]:
    """The tokens on the page, each with its probability."""
    drawn(window)
    return window.page.locator("#text [role=option]").evaluate_all("all => all.map((e) => e.ariaLabel)")


def in_sight(window: Window, *selectors: str) -> bool:
    """Return whether elements stand in the window, whole, without scrolling."""
    return window.page.evaluate(
        """(selectors) => selectors.every((selector) => {
            const box = document.querySelector(selector).getBoundingClientRect();
            return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight;
        })""",
        list(selectors),
    )


def choose_memory(window: Window, key: str) -> None:
    """Choose how long the memory is: "Home" for all of it, "End" for none."""
    reach(window, "combobox", "Memory")
    window.page.keyboard.press(key)


def test_a_whole_session_by_keyboard_alone(chrome, place, letters):
    with at_desk(chrome, place) as window:
        page = window.page
        assert page.get_by_role("heading", level=1).inner_text() == letters.stem
        write(window, "def ", Tokens_to_generate=12, Temperature=0.9, Seed=7)
        press(window, "Generate", "Generated 12 tokens")
        first = tokens(window)
        assert len(first) == 16
        assert page.get_by_role("meter", name="Memory rows filled").get_attribute("aria-valuenow") == "6"

        page.locator("#text [role=option][tabindex='0']").wait_for()
        while not page.evaluate("document.activeElement.role === 'option'"):
            page.keyboard.press("Shift+Tab")
        page.keyboard.press("Home")
        for _ in range(6):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")  # the seventh token: its alternatives, the first of which has the focus
        alternatives = page.get_by_role("region", name="Alternatives")
        assert alternatives.get_by_role("listitem").count() == 10
        chosen = page.evaluate("document.activeElement.innerText")
        assert "Continue with" in page.evaluate("document.activeElement.textContent")
        page.keyboard.press("Enter")
        page.get_by_role("status").filter(has_text="Generated 12 tokens").wait_for()
        second = tokens(window)
        assert second[:6] == first[:6]
        assert second[6] != first[6]
        assert second[6].split(",")[0] in chosen
        assert len(second) == 7 + 12

        press(window, "Go back to 1", "Back at state 1")
        assert tokens(window) == []
        assert page.get_by_role("meter", name="Memory rows filled").get_attribute("aria-valuenow") == "0"
        press(window, "Generate", "Generated 12 tokens")
        assert tokens(window) == first, "the same state and the same seed draw the same tokens"

        choose_memory(window, "End")
        write(window, "x", Tokens_to_generate=3)
        press(window, "Generate", "Generated 3 tokens")
        assert page.get_by_role("meter", name="Memory rows filled").get_attribute("aria-valuenow") == "0"
        press(window, "Compare losses", "Compared 4 memory lengths")
        assert page.get_by_role("table", name="Loss by memory length").locator("tbody tr").count() == 4
        press(window, "Start anew", "Started anew")
        assert tokens(window) == []
        assert set(to_reach(page)) <= set(reached_by_tab(page))
        assert window.faults() == []


def test_losses_are_those_that_the_runtime_computes(chrome, place, letters):
    model = txl_runtime.load(letters, "cpu", threads=1)
    ids = model.vocabulary.encode(TEXT)
    with at_desk(chrome, place) as window:
        write(window, TEXT)
        press(window, "Compare losses", "Compared 4 memory lengths")
        marks = window.page.locator("#compared .gains .token").evaluate_all(
            "all => all.map((e) => [e.textContent, e.className.replace('token', '').trim(), e.title])"
        )
        rows = window.page.get_by_role("table", name="Loss by memory length").locator("tbody tr").all()
        found = [[cell.inner_text().strip() for cell in row.locator("th, td").all()] for row in rows]
        window.page.get_by_text("The numbers", exact=True).click()
        single = window.page.get_by_role("table", name="Loss of each token").locator("tbody tr").all()
        each = [row.locator("td").all_inner_texts()[1:] for row in single]
        assert window.faults() == []
    assert [row[0] for row in found] == ["none", "1 row", "3 rows", "all 6 rows"]
    means = []
    whole = model.stream(1).score(ids[None])[0]
    for (_, mean, perplexity, more), length in zip(found, (0, 1, 3, 6), strict=True):
        losses = model.stream(1, memory_length=length).score(ids[None])[0]
        if length < 6:
            size = len(losses) // 8
            blocks = [(losses - whole)[at : at + size].mean() for at in range(0, len(losses) // size * size, size)]
            value, error = (losses - whole).mean(), np.std(blocks, ddof=1) / math.sqrt(len(blocks))
            said = "may be chance" if abs(value) < 2 * error else "worse" if value > 0 else "better"
            assert more.replace("−", "-") == f"{value:+.3f} ± {error:.3f}, {said}"
        means.append(float(losses.mean()))
        assert abs(float(mean) - means[-1]) < 1e-4
        assert abs(float(perplexity) - math.exp(means[-1])) < 1e-3 * math.exp(means[-1])
    assert abs(means[0] - means[-1]) > 1e-3, "the memory matters in this model"
    none = model.stream(1, memory_length=0).score(ids[None])[0]
    assert "".join(text for text, _, _ in marks).replace("↵", "") == TEXT, "the text, coloured"
    for (_, mark, title), without, within in zip(marks[1:], none, whole, strict=True):
        times = math.exp(without - within)
        level = sum(max(times, 1 / times) >= least for least in (1.1, 2, 5))
        assert mark == ("" if not level else f"g{level if times > 1 else -level}")
        assert "with memory" in title
    for column, length in ((0, 0), (1, 6)):
        losses = model.stream(1, memory_length=length).score(ids[None])[0]
        assert np.abs(np.array([float(row[column]) for row in each]) - losses).max() < 1e-3
    for *_, lowered in each:
        assert re.fullmatch(r"\+\d\.\d{3}, better|−\d\.\d{3}, worse|[+−]0\.000, the same", lowered)


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (380, 700)])
def test_the_field_and_generate_are_seen_without_scrolling(chrome, place, width, height):
    with at_desk(chrome, place, width=width, height=height) as window:
        assert window.page.evaluate("document.activeElement.id") == "draft", "one can write at once"
        assert in_sight(window, "#draft", "#generate", "#stop")
        window.page.keyboard.insert_text("def ")
        window.page.keyboard.press("Control+Enter")
        window.page.get_by_role("status").filter(has_text="Generated 40 tokens").wait_for()
        drawn(window)
        assert in_sight(window, "#draft", "#generate", "#stop"), "after a generation, too"
        assert window.faults() == []


def test_a_page_that_is_loaded_again_has_its_text_and_its_settings(chrome, place):
    with at_desk(chrome, place, width=380) as window:
        write(window, "def ", Tokens_to_generate=9, Seed=5)
        press(window, "Generate", "Generated 9 tokens")
        write(window, "and then ", Temperature=0.25)
        window.page.get_by_role("checkbox", name="Show every probability").check()
        text = tokens(window)
        for slip in (False, True):
            if slip:
                window.page.goto("about:blank")
                window.page.go_back()
            else:
                window.page.reload()
            window.page.locator("#status:not(:empty), #lost:not([hidden])").first.wait_for()
            assert window.page.locator("#lost").is_hidden(), window.page.locator("#lost").inner_text()
            told = window.page.get_by_role("status").inner_text()
            assert "The text from before is here" in told
            assert "states are gone" in told
            assert tokens(window) == text
            assert window.page.get_by_role("textbox", name="Text to add").input_value() == "and then "
            assert window.page.locator("#count").input_value() == "9"
            assert window.page.locator("#temperature").input_value() == "0.25"
            assert window.page.get_by_role("checkbox", name="Show every probability").is_checked()
            assert window.page.locator("#text.numbers").count() == 1
            assert window.page.get_by_role("list", name="States").locator("li").count() == 0
        press(window, "Generate", "Generated 9 tokens")
        assert [said.split(",")[0] for said in tokens(window)][: len(text)] == [said.split(",")[0] for said in text]
        assert len(tokens(window)) == len(text) + len("and then ") + 9
        assert [fault for fault in window.faults() if "429" not in fault] == [], "the server may not know that it went"


def test_a_field_that_is_folded_away_is_pointed_at_where_it_is_wrong(chrome, place):
    with at_desk(chrome, place, width=380) as window:
        write(window, "def ", Tokens_to_generate=-1)
        window.page.locator("#settings > summary").press("Enter")
        press(window, "Generate")
        assert window.page.evaluate("document.activeElement.id") == "count"
        assert tokens(window) == []
        assert window.faults() == []


def test_what_was_read_and_not_given_yet_is_not_said_to_be_in_the_memory(chrome, place):
    with at_desk(chrome, place) as window:
        write(window, "def main", Tokens_to_generate=2)
        press(window, "Read", "Read 8 tokens")
        meter, held = window.page.get_by_role("meter"), window.page.locator("#text .held")
        assert (meter.get_attribute("aria-valuenow"), held.count()) == ("0", 0)
        assert (
            "8 tokens of the text will go in with the next generation"
            in window.page.locator("#meter-text").inner_text()
        )
        press(window, "Generate", "Generated 2 tokens")
        assert (meter.get_attribute("aria-valuenow"), held.count()) == ("6", 6)
        assert "will go in" not in window.page.locator("#meter-text").inner_text()
        first = window.page.get_by_role("list", name="States").locator("li").last.inner_text()
        assert "8 tokens to go in" in first, "as the meter said before"


def test_a_state_has_the_name_that_it_was_given(chrome, place):
    with at_desk(chrome, place) as window:
        write(window, "def main(", Tokens_to_generate=2)
        press(window, "Generate", "Generated 2 tokens")
        reach(window, "textbox", "Name of the state")
        window.page.keyboard.insert_text("<b>before‮")
        window.page.keyboard.press("Enter")
        window.page.get_by_role("status").filter(has_text="State 2 is kept").wait_for()
        drawn(window)
        newest, oldest = (
            each.inner_text() for each in window.page.get_by_role("list", name="States").locator("li").all()
        )
        assert "<b>before‹U+202E›" in newest
        assert "11 tokens, 6 memory rows filled, kept by you" in newest
        assert "The beginning" in oldest
        assert window.faults() == []


def side_by_side(window: Window) -> list[list[str]]:
    """The probabilities of the tokens on both sides, with memory and without."""
    sides = window.page.locator("#sides .tokens").all()
    return [side.locator(".token").evaluate_all("all => all.map((e) => e.title)") for side in sides]


def test_with_and_without_memory_generates_twice_beside_the_text(chrome, place, letters):
    model = txl_runtime.load(letters, "cpu", threads=1)
    with at_desk(chrome, place) as window:
        write(window, TEXT, Tokens_to_generate=30, Temperature=0.5, Seed=3)
        press(window, "With and without memory", "Generated 30 tokens with memory and without")
        within, without = side_by_side(window)
        hint = window.page.locator("#both-hint").inner_text()
        assert "reads the last 4 tokens in a fresh state" in hint
        assert "draws with the next seed: 3, 4 and so on" in hint
        assert tokens(window) == []
        assert window.page.get_by_role("meter").get_attribute("aria-valuenow") == "0"
        assert accessibility(window.page) == []
        assert window.faults() == []

    def drawn_by(prompt: list[int], count: int, seed: int) -> list[int]:
        stream = model.stream(1)
        return [
            int(token[0])
            for token in stream.generate(np.array([prompt]), max_new_tokens=count, temperature=0.5, seed=seed)
        ]

    text = model.vocabulary.encode(TEXT).tolist()
    alone = list(text)
    for at in range(30):
        alone += drawn_by(alone[-4:], 1, 3 + at)
    for titles, ids in ((within, drawn_by(text, 30, 3)), (without, alone[len(text) :])):
        names = [f"“{bytes([token]).decode()}”" if 33 <= token < 127 else None for token in ids]
        assert len(titles) == 30
        assert any(names)
        for title, name in zip(titles, names, strict=True):
            assert name is None or title.startswith(f"{name}, ")
    assert within != without


def test_without_memory_an_empty_text_begins_as_it_does_with_memory(chrome, place):
    with at_desk(chrome, place) as window:
        write(window, "", Tokens_to_generate=3, Temperature=0)
        press(window, "With and without memory", "Generated 3 tokens with memory and without")
        within, without = side_by_side(window)
        assert len(within) == 3
        assert within == without, "a segment of 4 holds all that came before"
        assert window.faults() == []


@pytest.mark.parametrize(("width", "unfolded"), [(1400, True), (380, False)])
def test_the_comparison_is_a_sentence_with_a_table_behind_it(chrome, place, width, unfolded):
    with at_desk(chrome, place, width=width) as window:
        write(window, TEXT)
        press(window, "Compare losses", "Compared 4 memory lengths")
        told = window.page.locator("#compared > p").inner_text()
        summary = window.page.get_by_text("By memory length", exact=True)
        table = window.page.get_by_role("table", name="Loss by memory length")
        assert table.is_visible() == unfolded
        if not unfolded:
            summary.press("Enter")
        cells = [row.locator("th, td").all_inner_texts() for row in table.locator("tbody tr").all()]
        assert re.match(
            rf"Over 40 tokens, the memory (lowers|raises) the perplexity from {cells[0][2]} to {cells[-1][2]}, ", told
        )
        assert too_wide(window.page) == []
        assert window.faults() == []


@pytest.fixture(scope="module")
def recalling(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    """A playground with a datastore, which has read a stranger's text."""
    place = tmp_path_factory.mktemp("stores")
    (place / "<b>notes.txt").write_text(LINE * 20 + "\n".join(HOSTILE))
    build(txl_runtime.load(letters, "cpu", threads=1), [place / "<b>notes.txt"], place / "store")
    mixture = {"--datastore": place / "store", "--knn": 8, "--knn-temperature": 1, "--knn-weight": 0.5}
    with playing(letters, *(part for pair in mixture.items() for part in pair)) as started:
        yield started


def shown_behind(window: Window, index: int) -> tuple[Any, dict[str, Any]]:
    """Choose a token by keyboard; the panel of its neighbours once they are there, and the server's answer."""
    window.page.evaluate("document.querySelector('#neighbours-list').replaceChildren()")
    with window.page.expect_response("**/v1/neighbours") as told:
        window.page.locator("#text [role=option]").nth(index).press("Enter")
    near = window.page.get_by_role("region", name="Neighbours in the datastore")
    near.get_by_role("listitem").first.wait_for()
    return near, {"asked": told.value.request.post_data_json, **told.value.json()}


@pytest.mark.parametrize(("width", "scheme"), [(380, "dark"), (1400, "light")])
def test_alternatives_stand_with_and_without_the_datastore_over_the_neighbours_behind_them(
    chrome, recalling, width, scheme
):
    with at_desk(chrome, recalling, width=width, scheme=scheme) as window:
        write(window, LINE, Tokens_to_generate=2)
        press(window, "Generate", "Generated 2 tokens")
        assert window.page.locator("#neighbours").is_hidden()
        near, answer = shown_behind(window, 20)
        assert answer["asked"] == {"prompt": list(LINE[:20].encode()), "alternatives": 10, "neighbours": 8}

        items = window.page.locator("#choices-list > li")
        bars = items.evaluate_all(
            "all => all.map((e) => [...e.querySelectorAll('rect')].map((r) => +r.getAttribute('width')))"
        )
        names = items.locator("bdi").all_inner_texts()
        for bar, name, each in zip(bars, names, answer["alternatives"], strict=False):
            assert bar == pytest.approx([100 * each["probability"], 100 * each["without"]], abs=0.0051)
            if 33 <= each["id"] < 127:
                assert name == f"“{each['token']}”"
        assert len(items.filter(has_text="without").all()) == len(answer["alternatives"]) == 10
        assert items.filter(has_text="stands there").count() == 1
        assert window.page.evaluate("document.activeElement.title").startswith("Continue with"), "it keeps the focus"

        found = [each for each in answer["neighbours"] if each["before"].isprintable() and each["after"].isprintable()]
        passages = near.locator(".passage").all_text_contents()
        assert len(passages) == len(answer["neighbours"])
        for each in found:
            assert each["before"] + each["token"].replace(" ", "␣") + each["after"] in passages
        assert found
        marked = near.locator("mark").all_text_contents()
        assert [name.replace(" ", "␣") for name in (each["token"] for each in answer["neighbours"])] == marked
        told = near.locator("li .hint").all_inner_texts()
        for said, each in zip(told, answer["neighbours"], strict=True):
            assert re.search(r"^\S+ % at distance \S+, <b>notes.txt, position ", said)
            assert float(said.split()[4].rstrip(",")) == pytest.approx(each["distance"], rel=5e-3)
            assert said.endswith(f"position {each['position']:,}")
        assert too_wide(window.page) == []
        assert accessibility(window.page) == []
        assert window.faults() == []


def test_passages_of_a_stranger_s_text_are_shown_and_never_obeyed(chrome, recalling):
    with at_desk(chrome, recalling, width=380) as window:
        write(window, HOSTILE[0], Tokens_to_generate=1)
        press(window, "Generate", "Generated 1 token")
        near, answer = shown_behind(window, len(HOSTILE[0].encode()) // 2)
        assert any("<" in each["before"] for each in answer["neighbours"]), "the store has read it"
        tags = near.locator("*").evaluate_all("all => [...new Set(all.map((e) => e.localName))].sort()")
        assert tags == ["bdi", "h3", "li", "mark", "ol", "p", "rect", "span", "svg"]
        assert not set(near.inner_text()) & set("\x00\x1b\u202e\u2066")
        assert too_wide(window.page) == []
        assert window.faults() == []


def test_no_search_no_store_and_a_busy_server_are_told_from_neighbours(chrome, recalling):
    plans: list[dict[str, Any]] = []

    def told(route: Any) -> None:
        plan = plans.pop(0)
        if plan["status"] != 200:
            return route.fulfill(status=plan["status"], json={"error": {"message": "neighbours are being looked for"}})
        answer = route.fetch()
        return route.fulfill(response=answer, json=answer.json() | plan["changes"])

    long = {"token": "t", "share": 0.5, "distance": 1.0, "text": "a", "position": 9}
    none: dict[str, Any] = {"status": 200, "changes": {"searched": False, "neighbours": []}}
    cut: dict[str, Any] = {"status": 200, "changes": {"neighbours": [long | {"before": "😀" * 99, "after": "b" * 99}]}}
    with at_desk(chrome, recalling) as window:
        write(window, LINE, Tokens_to_generate=2)
        press(window, "Generate", "Generated 2 tokens")
        window.page.route("**/v1/neighbours", told)
        near, token = window.page.locator("#neighbours"), window.page.locator("#text [role=option]").nth(4)

        plans[:] = [none]
        token.press("Enter")
        near.get_by_text("The gate made no search.").wait_for()
        assert near.get_by_role("listitem").count() == 0

        plans[:] = [{"status": 429}, cut]
        token.press("Enter")
        near.get_by_text("😀" * 60 + "tb").wait_for()
        assert near.locator(".passage").inner_text() == "…" + "😀" * 60 + "t" + "b" * 30 + "…"

        plans[:] = [{"status": 429}, {"status": 429}]
        token.press("Enter")
        near.get_by_text("Neighbours are being looked for. Choose the token again.").wait_for()

        plans[:] = [{"status": 404}]
        token.press("Enter")
        near.wait_for(state="hidden")
        assert window.page.locator("#choices-list > li").filter(has_text="without").count() == 0, "the model alone"
        assert plans == []
        assert [fault for fault in window.faults() if not re.search("status of (404|429)", fault)] == []


def test_tokens_come_one_after_the_other_and_stop_when_told(chrome, place):
    with at_desk(chrome, place) as window:
        write(window, "def ", Tokens_to_generate=4000)
        press(window, "Generate")
        shown = window.page.locator("#text [role=option]")
        shown.nth(5).wait_for()
        early = shown.count()
        window.page.keyboard.press("Tab")
        window.page.keyboard.press("Tab")
        assert window.page.evaluate("document.activeElement.id") == "stop"
        window.page.keyboard.press("Enter")
        told = window.page.get_by_role("status").filter(has_text=re.compile("Stopped|Generated"))
        assert told.inner_text().startswith("Stopped after")
        assert early < shown.count() < 4004
        assert window.faults() == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_in_every_width(chrome, place, scheme):
    with at_desk(chrome, place, scheme=scheme) as window:
        assert accessibility(window.page) == [], "before anything was done"
        write(window, TEXT + " " + "w" * 300, Tokens_to_generate=8)
        press(window, "Compare losses", "Compared 4 memory lengths")
        press(window, "Generate", "Generated 8 tokens")
        window.page.locator("#text [role=option]").nth(4).click()
        for folded in window.page.locator("details:visible").all():
            folded.locator("summary").click()
        for width in WIDTHS:
            window.page.set_viewport_size({"width": width, "height": 900})
            assert too_wide(window.page) == [], width
        assert accessibility(window.page) == [], "with everything unfolded"
        assert set(to_reach(window.page)) <= set(reached_by_tab(window.page))
        assert window.faults() == []


def test_a_stranger_s_texts_are_shown_and_never_obeyed(chrome, place):
    with at_desk(chrome, place, width=380) as window:
        before = window.page.locator("*").evaluate_all("all => new Set(all.map((e) => e.tagName)).size")
        for text in ("\n".join(HOSTILE), "\x00\x01 NUL", "👩🏽\u200d🚀 שלום \u202egpj"):
            write(window, text, Tokens_to_generate=2)
            press(window, "Generate", "Generated 2 tokens")
        window.page.locator("#numbers").check()
        for folded in window.page.locator("details#asked:visible").all():
            folded.locator("summary").click()
        assert too_wide(window.page) == []
        shown = window.page.locator("#text").inner_text()
        assert not set(shown) & set("\x00\x1b\u202e\u2066")
        after = window.page.locator("*").evaluate_all("all => new Set(all.map((e) => e.tagName)).size")
        assert after - before <= 5, "lists and codes, and nothing that was typed"
        assert (
            window.page.locator("iframe, img, main style, main script, main form:not(#ask, #again, #one)").count() == 0
        )
        assert window.faults() == []


def test_what_is_too_long_is_refused_with_a_sentence(chrome, server):
    with at_desk(chrome, server) as window:
        written = "(element, text) => { element.value = text; element.dispatchEvent(new Event('input')); }"
        window.page.get_by_role("textbox", name="Text to add").evaluate(written, "a" * 300_000)
        press(window, "Generate")
        window.page.get_by_role("alert").filter(has_text="at most").wait_for()
        assert tokens(window) == []
        write(window, "b", Tokens_to_generate=2)
        press(window, "Generate", "Generated 2 tokens")
        assert window.faults() == []


def test_a_second_tab_is_refused_until_the_first_is_closed(chrome, server):
    with contextlib.ExitStack() as stack:
        with at_desk(chrome, server):
            second = stack.enter_context(opened(chrome, server.address))
            refused = second.page.get_by_role("region", name="The server does not let this page in")
            refused.wait_for()
            assert "tab" in refused.inner_text().lower()
        again = second.page.get_by_role("button", name="Connect again")
        for _ in range(50):
            if again.is_hidden():
                break
            again.press("Enter")
            second.page.wait_for_timeout(100)
        second.page.get_by_role("status").filter(has_text="Ready").wait_for()
        assert second.foreign == second.dialogs == []
        assert {line for line in second.said if "429" not in line} == set(), "the browser notes the refusal itself"


def sessions_of(server: Playground) -> int:
    """Return the number of named sessions that the server has, wherever their memory is, from its metrics."""
    lines = server.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("txl_sessions_held{"))


def test_the_page_tells_that_the_server_was_interrupted(chrome, letters):
    with playing(letters) as server, at_desk(chrome, server) as window:
        write(window, "def ", Tokens_to_generate=1000)
        press(window, "Generate")
        window.page.locator("#text [role=option]").nth(5).wait_for()
        window.page.evaluate("scrollTo(0, 99999)")
        assert server.interrupt() in (0, 130)
        window.page.get_by_role("region", name="The connection is lost").wait_for()
        assert window.page.evaluate("scrollY") > 300, "far below the top"
        assert in_sight(window, "#lost"), "where one looks"
        assert len(tokens(window)) > 5, "the text is still there"
        assert accessibility(window.page) == []
        assert "Traceback" not in "".join(server.said)
        assert window.foreign == window.dialogs == []


def test_a_page_goes_on_with_a_server_that_was_killed_and_came_back_and_not_with_another_model(chrome, letters):
    with contextlib.ExitStack() as stack:

        def killed() -> None:
            first.process.kill()
            first.process.wait()
            lost.get_by_role("heading", name="The connection is lost").wait_for()

        first = stack.enter_context(serving(letters))
        port = first.url.rpartition(":")[2]
        window = stack.enter_context(opened(chrome, f"{first.url}/playground"))
        page, lost = window.page, window.page.locator("#lost")
        page.get_by_role("status").filter(has_text="Ready").wait_for()
        write(window, "def ", Tokens_to_generate=3)
        press(window, "Generate", "Generated 3 tokens")
        text = tokens(window)
        killed()
        assert tokens(window) == text
        assert "its memory is read anew" in lost.inner_text()
        press(window, "Connect again")
        lost.filter(has_text="cannot be reached").wait_for()
        first = stack.enter_context(serving(letters, "--port", port))
        press(window, "Connect again", "Ready")
        press(window, "Generate", "Generated 3 tokens")
        assert tokens(window)[: len(text)] == text
        killed()
        stack.enter_context(serving(frozen("ring"), "--port", port))
        press(window, "Connect again")
        lost.get_by_role("heading", name="Another model is served here now").wait_for()
        assert "copy what you need of it first" in lost.inner_text()
        assert len(tokens(window)) == len(text) + 3
        assert not [line for line in window.said if "Failed to load resource" not in line]


@contextlib.contextmanager
def of_another_model(chrome: Any, server: Playground, **facts: Any) -> Iterator[Any]:
    """The page, told other facts of its model."""

    def changed(route: Any) -> None:
        answer = route.fetch()
        document = answer.json()
        document["data"][0] |= facts
        route.fulfill(response=answer, json=document)

    with at_desk(chrome, server) as window:
        window.page.route("**/v1/models", changed)
        window.page.reload()
        yield window.page


@pytest.mark.parametrize(
    ("side", "entries"),
    [
        ("inputs", [{"name": "tokens", "role": "tokens"}, {"name": "features", "role": "feature"}]),
        ("inputs", [{"name": "a", "role": "tokens"}, {"name": "b", "role": "tokens"}]),
        ("outputs", [{"name": "values", "role": "value"}]),
    ],
)
def test_the_page_says_of_a_model_that_needs_more_than_tokens_that_it_continues_no_texts(chrome, server, side, entries):
    with of_another_model(chrome, server, **{side: entries}) as page:
        page.get_by_role("alert").filter(has_text="This model does not continue texts").wait_for()
        assert not page.get_by_role("button", name="Generate", exact=True).is_visible()


def test_the_page_says_of_a_model_without_memory_rows_that_it_has_none(chrome, server):
    with of_another_model(chrome, server, memory_length=0) as page:
        page.get_by_text("This model has no memory rows: it sees its segment alone.").wait_for()
        assert page.get_by_role("meter").get_attribute("aria-valuetext") == "no memory"


def test_a_page_of_another_origin_can_do_nothing(chrome, server, tmp_path):
    """Even where it knows the token: by fetch, with and without leave to read, and by a form."""
    (tmp_path / "index.html").write_text("<!doctype html><title>elsewhere</title>")

    with served(tmp_path) as origin, opened(chrome, f"{origin}/index.html", allowed=[server.origin]) as window:
        statuses = list[tuple[str, int]]()
        window.page.on("response", lambda answer: statuses.append((answer.request.resource_type, answer.status)))
        read = window.page.evaluate(
            """async ([origin, token]) => {
                    const body = JSON.stringify({prompt: "def ", max_tokens: 2});
                    const bearer = {Authorization: `Bearer ${token}`};
                    const ways = [
                        ["/v1/models", {}],
                        ["/v1/models", {headers: bearer}],
                        ["/playground/tab", {headers: bearer}],
                        ["/v1/completions", {method: "POST", body, mode: "no-cors"}],
                        ["/v1/completions", {method: "POST", body, headers: {...bearer, "Content-Type": "text/json"}}],
                        [`/playground?token=${token}`, {}],
                    ];
                    const read = [];
                    for (const [path, how] of ways) {
                        try {
                            const answer = await fetch(origin + path, how);
                            if (answer.type !== "opaque") read.push([path, await answer.text()]);
                        } catch {}
                    }
                    return read;
                }""",
            [server.origin, server.token],
        )
        assert read == []
        with window.page.expect_navigation():
            window.page.evaluate(
                """([origin, token]) => {
                        const form = document.createElement("form");
                        form.method = "post";
                        form.enctype = "text/plain";
                        form.action = `${origin}/v1/completions?token=${token}`;
                        form.innerHTML = `<input name='{"prompt": "def ", "max_tokens": 2, "x": "' value='"}'>`;
                        document.body.append(form);
                        form.submit();
                    }""",
                [server.origin, server.token],
            )
        assert [status for kind, status in statuses if kind == "document"] == [403], "the form"
        assert {status for _, status in statuses} <= {401, 403}, statuses
    assert sessions_of(server) == 0
