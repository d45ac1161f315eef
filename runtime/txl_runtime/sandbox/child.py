"""The child's side of a bounded process: `python child.py PROGRAM MEMORY SECONDS`, as `process.Bounded` starts it.

PROGRAM is a file of Python with a function `answer(request: bytes) -> bytes`. This module and PROGRAM are run as files,
so that no package is imported that PROGRAM does not ask for: Python's own library alone takes 30 ms to start.

A frame is 8 bytes of length, little-endian, and that many bytes. A request is a frame on stdin, its answer a frame on
stdout. The process ends when stdin does.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

LENGTH = struct.Struct("<Q")
"""The beginning of a frame: its length."""
NO_MEMORY = 77
"""The exit code after a MemoryError."""


def read_frame(file: IO[bytes], most: int) -> bytes:
    """The next frame.

    Raises:
        EOFError: the other side is gone.
        ValueError: the frame has more than `most` bytes, of which none are read; the message is the number it has.
    """
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (size,) = LENGTH.unpack(head)
    if size > most:
        raise ValueError(str(size))
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def write_frame(file: IO[bytes], data: bytes) -> None:
    """Write a frame.

    Raises:
        OSError: the other side is gone.
    """
    file.write(LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


def main(program: str, memory: str, seconds: str) -> None:
    """Answer requests until stdin ends.

    Args:
        program: path of the file with `answer`.
        memory: bytes of address space beyond what is held once `program` is loaded.
        seconds: of processor time for each request.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches this process too; its starter ends it
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(__file__)]  # noqa: PTH120 - 20 ms less
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # native code prints, and a line of it would be taken for a frame
        os.dup2(nothing, number)
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, waiting), daemon=True).start()
    code = 1
    try:
        answer = _loaded(program)
        _bound_memory(int(memory))
        while True:
            request = waiting.get()
            _bound_time(int(seconds))
            write_frame(answers, answer(request))
    except MemoryError:
        code = NO_MEMORY
    finally:
        os._exit(code)  # at once: an orderly end would wait for the thread that reads


def _read(file: IO[bytes], waiting: queue.SimpleQueue[bytes]) -> None:
    """Pass requests on, and end with whoever sends them, whatever runs here."""
    try:
        while True:
            waiting.put(read_frame(file, sys.maxsize))
    finally:
        os._exit(0)


def _loaded(program: str) -> Callable[[bytes], bytes]:
    module: Any = type(sys)("bounded")
    sys.modules["bounded"] = module  # where msgspec and dataclasses look for the types that a class names
    with open(program, "rb") as file:  # noqa: PTH123 - as above
        exec(compile(file.read(), program, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the project's own
    found: Callable[[bytes], bytes] = module.answer
    return found


def _bound_memory(memory: int) -> None:
    """Allow `memory` bytes of address space beyond those that are held, and no core file."""
    if sys.platform == "linux":  # elsewhere address space is not what a process takes, or cannot be limited
        import resource

        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - as above
            held = int(file.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, held + memory)
        _limit(resource.RLIMIT_CORE, 0)


def _bound_time(seconds: int) -> None:
    """Allow `seconds` of processor time from now on; SIGXCPU ends the process then."""
    if sys.platform == "linux":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)


if sys.platform == "linux":

    def _limit(kind: int, most: int) -> None:
        """Set the soft limit, which a hard one that the process was started with may undercut."""
        import resource

        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main(*sys.argv[1:])
