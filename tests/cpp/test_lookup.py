"""Drafts from the text in C++ beside Python's: what finds and what pauses them, the tokens, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from frozen import frozen
from step_models import StepModel, counting
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_runtime import UsageError
from txl_runtime.streaming.lookup import Pace, Repeats

from conformance.driver import packed, unpacked
from conformance.talking import Talk

pytestmark = [pytest.mark.slow(keep=9), pytest.mark.timeout(1200)]  # whoever comes first builds
PROMPT = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4, 5, 4, 5], [6, 7, 8, 9, 6, 7, 8, 9]]
COUNT = 300
ROUNDING = 2e-5
FAMILY: dict[str, Any] = {"segment_length": (5, 1), "batch_size": 3, "verify": False}


class Recurrent(torch.nn.Module):
    """An LSTM over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.cells, self.head = torch.nn.Embedding(11, 16), torch.nn.LSTM(16, 16), torch.nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, (h, c) = self.cells(self.table(tokens.T), (h, c))
        return torch.log_softmax(4 * self.head(rows.transpose(0, 1)), -1), h, c


def lstm(path: Path) -> Path:
    """Its bundle, of segments of 1 … 5."""
    spec = StepSpec(
        Recurrent(),
        [InputSpec("tokens", ("B", "L"), tokens=11)],
        [StateSpec(name, (1, "B", 16)) for name in "hc"],
        [OutputSpec("logprobs", role="logprobs")],
    )
    txl_export.export(spec, path, segment_length=(5, 4, 3, 2, 1), batch_size=3, verify=False)
    return path


def lockstep(lengths: tuple[int, ...]) -> StepModel:
    """The counting model with exact segments, whose sequences all run or none."""
    model = counting(lengths)
    model.lengths, model.streams = "exact", "lockstep"
    return model


MODELS = ("counting", "lockstep", "window", "lookup", "lstm")


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory, make_bundle: Callable[..., Path]) -> Callable[[str], Path]:
    made = {
        "counting": lambda path: counting((8, 1)).write(path),
        "lockstep": lambda path: lockstep((5, 4, 3, 2, 1)).write(path),
        "window": lambda _: make_bundle(same_length=True, **FAMILY),
        "lookup": lambda _: make_bundle(lookup=True, **FAMILY),
        "lstm": lstm,
    }
    found: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in found:
            found[name] = made[name](tmp_path_factory.mktemp("models") / "b.txl")
        return found[name]

    return find


def tried(built: Path, *words: object, given: object = "") -> list[str]:
    """The lines of the program that tries drafts."""
    command = [str(built / "txl-lookup"), *map(str, words)]
    said = subprocess.run(command, input=str(given), capture_output=True, text=True, check=True, timeout=600)
    return said.stdout.splitlines()


def generated(built: Path, path: Path, b: int, *words: object) -> tuple[list[list[list[int]]], list[str], np.ndarray]:
    """Tokens [n, b] of each call, what was refused, and the state after it: fill, and what comes next."""
    tokens = " ".join(str(token) for row in PROMPT[:b] for token in row)
    *lines, state = tried(built, path, b, *words, given=tokens)
    calls = list(itertools.takewhile(lambda line: line[:1].isdigit(), lines))
    found = [np.array(line.split(), int).reshape(-1, b).tolist() for line in calls]
    return found, lines[len(calls) :], np.array(state.split(), float)


# --- the tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_state_are_those_of_plain_decoding_and_of_python(
    built: Path, engine: Path, placed: Callable[[str], Path], name: str, b: int, temperature: float
) -> None:
    path = placed(name)
    model = txl_runtime.load(path, "cpu", threads=1)
    if b == 1 and not model.manifest.can.run_fewer:
        pytest.skip("needs all sequences")
    drafted, plain = (generated(built, path, b, most, temperature, COUNT) for most in (4, 0))
    tokens = [token for call in drafted[0] for token in call]
    assert tokens == [token for call in plain[0] for token in call]
    assert tokens == [token.tolist() for token in model.stream(b).generate(PROMPT[:b], COUNT, temperature, seed=5)]
    np.testing.assert_allclose(drafted[2], plain[2], rtol=0, atol=ROUNDING)
    assert len(plain[0]) == COUNT
    sizes = [len(call) for call in drafted[0]]
    assert sizes[:8] == [1] * 8, "the first steps are without drafts"
    assert max(sizes) > 1, "no draft came true"


@pytest.mark.parametrize("name", ["counting", "lockstep", "window"])
def test_a_draw_that_fails_leaves_the_state_that_plain_decoding_leaves(
    built: Path, engine: Path, placed: Callable[[str], Path], name: str
) -> None:
    cut = 0
    for fails in range(30, 60, 3):  # draws of three sequences each
        drafted, plain = (generated(built, placed(name), 3, most, 0.1, COUNT, fails) for most in (4, 0))
        tokens = [token for call in drafted[0] for token in call]
        assert tokens == [token for call in plain[0] for token in call]
        assert plain[1] == ["after 0: adjust returned 1 for sequence 0, expected 0; mend it"]
        after, _, said = drafted[1][0].partition(": ")
        assert plain[1][0].endswith(said)
        np.testing.assert_allclose(drafted[2], plain[2], rtol=0, atol=ROUNDING)
        cut += after != "after 0"
    assert cut, "none failed within a draft"


