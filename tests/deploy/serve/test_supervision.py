"""A server's messages to a manager of services, over the socket that it names."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from support import call_main
from txl_runtime.sessions import Sessions

from txl_deploy.serve.supervision import tell_manager

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no such sockets")


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket at which systemd listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(10)
        listening.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_a_state_is_one_message(manager):
    tell_manager("READY=1")
    assert manager.recv(100) == b"READY=1"


@pytest.mark.skipif(sys.platform != "linux", reason="names in no folder are Linux's alone")
def test_the_manager_may_have_a_name_in_no_folder(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(10)
        listening.bind(f"\0txl-deploy-test-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@txl-deploy-test-{os.getpid()}")
        tell_manager("STOPPING=1")
        assert listening.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all", "vsock:2:1234", "/" + "a" * 200])
def test_a_manager_that_is_none_is_no_problem(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    tell_manager("READY=1")


def test_nobody_is_told_where_nobody_asked(manager, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET")
    tell_manager("READY=1")
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)


def test_a_server_is_ready_once_it_listens_and_tells_that_it_stops(letters, manager, monkeypatch, capfd):
    """A manager that believed it before would send requests to a server that still loads its model."""
    real = uvicorn.Server.startup

    async def startup(self, sockets=None):
        await real(self, sockets)
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)
        manager.settimeout(10)

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    monkeypatch.setattr(Sessions, "expire", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    code, _, _ = call_main(("serve", letters, "--port", 0, "--idle-seconds", 0.1), monkeypatch, capfd)
    assert (code, manager.recv(100), manager.recv(100)) == (0, b"READY=1", b"STOPPING=1")
