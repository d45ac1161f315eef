"""Every verb in hostile surroundings and with odd arguments: an exit code of the contract and one line, no traceback.

A sample is tried each time, a larger one in the sweep; TXL_SURROUNDINGS=1 tries all of them, which takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from resealing import copied
from support import call_main, save_checkpoint, small_config

from txl_deploy.verbs import command

ALL = bool(os.environ.get("TXL_SURROUNDINGS"))
COMMAND = f"{shlex.quote(sys.executable)} -m txl_deploy"

CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a stranger's name must not send to a terminal."""
CONTRACT = {0, 1, 2}
"""Exit codes of runs that nobody interrupts; 141 beside them where the reader of a pipe has gone."""

WORK = {
    "version": "--version",
    "help": "--help",
    "help of a verb": "export --help",
    "inspect": "inspect kv",
    "inspect an engine": "inspect kv/engines/cuda/logprobs-ring-4.onnx",
    "inspect nothing": "inspect nothing",
    "selftest": "selftest kv",
    "generate": "generate kv --prompt-tokens 1,2,3 --max-new-tokens 4 --seed 1",
    "generate too long": "generate kv --prompt-tokens 1,2,77 --max-new-tokens 4",
    "score": "score kv ids.npy",
    "score text": "score kv text.txt",
    "build": "build kv --target tensorrt",
    "report": "report kv -o new.html --force",
    "package": "package kv --target triton -o new.txl --force",
    "wrong": "selftset kv",
    "wrong option": "selftest kv --threads many",
    "export nothing": "export nothing.pt",
}
"""Commands that take a third of a second each, good and bad."""
TORCH = {
    "inspect a checkpoint": "inspect good.pt",
    "export": "export good.pt --segment-length 2 --force --no-verify -o new.txl",
    "verify": "verify kv --segments 3",
    "bench": "bench kv --against none --seconds 0.01",
}
"""Commands that take seconds."""

SURROUNDINGS = {
    "nothing": "{}",
    "full stdout": "{} >/dev/full",
    "stdout that cannot be written": "{} 1</dev/null",
    "full stderr": "{} 2>/dev/full",
    "a reader that leaves": "set -o pipefail; {} | true",
    "a reader of one line": "set -o pipefail; {} | head -1",
    "C": "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {}",
    "ASCII": "PYTHONIOENCODING=ascii {}",
    "strict ASCII": "PYTHONIOENCODING=ascii:strict LC_ALL=C {}",
    "Latin-1": "PYTHONIOENCODING=latin-1:strict {}",
    "no HOME": "env -u HOME {}",
    "a HOME that is none": "HOME=/nonexistent {}",
    "a HOME that is no folder": "HOME=/dev/null {}",
    "no TMPDIR": "env -u TMPDIR {}",
    "a TMPDIR that is none": "TMPDIR=/nonexistent {}",
    "no environment": "env -i {}",
    "a dumb terminal": "TERM=dumb {}",
    "no colour": "NO_COLOR=1 {}",
    "colour": "FORCE_COLOR=1 TERM=dumb {}",
    "1 column": "COLUMNS=1 {}",
    "20 columns": "COLUMNS=20 {}",
    "columns in words": "COLUMNS=many LINES=few TERMINAL_WIDTH=wide {}",
    "columns in odd digits": "COLUMNS=² LINES=² {}",
    "umask 077": "umask 077; {}",
    "umask 777": "umask 777; {}",
    "16 files": "ulimit -n 16; {}",
    "no core, little stack": "ulimit -c 0 -s 512; {}",
    "small files": "ulimit -f 1; trap '' XFSZ; {}",
    "Python's warnings as errors": "PYTHONWARNINGS=error {}",
    "development mode": "PYTHONDEVMODE=1 {}",
    "ignored signals": "trap '' INT TERM PIPE; {}",
    "a deleted folder": "mkdir -p gone; cd gone; rmdir ../gone; {}",
}
"""Surroundings from a shell. Those that are none of a command's business, such as a missing folder, may fail it."""

