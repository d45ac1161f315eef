"""Define a server's options: its address, its users, and the limits of requests.

All limits, whether they are options or constants, suit a small machine.
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

from txl_deploy.retrieval import Mixture

PROMPT_TOKENS = 1 << 18
"""Maximum number of tokens of one prompt."""
MAX_TOKENS = 1 << 14
"""Maximum number of tokens that one text may ask for."""
CHOICES = 128
"""Maximum number of texts per request: number of prompts times n."""
STOPS = 4
"""Maximum number of stop texts of a request; the same number as OpenAI's."""
STOP_LENGTH = 256
"""Maximum number of characters of a stop text."""
BIASES = 1024
"""Maximum number of tokens of a request's `logit_bias`."""
TOP_LOGPROBS = 20
"""Maximum number of most probable tokens that a request may ask for at each position."""
LOGPROBS = 1 << 19
"""Maximum number of log-probabilities in one answer: positions times most probable tokens per position."""
ECHOED = LOGPROBS
"""Maximum number of prompt tokens that one answer echoes, over all texts: each is looked up before the computation."""
LOST = "\ufffd"
"""Character in place of bytes of an address that are not UTF-8. Names with it are refused: they could become equal."""
NO_NAMES = (".", "..")
"""Names that are refused, because clients remove them from an address before they send it."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The options of `serve`.

    Attributes:
        bundle: the bundle's folder.
        host, port: the address on which the server listens; port 0 for any free port.
        token: the token that every request must send; None for no token, which is allowed only on loopback.
        name: the model's name for clients; None for the bundle's name.
        backend, threads: see `txl_runtime.load`.
        rows: number of sequences computed together; None for the bundle's batch size.
        lookup: maximum number of tokens of a draft that is looked up in a session's text, 0 … 4; 0 is off.
        mixture: a datastore that every draw searches, and its numbers; None if there is no datastore.
        sessions: maximum number of sessions at once.
        waiting: maximum number of requests that wait for a row.
        session_bytes: maximum number of bytes of parked sessions in the host's memory.
        idle_seconds: seconds after which an unused session ends.
        checkpoint_dir, checkpoint_every: the folder that keeps sessions over a restart; seconds between checkpoints.
        drain_seconds: seconds that running requests get to finish when the server stops.
        tabs: maximum number of open tabs of the playground.
        local: True to accept only this machine's host names and the server's own page, even with a token.
        json_logs: True to log one JSON object per event and per request.
    """

    bundle: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    name: str | None = None
    backend: str = "auto"
    threads: int | None = 1
    rows: int | None = None
    lookup: int = 0
    mixture: Mixture | None = None
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
        """Return the model's name for clients; bytes of a folder's name that are not UTF-8 are escaped."""
        if self.name:
            return self.name
        return os.fsencode(self.bundle.resolve().name.removesuffix(".txl")).decode(errors="backslashreplace")

    @property
    def loopback(self) -> bool:
        """Return True if the server's address is this machine's own and cannot be reached from other machines.

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
            UsageError: other machines can reach the host and there is no token, or the host is unknown.
        """
        # `loopback` comes first: it refuses an unknown host even with a token
        if not self.loopback and self.token is None:
            raise UsageError(
                f"host {shown(self.host)} can be reached from other machines and no token is set, expected one there; "
                "give --token-file FILE, or listen on 127.0.0.1"
            )


def addresses(host: str) -> list[str]:
    """Resolve a host name to its addresses.

    Raises:
        UsageError: the name has no address.
    """
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host {shown(host)} is unknown ({error}), expected one of this machine; check it") from None
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in infos))


def _flag(field: str) -> str:
    return {"sessions": "--max-sessions"}.get(field, f"--{field.replace('_', '-')}")


def check_session_name(name: str) -> str:
    """Return a session's name after checking that it can stand in an address and on a terminal.

    Raises:
        UsageError: the name is empty, too long, or has a slash or an unprintable character.
    """
    if not 0 < len(name) <= LONGEST_NAME or "/" in name or not name.isprintable() or name in NO_NAMES or LOST in name:
        raise UsageError(
            f"session is {shown(name)}, expected 1 … {LONGEST_NAME} characters that print, and no slash; choose another"
        )
    return name
