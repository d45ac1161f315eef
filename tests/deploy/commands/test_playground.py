"""`txl-deploy playground` as a process: what it prints, what it refuses at once, and that nothing outlives it."""

from __future__ import annotations

import html
import json
import re
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import url2pathname

import httpx2
import pytest
from frozen import frozen
from playing import Playground, playing
from step_models import recurrent
from support import call_main, until

CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "/playground/tab", headers={"authorization": "Bearer " + sys.argv[2]})
with urllib.request.urlopen(request) as answer:
    for line in answer:
        print(line.decode(), end="", flush=True)
"""
"""A browser, as the server sees it: a process that keeps the connection of its tab open."""


@pytest.fixture(scope="module")
def letters() -> Path:
    """A bundle that reads bytes."""
    return frozen("clusters")


def open_tab(found: Playground) -> tuple[subprocess.Popen[str], str]:
    """A process that keeps a tab open, and the tab's name."""
    command = [sys.executable, "-c", CLIENT, found.origin, found.token]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    return client, json.loads(client.stdout.readline().removeprefix("data: "))["tab"]


def names(found: Playground) -> list[str]:
    return [each["name"] for each in found.get("/v1/sessions").json()["data"]]


@pytest.mark.slow
def test_a_killed_browser_leaves_no_session_and_no_request(letters):
    with playing(letters) as found:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/playground\?token=[\w-]{32}", found.address)
        assert "for this machine alone; Ctrl-C ends it" in "".join(found.said)
        assert httpx2.get(found.address).status_code == 200
        for killed in (signal.SIGKILL, signal.SIGTERM):
            client, tab = open_tab(found)
            assert found.get("/playground/tab").json()["error"]["code"] == "tabs"
            body = {"prompt": "abc", "session": f"{tab}-a", "max_tokens": 4000, "stream": True}
            asked = {"json": body, "headers": found.shown, "timeout": 60}
            with httpx2.stream("POST", f"{found.origin}/v1/completions", **asked) as answer:
                pieces = answer.iter_lines()
                next(pieces)
                client.send_signal(killed)
                client.communicate(timeout=30)
                assert '"code":"closed"' in [line for line in pieces if line][-1]
            until(lambda: not names(found))
            assert "txl_requests_running 1.0" in found.get("/metrics").text, "this one alone"
        client, _ = open_tab(found)
        assert found.interrupt() == 0
        said = "".join(found.said)
        assert "stopped" in said
        assert said.count(found.token) == 1, "the address alone"
        client.communicate(timeout=30)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int(found.origin.rpartition(":")[2])), timeout=5).close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_while_tokens_are_drawn(letters, number):
    with playing(letters, "--tabs", 2) as found:
        client, tab = open_tab(found)
        asked = {"json": {"prompt": "abc", "session": f"{tab}-a", "max_tokens": 4000}, "headers": found.shown}
        with ThreadPoolExecutor() as aside:
            asked = aside.submit(httpx2.post, f"{found.origin}/v1/completions", **asked, timeout=60)
            until(lambda: names(found))
            assert found.interrupt(number) == 0
            assert asked.exception(30) is not None or asked.result().json()["error"]["code"] == "closed"
        client.communicate(timeout=30)
        assert subprocess.run(["pgrep", "-P", str(found.process.pid)], check=False, capture_output=True).stdout == b""


@pytest.mark.slow
def test_a_browser_is_opened_with_the_address(letters, tmp_path):
    told = tmp_path / "told"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {told}.part\nmv {told}.part {told}\n')
    browser.chmod(0o755)
    with playing(letters, BROWSER=str(browser)) as found:
        until(told.exists)
        page = Path(url2pathname(told.read_text().strip().removeprefix("file://")))
        assert f'content="0; url={html.escape(found.address)}"' in page.read_text()
        assert stat.S_IMODE(page.parent.stat().st_mode) == 0o700, "other users see the words that start a program"
        assert found.interrupt() == 0
        assert not page.parent.exists()
    with playing(letters, BROWSER=str(tmp_path / "none"), PATH=str(tmp_path), DISPLAY="") as found:
        until(lambda: "note: no browser was found here; open the address in one\n" in found.said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tabs", 0), "tabs is 0, expected at least 1; check --tabs"),
        (("--rows", 9), "rows are 9, expected 1 … 2"),
        (("--backend", "no"), "backend 'no' is unknown"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(letters, options, message, monkeypatch, capfd):
    code, out, err = call_main(("playground", letters, "--no-open", *options), monkeypatch, capfd)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_model_that_continues_no_tokens_is_refused(tmp_path, monkeypatch, capfd):
    bundle = recurrent().write(tmp_path / "robot.txl")
    code, _, err = call_main(("playground", bundle, "--no-open"), monkeypatch, capfd)
    assert (code, err.count("\n")) == (2, 1)
    assert "the model reads named arrays, or returns no log-probabilities" in err
