"""Define a server's options: where it listens, who may use it, and the limits of requests.

A small machine survives every limit, be it an option or a constant.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from txl_runtime.errors import UsageError
from txl_runtime.sessions.requests import Limits
from txl_runtime.sessions.state import LONGEST_NAME
from txl_runtime.streaming.checks import shown

PROMPT_TOKENS = 1 << 18
"""Most tokens of one prompt."""
MAX_TOKENS = 1 << 14
"""Most tokens that one text may ask for."""
CHOICES = 128
"""Most texts that one request may ask for: n times its prompts."""
STOPS = 4
"""Most stop texts of a request, as OpenAI has it."""
STOP_LENGTH = 256
"""Most characters of a stop text."""
BIASES = 1024
"""Most tokens of a request's `logit_bias`."""
TOP_LOGPROBS = 20
"""Most alternatives (most probable tokens) that a request may ask for at each position."""
LOGPROBS = 1 << 19
"""Most log-probabilities of one answer: positions times the alternatives at each."""
ECHOED = LOGPROBS
"""Most tokens of prompts that one answer may echo, over all its texts: each is looked up before any is computed."""
LOST = "\ufffd"
"""Replacement of bytes of an address that are no UTF-8; it would make different names equal."""
NO_NAMES = (".", "..")
"""Names that clients remove from an address before they send it."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The options of `serve`.

    Attributes:
        bundle: the bundle's folder.
        host, port: the address that it listens on; port 0 for any that is free.
        token: the token that every request has to send; None for none, which is allowed on loopback only.
        name: the model's name for clients; None for the bundle's name.
        backend, threads: see `txl_runtime.load`.
        rows: sequences computed together; None for the bundle's B.
        sessions: most named and unnamed sessions at once.
        waiting: most requests that wait for a row.
        session_bytes: most bytes of parked sessions in the host's memory.
        idle_seconds: seconds after which an unused session ends.
        checkpoint_dir, checkpoint_every: the folder that keeps sessions over a restart; seconds between checkpoints.
        drain_seconds: seconds that running requests have once the server is stopping.
        tabs: most open tabs of the playground.
        local: True to answer only this machine's names and the server's own page, even with a token.
        json_logs: True if every line is a JSON object, and each request has one.
    """

    bundle: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    name: str | None = None
    backend: str = "auto"
    threads: int | None = 1
    rows: int | None = None
    sessions: int = 1024
    waiting: int = 256
    session_bytes: int = 1 << 30
    idle_seconds: float = 3600.0
    checkpoint_dir: Path | None = None
    checkpoint_every: float = 60.0
    drain_seconds: float = 30.0
    tabs: int = 16
    local: bool = False
    json_logs: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise UsageError(f"port is {self.port}, expected 0 … 65535; check --port")
        for name in ("sessions", "tabs"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least 1; check {_flag(name)}")
        for name in ("waiting", "session_bytes"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least 0; check {_flag(name)}")
        for name in ("idle_seconds", "checkpoint_every"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(
                    f"{name} is {getattr(self, name)}, expected a finite number of seconds above 0; check {_flag(name)}"
                )
        if not 0 <= self.drain_seconds < math.inf:
            raise UsageError(
                f"drain_seconds is {self.drain_seconds}, expected a finite number of seconds, 0 or more; check "
                "--drain-seconds"
            )
        if self.name is not None and any("\ud800" <= sign <= "\udfff" for sign in self.name):
            raise UsageError(f"name is {shown(self.name)}, expected text that is UTF-8; choose another --name")
        if self.token is not None and (not self.token.isascii() or not self.token.isprintable() or " " in self.token):
            raise UsageError("the token holds white space, controls or letters beyond ASCII; choose another one")
        if self.token == "":
            raise UsageError("the token is empty, expected at least one character; choose one, or leave it out")

    @property
    def served_name(self) -> str:
        """Return the model's name for clients; bytes of a folder's name that are no UTF-8 are escaped."""
        if self.name:
            return self.name
        return os.fsencode(self.bundle.resolve().name.removesuffix(".txl")).decode(errors="backslashreplace")

    @property
    def loopback(self) -> bool:
        """Return True if the host is this machine and cannot be reached from outside.

        Raises:
            UsageError: the host is unknown.
        """
        return all(ipaddress.ip_address(address).is_loopback for address in addresses(self.host))

    @property
    def limits(self) -> Limits:
        """Return the limits of the sessions."""
        return Limits(
            sessions=self.sessions,
            waiting=self.waiting,
            host_bytes=self.session_bytes,
            idle_seconds=self.idle_seconds,
            positions=PROMPT_TOKENS + MAX_TOKENS,
        )

    def require_token(self) -> None:
        """Refuse to listen to other machines without a token.

        Raises:
            UsageError: the host is beyond loopback and there is no token, or the host is unknown.
        """
        if not self.loopback and self.token is None:  # `loopback` first: it refuses an unknown host even with a token
            raise UsageError(
                f"host {shown(self.host)} can be reached from other machines and no token is set, expected one there; "
                "give --token-file FILE, or listen on 127.0.0.1"
            )


def addresses(host: str) -> list[str]:
    """Resolve a host's name to its addresses.

    Raises:
        UsageError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host {shown(host)} is unknown ({error}), expected one of this machine; check it") from None
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def _flag(field: str) -> str:
    return {"sessions": "--max-sessions"}.get(field, f"--{field.replace('_', '-')}")


def check_session_name(name: str) -> str:
    """Check a session's name, which has to fit into an address and onto a terminal, and return it.

    Raises:
        UsageError: it is empty, too long, or holds a slash or an unprintable character.
    """
    if not 0 < len(name) <= LONGEST_NAME or "/" in name or not name.isprintable() or name in NO_NAMES or LOST in name:
        raise UsageError(
            f"session is {shown(name)}, expected 1 … {LONGEST_NAME} characters that print, and no slash; choose another"
        )
    return name
