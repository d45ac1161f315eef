"""Widths as a run finds them, messages that nobody takes, and what is shown of names that strangers chose."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from rich.live import Live

from txl_deploy import console, terminal
from txl_deploy.console import facts_table, number, plain, rows_table, text_writer


@pytest.mark.parametrize(
    ("columns", "left"),
    [
        ("0", None),
        ("many", None),
        ("²", None),
        ("1", "20"),
        ("20", "20"),
        ("120", "120"),
        ("1000000000", "1000"),
    ],
)
def test_a_width_is_one_that_text_fits_into(monkeypatch: pytest.MonkeyPatch, columns: str, left: str | None) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    terminal.settle()
    assert os.environ.get("COLUMNS") == left


def test_messages_that_nobody_takes_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.TextIOBase):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(terminal.Messages, "stream", Full())
    console.stderr.print("a note")
    terminal.Messages().flush()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain ñ 漢", "plain ñ 漢"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\r", "a\\nb\\r"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("k\udcffv", "k\\xffv"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(
    name: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert plain(name) == shown
    console.stdout.print(facts_table({"name": name, name: "value"}))
    console.stdout.print(rows_table(("tensor", "shape"), [(name, "[1]")]))
    console.stdout.print(name.replace("\n", " "))
    out = capsys.readouterr().out
    assert out.count(shown.replace("\\n", " ")) + out.count(shown) >= 4
    assert not set(out) & (set(name) - set(shown) - set("\n"))


@pytest.mark.parametrize("name", ["[bold]b[/bold]", "[/x]", ":smile:"])
def test_a_name_is_no_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.stdout.print(rows_table(("tensor",), [(name,)]))
    console.stdout.print(name)
    assert capsys.readouterr().out.count(name) == 2


@pytest.mark.parametrize("value", [None, 1, 2.5, "many", [1], {"a": 1}, "\x1b"])
def test_a_number_that_is_none_is_shown_as_it_is(value: object) -> None:
    assert number(value)


@pytest.mark.parametrize("columns", [20, 24, 40])
def test_a_table_of_many_columns_loses_nothing_where_it_does_not_fit(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    headings = tuple(f"head{at}" for at in range(9))
    console.stdout.print(rows_table(headings, [tuple(f"cell{at}" for at in range(9))]))
    out = capsys.readouterr().out
    assert all(word in out for at in range(9) for word in (f"head{at}", f"cell{at}"))


CHAINS = [("segments of 64, ring", 1, 200, "2.67e-05", "2e-06"), ("all operations, lengths mixed", 1, 13, "–", "0.01")]


@pytest.mark.parametrize(("columns", "lines"), [(100, 3), (60, 5), (46, 6), (40, 13)])
def test_a_long_first_column_is_not_folded_again_and_again(
    columns: int, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.stdout, "_width", columns)  # COLUMNS counts at its making alone
    console.stdout.print(rows_table(("chain", "sequences", "segments", "outputs max", "states"), CHAINS))
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(shown) == lines
    assert max(map(len, shown)) <= columns
    for chain in CHAINS:
        for cell in chain[1:]:
            assert any(str(cell) in line.split() for line in shown), "no number is cut"
        assert columns == 60 or chain[0] in " ".join(" ".join(shown).split())


class _Screen(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "shown"), [(_Screen, b"\\x1b[2J\n\tn\xcc\x83\\x07"), (io.TextIOWrapper, None)])
def test_a_models_text_is_escaped_on_a_terminal_alone(
    kind: type[io.TextIOWrapper], shown: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"\x1b[2J\n\tn\xcc\x83\x07"
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", kind(raw, encoding="utf-8"))
    write = text_writer()
    for byte in text:
        write(bytes([byte]))
    assert raw.getvalue() == (shown or text)


def test_json_holds_names_that_are_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    console.print_json({"path": "k\udcffv", "k\udcff": ["\udc80"]})
    assert capfd.readouterr().out.split() == ["{", '"path":', '"k\\\\xffv",', '"k\\\\xff":', "[", '"\\\\x80"', "]", "}"]


def test_json_sends_a_terminal_nothing_that_it_obeys(capfd: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[2J\x7f\x9b\u202e\n"
    console.print_json({"name": name})
    out = capfd.readouterr().out
    assert not set(out) & (set(name) - set("a[2J\n"))
    assert json.loads(out) == {"name": name}


class _Drawn(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "term"), [(io.StringIO, "xterm"), (_Drawn, "dumb")])
def test_progress_is_drawn_only_where_the_cursor_moves(
    kind: type[io.StringIO], term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to use colours, rich takes everything for a terminal: a file too, and one that would leave empty lines."""
    said = kind()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(console, "stderr", console._Plain(file=said))
    with console.Display() as display:
        display.stage("trace")
    assert said.getvalue().endswith(" s\n")
    assert said.getvalue().startswith("trace: ")


def test_an_interrupt_while_a_bar_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would: what a `with` did not begin it does not end."""
    said, before = _Drawn(), sys.stderr
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "stderr", console._Plain(file=said))

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        assert sys.stderr is not before
        raise KeyboardInterrupt

    monkeypatch.setattr(Live, "refresh", interrupted)
    with pytest.raises(KeyboardInterrupt), console.Display():
        pass
    assert sys.stderr is before
    assert "\x1b[?25" not in said.getvalue()


@pytest.mark.parametrize("columns", [40, 80])
def test_a_bar_keeps_its_time_and_count_in_a_narrow_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is too long is cut: the title first, and never the time."""
    screen = _Drawn()
    monkeypatch.setattr(console, "stderr", console._Plain(file=screen, width=columns, color_system=None))
    for of_bytes, field in ((False, "120/200"), (True, "60%")):
        bar = console.Display(of_bytes)._progress
        bar.add_task("verify against PyTorch, rolled memory", total=200, completed=120)
        console.stderr.print(bar.get_renderable())
        last = screen.getvalue().splitlines()[-1]
        assert "0:00:00" in last
        assert field in last
        assert "━" in last
        assert "verify" in last
        assert len(last) <= columns


@pytest.mark.skipif(os.name == "nt", reason="closes a descriptor by its number")
@pytest.mark.parametrize("closed", [1, 2])
def test_a_command_whose_standard_stream_is_closed_ends_at_once(closed):
    line = f"exec {sys.executable} -m txl_deploy --version {closed}>&-"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
