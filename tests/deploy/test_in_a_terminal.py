"""Every verb in a terminal, and the training sample: what is drawn, and what Ctrl-C leaves behind."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from foreign_graphs import wide
from frozen import frozen
from ptys import BAR, COMMAND, CTRL_C, Left, held_at, in_a_terminal
from resealing import copied
from support import save_checkpoint, small_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="terminals are made as Linux makes them")

TRAIN = (sys.executable, Path(__file__).parents[2] / "samples" / "train_char_lm.py")
TINY = "--layers 1 --d-model 16 --heads 2 --d-inner 16 --segment 16 --memory 8 --no-bfloat16"

DRAWN = {
    "score": ("score kv long.npy", BAR),
    "score documents": ("score kv documents --jobs 2", BAR),
    "bench": ("bench kv --against none --seconds 100", BAR),
    "verify": ("verify kv --segments 100000", BAR),
    "export": ("export good.pt --segment-length 2 -o new.txl", BAR),
    "inspect an ONNX file": ("inspect wide.onnx", BAR),
    "inspect --check": ("inspect kv --check", BAR),
}
"""Commands that draw bars, with enough to do that Ctrl-C comes before the end."""
LONG = {
    "generate": ("generate kv --prompt-tokens 1,2 --max-new-tokens 1000000", r"\d \d"),
    "export, tracing": ("export good.pt --segment-length 2 -o new.txl", "trace"),
    "export, verifying": ("export good.pt --segment-length 2 -o new.txl", "PyTorch"),
    "verify, verifying": ("verify kv --segments 100000", "PyTorch"),
    "bench, measuring": ("bench kv --against none --seconds 100", "time "),
    "bench against PyTorch": ("bench kv --seconds 100", "agree"),
}
"""A text, and what is deeper in the work, where libraries run."""
SHORT = {
    "inspect": ("inspect kv", "manifest.json", "held"),
    "selftest": ("selftest kv", "manifest.json", "held"),
    "package": ("package kv --target triton -o new.txl", "manifest.json", "held"),
    "build": ("build built --target cuda --force", "0-logprobs-ring-4.onnx", "(?s)writing.*held"),
    "report": ("report kv -o new.txl", "page.css", f"(?s){BAR}.*held"),
}
"""Short commands: each waits for Ctrl-C where it opens a file of this name, the last two while their bar is drawn."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bundles, a checkpoint, texts of ids, and documents."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("kv", "built"):
        copied(frozen("0.8/tokens"), folder / name)
    save_checkpoint(folder / "good.pt", small_config())
    np.save(folder / "ids.npy", np.arange(400, dtype=np.int32) % 41)
    # Minutes of work, so that it is not done before a busy machine has looked at the terminal.
    np.save(folder / "long.npy", (np.arange(5_000_000) % 41).astype(np.uint8))
    (folder / "wide.onnx").write_bytes(wide())
    (folder / "documents").mkdir()
    for at in range(4):
        (folder / "documents" / f"{at}.npy").hardlink_to(folder / "long.npy")
    return folder


def judge(left: Left, code: int, last: str) -> None:
    """Raise AssertionError unless a command that was told to stop left everything as it was."""
    assert left.code == code, left.lines
    *said, end = left.lines
    assert ("".join(said[-2:]).endswith(last), end) == (True, ""), left.lines  # it may go on in the next line
    assert "Traceback" not in left.output
    assert not left.hidden
    assert left.settings_kept
    assert not left.torn


@pytest.mark.parametrize(
    ("verb", "columns"),
    [
        *((verb, 80) for verb in DRAWN),
        *(pytest.param(verb, 40, marks=pytest.mark.slow) for verb in (*DRAWN, "generate")),
        *(pytest.param(verb, 80, marks=pytest.mark.slow) for verb in LONG),
    ],
)
def test_ctrl_c_ends_what_takes_long(verb: str, columns: int, place: Path) -> None:
    line, at = (DRAWN | LONG)[verb]
    judge(in_a_terminal([*COMMAND, *line.split()], columns, at, CTRL_C, folder=place), 130, "error: interrupted")
    assert not (place / "new.txl").exists()


