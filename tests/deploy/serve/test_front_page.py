"""GET /: what a person and what a program find there."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from txl_deploy.serve.app import ENDPOINTS
from txl_deploy.serve.front_page import LINKS

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


class Shown(HTMLParser):
    """A page as a reader sees it: its text without what is hidden, its links, and its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.links, self.elements = "", list[str](), set[str]()
        self._hidden = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.text += " "
        self.links += [value for name, value in attrs if name == "href" and tag == "a" and not self._hidden]
        if any(name == "hidden" for name, _ in attrs) and not self._hidden:
            self._hidden = tag

    def handle_endtag(self, tag):
        if tag == self._hidden:
            self._hidden = ""

    def handle_data(self, data):
        self.text += "" if self._hidden else data


def test_a_person_finds_the_model_and_the_way_on(served):
    answer = served.get("/", headers=BROWSER)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    shown = Shown(answer.text)
    assert "small" in shown.text
    assert {"/playground", "/health", "/metrics"} < set(shown.links)
    for path in shown.links:
        assert served.get(path).status_code == 200, path


def test_the_page_runs_nothing_and_asks_nobody_else(served):
    answer = served.get("/")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert (answer.headers["cache-control"], answer.headers["vary"]) == ("no-store", "accept")
    assert not Shown(answer.text).elements & {"script", "img", "iframe", "form", "style"}
    assert "://" not in answer.text


def test_the_page_names_every_endpoint(served):
    text = Shown(served.get("/").text).text
    for path in ENDPOINTS:
        if path not in (
            "/",
            "/playground/tab",
            "/playground/{file}",
            "/v1/neighbours",
        ):  # parts of two pages
            assert re.search(rf"{re.escape(path)}(?![\w/])", text), path


def test_a_name_with_markup_is_text(serve):
    answer = serve(name='<script>alert("a")</script>&amp;').get("/")
    assert "script" not in Shown(answer.text).elements
    assert '<script>alert("a")</script>&amp;' in Shown(answer.text).text


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/json", "application/json"),
        ("application/json, */*;q=0.5", "application/json"),
        ("*/*", "text/html; charset=utf-8"),
        ("", "text/html; charset=utf-8"),
        ("text/html, application/json", "text/html; charset=utf-8"),
    ],
)
def test_a_program_that_asks_for_json_gets_it(served, accept, kind):
    answer = served.get("/", headers={"accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    if kind == "application/json":
        found = answer.json()
        assert (found["object"], found["name"], found["model"]) == ("server", "txl-deploy", "small")
        assert found["links"] == LINKS
        assert set(LINKS.values()) < set(ENDPOINTS)


def test_a_server_with_a_token_names_nothing_there_and_says_how_to_show_it(serve):
    server = serve(token="secret-token", name="private-name")
    for headers in (BROWSER, {"accept": "application/json"}):
        answer = server.get("/", headers=headers)
        assert answer.status_code == 200
        assert "private-name" not in answer.text
        assert "secret-token" not in answer.text
    shown = Shown(server.get("/", headers=BROWSER).text).text
    assert "asks for a token" in shown
    assert "/playground?token=TOKEN" in shown
