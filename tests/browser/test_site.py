"""The documentation as a site, built by `make site` and opened from the disk in Chromium."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from browsing import SCHEMES, WIDTHS, accessibility, opened, served, too_wide

ROOT = Path(__file__).parents[2]
PAGES = ("index", "docs/performance", "docs/site/txl_runtime")
QUESTIONS = {
    "export policy": "docs/first-steps",
    "memory length": "docs/runtime",
    "snapshot": "docs/runtime",
    "which gpus": "docs/platforms",
}
"""A newcomer's words, and a page that the search has to offer among the first."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def site() -> Path:
    """Build it; mkdocs refuses a link or an anchor that leads nowhere."""
    python = ROOT / ".site" / "bin" / "python"
    if not python.exists():
        pytest.skip("what builds the site is not here; make .site/ready brings it")
    done = subprocess.run([python, ROOT / "docs/site/build.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return ROOT / "site"


def start_page(chrome, site: Path):
    """Open it from the disk; it may ask for every file of the site."""
    files = [str(path) for path in site.rglob("*.*")]
    return opened(chrome, (site / "index.html").as_uri(), allowed=files)


def test_pages_fit_every_width_and_can_be_read_by_all(chrome, site):
    with served(site) as origin:
        for name, scheme in itertools.product(PAGES, SCHEMES):
            with opened(chrome, f"{origin}/{name}.html", scheme=scheme) as window:
                for width in WIDTHS:
                    window.page.set_viewport_size({"width": width, "height": 900})
                    assert too_wide(window.page) == [], (name, width)
                assert accessibility(window.page, enhanced=False) == [], (name, scheme)
                assert window.faults() == []


def test_the_search_answers_from_a_disk(chrome, site):
    with start_page(chrome, site) as window:
        for words, page in QUESTIONS.items():
            window.page.reload()
            window.page.locator(".md-search__input").fill(words)
            window.page.locator(".md-search-result__link").first.wait_for()
            found = window.page.locator(".md-search-result__item > .md-search-result__link").all()
            links = [link.get_attribute("href") for link in found[:8]]
            assert any(f"{page}.html" in str(link) for link in links), (words, links)


def test_the_list_for_language_models_names_pages_that_are_there(site):
    lines = [line for line in (site / "llms.txt").read_text().splitlines() if line.startswith("- [")]
    assert len(lines) > 25
    for line in lines:
        assert (site / line.partition("](")[2].removesuffix(")")).is_file(), line
    assert not list((site / "docs").rglob("*.md.md"))


def test_the_model_runs_in_the_start_page(chrome, site):
    if not (site / "try.html").is_file():
        pytest.skip("onnxruntime-web is not here; make js brings it")
    with start_page(chrome, site) as window:
        window.page.locator("details.try summary").click()
        frame = window.page.frame_locator("details.try iframe")
        frame.get_by_role("button", name="Generate", exact=True).wait_for()
        frame.locator("#status:not(:empty)").first.wait_for()
        assert window.faults() == []