@pytest.mark.parametrize("columns", [80, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", SHORT)
def test_ctrl_c_ends_a_short_verb(verb: str, columns: int, place: Path) -> None:
    line, end, at = SHORT[verb]
    left = in_a_terminal([*held_at(end), *line.split()], columns, at, CTRL_C, folder=place)
    judge(left, 130, "error: interrupted")
    assert not (place / "new.txl").exists()


@pytest.mark.parametrize("columns", [80, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("line", ["serve kv --port 0", "playground kv --no-open"])
def test_ctrl_c_ends_a_server(line: str, columns: int, place: Path) -> None:
    judge(in_a_terminal([*COMMAND, *line.split()], columns, "http://", CTRL_C, folder=place), 0, "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 40])
def test_ctrl_c_ends_training(columns: int, tmp_path: Path) -> None:
    command = [*TRAIN, "--out", tmp_path / "demo", *TINY.split(), "--minutes", "5"]
    judge(in_a_terminal(command, columns, "step [1-9]", CTRL_C), 130, "interrupted: nothing was saved")
    assert list((tmp_path / "demo").iterdir()) == []


def test_a_bar_ends_where_the_run_is_told_to_end(place: Path) -> None:
    line = DRAWN["score documents"][0].split()
    judge(in_a_terminal([*COMMAND, *line], at=BAR, press=signal.SIGTERM, folder=place), 143, "error: terminated")


def test_a_bar_that_is_full_stays_and_the_result_follows(place: Path) -> None:
    left = in_a_terminal([*COMMAND, "score", "kv", "ids.npy"], folder=place)
    assert (left.code, left.hidden, left.torn, left.settings_kept) == (0, False, [], True)
    bar, *rest = left.lines
    assert bar.split()[:3:2] == ["score", BAR * 40]
    assert "399/399" in bar
    assert not any(BAR in line for line in rest)
    assert any(line.startswith("perplexity") for line in rest)


@pytest.mark.parametrize("command", [("env", "TERM=dumb", *COMMAND), ("sh", "-c", '"$@" 2>&1 | cat', "sh", *COMMAND)])
def test_nothing_is_drawn_where_no_cursor_moves(command: tuple[str, ...], place: Path) -> None:
    left = in_a_terminal([*command, "score", "kv", "ids.npy"], folder=place)
    assert left.code == 0
    assert "\x1b" not in left.output
    assert BAR not in left.output
    assert left.lines[0].startswith("score ids.npy: ")


PRINTING = """
import logging, sys, warnings
from txl_deploy import terminal
from txl_deploy.console import Display

class Own:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()

terminal.settle()
with Display() as display:
    display.stage("the work", 3)
    display.advance()
    warnings.warn("is old")
    logging.getLogger("library").warning("a line of a log")
    display.advance()
    sys.stderr = Own(sys.stderr)
    print("through a stream of its own", file=sys.stderr)
    display.warn("a note that is longer than the forty columns of a line")
    print("a result")
    display.advance()
"""


def test_what_is_said_while_a_bar_is_drawn_stands_above_it_whole(place: Path) -> None:
    left = in_a_terminal(
        ["sh", "-c", '"$@" >result.txt', "sh", sys.executable, "-c", PRINTING], columns=40, folder=place
    )
    assert (left.code, left.hidden, left.torn) == (0, False, [])
    *said, bar, end = left.lines
    assert bar.split()[:2] == ["the", "work"]
    assert "3/3" in bar
    assert end == ""
    assert "UserWarning: is old" in said[0]
    assert said[-4:] == [
        "a line of a log",
        "through a stream of its own",
        "note: a note that is longer than the for",
        "ty columns of a line",
    ]
    assert (place / "result.txt").read_text() == "a result\n"


@pytest.mark.parametrize("columns", [pytest.param(80, marks=pytest.mark.slow), 60, 40])
def test_a_bar_moves_within_a_document_and_is_never_crowded_out(columns: int, place: Path) -> None:
    (place / f"three{columns}").mkdir()
    for at in range(3):
        np.save(place / f"three{columns}" / f"{at}.npy", np.arange(15_000, dtype=np.int32) % 41)
    left = in_a_terminal([*COMMAND, "score", "kv", f"three{columns}"], columns, folder=place)
    assert (left.code, left.torn) == (0, [])
    drawn = re.findall(rf"([{BAR}╸╺]+)(?:\x1b\[[\d;]*m|[ {BAR}╸╺])*\s*(\d+)%", left.output)
    shares = [int(share) for _, share in drawn]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert len(set(shares) - {0, 33, 34, 66, 67, 100}) >= 1, shares
    bar = next(line for line in left.lines if "100%" in line)
    assert bar.count(BAR) >= 4
