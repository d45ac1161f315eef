"""Descriptions of foreign files: sequences, positions, how long a change lasts, what is dead, and what comes next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_graphs as graphs
import pytest
import torch
from foreign_graphs import STATEFUL, STATELESS, B, Case, D, H, exported, step
from linear_graphs import stateful
from onnx import TensorProto, helper
from support import PACKAGES
from torch import Tensor, nn
from txl_export.families.graph.describing import GraphFacts, describe_graph
from txl_runtime.listener import Silent


def described(data: bytes, folder: Path, seconds: float = 30) -> GraphFacts:
    (folder / "graph.onnx").write_bytes(data)
    return describe_graph(folder / "graph.onnx", Silent(), seconds)


def of_case(case: Case, folder: Path) -> GraphFacts:
    return described(exported(case)[0], folder)


def lasting(facts: GraphFacts) -> dict[str, tuple[int, bool]]:
    return {found.state: (found.runs, found.itself) for found in facts.lasting}


def test_a_window_forgets_after_as_many_runs_as_it_has_places(tmp_path):
    facts = of_case(STATEFUL["delay line"], tmp_path)
    assert lasting(facts) == {"line_0": (7, False)}
    assert facts.axes is not None
    assert (facts.axes.sequences, facts.axes.independent, facts.axes.reaching) == (B, True, [])


def test_what_never_forgets_is_followed_to_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("txl_export.families.graph.find.behaviour.STEPS", 20)
    facts = of_case(STATEFUL["average"], tmp_path)
    assert {found.followed for found in facts.lasting} == {20}
    assert all(found.open and found.itself for found in facts.lasting)


def test_positions_are_found_where_they_are_open_and_where_they_are_fixed(tmp_path):
    for name in ("lstm open", "lstm"):
        axes = of_case(STATEFUL[name], tmp_path).axes
        assert axes is not None
        assert axes.segment == {"x": 1, "y": 1}
        assert axes.batch == {"x": 0, "h": 1, "c": 1, "y": 0, "hn": 1, "cn": 1}
        assert axes.sequences == (None if name == "lstm open" else B)
        assert axes.lengths == ([1, 4, 5, 8] if name == "lstm open" else [])


def test_a_history_that_every_call_is_given_is_told_from_a_stream_and_so_is_a_start_that_is_not_zeros(tmp_path):
    def run(self, x):
        left = torch.full((1, 1, H), 0.5)
        return self.l(x, (left, left))[0][:, -1]

    case = Case(step(run, l=lambda: nn.LSTM(D, H, batch_first=True)), {"x": graphs.normal(1, 10, D)}, ("y",), {})
    facts = of_case(case, tmp_path)
    assert [found.what for found in facts.forgets] == [
        "begins with the same numbers in every call, which are not zeros"
    ]
    assert (facts.history, "--open would be wrong" in facts.next) == ("x", True)


@pytest.mark.parametrize(("inputs", "attributes"), [(["a"], {"to": TensorProto.FLOAT}), (["x", "x"], {"axis": "none"})])
def test_a_graph_that_onnx_runtime_does_not_open_is_not_looked_at(inputs, attributes, tmp_path):
    """95 bytes, whose node reads itself: a walk along it would have no end; and an attribute of another type."""
    node = helper.make_node("Cast" if "to" in attributes else "Gather", inputs, ["a"], **attributes)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "a"))
    proto = helper.make_model(helper.make_graph([node], "g", [x], [y]), ir_version=8)
    facts = described(proto.SerializeToString(), tmp_path)
    assert (facts.stopped.startswith("ONNX Runtime does not run it"), facts.command, facts.runs) == (True, "", 0)


def test_sizes_with_which_nothing_comes_back_are_passed_over(tmp_path):
    case = Case(step(lambda self, x: x[:, 4:] * 2), {"x": graphs.normal(B, 9)}, ("y",), {}, {"x": {1: "time"}})
    assert of_case(case, tmp_path).sizes == {"time": 8}


@pytest.mark.parametrize("name", ["growing caches and a mask", "growing caches and a mask of both lengths"])
def test_growing_caches_grow_and_are_not_followed(name, tmp_path):
    facts = of_case(STATEFUL[name], tmp_path)
    assert facts.stopped == ""
    assert {state.grows for state in facts.states} == {2}
    assert facts.lasting == []


def of_function(
    folder: Path, function: Callable[..., Any], given: dict[str, Tensor], free: Any = None, **layers: Any
) -> GraphFacts:
    return of_case(Case(step(function, **layers), given, ("y",), {}, free), folder)


def test_time_first_and_open_is_no_axis_of_sequences(tmp_path):
    case = STATEFUL["lstm time first"]
    renamed = {"c": {0: "time"}, "y": {0: "time"}}
    axes = of_case(Case(case.make, case.given, case.returned, {}, renamed), tmp_path).axes
    assert axes is not None
    assert (axes.sequences, axes.segment) == (B, {"c": 0, "y": 0})
    assert axes.batch == {"c": 1, "h": 1, "d": 1, "y": 1, "p": 1, "q": 1}


def test_what_reads_both_ways_has_no_positions_one_after_the_other(tmp_path):
    axes = of_case(STATELESS["lstm in both directions"], tmp_path).axes
    assert axes is not None
    assert axes.segment == {}


def test_lengths_that_are_multiples_are_found(tmp_path):
    free = {"x": {1: "time"}, "y": {1: "time"}}
    facts = of_function(tmp_path, lambda self, x: x.reshape(B, -1, 4, D).mean(2), {"x": graphs.normal(B, 8, D)}, free)
    assert facts.axes is not None
    assert (facts.axes.segment, facts.axes.lengths) == ({"x": 1, "y": 1}, [4, 8])


def test_the_first_length_that_is_tried_is_that_of_a_window_over_the_input(tmp_path):
    layer = lambda: nn.Conv1d(1, 4, 256, stride=128)  # noqa: E731
    facts = of_function(
        tmp_path, lambda self, x: self.c(x), {"x": graphs.normal(1, 1, 576)}, {"x": {2: "time"}}, c=layer
    )
    assert facts.sizes == {"time": 640}


def test_where_two_sequences_do_not_run_one_is_tried(tmp_path):
    given = {"x": graphs.normal(1, D), "e": graphs.normal(1, D)}
    facts = of_function(tmp_path, lambda self, x, e: torch.cat([x, e], 1), given, {"x": {0: "batch"}})
    assert (facts.stopped, facts.sizes) == ("", {"batch": 1})


def test_where_whole_numbers_do_not_fit_zeros_are_tried(tmp_path):
    given = {"x": graphs.normal(B, 1, D), "which": torch.tensor([0])}
    facts = of_function(tmp_path, lambda self, x, which: torch.index_select(x, 1, which), given)
    assert facts.stopped == ""


def _reaching(self: nn.Module, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence's state takes up the others', as a norm over the batch does."""
    h = self.cell(x, h - h.mean(0, keepdim=True))  # type: ignore[operator]
    return self.o(h), h  # type: ignore[operator]