ELSEWHERE = {
    "a byte that is no UTF-8": "k\udcffv",
    "other letters": "kñv",
    "controls": "k\x1b[2J\n\u202ev",
    "markup": "k[v]",
}
"""Names that the bundle has as well, and every command is tried with."""
NARROW = ("C", "strict ASCII", "nothing", "20 columns")
"""Surroundings that these are tried in."""
GONE = ("a reader that leaves", "a reader of one line")
UNSEEN = ("full stdout", "stdout that cannot be written", *GONE)
"""Standard output is not looked at."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each: a bundle under several names, a checkpoint, token ids, a text, a pipe."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("kv", *ELSEWHERE.values()):
        copied(frozen("0.8/tokens"), folder / name)
    save_checkpoint(folder / "good.pt", small_config())
    np.save(folder / "ids.npy", np.arange(40, dtype=np.int32) % 41)
    (folder / "text.txt").write_text("one two\n")
    os.mkfifo(folder / "fifo")
    return folder


def judge(code: int, out: str | None, err: str, asked_json: bool, codes: Iterable[int] = CONTRACT) -> None:
    """Raise AssertionError unless the answer is one of the contract; `out` is None where nobody looked at it."""
    err = "".join(line for line in err.splitlines(keepends=True) if "[W:onnxruntime:" not in line)  # of its own accord
    assert "Traceback" not in err, err[-2000:]
    assert "this is a defect" not in err, err[-2000:]
    assert code in codes, (code, err[-2000:])
    *before, last = err.splitlines() or [""]
    if code == 2 and err:
        assert last.startswith("error: "), err
        assert all(line.startswith(("note: ", "warning")) or line.endswith(" s") for line in before), err
    assert not CONTROLS.search(err), repr(err)
    if out is None:
        return
    assert "Traceback" not in out
    assert not CONTROLS.search(out), repr(out)
    if asked_json:
        assert json.loads(out) is not None if out else code != 0


def tried(cases: list[Any], fast: int, slow: int) -> list[Any]:
    """A sample of cases in an order that does not change, more for the sweep, all where they are asked for."""
    order = sorted(cases, key=lambda case: zlib.crc32(repr(case).encode("utf-8", "surrogateescape")))
    chosen = order if ALL else order[: fast + slow]
    return [pytest.param(*case, marks=[] if at < fast else pytest.mark.slow(keep=4)) for at, case in enumerate(chosen)]


SURROUNDED = [
    (command, surrounding, more)
    for surrounding in SURROUNDINGS
    for command in (*WORK, *TORCH)
    for more in ("", " --json")
    if not (more and command in ("version", "help", "help of a verb"))
    if not (command in TORCH and more)
]
NAMED = [
    (command, surrounding, name, more)
    for surrounding in NARROW
    for command, line in (WORK | TORCH).items()
    for name in ELSEWHERE
    for more in ("", " --json")
    if " kv" in line and not (command in TORCH and more)
]


def answer(place: Path, line: str, surrounding: str) -> None:
    """Run one command in one surrounding, and judge it."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TXL_DEPLOY_TRACEBACK", "COLUMNS", "LINES")
    } | {"OMP_NUM_THREADS": "1"}
    script = SURROUNDINGS[surrounding].format(f"{COMMAND} {line}")
    options: dict[str, Any] = {"cwd": place, "env": environment, "capture_output": True, "timeout": 280, "check": False}
    done = subprocess.run(["bash", "-c", script], stdin=subprocess.DEVNULL, **options)
    raw = "generate" in line and "--json" not in line
    out = None if surrounding in UNSEEN or raw else done.stdout.decode(errors="replace")
    codes = CONTRACT | {141} if surrounding in GONE else CONTRACT
    if surrounding in UNSEEN and surrounding not in GONE:
        codes = {1, 2}
    judge(done.returncode, out, done.stderr.decode(errors="replace"), "--json" in line, codes)


@pytest.mark.parametrize(("command", "surrounding", "more"), tried(SURROUNDED, 5, 20))
def test_a_command_in_odd_surroundings_answers_by_the_contract(
    place: Path, command: str, surrounding: str, more: str
) -> None:
    answer(place, (WORK | TORCH)[command] + more, surrounding)


