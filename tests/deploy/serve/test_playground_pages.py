"""The playground's page: its headers, its files, and who may ask for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import Served

from txl_deploy.page import files
from txl_deploy.serve.app import ENDPOINTS

TOKEN = "secret-token"
SHOWN = {"authorization": f"Bearer {TOKEN}"}
PATHS = [path.replace("{name}", "a").replace("{file}", "page.js") for path in ENDPOINTS]
FILES = [path for path in files() if path.suffix in (".js", ".css")]


@pytest.fixture(scope="module")
def local(letters: Path):
    """The server of `txl-deploy playground`."""
    server = Served(letters, token=TOKEN, local=True, tabs=1)
    yield server
    server.close()


def test_the_page_asks_nobody_else_and_stands_in_no_other(local):
    for path, kind in [
        (f"/playground?token={TOKEN}", "text/html; charset=utf-8"),
        ("/playground/page.css", "text/css; charset=utf-8"),
        ("/playground/page.js", "text/javascript; charset=utf-8"),
    ]:
        answer = local.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == kind
        assert answer.headers["content-security-policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_those_of_the_package_and_need_no_token(local, path):
    assert local.get(f"/playground/{path.name}").content == path.read_bytes()


@pytest.mark.parametrize("name", ["none.js", "page.html", "..%2fpages.py", "__init__.py", "%2e%2e", "page.js%00", "é"])
def test_there_is_no_other_file(local, name):
    assert local.request("GET", f"/playground/{name}", headers=SHOWN).status_code == 404


@pytest.mark.parametrize(
    "query",
    ["", "?token=", "?token=wrong", f"?token={TOKEN}x", f"?Token={TOKEN}", f"?x={TOKEN}", "?token=%ff%00", "?token=é"],
)
def test_the_page_is_shown_to_nobody_without_its_token(local, query):
    error = local.refused(401, "GET", f"/playground{query}")
    assert error["code"] == "token"
    assert TOKEN not in error["message"]


@pytest.mark.parametrize("path", sorted({*PATHS} - {"/", "/playground", "/playground/page.js", "/health"}))
def test_a_token_in_the_address_opens_the_page_alone(local, path):
    method = next(iter(ENDPOINTS[path.replace("/a", "/{name}")]))
    assert local.refused(401, method, f"{path}?token={TOKEN}")["code"] == "token"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["example.com", "evil.localhost:8000", "", "127.0.0.2"])
def test_a_foreign_host_is_refused_on_every_path(local, path, host):
    assert local.refused(400, "GET", path, headers={**SHOWN, "host": host})["code"] == "host"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "origin", ["http://example.com", "null", "", "http://localhost:1", "https://localhost.evil", "file://"]
)
def test_a_foreign_origin_is_refused_on_every_path(local, path, origin):
    assert local.refused(403, "GET", path, headers={**SHOWN, "origin": origin})["code"] == "origin"


LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
"""A browser's headers if a page of another server links to here; an image says so too, and no Origin."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_foreign_page_embeds_is_refused_on_every_path(local, served, path, site):
    """Another port of this machine is the same site to a browser, and another server."""
    image = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    frame = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
    for headers in (image, frame):
        assert local.refused(403, "GET", path, headers={**SHOWN, **headers})["code"] == "origin"
        assert served.refused(403, "GET", path, headers=headers)["code"] == "origin"


@pytest.mark.parametrize("path", PATHS)
def test_a_link_of_a_foreign_page_opens_what_only_shows_something(served, path):
    shows = path in ("/", "/playground", "/health", "/metrics")
    assert served.get(path, headers=LINK).status_code == (200 if shows else 403)
    assert served.get(path, headers={**LINK, "origin": "http://example.com"}).status_code == 403


def test_its_own_page_and_the_address_line_are_answered(local):
    for site in ("same-origin", "none"):
        headers = {"sec-fetch-site": site, "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}
        assert local.get("/v1/models", headers={**SHOWN, **headers}).status_code == 200
    assert local.get(f"/playground?token={TOKEN}", headers=LINK).status_code == 200, "from the file that opens it"
    assert local.get("/playground", headers=LINK).status_code == 401


def test_its_own_origin_is_answered(local):
    for host in ("localhost", "127.0.0.1:8123", "[::1]:9"):
        headers = {**SHOWN, "host": host, "origin": f"http://{host}"}
        assert local.get("/v1/models", headers=headers).status_code == 200
        headers["origin"] = "http://localhost:1"
        local.refused(403, "GET", "/v1/models", headers=headers)
    both = [("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://evil.example"), *SHOWN.items()]
    local.refused(403, "GET", "/v1/models", headers=both)


def test_a_server_without_a_token_refuses_pages_of_others(served):
    assert served.refused(403, "GET", "/v1/models", headers={"origin": "http://example.com"})["code"] == "origin"
    assert served.get("/v1/models", headers={"origin": "http://localhost"}).status_code == 200
    assert served.get("/playground").status_code == 200


def test_a_server_with_a_token_has_the_page_behind_it_under_any_name(serve):
    server = serve(token=TOKEN)
    named = {"host": "models.example.com"}
    assert server.get(f"/playground?token={TOKEN}", headers=named).status_code == 200
    assert server.get("/playground", headers={**named, **SHOWN}).status_code == 200
    server.refused(401, "GET", "/playground", headers=named)
    own = {**named, **SHOWN, "origin": "https://models.example.com"}
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=own).status_code == 200
    assert server.get("/playground/page.js", headers=own).status_code == 200
    server.refused(403, "GET", "/playground/tab", headers={**own, "origin": "https://example.com"})
    server.refused(403, "GET", "/playground/tab", headers={**named, **SHOWN, "sec-fetch-site": "cross-site"})
    assert server.get("/v1/models", headers={**named, **SHOWN, "sec-fetch-site": "cross-site"}).status_code == 200


def test_the_token_is_in_no_log(serve, capfd):
    server = serve(token=TOKEN, local=True, json_logs=True)
    capfd.readouterr()
    assert server.get(f"/playground?token={TOKEN}").status_code == 200
    server.refused(401, "GET", f"/playground?token={TOKEN}x")
    server.refused(401, "GET", f"/v1/models?token={TOKEN}")
    out, err = capfd.readouterr()
    assert err.count('"event":"request"') == 3
    assert TOKEN not in out + err
    assert TOKEN not in repr(server.settings)
