"""Notify the service manager that started this process, if there is one, by systemd's protocol sd_notify."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal


def tell_manager(state: Literal["READY=1", "STOPPING=1"]) -> None:
    """Send a state to the socket that NOTIFY_SOCKET names, if there is one; a failure is ignored."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):  # the address is a path, or "@" and the name of an abstract socket
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
