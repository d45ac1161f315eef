"""Start `txl-deploy serve` in a process of its own, send it requests, measure it, and stop it."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

READY = 120
"""The seconds within which a server has to listen."""
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A process of `txl-deploy serve` on a free port.

    Args:
        bundle: the bundle to serve.
        log: the file to which the server's standard error is appended.
        options: further options of the command.
    """

    def __init__(self, bundle: Path, log: Path, *options: object) -> None:
        command = [sys.executable, "-m", "txl_deploy", "serve", bundle, "--port", 0, "--json-logs", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with log.open("ab") as text:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdout=subprocess.PIPE, stderr=text, env=environment
            )
        atexit.register(self.process.kill)  # the server ends with this program, even after an error
        self.log, self.port = log, 0
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], READY)[0]:
            self.kill()
            raise SystemExit(f"the server has not listened for {READY} s; see {log}")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the server ended with exit code {self.process.wait()}; see {log}")
        self.port = int(json.loads(line)["url"].rpartition(":")[2])

    def ask(self, method: str, path: str, body: object = None, seconds: float = 60) -> tuple[int, Any]:
        """Send one request on a new connection; return its status, and its JSON document or text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"} if data else {})
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.getheader("content-type", "") or ""
            return answer.status, json.loads(text) if kind.startswith("application/json") else text.decode()
        finally:
            connection.close()

    def resident(self) -> int:
        """Return the server's resident memory in bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text("ascii").split()[1]) * PAGE

    def processor_seconds(self) -> float:
        """Return the processor seconds of all the server's threads so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text("ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def descriptors(self) -> int:
        """Return the number of the server's open files and connections."""
        return len([*Path(f"/proc/{self.process.pid}/fd").iterdir()])

    def kill(self) -> None:
        """End the server with SIGKILL, which leaves it no time to tidy up."""
        self.process.kill()
        self._gone()

    def stop(self, seconds: float = 60) -> int:
        """End the server with SIGTERM, as a service manager does; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        self._gone()
        return code

    def _gone(self) -> None:
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def text_of(seed: int, length: int) -> str:
    """Return a random text of `length` small letters and spaces, always the same for a seed."""
    draws = random.Random(seed)
    return "".join(draws.choices("etaoin shrdlu", k=length))


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of all values lies, e.g. the p99 for 0.99; NaN without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def until(seconds: float, check: Any) -> bool:
    """Call a check until it returns True, for at most `seconds`; return its last result."""
    end = time.monotonic() + seconds
    while not (result := bool(check())) and time.monotonic() < end:
        time.sleep(0.02)
    return result
