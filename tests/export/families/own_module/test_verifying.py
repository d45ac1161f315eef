"""A real bundle against its module: what was exported passes, and faults put into its graph are found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import txl_export
from onnx import helper, numpy_helper
from stand_ins import small_steps
from torch import nn
from txl_export.families.own_module.plan import Plan, make_plan
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_export.families.own_module.verifying import check_same_module, replay_vectors, verify_step
from txl_export.proof.bits import IDLE, INDEPENDENT
from txl_export.proof.chains import FLAGGED
from txl_export.proof.gates import OUTPUTS, STATES
from txl_export.proof.parity import Parity
from txl_runtime import load
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent
from verified_steps import Heard

pytestmark = pytest.mark.slow
B, SEGMENTS = 3, 16


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "policy.txl"
    txl_export.export(small_steps.policy(), path, segment_length=(4,), batch_size=B, verify=False)
    return path


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(small_steps.policy(), B, (4,), Silent())


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy.txl"))


def verified(bundle: Path, plan: Plan) -> Parity:
    return verify_step(partial(load, bundle, "cpu"), plan, "the module itself", SEGMENTS)


def failing(parity: Parity) -> set[str]:
    return {gate.name for gate in parity.gates if gate.passed is False}


def edit(bundle: Path, change: Callable[[onnx.GraphProto], None]) -> None:
    """Change the graph, and let the manifest say what the file is now."""
    path = bundle / "step-4.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    path.write_bytes(model.SerializeToString())
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    manifest["files"][path.name] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def before(graph: onnx.GraphProto, name: str) -> str:
    """Call a value by another name where it is made; the other name."""
    aside = f"{name}.before"
    for node in graph.node:
        node.output[:] = [aside if output == name else output for output in node.output]
    return aside


def constant(graph: onnx.GraphProto, name: str, values: object) -> str:
    graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    return name


def leaks(graph: onnx.GraphProto) -> None:
    """Nothing of every neighbour, times zero."""
    aside = before(graph, "action")
    constant(graph, "sequences", np.array([0], np.int64))
    constant(graph, "nothing", np.zeros((), np.float32))
    graph.node.append(helper.make_node("ReduceSum", [aside, "sequences"], ["together"]))
    graph.node.append(helper.make_node("Mul", ["together", "nothing"], ["leak"]))
    graph.node.append(helper.make_node("Add", [aside, "leak"], ["action"]))


def moves_idle_rows(graph: onnx.GraphProto) -> None:
    """Round the states that are kept of idle sequences."""
    aside = before(graph, "state.c.out")
    constant(graph, "nearly", np.float32(1 - 1e-6))
    graph.node.append(helper.make_node("Mul", [aside, "nearly"], ["state.c.out"]))


def bakes_a_state(graph: onnx.GraphProto) -> None:
    """The cell starts every segment as it did when it was captured."""
    (kept,) = [node for node in graph.node if "state.c.out" in node.output]
    for node in graph.node:
        if node is not kept:
            node.input[:] = ["baked" if name == "state.c.in" else name for name in node.input]
    # It is made from the state, for it has the state's sequences, whose number the graph leaves open.
    constant(graph, "nothing", np.float32(0))
    constant(graph, "captured", np.float32(0.1))
    graph.node.insert(0, helper.make_node("Mul", ["state.c.in", "nothing"], ["erased"]))
    graph.node.insert(1, helper.make_node("Add", ["erased", "captured"], ["baked"]))


def turns_to_nan(graph: onnx.GraphProto) -> None:
    aside = before(graph, "value")
    constant(graph, "nan", np.float32(np.nan))
    graph.node.append(helper.make_node("Add", [aside, "nan"], ["value"]))


def test_what_was_exported_passes_and_its_vectors_too(bundle, plan):
    parity = verified(bundle, plan)
    parity.require()
    assert parity.reference == "the module itself, computed in float64"
    replayed = replay_vectors(partial(load, bundle, "cpu"))
    replayed.require()
    assert [gate.name for gate in replayed.gates] == [
        "stored outputs max abs (relative)",
        "stored state max abs (relative)",
    ]
    assert replayed.reference.startswith("the bundle's own vectors")
    assert replayed.document()["chains"] == []


@pytest.mark.parametrize(
    ("fault", "gates"),
    [(leaks, {INDEPENDENT}), (moves_idle_rows, {IDLE}), (bakes_a_state, {OUTPUTS, STATES}), (turns_to_nan, {OUTPUTS})],
)
def test_a_fault_in_the_graph_is_found(bundle, plan, fault, gates):
    edit(bundle, fault)
    assert failing(verified(bundle, plan)) >= gates


@pytest.mark.parametrize("fault", [bakes_a_state, turns_to_nan])
def test_without_the_module_the_vectors_find_it(bundle, fault):
    edit(bundle, fault)
    parity = replay_vectors(partial(load, bundle, "cpu"))
    assert failing(parity)


def test_another_module_is_not_what_the_bundle_computes(bundle):
    spec = small_steps.policy()
    with torch.no_grad():
        spec.module.lstm.weight_hh_l1[0, 0] += 0.05
    parity = verified(bundle, make_plan(spec, B, (4,), Silent()))
    assert failing(parity) >= {STATES}


def test_a_nan_that_a_layer_of_many_positions_hides_is_told(bundle, plan):
    heard = Heard()
    verify_step(partial(load, bundle, "cpu"), plan, "the module itself", SEGMENTS, heard).require()
    assert [line for line in heard.warnings if "a NaN in input obs does not show in output action, " in line]


class Counted(nn.Module):
    """A cache whose rows count from the newest back; PyTorch's attention shows NaN of rows that its mask hides."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, keys, values, fill):
        keys, values = (
            torch.cat([held, make(x)[:, None]], 1)[:, 1:] for held, make in ((keys, self.k), (values, self.v))
        )
        fill = torch.clamp(fill + 1, max=6)
        seen = (torch.arange(6) >= 6 - fill[:, None])[:, None, None]
        y = nn.functional.scaled_dot_product_attention(self.q(x)[:, None, None], keys[:, None], values[:, None], seen)
        return y[:, 0, 0].clone(), keys, values, fill


