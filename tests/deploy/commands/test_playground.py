"""`txl-deploy playground` as a process: what it prints, what it refuses at once, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import httpx2
import pytest
from step_models import recurrent
from support import call_main, until
from txl_runtime.installing import pip_line

from txl_deploy.commands import serve as serve_command

CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "/playground/tab", headers={"authorization": "Bearer " + sys.argv[2]})
with urllib.request.urlopen(request) as answer:
    for line in answer:
        print(line.decode(), end="", flush=True)
"""
"""What a browser is to the server: a process that keeps the connection of its tab open."""


@pytest.fixture(scope="module")
def letters(make_bundle) -> Path:
    """A bundle that reads bytes."""
    return make_bundle(
        config={"vocab_size": 256}, vocabulary=True, batch_size=3, boundary_token=10, verify=False, seed=3
    )


class Playground:
    """`txl-deploy playground` in a process of its own.

    Attributes:
        address: what it printed.
        url, token: the parts of it.
    """

    def __init__(self, bundle: Path, *options: object, **environment: str) -> None:
        command = [sys.executable, "-m", "txl_deploy", "playground", bundle, *options]
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        address = re.search(r"http\S+", self.line)
        if address is None:
            self.process.kill()  # nobody else knows of it
            raise AssertionError(self.line + self.process.communicate()[1])
        self.address = address[0]
        self.url, self.token = self.address.split("/playground?token=")

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """One request with the token."""
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx2.request(method, f"{self.url}{path}", headers=headers, timeout=60, **options)

    def open_tab(self) -> tuple[subprocess.Popen[str], str]:
        """A process that keeps a tab open, and the tab's name."""
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, self.url, self.token], stdout=subprocess.PIPE, text=True
        )
        assert client.stdout is not None
        return client, json.loads(client.stdout.readline().removeprefix("data: "))["tab"]

    def end(self, number: int) -> tuple[int, str]:
        """Its exit code and standard error after a signal."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextlib.contextmanager
def playing(bundle: Path, *options: object, **environment: str) -> Iterator[Playground]:
    found = Playground(bundle, *options, **environment)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.communicate()


def names(found: Playground) -> list[str]:
    return [each["name"] for each in found.ask("GET", "/v1/sessions").json()["data"]]


@pytest.mark.slow
def test_a_killed_browser_leaves_no_session_and_no_request(letters):
    with playing(letters, "--no-open") as found:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/playground\?token=[\w-]{32}", found.address)
        assert "for this machine alone; Ctrl-C ends it" in found.line
        assert httpx2.get(found.address).status_code == 200
        for killed in (signal.SIGKILL, signal.SIGTERM):
            client, tab = found.open_tab()
            assert found.ask("GET", "/playground/tab").json()["error"]["code"] == "tabs"
            body = {"prompt": "abc", "session": f"{tab}-a", "max_tokens": 4000, "stream": True}
            headers = {"authorization": f"Bearer {found.token}"}
            with httpx2.stream("POST", f"{found.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
                pieces = answer.iter_lines()
                next(pieces)
                client.send_signal(killed)
                client.communicate(timeout=30)
                assert '"code":"closed"' in [line for line in pieces if line][-1]
            until(lambda: not names(found))
            assert "txl_requests_running 1.0" in found.ask("GET", "/metrics").text, "this one alone"
        client, _ = found.open_tab()
        code, errors = found.end(signal.SIGINT)
        assert code == 0
        assert "stopped" in errors
        assert found.token not in errors
        client.communicate(timeout=30)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int(found.url.rpartition(":")[2])), timeout=5).close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_while_tokens_are_drawn(letters, number):
    with playing(letters, "--no-open", "--tabs", 2) as found:
        client, tab = found.open_tab()
        body = {"prompt": "abc", "session": f"{tab}-a", "max_tokens": 4000}
        with ThreadPoolExecutor() as aside:
            asked = aside.submit(found.ask, "POST", "/v1/completions", json=body)
            until(lambda: names(found))
            assert found.end(number)[0] == 0
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
        assert found.end(signal.SIGINT)[0] == 0
        assert not page.parent.exists()
    with playing(letters, BROWSER=str(tmp_path / "none"), PATH=str(tmp_path), DISPLAY="") as found:
        assert found.process.stderr is not None
        assert found.process.stderr.readline() == "note: no browser was found here; open the address in one\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", 70000), "port is 70000, expected 0 … 65535; check --port"),
        (("--tabs", 0), "tabs is 0, expected at least 1; check --tabs"),
        (("--tabs", -3), "tabs is -3, expected at least 1; check --tabs"),
        (("--rows", 9), "rows are 9, expected 1 … 3"),
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


def test_what_is_not_installed_is_named(letters, monkeypatch, capfd):
    monkeypatch.setattr("txl_deploy.extras.find_spec", lambda name: None if name == "uvicorn" else object())
    assert "uvicorn" in serve_command.NEEDED
    code, _, err = call_main(("playground", letters), monkeypatch, capfd)
    assert (code, err) == (2, f"error: playground needs uvicorn, not installed here; {pip_line('serve')}\n")
