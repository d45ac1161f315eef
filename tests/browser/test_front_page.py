"""The page at / of a server without a token, in Chromium, and what a page of another server can do to that server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2
import pytest
from browsing import SCHEMES, WIDTHS, accessibility, opened, reached_by_tab, served, to_reach, too_wide
from frozen import frozen
from serving import Server, serving
from support import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """It asks for no token, so pages of others must not reach it."""
    with serving(frozen("clusters"), "--name", "small") as started:
        yield started


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_in_every_width(chrome, server, scheme):
    with opened(chrome, server.url, scheme=scheme) as window:
        for width in WIDTHS:
            window.page.set_viewport_size({"width": width, "height": 900})
            assert too_wide(window.page) == [], width
        assert accessibility(window.page) == []
        assert set(to_reach(window.page)) <= set(reached_by_tab(window.page))
        assert window.faults() == []
        window.page.get_by_role("link", name="/playground").click()
        window.page.locator("#status:not(:empty)").wait_for()
        assert window.faults() == []


def test_a_page_of_another_server_embeds_nothing_and_may_link_to_the_page(chrome, server, tmp_path):
    """A picture and a frame are asked for without an Origin; what gives them away is Sec-Fetch-Site."""
    embedded = "/playground/tab", "/v1/sessions", "/metrics", "/"
    (tmp_path / "index.html").write_text(
        "<!doctype html><title>elsewhere</title>"
        + "".join(f'<img src="{server.url}{path}"><iframe src="{server.url}{path}"></iframe>' for path in embedded)
        + f'<a href="{server.url}/">there</a>'
    )

    tabs = answered(server, "/playground/tab", 200)

    with served(tmp_path) as origin, opened(chrome, f"{origin}/index.html", allowed=[server.url]) as window:
        until(lambda: answered(server, "other", 403) == 2 * len(embedded))
        window.page.get_by_text("there").click()
        window.page.get_by_role("heading", name="small").wait_for()
    assert answered(server, "other", 403) == 2 * len(embedded), "the link is followed"
    assert answered(server, "/playground/tab", 200) == tabs, "no tab was taken"


def answered(server: Server, path: str, status: int) -> int:
    """Requests of a route that were answered so, as the server counts them; "other" where none was looked for."""
    text = httpx2.get(f"{server.url}/metrics").text
    found = re.findall(rf'^txl_requests_total{{path="{path}",status="{status}"}} (\S+)$', text, re.MULTILINE)
    return int(float(found[0])) if found else 0