def _dead(self: nn.Module, x: Tensor, h: Tensor, line: Tensor) -> tuple[Tensor, ...]:
    h = self.cell(x, h)  # type: ignore[operator]
    return self.o(h), h, torch.cat([line[:, 1:], x[:, None]], 1)  # type: ignore[operator]


LAYERS = {"cell": lambda: nn.GRUCell(D, H), "o": graphs.linear(H, 3)}


def test_a_state_that_reaches_another_sequence_is_named(tmp_path):
    case = Case(step(_reaching, **LAYERS), {"x": graphs.normal(B, D), "h": graphs.normal(B, H)}, ("y", "hn"), {})
    axes = of_case(case, tmp_path).axes
    assert axes is not None
    assert (axes.independent, axes.reaching) == (False, ["h"])


def test_a_state_that_changes_nothing_is_dead(tmp_path):
    given = {"x": graphs.normal(B, D), "h": graphs.normal(B, H), "line": graphs.normal(B, 3, D)}
    facts = of_case(Case(step(_dead, **LAYERS), given, ("y", "hn", "line_out"), {}), tmp_path)
    assert [state.input for state in facts.states] == ["h", "line"]
    assert lasting(facts)["line"] == (0, False)
    assert lasting(facts)["h"][0] > 0


def test_a_graph_that_draws_numbers_of_its_own_is_not_judged(tmp_path):
    case = Case(
        step(lambda self, x, h: (x + torch.randn(B, D), h * 0.5 + torch.randn(B, D))),
        {"x": graphs.normal(B, D), "h": graphs.normal(B, D)},
        ("y", "hn"),
        {},
    )
    facts = of_case(case, tmp_path)
    assert "two runs with the same inputs return other numbers" in facts.stopped
    assert facts.states == []


def test_what_cannot_be_run_is_told_and_no_command_is_printed(tmp_path):
    facts = described(exported(STATELESS["gru that starts anew"])[0], tmp_path, seconds=0)
    assert "more than 0 s" in facts.stopped
    assert facts.axes is None
    assert (facts.command, "no command" in facts.next) == ("", True)


def test_numbers_are_the_same_in_every_run(tmp_path):
    first, second = (of_case(STATEFUL["lstm cell"], tmp_path) for _ in range(2))
    assert first == second


def test_a_graph_without_state_needs_nothing(tmp_path):
    facts = of_case(STATELESS["classifier"], tmp_path)
    assert (facts.command, "ONNX Runtime is all" in facts.next) == ("", True)
    facts = of_case(STATELESS["gru that starts anew"], tmp_path)
    assert facts.command.endswith("--open")
    assert "--open carries on what it forgets" in facts.next
    assert "txl-deploy verify FILE.onnx --module" in facts.next


