"""The child process that `process.Bounded` starts as `python child.py PROGRAM MEMORY SECONDS`.

PROGRAM is a Python file with a function `answer(request: bytes) -> bytes`. This module and PROGRAM are run as files, so
that only the packages that PROGRAM imports are loaded: loading only modules of Python's own library takes 30 ms.

A frame is a length n in 8 bytes, little-endian, followed by n bytes. A request is a frame on stdin, its answer a frame
on stdout. The process ends when stdin is closed.
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
"""Format of the length at the beginning of a frame: 8 bytes, little-endian."""
NO_MEMORY = 77
"""The exit code of the child after a MemoryError."""


def read_frame(file: IO[bytes], most: int) -> bytes:
    """Read the next frame and return its content.

    Raises:
        EOFError: the process at the other end closed the pipe.
        ValueError: the frame has more than `most` bytes; its content is not read, and the message is its size.
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
    """Write `data` as one frame.

    Raises:
        OSError: the process at the other end closed the pipe.
    """
    file.write(LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


def main(program: str, memory: str, seconds: str) -> None:
    """Answer requests until stdin ends.

    Args:
        program: path of the file with `answer`.
        memory: allowed bytes of address space, in addition to the bytes in use after `program` was loaded.
        seconds: allowed processor time for each request, in seconds.
    """
    # a terminal sends Ctrl-C to this process as well, but the parent ends it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(__file__)]  # noqa: PTH120 - 20 ms less
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # ONNX Runtime's native code may print, and the parent would read its lines as frames
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
        os._exit(code)  # an orderly exit would wait for the thread that reads stdin


def _read(file: IO[bytes], waiting: queue.SimpleQueue[bytes]) -> None:
    """Put the requests from stdin into a queue; end the process when stdin is closed, even during a request."""
    try:
        while True:
            waiting.put(read_frame(file, sys.maxsize))
    finally:
        os._exit(0)


def _loaded(program: str) -> Callable[[bytes], bytes]:
    module: Any = type(sys)("bounded")
    sys.modules["bounded"] = module  # msgspec and dataclasses look up the annotations of classes there
    with open(program, "rb") as file:  # noqa: PTH123 - as above
        exec(compile(file.read(), program, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the project's own
    function: Callable[[bytes], bytes] = module.answer
    return function


def _bound_memory(memory: int) -> None:
    """Allow `memory` bytes of address space in addition to the bytes in use now, and no core file."""
    if sys.platform == "linux":  # other systems cannot limit address space, or count more than memory in it
        import resource

        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - as above
            held = int(file.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, held + memory)
        _limit(resource.RLIMIT_CORE, 0)


def _bound_time(seconds: int) -> None:
    """Allow `seconds` of processor time from now on; the signal SIGXCPU then ends the process."""
    if sys.platform == "linux":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)


if sys.platform == "linux":

    def _limit(kind: int, most: int) -> None:
        """Set a soft limit to `most`, or to the hard limit if that is lower."""
        import resource

        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main(*sys.argv[1:])
