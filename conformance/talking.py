"""A driver's process: requests go in, replies come out, and whatever else it does is told in one line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import IO, Any

from txl_runtime.errors import UsageError, brief
from txl_runtime.starting import signal_of

LONGEST = 64 << 20
"""Bytes of one reply at most."""
SECONDS_TO_END = 2.0
_TAIL = 4096
"""Bytes that are kept of what a driver says on standard error."""


class DriverFailed(Exception):  # noqa: N818
    """A driver broke the protocol, in one line; its process is of no more use."""


class Talk:
    """A driver in a process of its own; use it in a `with`, which ends the process and all that it started.

    Ctrl-C in a terminal is for the runner, which then ends the driver: it stands in a session of its own.

    Args:
        command: its words.
        silence: seconds that a reply may take.

    Raises:
        UsageError: there is no such command.
    """

    def __init__(self, command: Sequence[str], silence: float) -> None:
        self._silence, self._number, self._said = silence, 0, b""
        self._replies, self._requests = SimpleQueue[bytes](), SimpleQueue[bytes | None]()
        try:
            self._process = process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(
                f"--driver {command[0]}: {error.strerror}; expected a command that can be started"
            ) from None
        work = ((self._write, process.stdin), (self._read, process.stdout), (self._overhear, process.stderr))
        self._threads = [threading.Thread(target=does, args=(stream,), daemon=True) for does, stream in work]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close its input, so that it can end; what has not ended soon, and what it has started, is killed."""
        try:
            if kind is None:
                self._requests.put(None)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(SECONDS_TO_END)
        finally:
            self._kill()
            self._requests.put(None)
            for thread in self._threads:
                thread.join(SECONDS_TO_END)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            DriverFailed: it died, was silent too long, or answered what is no reply to this request.
        """
        self._number += 1
        does = request["do"]
        self._requests.put(json.dumps({"id": self._number, **request}).encode() + b"\n")
        try:
            line = self._replies.get(timeout=self._silence)
        except Empty:
            self._kill()
            raise DriverFailed(f"said nothing for {self._silence:g} s when asked to {does}") from None
        if not line:
            raise DriverFailed(f"died when asked to {does}{self._how_it_ended()}")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or len({"ok", "refused"} & reply.keys()) != 1:
            said = brief(line[:100].decode(errors="replace").strip())
            raise DriverFailed(f"answered {does} with {said!r}, expected a reply in JSON with ok or refused")
        if reply.get("id") != self._number:
            raise DriverFailed(
                f"answered {does} with the id {reply.get('id')!r}, expected {self._number}; replies come in order"
            )
        return reply

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._kill()
            return ", or closed its output"
        self._threads[-1].join(SECONDS_TO_END)
        said = [line for line in self._said.decode(errors="replace").splitlines() if line.strip()]
        return f", {signal_of(code) or f'code {code}'}" + (f": {brief(said[-1].strip())}" if said else "")

    def _write(self, stream: IO[bytes]) -> None:
        """Send requests, in a thread of its own: a driver may read none."""
        with contextlib.suppress(OSError), stream:
            while (line := self._requests.get()) is not None:
                stream.write(line)
                stream.flush()

    def _read(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError), stream:
            while line := stream.readline(LONGEST):
                self._replies.put(line)
        self._replies.put(b"")

    def _overhear(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError), stream:
            while piece := os.read(stream.fileno(), _TAIL):
                self._said = (self._said + piece)[-_TAIL:]

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
