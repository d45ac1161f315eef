"""A package's model on the command line: the whole way of a small one, and every wrong use in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stand_ins import small_adapter
from stand_ins.small_adapter import CONFIG, NAME, state_dict
from support import cli, save_checkpoint, small_config
from txl_export.adapters.table import ADAPTERS

GIVEN = ("--adapter", NAME, "--config", "c.json", "--weights", "net.pt")
RUNS = "small-memory 1.2.3 is run on this machine"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder but for a small package, its config and its weights; its adapter is in the table."""
    monkeypatch.chdir(tmp_path)
    small_adapter.write_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    torch.save({"model": state_dict(), "step": 3}, "net.pt")
    with small_adapter.adapter():
        yield tmp_path


@pytest.mark.slow
def test_a_package_s_model_goes_the_whole_way(folder, run):
    made = run("export", *GIVEN, "--json")
    assert made.code == 0, made.stderr
    document = json.loads(made.stdout)
    assert document["bundle"] == "net.txl", "beside the weights"
    assert document["parity"]["passed"]
    assert made.lines[0] == f"note: {RUNS}; of it, only graphs and weights enter the bundle"
    shown = run("inspect", "net.txl")
    assert "Net (adapter small, small-memory 1.2.3)" in shown.stdout
    verified = run("verify", "net.txl", *GIVEN, "--segments", 4, "--json")
    assert verified.code == 0, verified.stderr
    assert f"note: {RUNS}" in verified.lines
    assert json.loads(verified.stdout)["reference"].startswith("the module itself")
    measured = run("bench", "net.txl", *GIVEN, "--against", "torch", "--seconds", 0.01, "--threads", 1, "--json")
    assert measured.code == 0, measured.stderr
    assert {row["competitor"] for row in json.loads(measured.stdout)["rows"]} == {"bundle", "torch"}
    for verb in (("verify",), ("bench", "--against", "none")):
        replayed = run(verb[0], "net.txl", *verb[1:], "--config", "c.json")
        assert replayed.code == 2
        assert "--config is given without --adapter" in replayed.lines[-1]


WRONG = {
    "no weights": (("--adapter", NAME), "--adapter small is given without --weights; give the package's checkpoint"),
    "two models": (("net.pt", *GIVEN), "net.pt and --adapter are both given"),
    "nothing": ((), "no CHECKPOINT is given, expected a file, a folder, FILE.py:FUNCTION, or --adapter NAME"),
    "a config that is a list": ((*GIVEN, "--config", "list.json"), "list.json: holds a list, expected one JSON object"),
    "an alias": ((*GIVEN, "--alias", "a.b=c.d"), "--alias is for a Transformer-XL's checkpoint"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_line_and_exit_code_2_and_leaves_nothing(folder, run, case):
    options, words = WRONG[case]
    (folder / "list.json").write_text("[]")
    before = {path.name for path in folder.iterdir()}
    ended = run("export", *options)
    assert ended.code == 2, ended.stderr
    assert ended.lines[-1].startswith("error: ")
    assert words in ended.lines[-1]
    assert not any("Traceback" in line for line in ended.lines)
    assert {path.name for path in folder.iterdir()} - before <= {"__pycache__"}


def test_of_the_package_s_exception_its_frames_are_shown(folder, run):
    (folder / "c.json").write_text('{"width": 4, "scale": -1}')
    ended = run("export", *GIVEN)
    assert ended.lines[-1].startswith("error: small: the package refuses the config: ValueError: scale is negative")
    frames = "\n".join(ended.lines[:-1])
    assert 'small_memory.py", line' in frames
    assert "txl_export" not in frames


@pytest.mark.slow
def test_verify_and_bench_refuse_what_does_not_go_together(folder, run):
    assert run("export", *GIVEN, "--no-verify").code == 0
    txl = folder / "t.pt"
    save_checkpoint(txl, small_config())
    assert run("export", txl, "--no-verify").code == 0
    torch.save({key: value + 1 for key, value in state_dict().items()}, "other.pt")
    (folder / "wide.json").write_text('{"width": 9}')
    torch.save(state_dict(9), "wide.pt")
    wide = ("--adapter", NAME, "--config", "wide.json", "--weights", "wide.pt")
    for verb, bundle, options, words in (
        ("verify", "net.txl", (*GIVEN, "--module", "a.py:build"), "--module and --adapter are both given"),
        ("bench", "net.txl", (*GIVEN, "--module", "a.py:build"), "--module and --adapter are both given"),
        ("verify", "net.txl", ("--adapter", NAME), "--adapter small is given without --weights"),
        ("bench", "net.txl", ("--adapter", NAME), "--adapter small is given without --weights"),
        ("verify", "net.txl", ("--adapter", NAME, "--bisect"), "--adapter is given with --bisect"),
        ("verify", "net.txl", ("--weights", "net.pt"), "--weights is given without --module; give --module FILE.py:"),
        ("verify", "net.txl", wide, "Net (adapter small, small-memory 1.2.3) is not the module of this bundle"),
        ("verify", "t.txl", GIVEN, "--module, --adapter and --weights are for models of your own"),
        ("bench", "t.txl", GIVEN, "--adapter is for a model of your own; leave it out"),
    ):
        ended = run(verb, bundle, *options)
        assert ended.code == 2, (verb, options, ended.stderr)
        assert words in ended.lines[-1]
    changed = run(
        "verify", "net.txl", "--adapter", NAME, "--config", "c.json", "--weights", "other.pt", "--segments", 4
    )
    assert changed.code == 1


def test_the_help_leads_to_the_page_that_has_every_adapter():
    shown = cli("export", "--help", env={"COLUMNS": "200"}).stdout
    assert "docs/adapters.md" in shown
    page = (Path(__file__).parents[3] / "docs/adapters.md").read_text()
    assert sorted(line[3:] for line in page.splitlines() if line.startswith("## ")) == sorted(ADAPTERS)


def test_a_package_that_is_not_installed_is_named(tmp_path):
    torch.save(state_dict(), tmp_path / "net.pt")
    done = cli("export", "--adapter", "x-transformers", "--weights", tmp_path / "net.pt")
    assert done.returncode == 2
    assert done.stderr == "error: x-transformers is not installed; pip install x-transformers\n"
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt"]
