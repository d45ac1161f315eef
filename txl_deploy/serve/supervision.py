"""Notify the service manager that started this process, if it asks: systemd's protocol of sd_notify."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal


def tell_manager(state: Literal["READY=1", "STOPPING=1"]) -> None:
    """Send a state to the socket that NOTIFY_SOCKET names, if there is one; a failure is ignored."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):  # a path, or "@" for an abstract socket
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