SILERO = PACKAGES / "silero_vad" / "data"


@pytest.mark.skipif(not SILERO.exists(), reason="make packages installs silero-vad")
@pytest.mark.parametrize("name", ["silero_vad", "silero_vad_16k_op15", "silero_vad_op18_ifless"])
def test_silero_vad_keeps_one_state_and_needs_64_samples_in_front(name):
    facts = describe_graph(SILERO / f"{name}.onnx", Silent())
    assert [(state.input, state.output) for state in facts.states] == [("state", "stateN")]
    state = facts.states[0]
    assert (state.shape[0], state.shape[2], type(state.shape[1])) == (2, 128, str)
    assert facts.axes is not None
    assert (facts.axes.sequences, facts.axes.independent) == (None, True)
    assert (facts.axes.batch["state"], facts.axes.segment) == (1, {"input": 1})
    assert [(found.before, found.step) for found in facts.contexts] == [(64, 128)]
    size = "input:1=576" if name == "silero_vad" else "sequence=576"
    fixed = "--fix sr=16000 " * (name != "silero_vad_16k_op15")
    assert facts.command.endswith(f"-o {name}.txl {fixed}--fix {size}")
    assert facts.settings == ({"sr": [16000]} if fixed else {})
    assert "sr" in {port.name for port in facts.inputs}


def test_outputs_that_chance_reaches_are_left_out_of_the_command(tmp_path):
    def run(self: Any, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        h = self.cell(x, h)
        return self.o(h), self.o(h) + torch.randn(B, 3), h

    given = {"x": graphs.normal(B, D), "h": graphs.normal(B, H)}
    facts = of_case(Case(step(run, **LAYERS), given, ("mean", "drawn", "hn"), {}), tmp_path)
    assert facts.random == (["RandomNormal"], ["drawn"])
    assert [state.output for state in facts.states] == ["hn"]
    assert facts.command.endswith("-o graph.txl --output mean")


def test_what_is_undecided_is_answered_in_the_command(tmp_path):
    facts = of_case(STATEFUL["history of tokens"], tmp_path)
    assert facts.command.endswith("-o graph.txl --state before=after")


def test_an_operator_that_no_bundle_may_have_is_named_and_no_command_is_printed(tmp_path):
    def run(self: Any, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        h = self.cell(x, h)
        return self.o(h), torch.linalg.det(h[:, None] * h[:, :, None]), h

    given = {"x": graphs.normal(B, D), "h": graphs.normal(B, H)}
    facts = of_case(Case(step(run, **LAYERS), given, ("y", "det", "hn"), {}), tmp_path)
    assert (facts.command, facts.unknown) == ("", ["Det"])
    assert "No bundle may have Det" in facts.next


def test_a_command_that_takes_too_long_to_try_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("txl_export.families.graph.describing.TRIED", 0.0)
    facts = of_case(STATEFUL["lstm"], tmp_path)
    assert facts.command.endswith("-o graph.txl")
    assert "not tried to its end" in facts.tried
    assert facts.tried in facts.next


def test_a_size_that_a_weight_decides_is_taken_from_the_weight(tmp_path):
    case = STATEFUL["gru"]
    free = {"x": {0: "time", 2: "features"}, "y": {0: "time"}}
    facts = of_case(Case(case.make, case.given, case.returned, {}, free), tmp_path)
    assert facts.sizes["features"] == D
    assert "--fix" not in facts.command


def test_positions_are_those_of_data_and_not_of_a_cache(tmp_path):
    """As WeNet's encoder: what runs along positions is a convolution with a cache in front."""
    facts = of_case(STATEFUL["convolutions, a position a call"], tmp_path)
    assert facts.axes is not None
    assert (facts.axes.segment["x"], facts.axes.segment["y"], facts.axes.batch["cache_0"]) == (2, 2, 0)


def test_linear_attention_carries_its_state_and_one_that_is_given_none_is_named(tmp_path):
    facts = described(stateful(tmp_path / "f.onnx").read_bytes(), tmp_path)
    assert [(state.input, state.output, state.proof) for state in facts.states] == [
        ("conv", "new_conv", "recurrent"),
        ("memory", "new_memory", "recurrent"),
    ]
    assert facts.axes is not None
    assert (facts.axes.segment["x"], facts.axes.batch["memory"], facts.unknown, facts.forgets) == (1, 0, [], [])
    assert facts.command.startswith("txl-deploy export")
    facts = described(stateful(tmp_path / "f.onnx", past=False).read_bytes(), tmp_path)
    assert [found.op for found in facts.forgets] == ["CausalConvWithState", "LinearAttention"]
    assert "is given no past_state, expected one" in facts.forgets[1].fault
    assert (
        facts.next == "An export was tried and refused: what it forgets cannot be carried on, and it has no other state"
    )
