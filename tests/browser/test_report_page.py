"""The report page in Chromium, opened from disk: of every kind of bundle, in both themes, three widths and on paper."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import txl_export
from browsing import SCHEMES, WIDTHS, accessibility, opened, reached_by_tab, to_reach, too_wide
from frozen import frozen
from hostile import HOSTILE, MARKUP
from support import save_checkpoint, small_config
from txl_export.families.registry import facts_of_bundle
from txl_report import write_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
LARGEST = 5_000_000
TEXT = "def main(arguments):\n    return arguments  # what was given, as it was given\n" * 12


def failed(bundle: Path, path: Path) -> Path:
    """Write what `verify --json` says of a bundle that is not the model: the first gate of its report, failed."""
    report = json.loads((bundle / "report.json").read_text("utf-8"))
    report["passed"] = False
    for gate in report["gates"]:
        gate["value"], gate["passed"] = 1e6, False
    path.write_text(json.dumps(report), "utf-8")
    return path


@pytest.fixture(scope="module")
def written(make_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A report of each kind, made once: `written("int8")`."""
    folder = tmp_path_factory.mktemp("reports")
    text = folder / "text.txt"
    text.write_text(TEXT, "utf-8")
    letters = {"vocab_size": 256}

    def options_of(kind: str) -> tuple[Path, dict[str, Any]]:
        match kind:
            case "everything":
                bundle = make_bundle(config=letters, vocabulary=True, batch_size=2)
                return bundle, {"text": text, "context": True}
            case "int8":
                return frozen("0.8/int8"), {"text": text}
            case "adaptive":  # as wt103's: clusters of words, each with a narrower embedding
                clusters = {"vocab_size": 1100, "cutoffs": (300, 900), "div_val": 2}
                return make_bundle(config=clusters, batch_size=2), {}
            case "own module":
                return frozen("0.8/policy-16"), {}
            case "unverified":
                return frozen("ring"), {}
            case "failed":
                right = make_bundle(config=letters, vocabulary=True, batch_size=2)
                return right, {"verify": failed(right, folder / "failed.json")}
        raise ValueError(kind)

    def make(kind: str) -> Path:
        page = folder / f"{kind}.html"
        if not page.exists():
            bundle, options = options_of(kind)
            write_report(bundle, page, describe=facts_of_bundle, **options)
        return page

    return make