def test_one_call_gives_what_lookup_0_gives(built: Path, engine: Path, placed: Callable[[str], Path]) -> None:
    request = {"do": "generate", "tokens": packed(np.array(PROMPT, np.int32)), "counts": [8, 5, 1], "count": COUNT}
    for name, temperature in (("counting", 0.3), ("window", 0.0), ("window", 0.3)):
        found = []
        with Talk([str(built / "txl-driver")], 60.0) as c:
            for most in (4, 1, 0):
                for asked in (
                    {"do": "load", "path": str(placed(name)), "update": None},
                    {"do": "open", "b": 3, "memory_length": None},
                    {**request, "temperature": temperature, "top_k": 5, "top_p": None, "seed": 7, "lookup": most},
                ):
                    reply = c.ask(asked)
                    assert "ok" in reply, reply
                found.append({name: unpacked(array) for name, array in reply["ok"].items()})
        for drafted in found[:2]:
            assert drafted["tokens"].tolist() == found[2]["tokens"].tolist()
            np.testing.assert_allclose(drafted["logprobs"], found[2]["logprobs"], rtol=0, atol=ROUNDING)


# --- what is refused ----------------------------------------------------------------------------------------------


def resaid(path: Path, to: Path, stepwise: int) -> Path:
    """A copy of a bundle that says a different `stepwise`."""
    shutil.copytree(path, to)
    document = json.loads((path / "manifest.json").read_text())
    (to / "manifest.json").write_text(json.dumps(document | {"stepwise": stepwise}))
    return to


def test_a_model_that_has_no_drafts_is_refused_in_the_words_of_python(
    built: Path, engine: Path, placed: Callable[[str], Path], tmp_path: Path
) -> None:
    long, exact = (model.write(tmp_path / f"{n}") for n, model in enumerate((counting((64, 1)), lockstep((5, 1)))))
    cases = [
        (frozen("ring"), None),
        (resaid(frozen("ring"), tmp_path / "one", 1), None),
        (placed("window"), "rolled"),
        (long, None),
        (exact, None),
    ]
    said = set()
    asked = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": 1}
    request = {"do": "generate", "tokens": packed(np.array(PROMPT, np.int32)), "counts": None, "count": 4, **asked}
    with Talk([str(built / "txl-driver")], 60.0) as c:
        for path, update in cases:
            stream = txl_runtime.load(path, "cpu", threads=1, update=update).stream()
            with pytest.raises(UsageError, match="lookup is 2, expected 0, because") as refused:
                stream.generate(PROMPT, 4, lookup=2)
            c.ask({"do": "load", "path": str(path), "update": update})
            c.ask({"do": "open", "b": 3, "memory_length": None})
            reply = c.ask({**request, "lookup": 2})
            assert (reply["refused"], reply["kind"]) == (str(refused.value), "usage")
            assert "ok" in c.ask({**request, "lookup": 0})
            said.add(str(refused.value))
        for wrong in (-1, 5):
            assert c.ask({**request, "lookup": wrong})["refused"] == (
                f"lookup is {wrong}, expected a whole number of 0 ... 4; 0 is off"
            )
    assert len(said) == len(cases)


# --- what finds drafts, and what pauses them ----------------------------------------------------------------------


@pytest.mark.parametrize("ids", [2, 3, 5])
def test_the_same_drafts_are_found_as_in_python(built: Path, ids: int) -> None:
    draws, repeats = random.Random(ids), Repeats([])
    tokens = [draws.randrange(ids) - 1 for _ in range(400)]
    found = tried(built, "repeats", given=" ".join(map(str, tokens)))
    assert len(found) == len(tokens)
    for token, line in zip(tokens, found, strict=True):
        repeats.add((token,))
        assert line.split() == ([str(each) for each in repeats.find(4)] or ["-"])


@pytest.mark.parametrize("seed", range(3))
def test_drafts_pause_and_go_on_as_in_python(built: Path, seed: int) -> None:
    """The clock is set forward by hand, by what each step or draft is said to take."""
    draws, now = random.Random(seed), [0.0]
    pace = Pace(lambda: now[0])
    script, expected = list[str](), list[str]()
    for _ in range(2000):
        draft = pace.allows() and draws.random() < 0.5
        took, tokens = draws.uniform(1.0, 4.0 if draft else 2.0), draws.choice([1, 1, 1, 2, 3]) if draft else 1
        script.append(f"{int(draft)} {took!r} {tokens}")
        pace.start()
        now[0] += took
        pace.count(draft, tokens)
        now[0] += 50
        expected.append(str(int(pace.allows())))
    assert tried(built, "pace", given="\n".join(script)) == expected
    assert min("".join(expected).count(each) for each in "01") > 100, "there were no pauses, or nothing else"
