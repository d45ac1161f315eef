"""A bounded process: it may die, take too long or ask for too much, and nothing else ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import until
from txl_runtime.errors import UsageError
from txl_runtime.sandbox import child
from txl_runtime.sandbox.process import Bounded, Bounds, EndedError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only there does the system keep the limits")
BOUNDS = Bounds(memory=2**28, processor_seconds=1, seconds=60)
ANSWER = """
import os, sys, time

def answer(request):
    os.write(1, b"noise")
    print("noise")
    code = {
        b"held": "found = repr(sorted(sys.modules))",
        b"paths": "found = repr(sys.path)",
        b"memory": "bytearray(2**30)",
        b"allowed": "bytearray(2**27)",
        b"spin": "while True: pass",
        b"busy": "start = time.process_time()\\nwhile time.process_time() < start + 0.6: pass",
        b"sleep": "time.sleep(600)",
        b"long": "found = 'x' * 5000",
        b"fault": "1 / 0",
        b"leave": "os._exit(3)",
    }.get(request)
    names = dict(globals())
    exec(code or "", names)
    return names["found"].encode() if "found" in names else request
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(ANSWER)
    return path


def gone(process: Bounded) -> bool:
    """Return whether the process has ended."""
    return process._process.poll() is not None


def test_requests_of_any_bytes_are_answered_and_the_process_ends_with_them(program):
    with Bounded(program, BOUNDS) as process:
        for request in (b"", b"abc", bytes(range(256)), bytes(2**22)):
            assert process.ask(request) == request, "what it prints is no answer"
        assert not gone(process)
    assert gone(process)
    with pytest.raises(EndedError, match="was closed"):
        process.ask(b"abc")


def test_it_loads_nothing_that_the_program_does_not_ask_for_nor_looks_beside_its_own_file(program):
    with Bounded(program, BOUNDS) as process:
        held, paths = eval(process.ask(b"held")), eval(process.ask(b"paths"))
    assert not {name.partition(".")[0] for name in held} & {"txl_runtime", "numpy", "msgspec", "multiprocessing"}
    assert not [path for path in paths if path.endswith("sandbox")]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (b"long", "answered 5000 bytes, expected at most 4096"),
        (b"fault", "died of exit code 1"),
        (b"leave", "died of exit code 3"),
        pytest.param(b"memory", "needed more than 268435456 bytes of memory", marks=LINUX),
        pytest.param(b"spin", "took more than 1 s of processor time", marks=LINUX),
    ],
)
def test_a_process_that_ends_says_why_and_answers_no_more(program, request_, why):
    with Bounded(program, BOUNDS, most=4096) as process:
        assert process.ask(b"allowed") == b"allowed"
        for _ in range(2):
            with pytest.raises(EndedError) as ended:
                process.ask(request_)
            assert str(ended.value) == why
        assert gone(process)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("memory", "processor_seconds") for value in (0, -1, True, 1.5, 2**60, "1", None)),
        *(("seconds", value) for value in (0, -1.0, True, float("nan"), float("inf"), "1")),
    ],
)
def test_bounds_are_positive_numbers(name, value):
    with pytest.raises(UsageError, match=f"bounds: {name} is .*, expected a .*number above 0, at most .*; give that"):
        Bounds(**{"memory": 2**20, name: value})


def test_each_request_has_processor_time_of_its_own(program):
    with Bounded(program, BOUNDS) as process:
        for _ in range(4):
            assert process.ask(b"busy") == b"busy"


def test_a_request_that_takes_too_long_by_the_clock_is_ended(program):
    with Bounded(program, BOUNDS) as process:
        assert process.ask(b"abc") == b"abc"
        with pytest.raises(EndedError, match=r"took more than 0\.1 s"):
            process.ask(b"sleep", seconds=0.1)
        assert gone(process)


def test_a_process_that_is_killed_is_told_with_its_signal(program):
    with Bounded(program, BOUNDS) as process:
        process.ask(b"abc")
        os.kill(process._process.pid, signal.SIGSEGV)
        with pytest.raises(EndedError, match="died of SIGSEGV"):
            process.ask(b"abc")


def test_a_program_that_cannot_be_loaded_ends_it(tmp_path):
    (tmp_path / "wrong.py").write_text("import there_is_no_such_module")
    with Bounded(tmp_path / "wrong.py", BOUNDS) as process, pytest.raises(EndedError, match="exit code 1"):
        process.ask(b"abc")


def test_threads_get_their_own_answers(program):
    wrong = []

    def ask(number: int) -> None:
        for i in range(50):
            request = f"{number} {i}".encode()
            if process.ask(request) != request:
                wrong.append(request)

    with Bounded(program, BOUNDS) as process:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_an_interrupt_ends_it_since_the_answer_to_come_is_nobodys(program, monkeypatch):
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with Bounded(program, BOUNDS) as process:
        assert process.ask(b"abc") == b"abc"
        monkeypatch.setattr(child, "read_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.ask(b"sleep")
        assert gone(process)
        with pytest.raises(EndedError, match="was interrupted"):
            process.ask(b"abc")


def test_it_ends_when_nobody_holds_it(program):
    process = Bounded(program, BOUNDS)
    held = process._process
    del process
    until(lambda: held.poll() is not None)


@LINUX
def test_a_request_that_does_not_end_ends_with_whoever_asked_for_it(program):
    asking = (
        "import sys\n"
        "from txl_runtime.sandbox.process import Bounded, Bounds\n"
        "process = Bounded(sys.argv[1], Bounds(2**28, 600))\n"
        "process.ask(b'abc')\n"
        "print(process._process.pid, flush=True)\n"
        "process.ask(b'spin')\n"
    )
    with subprocess.Popen([sys.executable, "-c", asking, program], stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        ending = os.pidfd_open(int(asked.stdout.readline()))
        asked.kill()
    try:
        assert select.select([ending], [], [], 30)[0], "it outlived the process that started it"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(ending, signal.SIGKILL)
        os.close(ending)


@LINUX
def test_limits_that_its_starter_has_stay(program):
    code = (
        "import resource, sys\n"
        "from txl_runtime.sandbox.process import Bounded, Bounds, EndedError\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n"
        "with Bounded(sys.argv[1], Bounds(2**28, 30)) as process:\n"
        "    print(process.ask(b'abc'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("b'abc'\n", "")
