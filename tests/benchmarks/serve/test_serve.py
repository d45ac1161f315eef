"""Load on a server and kills of it, in small: `benchmarks/serve/serve_load.py` and `serve_kills.py` do it at length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import serve_kills
import serve_load
import servers_behind_nginx
from frozen import frozen
from nginx_process import NGINX

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(make_bundle: Callable[..., Path]) -> Path:
    return make_bundle(
        config={"vocab_size": 256}, vocabulary=True, batch_size=3, boundary_token=10, verify=False, seed=3
    )


def test_clients_that_are_killed_slow_or_wrong_harm_no_other(bundle: Path, tmp_path: Path) -> None:
    found = serve_load.load(bundle, tmp_path / "load", clients=6, requests=8, kill_every=2.5, options=())
    assert found["problems"] == []
    assert found["requests"] == 48
    assert found["descriptors"]["end"] < found["descriptors"]["most"] + 1
    assert {name.partition(" ")[0] for name in found["answers"]} >= {"plain", "session", "stream", "broken"}


def test_an_overloaded_server_says_when_to_come_again_and_serves_all(bundle: Path, tmp_path: Path) -> None:
    options = ("--rows", 1, "--max-waiting", 0)
    found = serve_load.load(bundle, tmp_path / "over", clients=5, requests=3, kill_every=0, options=options)
    assert found["problems"] == []
    assert found["requests"] == 15


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed here")
def test_two_servers_behind_nginx_answer_all_turns() -> None:
    *_, two = servers_behind_nginx.WAYS
    found = servers_behind_nginx.measured(frozen("clusters"), two, sessions=3)
    assert found.rate > 0
    assert found.processor > 0


def test_sessions_go_on_where_the_last_checkpoint_was_when_the_server_is_killed(bundle: Path, tmp_path: Path) -> None:
    found = serve_kills.kills(bundle, tmp_path, count=3, sessions=3, tokens=3000, seed=1)
    assert found["problems"] == []
    assert found["compared"] > 0
