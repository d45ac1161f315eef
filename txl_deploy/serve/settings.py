"""What a server is told at its start: where it listens, who may come in, and the limits of what it takes.

Every limit is one that a small machine survives, whether it is an option or a constant.
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
"""Tokens of one prompt."""
MAX_TOKENS = 1 << 14
"""Tokens that one text may ask for."""
CHOICES = 128
"""Texts that one request may ask for: n times its prompts."""
STOPS = 4
"""Stop texts of a request, as OpenAI has it."""
STOP_LENGTH = 256
"""Characters of a stop text."""
TOP_LOGPROBS = 20
"""Most probable tokens that a request may ask for at each position."""
LOGPROBS = 1 << 19
"""Log-probabilities that one answer may hold: positions times what is asked for at each."""
ECHOED = LOGPROBS
"""Tokens of prompts that one answer may echo, of all its texts together: each is looked up before any is computed."""
LOST = "\ufffd"
"""What becomes of bytes of an address that are no UTF-8: names that differ would be one."""
NO_NAMES = (".", "..")
"""What clients take out of an address before they send it."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The options of `serve`.

    Attributes:
        bundle: the bundle's folder.
        host, port: where it listens; port 0 for any that is free.
        token: what every request has to show; None where none is asked for, on loopback alone.
        name: what clients call the model; the bundle's name without it.
        backend, threads: see `txl_runtime.load`.
        rows: sequences computed together; None for the bundle's B.
        sessions: named and unnamed sessions that exist at once.
        waiting: requests that may wait for a row.
        session_bytes: of parked sessions in the host's memory.
        idle_seconds: after which an unused session ends.
        checkpoint_dir, checkpoint_every: where all sessions are kept over a restart, and every how many seconds.
        drain_seconds: what running requests are given when the server is told to stop.
        tabs: of the playground that are open at once.
        local: whether it answers this machine's names and its own page alone, though a token is asked for.
        json_logs: every line is a JSON object, one per request among them.
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
        """What clients call the model; bytes of a folder's name that are no UTF-8 stand there as escapes."""
        if self.name:
            return self.name
        return os.fsencode(self.bundle.resolve().name.removesuffix(".txl")).decode(errors="backslashreplace")

    @property
    def loopback(self) -> bool:
        """Whether the host is this machine to itself.

        Raises:
            UsageError: the host is none.
        """
        return all(ipaddress.ip_address(address).is_loopback for address in addresses(self.host))

    @property
    def limits(self) -> Limits:
        """Those of the sessions that it serves with."""
        return Limits(
            sessions=self.sessions,
            waiting=self.waiting,
            host_bytes=self.session_bytes,
            idle_seconds=self.idle_seconds,
            positions=PROMPT_TOKENS + MAX_TOKENS,
        )

    def require_token(self) -> None:
        """Refuse to listen to other machines without asking who they are.

        Raises:
            UsageError: the host is beyond loopback and there is no token, or it is no host.
        """
        if not self.loopback and self.token is None:  # in this order: what is no host is refused with a token, too
            raise UsageError(
                f"host {shown(self.host)} can be reached from other machines and no token is set, expected one there; "
                "give --token-file FILE, or listen on 127.0.0.1"
            )


def addresses(host: str) -> list[str]:
    """The addresses that a host's name stands for.

    Raises:
        UsageError: it stands for none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host {shown(host)} is unknown ({error}), expected one of this machine; check it") from None
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def _flag(field: str) -> str:
    return {"sessions": "--max-sessions"}.get(field, f"--{field.replace('_', '-')}")


def check_session_name(name: str) -> str:
    """The name of a session, which has to fit into an address and onto a terminal.

    Raises:
        UsageError: it is empty, too long, or holds a slash or what does not print.
    """
    if not 0 < len(name) <= LONGEST_NAME or "/" in name or not name.isprintable() or name in NO_NAMES or LOST in name:
        raise UsageError(
            f"session is {shown(name)}, expected 1 … {LONGEST_NAME} characters that print, and no slash; choose another"
        )
    return name
