"""What the manager of services that started this process is told, if it asks: systemd's protocol of sd_notify."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal


def tell_manager(state: Literal["READY=1", "STOPPING=1"]) -> None:
    """Send a state to the socket that NOTIFY_SOCKET names. Where there is none, or nobody reads it, nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):  # a path, or a name that is in no folder
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
