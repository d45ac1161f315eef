"""What a server says of itself when nobody reads it."""

from __future__ import annotations

import json
import os
import sys

from txl_deploy.serve.logs import Log


def test_a_full_pipe_is_not_waited_for_and_what_is_left_out_is_counted(monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # so that this test ends where the log would wait
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        log = Log(True)
        log.say("first", "first line")
        first = os.read(reading, 1000).decode()
        filled = 0
        while True:
            try:
                filled += os.write(writing, bytes(4096))
            except BlockingIOError:
                break
        for _ in range(3):
            log.say("lost", "lost line")
        while filled:
            filled -= len(os.read(reading, filled))
        log.say("last", "last line")
        rest = os.read(reading, 1000).decode()
        monkeypatch.undo()
    assert json.loads(first)["event"] == "first"
    note, last = map(json.loads, rest.splitlines())
    assert (note["event"], note["lines"], last["event"]) == ("lines_left_out", 3, "last")
