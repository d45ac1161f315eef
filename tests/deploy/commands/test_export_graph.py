"""`txl-deploy export FILE.onnx` and what its bundle is used for: the page, sessions, Triton's package, Ctrl-C."""

from __future__ import annotations

import json

import numpy as np
import pytest
import txl_runtime
from small_files import leaky
from txl_runtime.sessions import Outputs, Request, Sessions


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a file."""
    leaky(tmp_path / "leaky.onnx")
    monkeypatch.chdir(tmp_path)


def test_a_file_becomes_a_bundle_beside_it_that_is_inspected_reported_and_packaged(run, tmp_path):
    code, out, _ = run("export", "leaky.onnx", "--batch-size", "3", "--fix", "batch=3", "--state", "h=h_new", "--json")
    assert code == 0
    assert json.loads(out)["bundle"] == "leaky.txl"
    code, out, _ = run("inspect", "leaky.txl")
    assert (code, "leaky.onnx" in out, "batch = 3" in out) == (0, True, True)
    assert "leaky.onnx" in (tmp_path / "leaky.txl" / "report.html").read_text()
    assert run("selftest", "leaky.txl")[0] == 0
    code, out, err = run("package", "leaky.txl", "--target", "triton", "-o", "models")
    assert (code, (tmp_path / "models" / "leaky" / "1" / "model.py").exists()) == (0, True), out + err
    with Sessions(txl_runtime.load("leaky.txl", "cpu")) as sessions:
        found = []
        for name in ("one", "one", "two"):
            ticket = sessions.submit(Request(inputs={"x": np.ones((1, 3), np.float32)}), name)
            while sessions.round():
                pass
            found.append(next(event for event in ticket.events() if isinstance(event, Outputs)).arrays["y"])
        np.testing.assert_array_equal(found[2], found[0])
        assert not np.array_equal(found[1], found[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--state", "h"), "--state is 'h', expected IN=OUT, an input and an output of the file, or IN=; check it"),
        (("--fix", "rate"), "--fix is 'rate', expected NAME=VALUE, an input or an open size of the file; check it"),
        (
            ("--batch-axis", "x=one"),
            "'x=one', expected NAME=N, an input or output of the file and an axis of it from 0;",
        ),
        (("--position-axis", "x=-1"), "--position-axis is 'x=-1', expected NAME=N, an input or output of the file and"),
        (
            ("--window", "past=few"),
            "--window is 'past=few', expected NAME=ROWS, an input of the file and a number of rows;",
        ),
        (("--weights", "leaky.onnx"), "--weights is for a model in PyTorch, and this is an ONNX file; leave it out"),
        (("--initial", "leaky.onnx"), "expected arrays by input name, as numpy.savez writes them"),
    ],
)
def test_a_word_that_does_not_fit_is_answered_in_one_line(words, said, run, tmp_path):
    code, out, err = run("export", "leaky.onnx", *words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert not (tmp_path / "leaky.txl").exists()
