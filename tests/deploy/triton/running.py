"""A Triton server that a test starts, and clients in the environment that has theirs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
INSTALLED = ROOT / ".triton" / "ready.json"
CLIENTS = ROOT / ".clients" / "bin" / "python"


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    http: int
    grpc: int
    bundles: dict[str, Path] = field(default_factory=dict)

    def stubs(self) -> dict[str, int]:
        """The processes that run models, by the folder of the model."""
        found = {}
        for place in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                told = (place / "stat").read_text().rpartition(")")[2].split()
                if int(told[1]) == self.process.pid and told[0] != "Z":
                    model = (place / "cmdline").read_bytes().split(b"\0")[1].decode()
                    found[Path(model).parents[1].name] = int(place.name)
        return found

    def get(self, path: str, body: Any = None, seconds: float = 10) -> tuple[int, Any]:
        """Status and body of an HTTP request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def ready(self) -> bool:
        try:
            return self.get("/v2/health/ready", seconds=1)[0] == 200
        except OSError:
            return False

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def runs(process: int) -> bool:
    """Return whether a process has not ended; one that nobody has asked for its end has."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def installed() -> dict[str, Any]:
    """Return the server's paths; skip the test if it is not installed."""
    if not INSTALLED.exists():
        import pytest  # benchmarks start servers too

        pytest.skip("Triton's server is not installed; make triton")
    told: dict[str, Any] = json.loads(INSTALLED.read_text())
    return told


@contextlib.contextmanager
def running(log: Path, *repositories: Path, site: str | None = None) -> Iterator[Server]:
    """A server; it has started or given up when the block begins, and is killed when it ends."""
    told = installed()
    http, grpc = _free(2)
    shared = f"txl-deploy-test-{http}-"
    command = [told["server"], *(f"--model-repository={folder}" for folder in repositories)]
    command += [f"--backend-directory={told['backends']}", "--allow-metrics=false", "--exit-timeout-secs=1"]
    command += [f"--backend-config=python,shm-region-prefix-name={shared}"]
    command += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", f"--http-port={http}", f"--grpc-port={grpc}"]
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(told["libraries"]), "OMP_NUM_THREADS": "1"}
    environment["TXL_DEPLOY_PACKAGES"] = told["site"] if site is None else site
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    server = Server(process, log, http, grpc)
    try:
        ends = time.monotonic() + 120
        while process.poll() is None and not server.ready():
            assert time.monotonic() < ends, server.text()
            time.sleep(0.1)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for left in Path("/dev/shm").glob(f"{shared}*"):
            left.unlink(missing_ok=True)


def exercise(name: str, server: Server, **more: Any) -> None:
    """A function of `exercises.py`, called with a server in the environment of the clients; it asserts by itself."""
    if not CLIENTS.exists():
        import pytest

        pytest.skip("Triton's client is not installed; make clients")
    given = json.dumps({"http": server.http, "grpc": server.grpc, **more}, default=str)
    command = [str(CLIENTS), str(Path(__file__).with_name("exercises.py")), name, given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.text()[-3000:]}"


def _free(count: int) -> Sequence[int]:
    """Ports that nobody has just now."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