@pytest.mark.parametrize(("command", "surrounding", "name", "more"), tried(NAMED, 3, 7))
def test_a_bundle_may_have_any_name(place: Path, command: str, surrounding: str, name: str, more: str) -> None:
    line = (WORK | TORCH)[command].replace(" kv", f" {shlex.quote(ELSEWHERE[name])}")
    answer(place, line + more, surrounding)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_name_that_a_bundle_may_have_reaches_the_engine(
    place: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call_main(["selftest", place / ELSEWHERE[name]], monkeypatch, capfd)
    judge(code, out, err, False, {0})


@pytest.mark.slow
def test_names_that_are_no_utf8_are_opened_or_refused_before_any_work(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some libraries open no such path: ONNX's checker, and safetensors for PyTorch."""
    monkeypatch.chdir(place)
    name = ELSEWHERE["a byte that is no UTF-8"]
    shutil.copy("good.pt", f"{name}.pt")
    options = ["--segment-length", "2", "--no-verify"]
    for target in (f"{name}.txl", f"{name}/new.txl"):
        code, out, err = call_main(["export", "good.pt", "-o", target, *options], monkeypatch, capfd)
        judge(code, out, err, False, {2})
        assert "a path with bytes that are no UTF-8" in err
        assert err.count("\n") == 1
    code, out, err = call_main(["export", f"{name}.pt", "-o", "named.txl", *options], monkeypatch, capfd)
    judge(code, out, err, False, {0, None})
    source = json.loads(Path("named.txl/manifest.json").read_text())["provenance"]
    assert (source["source"]["name"], source["command"]["arguments"][0]) == ("k\\xffv.pt", "k\\xffv.pt")
    shutil.rmtree("named.txl")
    code, out, err = call_main(["verify", name, "--segments", "2"], monkeypatch, capfd)
    judge(code, out, err, False, {0, None})


ODD = (
    "", " ", "-", "--", "nan", "inf", "-inf", "-1", "0", "1", "1e999", "9" * 5000, str(2**31), str(2**63), str(2**70),
    "\x1b[31mred", "[/bold]", "a\nb", "\u202egnp", "\udcff", ":smile:", "\x7f", "a=b", "=", ",", "1,,2", "1;2", "é",
    "/dev/zero", "/dev/null", "/dev/full", "/", ".", "..", "/nonexistent/x", "fifo", "kv", "kv/manifest.json",
    "good.pt", "text.txt", "ids.npy", "x" * 300, "x" * 5000, "/proc/self/mem", "None", "true", "[]", "{}", "a.py:f",
)  # fmt: skip
"""Words that somebody may give in place of any argument."""
BASES = {
    "inspect": ("kv", []),
    "selftest": ("kv", []),
    "generate": ("kv", ["--prompt-tokens", "1,2", "--max-new-tokens", "2"]),
    "score": ("kv", ["ids.npy"]),
    "build": ("kv", ["--target", "tensorrt"]),
    "verify": ("kv", ["--segments", "2"]),
    "bench": ("kv", ["--against", "none", "--seconds", "0.001"]),
    "package": ("kv", ["--target", "triton", "-o", "new.txl"]),
    "report": ("kv", ["-o", "new.txl"]),
    "export": ("good.pt", ["--no-verify", "-o", "new.txl", "--segment-length", "2"]),
}
"""A good call of every verb: what it is called on, and the rest."""


ENDLESS = ("--max-new-tokens", "--segments", "--seconds")
"""Options that ask for work without end: a large number is obeyed."""


def flags(verb: str) -> list[str]:
    """Every flag of a verb that takes a value."""
    found = [each for each in command(verb).params if each.param_type_name == "option" and not each.is_flag]
    return [max(each.opts, key=len) for each in found]


ARGUED = [
    *(
        (verb, name, value)
        for verb in BASES
        for name in ("", *flags(verb))
        for value in ODD
        if not (name in ENDLESS and value.isdecimal() and int(value[:20]) > 1000)
    ),
    *((verb, "FILE", value) for verb in ("score",) for value in ODD),
    *((value, "VERB", "") for value in ODD),
]


@pytest.mark.parametrize("group", tried([(group,) for group in range(64)], 0, 4))
def test_odd_arguments_are_refused_in_one_line(
    group: int, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A 64th of all arguments: the verb runs, or says what is wrong."""
    monkeypatch.chdir(place)
    wrong = []
    for at, (verb, name, value) in enumerate(ARGUED):
        if zlib.crc32(repr((verb, name, value)).encode()) % 64 != group:
            continue
        on, rest = BASES.get(verb, ("kv", []))
        if name == "FILE":
            rest = [value]
        elif not name:
            on = value
        line = [verb, on, *rest, *([name, value] if name.startswith("-") else []), *(["--json"] if at % 2 else [])]
        try:
            code, out, err = call_main(line, monkeypatch, capfd)
            judge(code, None if verb == "generate" and not at % 2 else out, err, bool(at % 2))
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{[each[:60] for each in line]}: {error!r}"[:600])
        for made in place.glob("*.txl*"):
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    assert not wrong, "\n".join(wrong)
