"""Run nginx in front of servers, with the configuration of docs/serving.md."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
READY = 30
"""The seconds within which nginx has to listen, or to end."""


def lines_of_nginx(listen: int, ports: list[int], seconds: int = 20) -> str:
    """Return the page's configuration without TLS, changed for the ports of this machine.

    Args:
        listen: the port on which nginx listens.
        ports: the ports of the two servers.
        seconds: the time that a client has for each part of its request.
    """
    (lines,) = re.findall(r"^```nginx\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    lines = re.sub(r"^ *ssl_certificate.*\n", "", lines, flags=re.MULTILINE)
    here = {"listen 443 ssl": f"listen 127.0.0.1:{listen}", ":8000 ": f":{ports[0]} ", ":8001 ": f":{ports[1]} "}
    for old, new in here.items():
        assert lines.count(old) == 1, old
        lines = lines.replace(old, new)
    return re.sub(r"(client_\w+_timeout|send_timeout) 20s", rf"\1 {seconds}s", lines)


@contextlib.contextmanager
def nginx(folder: Path, lines: str, listen: int) -> Iterator[None]:
    """Run nginx as one process inside the block, once it listens.

    Args:
        folder: the new folder for the files of nginx.
        lines: the configuration's section http.
        listen: the port on which these lines let nginx listen.
    """
    folder.mkdir()
    kept = "".join(f"{name}_temp_path {folder};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    file, log = folder / "nginx.conf", folder / "error.log"
    file.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {log}; events {{}}\n"
        f"http {{ access_log off; {kept}\n{lines}}}\n",
        "utf-8",
    )
    process = subprocess.Popen([str(NGINX), "-p", folder, "-c", file, "-e", log])
    try:
        ends = time.monotonic() + READY
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", listen), 5):
                break
            assert process.poll() is None, f"nginx ended; see {log}"
            assert time.monotonic() < ends, f"nginx does not listen; see {log}"
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(READY)


def free_ports(count: int) -> list[int]:
    """Return numbers of ports on which nothing listens, e.g. [40001, 40002] for 2."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]