def test_a_counted_cache_behind_the_mask_of_torchs_attention_is_exported(tmp_path):
    states = [*(StateSpec(name, ("B", 6, 8)) for name in ("keys", "values")), StateSpec("fill", ("B",), dtype="int32")]
    heard, spec = Heard(), StepSpec(Counted(), [InputSpec("x", ("B", 8))], states, ["y"])
    txl_export.export(spec, tmp_path / "counted.txl", batch_size=2, listener=heard)
    assert not [line for line in heard.warnings if "NaN" in line]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"inputs": [InputSpec("obs", ("B", "L", 7))]}, "inputs obs float32 × B × L × 7, the bundle has obs float32"),
        ({"inputs": [InputSpec("x", ("B", "L", 6))]}, "the inputs x float32"),
        ({"inputs": [InputSpec("obs", ("B", "L", 6), lookahead=2)]}, "× lookahead=2, the bundle has"),
        ({"outputs": ["value", "action", "more"]}, "the outputs value, action, more, the bundle has action, value;"),
        ({"outputs": [OutputSpec("action", ("B", "L", 4)), "value"]}, "action B × L × 4, value, the bundle has action"),
        ({"states": [StateSpec("h", (2, "B", 8))]}, "the states h float32 × 2 × 3 × 8, the bundle has h"),
        ({"lengths": True}, "it has the lengths valid, the bundle has exact;"),
    ],
)
def test_a_module_with_other_tables_is_refused_before_it_runs(exported, change, told):
    spec = replace(small_steps.policy(), **change)
    with pytest.raises(UsageError) as caught:
        check_same_module(spec, "m.py:build", open_bundle(exported), Silent())
    assert str(caught.value).startswith("m.py:build is not the module of this bundle: it has the ")
    assert told in str(caught.value)


def test_other_weights_are_named_before_anything_runs(exported):
    heard, spec = Heard(), small_steps.policy()
    check_same_module(spec, "m.py:build", open_bundle(exported), heard)
    assert heard.warnings == []
    with torch.no_grad():
        spec.module.lstm.weight_ih_l1[0, 0] += 0.05
    check_same_module(spec, "m.py:build", open_bundle(exported), heard)
    assert heard.warnings == ["the weights of the module are not those of the bundle"]


def test_the_first_of_the_other_weights_is_named_where_the_file_has_it(tmp_path):
    def wide() -> StepSpec:
        torch.manual_seed(0)
        states = [StateSpec("h", ("B", 32))]
        return StepSpec(nn.GRUCell(16, 32), [InputSpec("x", ("B", 16))], states, ["h"], step=_cell)

    txl_export.export(wide(), tmp_path / "wide.txl", verify=False)
    heard, spec = Heard(), wide()
    with torch.no_grad():
        spec.module.weight_hh[0, 0] += 0.05
    check_same_module(spec, "m.py:build", open_bundle(tmp_path / "wide.txl"), heard)
    assert heard.warnings == ["the weights of the module are not those of the bundle (first: weight_hh)"]


