"""Two servers behind nginx with the lines of docs/serving.md: who has a session, what a kill costs, slow clients."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import httpx2
import pytest
from nginx_process import NGINX, free_ports, lines_of_nginx, nginx
from serving import Server, serving
from support import until

TOKEN = {"Authorization": "Bearer secret"}
WRITTEN = 'txl_checkpoints_total{result="written"}'
ANSWERED = 'txl_requests_total{path="/v1/completions",status="200"}'
SESSIONS = [f"session {number}" for number in range(100)]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="nginx is not installed here")]


def names(server: Server) -> set[str]:
    """The sessions that a server has, asked on its own port."""
    answer = httpx2.get(f"{server.url}/v1/sessions", headers=TOKEN, timeout=60)
    return {one["name"] for one in answer.json()["data"]}


def counted(server: Server, metric: str) -> float:
    """A server's metric of this name and these labels; 0 before it first counts."""
    lines = httpx2.get(f"{server.url}/metrics", headers=TOKEN, timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric} "))


def test_sessions_stay_with_their_server_and_come_back_with_it(letters: Path, tmp_path: Path) -> None:
    listen, *ports = free_ports(3)

    def start(number: int) -> contextlib.AbstractContextManager[Server]:
        kept = ("--checkpoint-dir", tmp_path / f"sessions-{number}", "--checkpoint-every", 0.2)
        return serving(letters, "--port", ports[number], "--token", "secret", *kept)

    with (
        start(0) as first,
        start(1) as second,
        nginx(tmp_path / "nginx", lines_of_nginx(listen, ports), listen),
        httpx2.Client(base_url=f"http://127.0.0.1:{listen}", headers=TOKEN, timeout=60) as client,
    ):

        def ask(name: str, seen: int) -> httpx2.Response:
            body = {"prompt": "ab", "max_tokens": 2, "seed": 1, "session_seen": seen}
            return client.post("/v1/completions", json=body, headers={"X-Session": name})

        for name in SESSIONS:
            assert ask(name, 0).status_code == 200
        assert names(first) | names(second) == set(SESSIONS)
        assert not names(first) & names(second)
        assert min(len(names(first)), len(names(second))) >= 10, "the hash spreads them"
        assert client.get(f"/v1/sessions/{SESSIONS[7]}", headers={"X-Session": SESSIONS[7]}).json()["seen"] == 3

        lost, began = names(first), counted(first, WRITTEN)
        until(lambda: counted(first, WRITTEN) >= began + 2)  # the second one began after the last request
        first.end(9)
        answers = {name: ask(name, 3).status_code for name in SESSIONS}
        assert {name for name, status in answers.items() if status == 502} == lost
        assert set(answers.values()) == {200, 502}
        assert not names(second) & lost, "no session was begun anew on the other server"

        with start(0) as again:
            assert again.ready["sessions_restored"] == len(lost)
            assert {ask(name, 3).json()["session"]["seen"] for name in lost} == {7}
            assert {ask(name, 7).status_code for name in SESSIONS} == {200}
            before = [counted(server, ANSWERED) for server in (again, second)]
            for _ in range(20):
                assert client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}).status_code == 200
            after = [counted(server, ANSWERED) for server in (again, second)]
            assert min(new - old for new, old in zip(after, before, strict=True)) > 0, "both take what has no session"


@pytest.mark.parametrize(
    "sent", [b"POST / HTTP/1.1\r\nhost: a\r\n", b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nab"]
)
def test_a_client_that_stops_in_its_request_is_sent_away(tmp_path: Path, sent: bytes) -> None:
    listen, *ports = free_ports(3)
    lines = lines_of_nginx(listen, ports, seconds=1)
    with (
        nginx(tmp_path / "nginx", lines, listen),
        socket.create_connection(("127.0.0.1", listen), 30) as client,
    ):
        client.sendall(sent)
        assert client.recv(4096).partition(b"\r\n")[0] in (b"", b"HTTP/1.1 408 Request Time-out")
