"""Sessions that are named in the header X-Session, as a proxy needs it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest


@pytest.fixture(autouse=True)
def _no_session_is_left(served) -> Iterator[None]:
    """Other modules share the server, and count its sessions."""
    yield
    for each in served.get("/v1/sessions").json()["data"]:
        served.request("DELETE", f"/v1/sessions/{quote(each['name'], safe='')}")


def test_a_header_names_the_session_of_a_completion(served):
    answer = served.post("/v1/completions", {"prompt": "ab", "max_tokens": 1}, headers={"X-Session": "header"})
    assert answer.json()["session"] == {"name": "header", "seen": 2}
    assert served.complete(prompt="c", max_tokens=1, session="header")["session"]["seen"] == 4
    seen = {"prompt": "", "max_tokens": 1, "session_seen": 4}
    assert served.post("/v1/completions", seen, headers={"X-Session": "header"}).json()["session"]["seen"] == 5


def test_a_header_beside_the_same_name_is_taken(served):
    body, header = {"prompt": "ab", "max_tokens": 1, "session": "both"}, {"X-Session": "both"}
    assert served.post("/v1/completions", body, headers=header).json()["session"]["name"] == "both"
    assert served.get("/v1/sessions/both", headers=header).json()["seen"] == 2
    assert served.request("DELETE", "/v1/sessions/both", headers=header).status_code == 200


@pytest.mark.parametrize("name", ["Ωmega", "a b"])
def test_a_name_beyond_ascii_is_utf8_in_the_header(served, name):
    headers = [(b"x-session", name.encode())]
    body = {"prompt": "ab", "max_tokens": 1}
    assert served.post("/v1/completions", body, headers=headers).json()["session"]["name"] == name
    assert served.get(f"/v1/sessions/{name}", headers=headers).json()["name"] == name


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([("X-Session", "ada"), ("X-Session", "bea")], "the header X-Session is there 2 times, expected once"),
        ([("X-Session", "ada")], "the header X-Session is 'ada', expected the request's session 'eve'; send the same"),
        ([(b"X-Session", b"\xff")], "the header X-Session is '�', expected the request's session 'eve'"),
    ],
)
def test_a_header_that_names_a_different_session_is_refused(served, headers, message):
    """The proxy has chosen the server by it, so that the session would be begun on the wrong one."""
    for method, path, more in (
        ("POST", "/v1/completions", {"json": {"prompt": "ab", "session": "eve"}}),
        ("GET", "/v1/sessions/eve", {}),
        ("DELETE", "/v1/sessions/eve", {}),
        ("PUT", "/v1/sessions/eve/state", {"content": b""}),
    ):
        error = served.refused(400, method, path, headers=headers, **more)
        assert message in error["message"], method
    assert "eve" not in [one["name"] for one in served.get("/v1/sessions").json()["data"]]


@pytest.mark.parametrize("value", [b"", b"a/b", b"\xff", b"x" * 257])
def test_a_header_that_is_no_name_is_refused(served, value):
    error = served.refused(400, json={"prompt": "ab"}, headers=[(b"x-session", value)])
    assert "session is" in error["message"]


def test_a_header_without_a_session_to_name_changes_nothing(served):
    assert served.get("/v1/models", headers={"X-Session": "ada"}).status_code == 200
    assert served.get("/v1/sessions", headers={"X-Session": "a/b"}).status_code == 200
