"""`txl-deploy serve` as a process: its start, what it refuses at once, its end, and connections that misbehave."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx2
import pytest
from safetensors.numpy import load
from serving import Server, events_of, serving
from support import call_main, until
from txl_runtime.errors import CheckError
from txl_runtime.installing import pip_line
from txl_runtime.sessions import Sessions

from txl_deploy.serve.server import CONNECTIONS, HEADER_BYTES

PROMPT = {"prompt": "once upon a time", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def beside(letters) -> Iterator[Server]:
    """A server for tests that leave nothing behind."""
    with serving(letters) as server:
        yield server


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "host '0.0.0.0' can be reached from other machines and no token is set"),
        (("--host", "no.such.host.invalid"), "host 'no.such.host.invalid' is unknown"),
        (("--host", "", "--token", "a"), "host '' is unknown"),
        (("--port", 70000), "port is 70000, expected 0 … 65535"),
        (("--token", "a", "--token-file", "b"), "--token and --token-file are both given"),
        (("--token-file", "no-such-file"), "no-such-file: No such file or directory, expected a file with the token"),
        (("--token", "a b"), "the token holds white space"),
        (("--token", ""), "the token is empty"),
        (("--threads", -1), "threads is -1"),
        (("--rows", 3), "rows"),
        (("--max-sessions", 0), "sessions is 0, expected at least 1; check --max-sessions"),
        (("--checkpoint-dir", "/dev/null/x"), "/dev/null/x"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(letters, options, message, monkeypatch, capfd):
    code, out, err = call_main(("serve", letters, "--port", 0, *options), monkeypatch, capfd)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_bundle_that_is_none_and_a_port_that_is_taken(letters, tmp_path, monkeypatch, capfd):
    code, _, err = call_main(("serve", tmp_path / "none.txl", "--port", 0), monkeypatch, capfd)
    assert (code, err.count("\n")) == (2, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = call_main(("serve", letters, "--port", port), monkeypatch, capfd)
        told = call_main(("serve", letters, "--port", port, "--json-logs"), monkeypatch, capfd)
    assert (code, err.count("\n")) == (2, 1)
    assert f"cannot listen on 127.0.0.1 port {port}" in err
    assert "choose another --port" in err
    line = json.loads(told[2])
    assert told[:2] == (2, "")
    assert (line["event"], line["exit_code"], f"error: {line['problem']}\n") == ("failed", 2, err)


@pytest.mark.parametrize("verb", ["serve", "playground"])
def test_what_is_not_installed_is_named(letters, verb, monkeypatch, capfd):
    real = importlib.util.find_spec
    monkeypatch.setattr("txl_deploy.extras.find_spec", lambda name: None if name == "uvicorn" else real(name))
    code, _, err = call_main((verb, letters), monkeypatch, capfd)
    assert code == 2
    assert err == f"error: {verb} needs uvicorn, not installed here; {pip_line('serve')}\n"


def test_a_bundle_that_fails_its_self_test_is_not_served(letters, monkeypatch, capfd):
    def wrong(model):
        raise CheckError("log-probabilities differ by 1.0")

    monkeypatch.setattr("txl_deploy.serve.health.run_selftest", wrong)
    code, out, err = call_main(("serve", letters, "--port", 0), monkeypatch, capfd)
    assert (code, out) == (1, "")
    assert "the self-test did not pass: log-probabilities differ by 1.0; it is not served" in err


def test_a_server_whose_sessions_failed_ends(letters, tmp_path, monkeypatch, capfd):
    """Somebody starts it again then, and it goes on from its last checkpoint."""

    def broken(self):
        raise RuntimeError("nobody foresaw it")

    def expire(self):
        monkeypatch.setattr(Sessions, "round", broken)

    monkeypatch.setattr(Sessions, "expire", expire)
    options = ("--port", 0, "--idle-seconds", 1, "--checkpoint-dir", tmp_path / "kept", "--json-logs")
    code, out, err = call_main(("serve", letters, *options), monkeypatch, capfd)
    assert code == 1
    assert json.loads(out)["event"] == "ready"
    last = json.loads(err.splitlines()[-1])
    said = "the thread of the sessions failed, expected it to run; start the server again"
    assert (last["event"], last["problem"], last["exit_code"]) == ("failed", said, 1)
    assert not (tmp_path / "kept" / "sessions.json").exists()


def test_what_fails_beside_requests_does_not_end_checkpoints(letters, monkeypatch, capfd):
    tries = []

    def expire(self):
        tries.append(1)
        if len(tries) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError("nobody foresaw it")

    monkeypatch.setattr(Sessions, "expire", expire)
    code, _, err = call_main(("serve", letters, "--port", 0, "--idle-seconds", 0.1), monkeypatch, capfd)
    assert (code, len(tries)) == (0, 3)
    assert err.count("error: upkeep of the sessions: ZeroDivisionError: nobody foresaw it; report it, please") >= 2


@pytest.mark.slow
def test_one_line_at_the_start_and_one_per_request(letters, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret-token\n")
    with serving(letters, "--token-file", token, "--name", "letters") as server:
        assert server.ready["event"] == "ready"
        assert (server.ready["model"], server.ready["rows"], server.ready["token"]) == ("letters", 2, True)
        headers = {"authorization": "Bearer secret-token"}
        answer = httpx2.post(f"{server.url}/v1/completions", json={**PROMPT, "session": "zoe"}, headers=headers)
        assert answer.json()["model"] == "letters"
        assert httpx2.get(f"{server.url}/v1/models/private-name", headers=headers).status_code == 404
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        assert server.end() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert [line["event"] for line in lines] == ["request", "request", "request", "draining", "stopped"]
    first = lines[0]
    assert first["id"] == answer.headers["x-request-id"]
    assert (first["path"], first["status"], first["milliseconds"] > 0) == ("/v1/completions", 200, True)
    assert not any(word in server.log for word in ("once upon", "zoe", "private-name", "secret-token")), "no id has a z"


@pytest.mark.slow
@pytest.mark.parametrize("told", ["SIGINT", "SIGHUP"])
def test_lines_for_people(letters, told):
    """Ctrl-C, and a terminal that is closed."""
    command = [sys.executable, "-m", "txl_deploy", "serve", str(letters), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(getattr(signal, told))
        out, err = process.communicate(timeout=60)
    assert line.startswith("serving small at http://127.0.0.1:")
    assert line.endswith("self-test passed; sessions end with the server; for this machine alone, without a token\n")
    assert (process.returncode, out) == (0, "")
    assert err == "stopping: 0 requests are given 30 s\nstopped\n"


def test_a_server_that_was_started_with_nohup_outlives_its_terminal(letters):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serving(letters) as server:
            server.process.send_signal(signal.SIGHUP)
            assert httpx2.get(f"{server.url}/health", timeout=30).status_code == 200
            assert httpx2.get(f"{server.url}/health", timeout=30).status_code == 200
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_what_runs_is_finished_and_what_comes_is_sent_away(letters):
    with serving(letters) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        asked = {**PROMPT, "max_tokens": 3000, "stream": True}
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_text()
            text = next(lines)
            server.process.send_signal(signal.SIGTERM)
            late = until(lambda: refused(server.url))
            text += "".join(lines)
        assert late.status_code == 503
        assert late.headers["retry-after"] == "5"
        assert events_of(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.end(None) == 0


@pytest.mark.slow
def test_what_runs_too_long_ends_with_an_error_and_its_session_is_kept(letters, tmp_path):
    with serving(letters, "--checkpoint-dir", tmp_path / "kept", "--drain-seconds", 0.2) as server:
        asked = {**PROMPT, "max_tokens": 16000, "stream": True, "session": "long", "logprobs": 0}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_text()
            text = next(lines)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(lines)
        last = json.loads(text.rstrip().rpartition("data: ")[2])
        assert last["error"]["code"] == "closed"
        assert server.end(None) == 0
    with serving(letters, "--checkpoint-dir", tmp_path / "kept") as server:
        (found,) = httpx2.get(f"{server.url}/v1/sessions").json()["data"]
    assert found["name"] == "long"
    assert found["seen"] > 16
    told = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
    drawn = sum(len(each["choices"][0]["logprobs"]["tokens"]) for each in told)
    assert found["seen"] == 16 + drawn - 1, "every token that was told is kept, and the last one is fed next"


@pytest.mark.slow
def test_a_killed_server_goes_on_with_its_sessions(letters, tmp_path):
    options = ("--checkpoint-dir", tmp_path / "kept", "--checkpoint-every", 0.2)
    asked = {**PROMPT, "session": "ada"}
    with serving(letters, *options) as server:
        httpx2.post(f"{server.url}/v1/completions", json=asked)
        before = state(server, "ada")
        index = tmp_path / "kept" / "sessions.json"
        until(lambda: index.exists() and "ada" in index.read_text())
        with pytest.raises(AssertionError):
            Server(letters, *options)  # one server has the folder
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    with serving(letters, *options) as server:
        after = state(server, "ada")
        assert before.keys() == after.keys()
        assert all((before[name] == after[name]).all() for name in before), "bit for bit"
        after = httpx2.post(f"{server.url}/v1/completions", json={**asked, "prompt": ""}).json()
    with serving(letters) as server:
        httpx2.post(f"{server.url}/v1/completions", json=asked)
        expected = httpx2.post(f"{server.url}/v1/completions", json={**asked, "prompt": ""}).json()
    assert after["choices"] == expected["choices"]


@pytest.mark.slow
def test_a_second_interrupt_ends_it_at_once(letters):
    asked = {**PROMPT, "max_tokens": 16000, "stream": True}
    with (
        serving(letters, "--drain-seconds", 300) as server,
        httpx2.stream("POST", f"{server.url}/v1/completions", json=asked) as answer,
    ):
        lines = answer.iter_text()  # which closes the connection when nobody has it any more
        next(lines)
        server.process.send_signal(signal.SIGINT)
        until(lambda: refused(server.url))
        assert server.end(signal.SIGINT) == 130


@pytest.mark.slow
def test_a_client_that_goes_gives_its_row_back(beside):
    for number in range(4):
        asked = {**PROMPT, "max_tokens": 16000, "session": f"gone{number}", "stream": bool(number % 2)}
        body = json.dumps(asked).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with connected(beside) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            until(lambda name=f"gone{number}": info(beside, name).get("running"))
        until(lambda name=f"gone{number}": not info(beside, name)["running"])
        assert info(beside, f"gone{number}")["seen"] < 16016


@pytest.mark.slow
def test_a_body_that_is_too_large_is_not_waited_for(beside):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connected(beside) as client:
        client.sendall(head + b"content-length: 100000000\r\n\r\n{")
        assert whole(client).startswith(b"HTTP/1.1 413")
    with connected(beside) as client:  # one that reads nothing before all is sent
        client.sendall(head + b"content-length: 9000000\r\n\r\n" + b" " * 9_000_000)
        assert whole(client).startswith(b"HTTP/1.1 413")


@pytest.mark.slow
def test_connections_beyond_the_most_and_headers_without_an_end_are_sent_away(beside):
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS - 1):
            stack.enter_context(connected(beside))
        until(lambda: httpx2.get(f"{beside.url}/health", timeout=30).status_code == 503)
    until(lambda: httpx2.get(f"{beside.url}/health", timeout=30).status_code == 200)
    with connected(beside) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (2 * HEADER_BYTES))
        assert whole(client).startswith(b"HTTP/1.1 400")


@contextlib.contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    """A bare connection."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.socket() as client:
        client.settimeout(30)
        client.connect((host, int(port)))
        yield client


def whole(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    while part := client.recv(1 << 16):
        found += part
    return found


def refused(url: str) -> httpx2.Response | None:
    """The answer of a server that takes no more."""
    answer = httpx2.get(f"{url}/v1/models", timeout=30)
    return answer if answer.status_code == 503 else None


def info(server: Server, name: str) -> dict:
    """Return a session's entry."""
    return httpx2.get(f"{server.url}/v1/sessions/{name}", timeout=30).json()


def state(server: Server, name: str) -> dict:
    """A session's tensors."""
    return load(httpx2.get(f"{server.url}/v1/sessions/{name}/state", timeout=30).content)
