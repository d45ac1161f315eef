"""`txl-deploy playground` in a process of its own, as users start it, and its page."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2


class Playground:
    """A playground that runs.

    Attributes:
        address: of its page, with the token.
        origin: of its server.
        token: that its page reads from the address.
        process: of it.
    """

    def __init__(self, bundle: Path, *options: object, **environment: str) -> None:
        opens = () if "BROWSER" in environment else ("--no-open",)
        command = [sys.executable, "-m", "txl_deploy", "playground", bundle, "--port", 0, *opens, *options]
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment,
        )
        self.said: list[str] = []
        found = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(found,), daemon=True)
        self._reader.start()
        found.wait(120)
        match = re.search(r"http://127\.0\.0\.1:\d+/playground\?token=[\w-]+", "".join(self.said))
        assert match, "".join(self.said)
        self.address = match.group()
        self.origin = "http://" + urlsplit(self.address).netloc
        (self.token,) = parse_qs(urlsplit(self.address).query)["token"]

    def _read(self, found: threading.Event) -> None:
        """A pipe that nobody reads would stop the server."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if "/playground?token=" in line:
                found.set()
        found.set()

    @property
    def shown(self) -> dict[str, str]:
        """Headers with the token."""
        return {"Authorization": f"Bearer {self.token}"}

    def get(self, path: str) -> Any:
        """The answer to a request with the token."""
        return httpx2.get(self.origin + path, headers=self.shown, timeout=60)

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Interrupt as Ctrl-C does; returns the exit code, once all output is read."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def playing(bundle: Path, *options: object, **environment: str) -> Iterator[Playground]:
    """A playground that is killed at the end, if it still runs."""
    started = Playground(bundle, *options, **environment)
    try:
        yield started
    finally:
        started.close()
