"""`txl-deploy inspect FILE.onnx`: what a foreign graph remembers, on a narrow terminal and as JSON."""

from __future__ import annotations

import json

import foreign_graphs as graphs
import pytest
import torch
from foreign_graphs import STATEFUL, STATELESS, exported


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with some graphs, stood in."""
    files = {
        "lstm": exported(STATEFUL["lstm open"])[0],
        "denoiser": exported(STATELESS["denoiser"])[0],
        "gru": exported(STATELESS["gru that starts anew"])[0],
        "both": exported(STATELESS["lstm in both directions"])[0],
        "if": graphs.branched(),
        "history": exported(STATEFUL["history of tokens"])[0],
        "cache": exported(STATEFUL["growing cache"])[0],
        "\x1b[31mred": exported(STATELESS["classifier"])[0],
    }
    for name, data in files.items():
        (tmp_path / f"{name}.onnx").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_state_is_shown_with_what_proves_it_on_sixty_columns(run, here, monkeypatch):
    monkeypatch.setattr("txl_deploy.console.stdout.width", 60)
    shown = run("inspect", "lstm.onnx")
    assert shown.code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 60
    text = " ".join(shown.stdout.split())
    for part in (
        "h → hn",
        "c → cn",
        "h, c: paired by a recurrent operator",
        "sequences any number, independent of one another",
        "positions axis 1 of x; 1, 4, 5, 8 of them run",
        "may compute for 30 s and take 2.1 GB",
        "operators of ai.onnx",
        "[batch, time, 6]",
        "docs/onnx-files.md has all options of the command that makes a bundle of it: txl-deploy export lstm.onnx -o",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("denoiser", ("no state: nothing", "ONNX Runtime is all")),
        ("gru", ("forgets after each call: GRU ", "-o gru.txl --open")),
        ("both", ("forgets after each call: LSTM ", "it cannot be opened: is bidirectional")),
        ("history", ("undecided, because their shapes alone say it: before → after", "--state before=after")),
        (
            "cache",
            ("past_key_values.0.key → present.0.key not followed, it grows", "--window past_key_values.0.key=ROWS"),
        ),
        ("if", ("setting rate", "compares with 16000; here 16000", "h → hn", "--fix rate=16000")),
    ],
)
def test_what_is_undecided_forgotten_or_set_is_said(run, here, name, parts):
    text = " ".join(run("inspect", f"{name}.onnx").stdout.split())
    assert all(part in text for part in parts), text


def test_a_file_that_draws_numbers_is_not_said_to_have_no_state(run, here):
    make = graphs.step(lambda self, x, h: (x + torch.randn(2, 6), h * 0.5 + torch.randn(2, 6)))
    case = graphs.Case(make, {"x": graphs.normal(2, 6), "h": graphs.normal(2, 6)}, ("y", "hn"), {})
    (here / "dice.onnx").write_bytes(exported(case)[0])
    text = " ".join(run("inspect", "dice.onnx").stdout.split())
    assert "whether it has a state is not known: two runs with the same inputs return other numbers" in text
    assert "no state" not in text


def test_as_json_it_is_one_document_with_everything(run, here):
    document = json.loads(run("inspect", "lstm.onnx", "--json").stdout)
    assert document["kind"] == "onnx"
    assert [(state["input"], state["output"], state["proof"]) for state in document["states"]] == [
        ("h", "hn", "recurrent"),
        ("c", "cn", "recurrent"),
    ]
    assert document["inputs"][0] == {"name": "x", "dtype": "float32", "shape": ["batch", "time", 6]}
    assert document["axes"]["independent"] is True
    assert {found["state"] for found in document["lasting"]} == {"h", "c"}
    assert (document["seconds"], document["stopped"], document["tried"]) == (30, "", "")


def test_json_beside_a_file_makes_no_engine_of_it(run, here):
    (here / "lstm.json").write_text('{"sample_rate": 16000}')
    assert "h → hn" in run("inspect", "lstm.onnx").stdout


def test_what_lies_where_engines_lie_is_an_engine_or_refused(run, here, monkeypatch):
    place = here / "engines" / "cuda"
    place.mkdir(parents=True)
    (here / "lstm.onnx").rename(place / "lstm.onnx")
    monkeypatch.chdir(place)
    found = run("inspect", "lstm.onnx")
    assert (found.code, found.stdout) == (2, "")
    assert "lstm.json" in found.stderr


def test_names_that_a_stranger_chose_are_not_obeyed(run, here):
    shown = run("inspect", "\x1b[31mred.onnx")
    assert shown.code == 0
    assert "\x1b" not in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("lstm.onnx", "--family", "txl"), "is an ONNX file"),
        (("text.onnx",), "no ONNX model"),
        (("gone.onnx",), "no such file"),
    ],
)
def test_what_cannot_be_inspected_is_one_line(run, here, arguments, part):
    (here / "text.onnx").write_text("no graph")
    found = run("inspect", *arguments)
    assert (found.code, found.stdout) == (2, "")
    *stages, error = found.stderr.splitlines()
    assert part in error
    assert not stages
