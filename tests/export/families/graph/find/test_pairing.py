"""Which inputs and outputs of a foreign graph are one state: found, not invented, and said where it cannot be known."""

from __future__ import annotations

from pathlib import Path

import foreign_graphs as graphs
import onnx_ir as ir
import pytest
import torch
from foreign_graphs import STATEFUL, STATELESS, Case, exported, paired, step
from txl_export.families.graph.find.pairing import _Pairing
from txl_export.families.graph.find.structure import read_structure
from txl_export.families.graph.find.trying import Inputs
from txl_export.families.graph.take.reading import read_foreign

EXPORTS = [
    *((name, None) for name in STATEFUL),
    *((name, 1) for name, case in STATEFUL.items() if not case.named),
]
"""Each with its own names, and with odd ones in another order."""


@pytest.mark.parametrize(("name", "odd"), EXPORTS)
def test_every_state_is_found_with_its_output(name: str, odd: int | None, tmp_path: Path) -> None:
    data, pairs = exported(STATEFUL[name], odd)
    found, _ = paired(data, tmp_path)
    assert {state.input: state.output for state in found.states} == pairs


@pytest.mark.parametrize("odd", [None, pytest.param(1, marks=pytest.mark.slow(keep=8))])
@pytest.mark.parametrize("name", STATELESS)
def test_no_state_is_invented(name: str, odd: int | None, tmp_path: Path) -> None:
    found, _ = paired(exported(STATELESS[name], odd)[0], tmp_path)
    assert found.states == []


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", ["gru cell", "lstm of two layers", "convolutions"])
def test_what_the_newer_exporter_writes_is_found_too(dynamo: str, tmp_path: Path) -> None:
    data, pairs = exported(STATEFUL[dynamo], 3, dynamo=True)
    found, _ = paired(data, tmp_path)
    assert {state.input: state.output for state in found.states} == pairs


def test_what_a_scan_carries_is_a_state(tmp_path: Path) -> None:
    found, _ = paired(graphs.scanned(), tmp_path)
    assert [(state.input, state.output, state.proof) for state in found.states] == [("b", "d", "recurrent")]


def test_each_kind_of_proof_is_needed_by_some_model(tmp_path: Path) -> None:
    wanted = {
        ("lstm", 1): {"recurrent"},
        ("window of keys and values", 1): {"moved"},
        ("growing cache", 1): {"grown"},
        ("gru cell", 1): {"cell"},
        ("lstm cell, packed", 1): {"cell"},
        ("convolution, tail of its input", 1): {"window"},
        ("ring", 1): {"counted", "written"},
        ("elman", None): {"named"},
    }
    for (name, odd), proofs in wanted.items():
        found, _ = paired(exported(STATEFUL[name], odd)[0], tmp_path)
        assert {state.proof for state in found.states} == proofs, name


def test_a_state_without_a_sign_of_it_is_undecided_and_says_who_else_would_fit(tmp_path: Path) -> None:
    make = step(graphs._elman, i=graphs.linear(8, 8), h=graphs.linear(8, 8), o=graphs.linear(8, 2))
    case = Case(make, {"a": graphs.normal(2, 8), "b": graphs.normal(2, 8)}, ("y", "c"), {})
    found, _ = paired(exported(case)[0], tmp_path)
    assert found.states == []
    assert [(each.input, each.outputs) for each in found.undecided] == [("a", ("c",)), ("b", ("c",))]
    assert "b would fit as well" in found.undecided[0].why


@pytest.mark.parametrize("name", [name for name, case in STATEFUL.items() if case.named])
def test_without_the_names_that_are_needed_nothing_wrong_is_said(name: str, tmp_path: Path) -> None:
    data, pairs = exported(STATEFUL[name], 1)
    found, _ = paired(data, tmp_path)
    said = {state.input: state.output for state in found.states}
    assert said.items() < pairs.items()
    assert {each.input for each in found.undecided} >= pairs.keys() - said.keys()


def test_names_that_agree_come_before_a_pair_that_alone_is_shown(tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(exported(STATEFUL["window of keys and values"])[0])
    foreign, runner = read_foreign(tmp_path / "graph.onnx"), graphs.Here(tmp_path / "graph.onnx", tmp_path)
    inputs = Inputs(foreign, read_structure(ir.to_proto(foreign.model), foreign.inputs))
    pairing = _Pairing(inputs, runner, inputs.find(runner))  # type: ignore[arg-type]
    for shown in pairing._proofs.values():
        shown.clear()
    pairing._proofs["kv_0", "new_kv_1"].add("window")
    assert pairing.decide().states == []


def test_what_is_returned_as_it_is_is_no_state(tmp_path: Path) -> None:
    found, _ = paired(exported(STATELESS["picture that is returned"])[0], tmp_path)
    assert found.data == {"state_in": "came back as it was, in a run as usual and in one 10 times as large: state_out"}


def test_the_one_input_with_data_is_no_state_whatever_it_is_called(tmp_path: Path) -> None:
    found, _ = paired(exported(STATELESS["autoencoder with a state's names"])[0], tmp_path)
    assert "nothing new would ever come in" in found.data["state"]
    assert not found.undecided


def test_what_a_threshold_beyond_usual_numbers_changes_is_not_said_to_come_back(tmp_path: Path) -> None:
    clip = step(lambda m, a, b: (a.clamp(-4, 4), m.o(b)), o=graphs.linear(8, 2))
    case = Case(clip, {"a": graphs.normal(2, 8), "b": graphs.normal(2, 8)}, ("c", "y"), {})
    found, _ = paired(exported(case)[0], tmp_path)
    assert found.data == {}
    assert [(each.input, each.outputs) for each in found.undecided] == [("a", ("c",)), ("b", ("c",))]


@pytest.mark.parametrize(("names", "said"), [("attended residual gated", []), ("input hidden output", ["hidden"])])
def test_a_gate_is_a_cell_unless_its_names_say_two_things(names: str, said: list[str], tmp_path: Path) -> None:
    new, before, after = names.split()
    make = step(lambda m, x, h: m.cell(x, h), cell=lambda: torch.nn.GRUCell(6, 6))
    case = Case(make, {new: graphs.normal(2, 6), before: graphs.normal(2, 6)}, (after,), {})
    found, _ = paired(exported(case)[0], tmp_path)
    assert [state.input for state in found.states] == said
