"""Inputs and outputs of a foreign graph that are one state: by nodes and names, nothing invented, and else asked."""

from __future__ import annotations

from pathlib import Path

import foreign_graphs as graphs
import pytest
from foreign_graphs import STATEFUL, STATELESS, Case, exported, paired, step
from txl_export.families.graph.find.pairing import options_of

ASKED = {"history of tokens": {"before": "after"}}
"""Pairs that neither a node nor a name says."""
NAMED = {"picture that is returned": {"state_in": "state_out"}}
"""A graph without state whose names say that it has one: the price of names; `--state state_in=` takes it back."""
ODD = [name for name, case in STATEFUL.items() if not case.named]


def said(data: bytes, folder: Path) -> dict[str, str]:
    return {state.input: state.output for state in paired(data, folder)[0].states}


@pytest.mark.parametrize("name", STATEFUL)
def test_every_state_is_found_with_its_output_or_asked_for(name: str, tmp_path: Path) -> None:
    data, pairs = exported(STATEFUL[name])
    found, _ = paired(data, tmp_path)
    asked = {one.input: one.suggested for one in found.undecided}
    assert {state.input: state.output for state in found.states} | asked == pairs
    assert asked == ASKED.get(name, {})


def test_without_names_recurrent_nodes_alone_say_it_and_nothing_else_is_said(tmp_path: Path) -> None:
    right, every = dict[str, int](), 0
    for name in ODD:
        data, pairs = exported(STATEFUL[name], 1)
        found = said(data, tmp_path)
        assert found.items() <= pairs.items(), name
        right[name], every = len(found), every + len(pairs)
    assert (sum(right.values()), every) == (16, 53)
    assert {name for name, count in right.items() if count} == {
        "lstm", "lstm time first", "lstm open", "lstm of two layers", "gru", "gru of one step, bare", "rnn",
        "lstm with resets", "gru and a rate", "convolution and lstm",
    }  # fmt: skip


@pytest.mark.parametrize("odd", [None, pytest.param(1, marks=pytest.mark.slow(keep=8))])
@pytest.mark.parametrize("name", STATELESS)
def test_no_state_is_invented_but_by_a_name_that_says_so(name: str, odd: int | None, tmp_path: Path) -> None:
    assert said(exported(STATELESS[name], odd)[0], tmp_path) == (NAMED.get(name, {}) if odd is None else {})


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", ["gru cell", "lstm of two layers", "convolutions"])
def test_what_the_newer_exporter_writes_is_found_too(dynamo: str, tmp_path: Path) -> None:
    data, pairs = exported(STATEFUL[dynamo], dynamo=True)
    assert said(data, tmp_path) == pairs


def test_what_a_scan_carries_is_a_state(tmp_path: Path) -> None:
    found, _ = paired(graphs.scanned(), tmp_path)
    assert [(state.input, state.output, state.proof) for state in found.states] == [("b", "d", "recurrent")]


def test_a_state_goes_through_both_branches_of_an_if(tmp_path: Path) -> None:
    found, structure = paired(graphs.branched(), tmp_path)
    assert (structure.branching, structure.compared) == ({"rate"}, {"rate": [16000]})
    assert [(state.input, state.output, state.proof) for state in found.states] == [("h", "hn", "recurrent")]


def test_a_node_comes_before_names(tmp_path: Path) -> None:
    lstm = STATEFUL["lstm"]
    crossed = Case(lstm.make, lstm.given, ("y", "c_out", "h_out"), {"h": "c_out", "c": "h_out"})
    assert said(exported(crossed)[0], tmp_path) == crossed.pairs


def test_one_question_holds_everything_that_is_undecided_and_leaves_data(tmp_path: Path) -> None:
    make = step(graphs._elman, i=graphs.linear(8, 8), h=graphs.linear(8, 8), o=graphs.linear(8, 2))
    case = Case(make, {"a": graphs.normal(2, 8), "b": graphs.normal(2, 8)}, ("q", "c"), {})
    found, _ = paired(exported(case)[0], tmp_path)
    assert found.states == []
    assert [(one.input, one.outputs) for one in found.undecided] == [("a", ("c",)), ("b", ("c",))]
    assert options_of(found.undecided) == "--state a= --state b=c"


@pytest.mark.parametrize("given", ["noisy_frame", "x"])
def test_what_is_called_data_is_not_asked_for(given: str, tmp_path: Path) -> None:
    make = step(graphs._elman, i=graphs.linear(8, 8), h=graphs.linear(8, 8), o=graphs.linear(8, 2))
    case = Case(make, {given: graphs.normal(2, 8), "b": graphs.normal(2, 8)}, ("q", "c"), {})
    assert [one.input for one in paired(exported(case)[0], tmp_path)[0].undecided] == ["b"]


def test_the_one_input_with_data_is_no_state_whatever_it_is_called(tmp_path: Path) -> None:
    found, _ = paired(exported(STATELESS["autoencoder with a state's names"])[0], tmp_path)
    assert (found.states, found.undecided) == ([], [])


def test_what_no_run_shows_to_do_anything_is_asked_for_whatever_it_is_called(tmp_path: Path) -> None:
    make = step(lambda m, x, h: (m.o(x), h * 0.5), o=graphs.linear(6, 2))
    case = Case(make, {"x": graphs.normal(2, 6), "h": graphs.normal(2, 8)}, ("y", "hn"), {})
    found, _ = paired(exported(case)[0], tmp_path)
    assert (found.states, [one.input for one in found.undecided]) == ([], ["h"])


def test_a_cache_that_grows_is_told_with_its_axis(tmp_path: Path) -> None:
    found, _ = paired(exported(STATEFUL["growing cache"])[0], tmp_path)
    assert {state.grows for state in found.states} == {2}