def _cell(module, inputs, states):
    new = module(inputs["x"], states["h"])
    return {"h": new * 1}, {"h": new}


class Spoken(nn.Module):
    """Prints in every call; its output and its state have one name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(256, 16), nn.GRUCell(16, 24)

    def forward(self, x, s):
        print("called")
        s = self.cell(self.table(x), s)
        return s * 2, s


def test_what_a_module_prints_is_no_result_and_a_vocabulary_needs_no_file(tmp_path, capsys):
    spec = StepSpec(
        Spoken(), [InputSpec("x", ("B",), tokens=256)], [StateSpec("s", ("B", 24))], ["s"], vocabulary={"kind": "bytes"}
    )
    result = txl_export.export(spec, tmp_path / "spoken.txl", batch_size=2)
    told = capsys.readouterr()
    assert told.out == ""
    assert "called" in told.err
    assert result.parity is not None
    model = load(result.path)
    assert model.vocabulary is not None
    assert model.vocabulary.decode([104, 105]) == b"hi"
    stream = model.stream()
    doubled = stream.run({"x": np.array([1, 2], np.int32)})["s"]
    np.testing.assert_allclose(doubled, 2 * stream.state()["s"], rtol=1e-6)


class Normalised(nn.Module):
    """A running mean that begins with what training measured."""

    def __init__(self, start: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", torch.linspace(1, 2, 4)[None] * start)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x
        return self.out(x - self.mean)


def test_a_bundle_starts_as_the_modules_attribute_holds_it(tmp_path):
    """One of zeros is what it always was; the other is a new model, which is said once."""
    ids, said = dict[str, str](), dict[str, list[str]]()
    for name, start, given in (("zeros", 0, {}), ("told", 1, {"initial": 0.0}), ("held", 1, {})):
        heard, spec = (
            Heard(),
            StepSpec(
                Normalised(start),
                [InputSpec("x", ("B", 4))],
                [StateSpec("mean", ("B", 4), attribute="mean", **given)],
                ["y"],
            ),
        )
        path = txl_export.export(spec, tmp_path / f"{name}.txl", listener=heard, verify=name == "held").path
        ids[name] = load(path).manifest.model_id
        said[name] = [line for line in heard.warnings if "model_id is new" in line]
    assert ids["zeros"] == ids["told"] != ids["held"]
    assert [len(lines) for lines in said.values()] == [0, 0, 1]
    module, stream = Normalised(1), load(tmp_path / "held.txl").stream(1)
    for x in np.random.default_rng(0).normal(size=(5, 1, 4)).astype(np.float32):
        with torch.no_grad():
            expected = module(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(stream.run({"x": x})["y"], expected, atol=1e-6)


class Episodes(nn.Module):
    """Counts the steps of an episode, no further than to `most`; a flag that is `begins` begins it."""

    def __init__(self, most: int, begins: bool) -> None:
        super().__init__()
        self.most, self.begins = most, begins

    def forward(self, x, flag, count):
        for place in range(x.shape[1]):
            count = torch.where(flag[:, place] == self.begins, 0, count + 1).clamp(max=self.most)
        return x + 0.01 * count[:, None, None], count


def episodes(most: int, begins: bool) -> StepSpec:
    inputs = [InputSpec("x", ("B", "L", 3)), InputSpec("flag", ("B", "L"), dtype="bool")]
    return StepSpec(Episodes(most, begins), inputs, [StateSpec("count", ("B",), dtype="int32")], ["y"])


@pytest.mark.parametrize(("batch", "length", "begins"), [(1, 1, True), (2, 4, True), (2, 1, False)])
def test_an_episode_is_long_enough_that_a_counter_which_stops_at_100_is_found(tmp_path, batch, length, begins):
    path = txl_export.export(
        episodes(100, begins), tmp_path / "short.txl", batch_size=batch, segment_length=(length,), verify=False
    ).path
    found = {}
    for most in (100, 10**6):
        heard, plan = Heard(), make_plan(episodes(most, begins), batch, (length,), Silent())
        parity = verify_step(partial(load, path, "cpu"), plan, "the module itself", None, heard)
        found[most] = bool(failing(parity)), any("count: still counts" in line for line in heard.warnings)
        longest = parity.verification().chains[0]
        assert longest.states["count"].reached >= min(most, length * (longest.segments - FLAGGED))
    assert longest.segments - FLAGGED >= 110
    assert failing(parity) >= {OUTPUTS, "whole numbers differing"}
    assert found == {100: (False, False), 10**6: (True, True)}
