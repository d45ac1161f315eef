"""A driver's process: whatever it does, what is asked of it ends, and so does all that it has started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import until

from conformance import talking
from conformance.talking import DriverFailed, Talk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_a_driver_that_reads_nothing_does_not_hold_the_runner() -> None:
    with Talk(script("import time; time.sleep(1000)"), 0.2) as talk, pytest.raises(DriverFailed, match="said nothing"):
        talk.ask({"do": "load", "path": "x" * (4 << 20)})
    assert talk._process.wait(10) < 0


def test_what_a_driver_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with Talk(("sh", "-c", f'sleep 1000 & echo $! > "{note}.part"; mv "{note}.part" "{note}"; cat > /dev/null'), 60.0):
        until(note.exists)
    status = Path("/proc") / note.read_text().strip() / "status"
    until(lambda: not status.exists() or "\nState:\tZ" in status.read_text())


def test_a_driver_that_goes_on_after_its_input_ended_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talking, "SECONDS_TO_END", 0.1)
    with Talk(script("import time; time.sleep(1000)"), 60.0) as talk:
        process = talk._process
    assert process.wait(10) < 0


def test_of_much_on_standard_error_the_last_line_is_told() -> None:
    loud = script("import sys; sys.stderr.write('x' * 300000 + '\\n\\nthe end\\n'); sys.exit(3)")
    with Talk(loud, 60.0) as talk, pytest.raises(DriverFailed, match="died when asked to hello, code 3: the end"):
        talk.ask({"do": "hello"})


@pytest.mark.parametrize("said", ["[" * 100000, "{}", "[]", '{"id": 1}', "\\xff"], ids=lambda said: said[:9])
def test_what_is_no_reply_is_told(said: str) -> None:
    wrong = script(f"input(); print({said!r})")
    with Talk(wrong, 60.0) as talk, pytest.raises(DriverFailed, match="expected a reply in JSON"):
        talk.ask({"do": "hello"})