KINDS = ("everything", "int8", "adaptive", "own module", "unverified", "failed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_opens_in_every_width_and_theme(chrome, written, kind):
    page = written(kind)
    assert page.stat().st_size < LARGEST
    with opened(chrome, page.as_uri()) as window:
        for width in WIDTHS:
            window.page.set_viewport_size({"width": width, "height": 900})
            assert too_wide(window.page) == [], width
        for scheme in SCHEMES:
            window.page.emulate_media(color_scheme=scheme)
            assert accessibility(window.page) == [], scheme
        window.page.emulate_media(media="print", color_scheme="light")
        window.page.set_viewport_size({"width": 700, "height": 900})
        assert too_wide(window.page) == [], "on paper"
        assert window.faults() == []


@pytest.mark.parametrize("kind", ["everything", "own module"])
def test_everything_in_a_report_is_reached_by_keyboard(chrome, written, kind):
    with opened(chrome, written(kind).as_uri(), width=380) as window:
        reached = reached_by_tab(window.page)
        assert set(to_reach(window.page)) <= set(reached), "a control or a scroll area that Tab does not reach"
        for name in reached:
            if name.split()[1].startswith("SUMMARY"):
                window.page.locator("*").nth(int(name.split()[0])).press("Enter")
        unfolded = reached_by_tab(window.page)
        assert len(unfolded) > len(reached)
        assert set(to_reach(window.page)) <= set(unfolded), "the same where it was folded"
        assert window.page.locator("details:not([open])").count() == 0, "Enter unfolds what is folded"
        assert window.faults() == []
        assert too_wide(window.page) == []
        assert accessibility(window.page) == [], "what was folded, too"


@pytest.mark.parametrize("kind", ["everything", "adaptive"])
def test_every_chart_has_a_name_and_a_table_with_its_numbers(chrome, written, kind):
    with opened(chrome, written(kind).as_uri()) as window:
        figures = window.page.locator("figure").all()
        assert len(figures) >= (5 if kind == "everything" else 2)
        told = window.page.locator("body").aria_snapshot()
        for figure in figures:
            (drawing,) = figure.locator("[role=img]").all()
            name = figure.locator("[role=img] > title").text_content()
            assert name.strip()
            assert f'img "{json.dumps(name)[1:-1]}' in told or name in told
            assert figure.locator("table").count() == 1
            rows = figure.locator("tbody tr").count()
            assert rows == int(figure.get_attribute("data-rows")) > 0
            points = drawing.locator(".point").count()
            assert points == 0 or points >= rows or points % rows == 0
            for point in drawing.locator(".point").all()[:3]:
                assert point.locator("title").text_content().strip()


def test_the_first_screen_shows_what_memory_does_beside_a_passage(chrome, written):
    with opened(chrome, written("everything").as_uri(), width=1400, height=900) as window:
        chart, passage = (window.page.locator(f".opening .{name}").bounding_box() for name in ("chart", "passage"))
        assert chart["x"] + chart["width"] < passage["x"], "side by side"
        assert max(chart["y"] + chart["height"], passage["y"] + passage["height"]) < 900, "without scrolling"
        titles = window.page.locator(".opening .passage .gain").evaluate_all("all => all.map((e) => e.title)")
        assert len(titles) > 100
        assert all(" with memory, " in title and " without: " in title for title in titles)


def test_tables_are_printed_where_they_were_unfolded_and_else_not(chrome, written):
    with opened(chrome, written("everything").as_uri()) as window:
        window.page.emulate_media(media="print")
        folded, told = (
            window.page.locator("details table"),
            window.page.get_by_text("Tables that are folded are not printed"),
        )
        assert folded.count() > 10
        assert not any(table.is_visible() for table in folded.all())
        assert told.is_visible()
        fits = "element => element.scrollHeight <= element.clientHeight + 1"
        assert window.page.locator(".opening .passage").evaluate(fits), "nothing runs over what stands below"
        short = len(re.findall(rb"/Type\s*/Page\b", window.page.pdf()))
        window.page.emulate_media(media="screen")
        assert not told.is_visible()
        window.page.get_by_role("link", name="Unfold all tables").click()
        assert all(table.is_visible() for table in folded.all())
        window.page.emulate_media(media="print")
        assert all(table.is_visible() for table in folded.all())
        assert not told.is_visible()
        assert len(re.findall(rb"/Type\s*/Page\b", window.page.pdf())) > 1.5 * short
        window.page.emulate_media(media="screen")
        window.page.get_by_role("link", name="Fold them").click()
        assert not any(table.is_visible() for table in folded.all())
        assert window.faults() == []


def test_a_report_says_what_was_not_measured_and_what_has_failed(chrome, written):
    with opened(chrome, written("unverified").as_uri()) as window:
        said = window.page.locator("body").inner_text()
        assert "--no-verify" in said or "not verified" in said.lower()
    with opened(chrome, written("failed").as_uri()) as window:
        assert "failed" in window.page.locator("header").inner_text().lower()
        assert window.page.locator(".verdict.failed").count() >= 1


def test_a_stranger_s_texts_are_shown_and_never_obeyed(chrome, tmp_path):
    """In the vocabulary, the text, the names of files and folders, where a bundle came from, and what was measured."""
    symbols = [*dict.fromkeys(["<unk>", *(text.replace("|", "") for text in HOSTILE)])]
    words = {"kind": "words", "symbols": symbols, "unknown": 0, "delimiter": "|"}
    config = small_config(vocab_size=len(symbols))
    plain = tmp_path / "plain"
    plain.mkdir()
    checkpoint = save_checkpoint(plain / "<img src=x onerror=window.owned=2>.pt", config, vocabulary=words)
    name = "'\"><script>window.owned=3<\u2215script>.txl"
    txl_export.export(checkpoint, plain / name, segment_length=(4, 1), batch_size=2)
    folder = plain.rename(tmp_path / os.fsdecode("<b onclick=window.owned=1>\u202e😀 ".encode() + b"\xff"))
    bundle = folder / name
    manifest = json.loads((bundle / "manifest.json").read_text("utf-8"))
    manifest["provenance"] |= {f"<img src=x onerror=window.owned={at}>": text for at, text in enumerate(HOSTILE)}
    manifest["provenance"] |= dict.fromkeys(manifest["provenance"], "".join(MARKUP))
    (bundle / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    text = folder / "\u202e<script>window.owned=4.txt"
    kept = [word for word in symbols if not set(word) & set("\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")]
    text.write_text("\n".join("|".join(kept[at:] + kept[:at]) for at in range(8)), "utf-8")
    page = folder / "report.html"
    write_report(bundle, page, text=text, context=True, describe=facts_of_bundle)
    said = page.read_text("utf-8")
    for character in "\x00\x01\x07\x1b\x7f\x9b\u202e\u2066\u200f\u2028":
        assert character not in said, hex(ord(character))
    with opened(chrome, page.as_uri(), width=380) as window:
        window.page.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
        for element in ("b", "script", "img", "iframe", "form", "a[href*=':']"):
            assert window.page.locator(f"body {element}").count() == 0, element
        for element in window.page.locator("body [title]").all()[:20]:
            element.hover(timeout=1000, force=True)
        assert "<script>window.owned=1</script>" in window.page.locator("body").inner_text()
        assert too_wide(window.page) == []
        assert window.faults() == []
