"""A foreign file made a bundle: beside the file itself, run by hand, and what is refused of it."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import txl_export
import txl_runtime
from foreign_graphs import STATEFUL, STATELESS, Case, exported
from linear_graphs import stateful
from onnx import TensorProto, helper, numpy_helper
from small_files import graph, leaky
from small_graphs import model, value
from support import PACKAGES
from txl_export.families.graph.describing import describe_graph
from txl_runtime.errors import CheckError, CheckpointError, UsageError
from txl_runtime.guard.forms import FORMS
from txl_runtime.listener import Silent
from verified_steps import Heard

QUICK = {
    "lstm open",
    "rnn",
    "ring",
    "history of tokens",
    "windows in half precision, whose numbers are alike by chance",
}
KNOWN = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in STATEFUL
    if not name.startswith("growing")
]
KINDS = {"tensor(float16)": "float16", "tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(bool)": "bool"}
STEPS = 24


def written(case: Case, folder: Path) -> Path:
    path = folder / "graph.onnx"
    path.write_bytes(exported(case)[0])
    return path


def by_hand(path: Path, manifest: Any, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the file with its states fed back, results by the bundle's names; states begin as zeros."""
    session = onnxruntime.InferenceSession(str(path))
    pairs: dict[str, str] = {name: output for name, output in manifest.family["states"].items() if output}
    fixed = {name: np.array(value) for name, value in manifest.family["fix"].items()}
    kinds = {port.name: KINDS.get(port.type, "float32") for port in session.get_inputs()}
    shapes = {state.name: state.shape for state in manifest.states}
    held = {name: np.zeros(shapes[name], kinds[name]) for name in pairs}
    names, found = [output.name for output in session.get_outputs()], []
    for inputs in given:
        feeds = {name: values.astype(kinds[name]) for name, values in inputs.items()}
        results = dict(zip(names, session.run(names, {**fixed, **feeds, **held}), strict=True))
        held = {name: results[output] for name, output in pairs.items()}
        found.append({name: results[name] for name in names if name not in pairs.values()})
    return found


def beside(path: Path, bundle: Path, **options: Any) -> float:
    """The largest difference between the file by hand and its bundle, over a chain."""
    manifest = txl_export.export(path, bundle, **options).manifest
    draws, length = np.random.default_rng(3), manifest.segment_lengths[0]

    def one(entry: Any) -> Any:
        shape = entry.sizes(manifest.batch_size, length)
        return draws.normal(size=shape) if entry.dtype == "float32" else draws.integers(0, entry.vocab or 2, shape)

    given = [{entry.name: one(entry).astype(entry.dtype) for entry in manifest.given} for _ in range(STEPS)]
    stream = txl_runtime.load(bundle, "cpu").stream()
    worst, ids = 0.0, {output.name for output in manifest.outputs if output.role == "logprobs"}
    for inputs, wanted in zip(given, by_hand(path, manifest, given), strict=True):
        for name, values in stream.run(inputs).items():
            expected = wanted[name].astype(float)
            if name in ids:
                expected = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
            worst = max(worst, float(np.abs(values.astype(float) - expected).max()))
    return worst


@pytest.mark.parametrize("name", KNOWN)
def test_a_bundle_computes_what_the_file_computes_with_its_states_fed_back(name, tmp_path):
    asked = {"before": "after"} if name == "history of tokens" else {}
    assert beside(written(STATEFUL[name], tmp_path), tmp_path / "bundle", states=asked) <= 1e-5


class Denoiser(torch.nn.Module):
    """Masks the frequencies of overlapping frames: HOP samples a call, the others of its 16 are its states."""

    HOP = 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("window", torch.hann_window(16).sqrt())
        self.gru, self.mask = torch.nn.GRUCell(9, 8), torch.nn.Linear(8, 9)

    def forward(self, x: Any, tail: Any, h: Any, overlap: Any) -> Any:
        frame = torch.cat([tail, x], 1)
        spectrum = torch.fft.rfft(frame * self.window)
        h = self.gru(spectrum.abs(), h)
        made = torch.fft.irfft(spectrum * torch.sigmoid(self.mask(h)), 16) * self.window
        made = made + torch.cat([overlap, torch.zeros_like(x)], 1)
        return made[:, : self.HOP], frame[:, self.HOP :], h, made[:, self.HOP :]


@pytest.mark.slow
def test_a_denoiser_s_frames_and_overlaps_are_states_and_its_transforms_products(tmp_path):
    given = {"x": torch.randn(1, 4), "tail": torch.randn(1, 12), "h": torch.randn(1, 8), "overlap": torch.randn(1, 12)}
    pairs = {"tail": "tail_new", "h": "h_new", "overlap": "overlap_new"}
    path = tmp_path / "denoiser.onnx"
    path.write_bytes(exported(Case(Denoiser, given, ("y", *pairs.values()), pairs), dynamo=True)[0])
    assert {node.op_type for node in onnx.load(path).graph.node} >= {"DFT"}
    assert describe_graph(path, Silent()).command.startswith("txl-deploy export"), "and none that is bound to fail"
    assert beside(path, tmp_path / "bundle") <= 1e-5


def test_an_open_batch_stays_open_and_takes_what_is_asked_for(tmp_path):
    found = txl_export.export(leaky(tmp_path / "f.onnx"), tmp_path / "b", batch_size=3).manifest
    assert (found.batch_size, found.streams, found.programs[0].open_batch) == (3, "independent", True)


def test_a_fixed_batch_is_the_bundles_and_no_other_is_taken(tmp_path):
    path = leaky(tmp_path / "f.onnx", 4)
    assert txl_export.export(path, tmp_path / "b").manifest.batch_size == 4
    with pytest.raises(UsageError, match=r"--batch-size is 2, expected 4: the file takes 4"):
        txl_export.export(path, tmp_path / "c", batch_size=2)
    assert not (tmp_path / "c").exists()


def test_states_begin_with_what_the_user_says(tmp_path):
    start = np.array([[1.0, 2.0, 3.0]], np.float32)
    path = leaky(tmp_path / "f.onnx")
    txl_export.export(path, tmp_path / "b", initial={"h": start})
    stream = txl_runtime.load(tmp_path / "b", "cpu").stream()
    x = np.zeros((1, 3), np.float32)
    np.testing.assert_allclose(stream.run({"x": x})["y"], np.tanh(start / 2), atol=1e-6)
    assert txl_export.verify(tmp_path / "b", checkpoint=path).passed
    with pytest.raises(UsageError, match=r"--initial has memory, expected states: h"):
        txl_export.export(path, tmp_path / "c", initial={"memory": start})


@pytest.mark.parametrize(
    ("first", "shown"),
    [(2**33 + 5, "8589934597"), (0.5, r"0\.5"), ("one", "one"), (1j, r"0\.\+1\.j|1j")],
)
def test_a_first_value_that_no_bundle_has_is_refused(first, shown, tmp_path):
    with pytest.raises(UsageError, match=rf"count begins with \[+'?({shown})'?\]+, expected int64 of at most 32 bits"):
        txl_export.export(counting(tmp_path / "f.onnx", [1]), tmp_path / "b", initial={"count": np.array([first])})


def counting(path: Path, shape: list[int], kind: int = TensorProto.INT64) -> Path:
    """count' = count + 1, and y = x · count'."""
    nodes = [
        helper.make_node("Add", ["count", "one"], ["count_new"]),
        helper.make_node("Cast", ["count_new"], ["factor"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    given = [value("x", [1, 3], TensorProto.FLOAT), value("count", shape, kind)]
    returned = [value("y", [1, 3], TensorProto.FLOAT), value("count_new", shape, kind)]
    one = numpy_helper.from_array(np.ones([], helper.tensor_dtype_to_np_dtype(kind)), "one")
    onnx.save(model(nodes, given, returned, [one], opset=13), path)
    return path


@pytest.mark.parametrize(("kind", "shape"), [(TensorProto.INT64, []), (TensorProto.DOUBLE, [1])])
def test_a_count_may_be_a_single_number_and_of_double_precision(kind, shape, tmp_path):
    path, three = counting(tmp_path / "f.onnx", shape, kind), np.full(shape, 3.0)
    txl_export.export(path, tmp_path / "b", states={"count": "count_new", "x": ""}, initial={"count": three})
    stream, x = txl_runtime.load(tmp_path / "b", "cpu").stream(), np.ones((1, 3), np.float32)
    assert [stream.run({"x": x})["y"][0, 0] for _ in range(3)] == [4, 5, 6]


def test_a_graph_that_is_damaged_is_refused_in_one_line_and_no_library_says_more(tmp_path, caplog):
    whole = onnx.load(leaky(tmp_path / "f.onnx"))
    whole.graph.output[0].name = "nothing"
    onnx.save(whole, tmp_path / "f.onnx")
    with pytest.raises(UsageError, match="ONNX Runtime does not run it"):
        txl_export.export(tmp_path / "f.onnx", tmp_path / "b")
    assert not caplog.records


def test_recurrent_layers_may_become_narrower(tmp_path):
    draws, sizes = np.random.default_rng(0), {"1": (6, 5), "2": (5, 4)}
    nodes, constants = [], {"ways": np.array([1])}
    for layer, (given, hidden) in sizes.items():
        source = "x" if layer == "1" else "y1"
        nodes.append(helper.make_node("GRU", [source, f"W{layer}", f"R{layer}", "", "", f"h{layer}"],
                                      [f"all{layer}", f"new_h{layer}"], hidden_size=hidden))  # fmt: skip
        nodes.append(helper.make_node("Squeeze", [f"all{layer}", "ways"], [f"y{layer}"]))
        constants |= {f"W{layer}": draws.normal(size=(1, 3 * hidden, given)).astype(np.float32)}
        constants |= {f"R{layer}": draws.normal(size=(1, 3 * hidden, hidden)).astype(np.float32)}
    given = [value("x", [4, "n", 6]), value("h1", [1, "n", 5]), value("h2", [1, "n", 4])]
    returned = [value("y2", [4, "n", 4]), value("new_h1", [1, "n", 5]), value("new_h2", [1, "n", 4])]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    onnx.save(model(nodes, given, returned, tensors, opset=14), tmp_path / "f.onnx")
    assert beside(tmp_path / "f.onnx", tmp_path / "b", batch_size=2) <= 1e-5


def test_an_output_may_be_an_input_as_it_is(tmp_path):
    path = leaky(tmp_path / "f.onnx")
    whole = onnx.load(path)
    whole.graph.output.append(whole.graph.input[0])
    onnx.save(whole, path)
    manifest = txl_export.export(path, tmp_path / "b").manifest
    assert [output.name for output in manifest.outputs] == ["y", "x_"]
    x = np.arange(3, dtype=np.float32)[None]
    np.testing.assert_array_equal(txl_runtime.load(tmp_path / "b", "cpu").stream().run({"x": x})["x_"], x)


def test_a_single_number_that_is_fixed_stays_one(tmp_path):
    nodes = [
        helper.make_node("Gather", ["table", "sr"], ["row"]),
        helper.make_node("ReduceSum", ["row", "first"], ["sum"], keepdims=0),  # of a row, and not of rows
        helper.make_node("Mul", ["h", "kept"], ["faded"]),
        helper.make_node("Add", ["faded", "x"], ["h_new"]),
        helper.make_node("Add", ["h_new", "sum"], ["y"]),
    ]
    sizes, table = [1, 3], np.arange(6).reshape(2, 3)
    path = graph(
        tmp_path / "f.onnx", nodes, {"x": sizes, "h": sizes, "sr": []}, {"y": sizes, "h_new": sizes},
        {"table": table, "kept": 0.5},
    )  # fmt: skip
    whole = onnx.load(path)
    whole.graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))
    onnx.save(whole, path)
    txl_export.export(path, tmp_path / "b", fix={"sr": "1"})
    y = txl_runtime.load(tmp_path / "b", "cpu").stream().run({"x": np.zeros((1, 3), np.float32)})["y"]
    np.testing.assert_array_equal(y, [[12, 12, 12]])


def test_positions_along_the_first_axis_of_fixed_sizes_are_no_sequences(tmp_path):
    nodes = [
        helper.make_node("CumSum", ["x", "first"], ["sums"]),
        helper.make_node("Add", ["sums", "h"], ["all"]),
        helper.make_node("Tanh", ["all"], ["y"]),
        helper.make_node("Split", ["all", "parts"], ["before", "h_new"]),
    ]
    given, returned = [value("x", [4, 1, 3]), value("h", [1, 1, 3])], [value("y", [4, 1, 3]), value("h_new", [1, 1, 3])]
    numbers = {"first": np.array(0), "parts": np.array([3, 1])}
    constants = [numpy_helper.from_array(number, name) for name, number in numbers.items()]
    onnx.save(model(nodes, given, returned, constants, opset=13), tmp_path / "f.onnx")
    manifest = txl_export.export(tmp_path / "f.onnx", tmp_path / "b", states={"h": "h_new", "x": ""}).manifest
    assert (manifest.batch_size, manifest.segment_lengths, manifest.given[0].shape) == (1, (4,), ("L", "B", 3))


def test_a_bundle_is_held_against_its_file_and_found_to_be_another_ones(tmp_path):
    path = leaky(tmp_path / "f.onnx")
    txl_export.export(path, tmp_path / "b", batch_size=2)
    assert txl_export.verify(tmp_path / "b", checkpoint=path).passed
    other = txl_export.verify(tmp_path / "b", checkpoint=leaky(tmp_path / "g.onnx", kept=0.4))
    assert not other.passed
    assert txl_export.verify(tmp_path / "b").passed, "the bundle's own vectors"


def test_a_graph_that_is_written_wrong_is_not_let_through(tmp_path, monkeypatch):
    from txl_export.families.graph.take import capturing

    settle = capturing.settle

    def wrong(model: ir.Model, *rest: Any) -> None:
        settle(model, *rest)
        (node,) = (node for node in model.graph if node.op_type == "Add")
        node.op_type = "Sub"

    monkeypatch.setattr(capturing, "settle", wrong)
    with pytest.raises(UsageError, match=r"step-1 cannot be made of the file: the graph's y is"):
        txl_export.export(leaky(tmp_path / "f.onnx"), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_is_not_certain_is_asked_for(tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["seen"]),
        helper.make_node("MatMul", ["a", "u"], ["held"]),
        helper.make_node("Add", ["seen", "held"], ["b"]),
        helper.make_node("Mul", ["b", "w1"], ["c"]),
    ]
    eye = np.eye(3) * 0.5
    path = graph(
        tmp_path / "f.onnx",
        nodes,
        {"x": [1, 3], "a": [1, 3]},
        {"b": [1, 3], "c": [1, 3]},
        {"w": eye, "u": eye, "w1": 2.0},
    )
    with pytest.raises(
        UsageError, match=r"which neither a node nor a name says: a as b or c\. .*give --state a=b, with other outputs"
    ):
        txl_export.export(path, tmp_path / "b")
    assert txl_export.export(path, tmp_path / "b", states={"x": "", "a": "b"}).manifest.states[0].name == "a"
    assert txl_export.verify(tmp_path / "b", checkpoint=path).passed, "it need not be asked for again"
    with pytest.raises(UsageError, match=r"the file has no d, it takes x, a and gives b, c; check --state"):
        txl_export.export(path, tmp_path / "c", states={"a": "d"})


def test_a_state_of_one_number_stays_one(tmp_path):
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["gain", "kept"], ["faded"]),
        helper.make_node("Add", ["faded", "mean"], ["gain_out"]),
        helper.make_node("Mul", ["x", "gain_out"], ["y"]),
    ]
    sizes = {"x": [1, 3], "gain": []}, {"y": [1, 3], "gain_out": []}
    path, told = graph(tmp_path / "f.onnx", nodes, *sizes, {"kept": 0.5}), {"gain": "gain_out", "x": ""}
    assert beside(path, tmp_path / "b", states=told) < 1e-6
    stream = txl_runtime.load(tmp_path / "b", "cpu").stream()
    stream.run({"x": np.ones((1, 3), np.float32)})
    stream.snapshot().save(tmp_path / "a.state")
    stream.restore(txl_runtime.StreamState.load(tmp_path / "a.state"))
    np.testing.assert_array_equal(stream.state()["gain"], np.array(1, np.float32), strict=True)


def test_a_cache_that_grows_without_end_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is longer after each call, without an end"):
        txl_export.export(written(STATEFUL["growing cache"], tmp_path), tmp_path / "bundle")


def test_a_graph_without_state_is_refused_with_what_could_be_one(tmp_path):
    with pytest.raises(UsageError, match=r"no state to carry from call to call, expected one: .*--open"):
        txl_export.export(written(next(iter(STATELESS.values())), tmp_path), tmp_path / "bundle")


def test_an_open_size_that_is_neither_sequences_nor_positions_gets_a_number(tmp_path):
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Mul", ["h", "kept"], ["faded"]),
        helper.make_node("Add", ["faded", "mean"], ["h_new"]),
        helper.make_node("Tanh", ["h_new"], ["y"]),
    ]
    path = graph(
        tmp_path / "f.onnx",
        nodes,
        {"x": ["n", "wide"], "h": ["n", 1]},
        {"y": ["n", 1], "h_new": ["n", 1]},
        {"kept": 0.5},
    )
    with pytest.raises(UsageError, match=r"x is open on axis 1, .*give --fix wide="):
        txl_export.export(path, tmp_path / "b")
    manifest = txl_export.export(path, tmp_path / "b", fix={"wide": "7"}).manifest
    assert manifest.given[0].shape == ("B", 7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fix": {"rate": "3"}}, "has no rate, expected an input or a size of x, h, batch; check --fix"),
        ({"fix": {"batch": "two"}}, "batch is fixed to 'two', expected a number, true, false or a list of them"),
        ({"fix": {"batch": "0"}}, "the size batch is fixed to 0, expected a whole number from 1"),
        ({"fix": {"x": "[1, 2]"}}, r"x is fixed to \[1, 2\], expected float32 \['batch', 3\]"),
        ({"batch_axes": {"x": 7}}, "--batch-axis is x=7, expected one of x, h, y, h_new and one of its axes"),
        ({"open": True}, "no hidden states|no state is hidden"),
        ({"precision": "int8"}, "precision is int8, which is for a Transformer-XL's matrices"),
        ({"memory_length": 8}, "--memory-length is for a model in PyTorch, and this is an ONNX file"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(options, said, tmp_path):
    with pytest.raises(UsageError, match=said) as raised:
        txl_export.export(leaky(tmp_path / "f.onnx"), tmp_path / "b", **options)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "option", [{"states": {"a": "b"}}, {"open": True}, {"fix": {"a": "1"}}, {"batch_axes": {"a": 1}}]
)
def test_options_of_files_are_refused_for_other_models(option, tmp_path):
    with pytest.raises(UsageError, match=r"is for an ONNX file, and this is a checkpoint"):
        txl_export.export(tmp_path / "model.pt", tmp_path / "b", **option)


@pytest.mark.slow
def test_no_helper_and_no_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    txl_export.export(leaky(tmp_path / "f.onnx"), tmp_path / "b")
    with pytest.raises(UsageError):
        txl_export.export(leaky(tmp_path / "f.onnx", 4), tmp_path / "c", batch_size=2)
    with pytest.raises(CheckpointError, match="numbers, expected at most"):
        txl_export.export(leaky(tmp_path / "f.onnx", size=2**26), tmp_path / "d")
    import gc

    gc.collect()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("txl-deploy")]


@pytest.mark.slow
def test_an_if_whose_condition_is_fixed_is_folded(tmp_path):
    def branch(name: str, factor: float) -> Any:
        nodes = [
            helper.make_node("Constant", [], [f"f{name}"], value=numpy_helper.from_array(np.float32(factor))),
            helper.make_node("Mul", ["h", f"f{name}"], [f"o{name}"]),
        ]
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(f"o{name}", TensorProto.FLOAT, [1, 3])]
        )

    nodes = [
        helper.make_node("If", ["mode"], ["faded"], then_branch=branch("a", 0.5), else_branch=branch("b", 0.25)),
        helper.make_node("Add", ["faded", "x"], ["h_new"]),
        helper.make_node("Tanh", ["h_new"], ["y"]),
    ]
    sizes = [1, 3]
    path = graph(
        tmp_path / "f.onnx", nodes, {"x": sizes, "h": sizes, "mode": []}, {"y": sizes, "h_new": sizes}, {"unused": 1.0}
    )
    with pytest.raises(UsageError, match=r"mode decides which part of the graph runs, .*give --fix mode=VALUE"):
        txl_export.export(path, tmp_path / "b")
    for mode, factor in (("true", 0.5), ("false", 0.25)):
        txl_export.export(
            path, tmp_path / "b", fix={"mode": mode}, initial={"h": np.ones((1, 3), np.float32)}, force=True
        )
        y = txl_runtime.load(tmp_path / "b", "cpu").stream().run({"x": np.zeros((1, 3), np.float32)})["y"]
        np.testing.assert_allclose(y, np.tanh(factor), atol=1e-6)


def test_a_step_of_which_positions_one_by_one_are_something_else_runs_in_whole_segments(tmp_path):
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Mul", ["h", "kept"], ["faded"]),
        helper.make_node("Add", ["faded", "mean"], ["h_new"]),
        helper.make_node("Add", ["x", "h_new"], ["y"]),
    ]
    path = graph(
        tmp_path / "f.onnx",
        nodes,
        {"x": ["n", "seq"], "h": ["n", 1]},
        {"y": ["n", "seq"], "h_new": ["n", 1]},
        {"kept": 0.5},
    )
    manifest = txl_export.export(path, tmp_path / "b").manifest
    assert (manifest.segment_lengths, manifest.commits) == ((64,), "segment")
    for shorter in (1, 4):
        with pytest.raises(UsageError, match=rf"segments of {shorter} are asked for beside 8, and one after another"):
            txl_export.export(path, tmp_path / "c", segment_length=(8, shorter))


def test_operators_that_no_graph_of_a_bundle_may_have_are_named(tmp_path):
    nodes = [
        helper.make_node("Det", ["m"], ["d"]),
        helper.make_node("Mul", ["h", "d"], ["faded"]),
        helper.make_node("Add", ["faded", "x"], ["h_new"]),
        helper.make_node("Reshape", ["x", "square"], ["m"]),
        helper.make_node("Tanh", ["h_new"], ["y"]),
    ]
    nodes = [nodes[3], nodes[0], *nodes[1:3], nodes[4]]
    path = graph(tmp_path / "f.onnx", nodes, {"x": [1, 4], "h": [1, 4]}, {"y": [1, 4], "h_new": [1, 4]}, {})
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 2]), "square"))
    onnx.save(model, path)
    with pytest.raises(UsageError, match=r"it becomes the operator Det, which no graph of a bundle may have"):
        txl_export.export(path, tmp_path / "b")


def test_linear_attention_in_a_file_of_opset_26_becomes_plain_operators_of_opset_18(tmp_path):
    assert beside(stateful(tmp_path / "f.onnx"), tmp_path / "b", segment_length=16) <= 1e-5
    made = onnx.load(tmp_path / "b" / "step-16.onnx", load_external_data=False)
    assert made.opset_import[0].version == 18
    assert {node.op_type for node in made.graph.node} <= FORMS[""].keys()


SILERO = PACKAGES / "silero_vad" / "data"


@pytest.mark.slow
@pytest.mark.skipif(not SILERO.exists(), reason="make packages installs silero-vad")
@pytest.mark.parametrize("name", ["silero_vad", "silero_vad_16k_op15", "silero_vad_op18_ifless"])
def test_silero_vad_becomes_a_bundle_that_is_its_own_run_over_a_thousand_frames(name, tmp_path):
    sizes = {"input:1": "576"} if name == "silero_vad" else {"sequence": "576"}
    path, bundle = SILERO / f"{name}.onnx", tmp_path / "b"
    manifest = txl_export.export(path, bundle, fix={"sr": "16000", **sizes}, batch_size=2).manifest
    assert (manifest.streams, manifest.programs[0].open_batch) == ("independent", True)
    session, stream = onnxruntime.InferenceSession(str(path)), txl_runtime.load(bundle, "cpu").stream()
    audio = np.random.default_rng(0).normal(0, 0.1, (1, 1000 * 512 + 64)).astype(np.float32)
    state, rate = np.zeros((2, 1, 128), np.float32), np.array(16000)
    for frame in range(1000):
        x = audio[:, frame * 512 : frame * 512 + 576]
        wanted, state = session.run(None, {"input": x, "state": state, "sr": rate})
        found = stream.run({"input": np.concatenate([x, x * 0])})["output"]
        assert abs(float(found[0, 0] - wanted[0, 0])) <= 1e-5


def test_a_failed_gate_leaves_no_bundle(tmp_path, monkeypatch):
    from txl_export.families.graph import family

    right = family.capturing
    monkeypatch.setattr(
        family, "capturing", lambda graph, *rest: right(ir.load(leaky(tmp_path / "other.onnx", kept=0.4)), *rest)
    )
    with pytest.raises((CheckError, UsageError)):
        txl_export.export(leaky(tmp_path / "f.onnx"), tmp_path / "b")
    assert not (tmp_path / "b").exists()


class Forgets(torch.nn.Module):
    """Called without a state, as most are that forget: convolutions with zeros in front, then recurrent layers."""

    def __init__(self, kind: str, layers: int, window: int, average: bool = False) -> None:
        super().__init__()
        self.window, self.average = window, average
        self.conv = torch.nn.Conv1d(4, 6, window + 1) if window else None
        make = getattr(torch.nn, kind)
        self.layers = make(6 if window else 4, 8, layers, batch_first=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, 4] → [B, L, 3]."""
        if self.conv is not None:
            padded = torch.nn.functional.pad(x.transpose(1, 2), (self.window, 0))
            x = torch.relu(self.conv(padded)).transpose(1, 2)
        if self.average:
            x = x - x.mean(1, keepdim=True)
        return self.head(self.layers(x)[0])


def forgetful(path: Path, model: torch.nn.Module, fixed: bool = False, positions: int = 16) -> Path:
    torch.manual_seed(0)
    open_axes = {name: {0: "batch", 1: "time"} for name in ("x", "y")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), (torch.randn(1, positions, 4),), path, input_names=["x"], output_names=["y"],
            opset_version=17, dynamic_axes=None if fixed else open_axes, dynamo=False,
        )  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("kind", "layers", "window", "fixed"),
    [
        pytest.param("LSTM", 2, 0, False, marks=pytest.mark.slow),
        ("GRU", 1, 2, True),
        pytest.param("RNN", 1, 0, True, marks=pytest.mark.slow),
        pytest.param("LSTM", 1, 4, True, marks=pytest.mark.slow),
    ],
)
def test_what_a_file_forgets_is_carried_on_and_equals_its_module_over_the_whole(kind, layers, window, fixed, tmp_path):
    model = Forgets(kind, layers, window)
    path = forgetful(tmp_path / "f.onnx", model, fixed)
    with pytest.raises(UsageError, match="--open"):
        txl_export.export(path, tmp_path / "b")
    manifest = txl_export.export(path, tmp_path / "b", open=True, batch_size=1 if fixed else 2).manifest
    assert len(manifest.states) == layers * (2 if kind == "LSTM" else 1) + bool(window)
    length, stream = manifest.segment_lengths[0], txl_runtime.load(tmp_path / "b", "cpu").stream()
    x = torch.randn(manifest.batch_size, 10 * length, 4)
    found = [stream.run({"x": part.numpy()})["y"] for part in x.split(length, 1)]
    np.testing.assert_allclose(np.concatenate(found, 1), model(x).detach().numpy(), atol=1e-5)
    assert txl_export.verify(tmp_path / "b", checkpoint=path).passed


def test_a_file_that_forgets_something_else_as_well_is_not_let_through(tmp_path):
    path = forgetful(tmp_path / "f.onnx", Forgets("GRU", 1, 0, average=True))
    with pytest.raises((CheckError, UsageError), match=r"with layers_GRU.h carried on, y of 6 segments|one position"):
        txl_export.export(path, tmp_path / "b", open=True, segment_length=8)
    assert not (tmp_path / "b").exists()


def test_a_file_of_one_position_a_call_is_proven_over_several_of_them(tmp_path):
    model = Forgets("GRU", 1, 0)
    path = forgetful(tmp_path / "f.onnx", model, fixed=True, positions=1)
    manifest = txl_export.export(path, tmp_path / "b", open=True).manifest
    assert manifest.segment_lengths == (1,)
    stream, x = txl_runtime.load(tmp_path / "b", "cpu").stream(), torch.randn(1, 12, 4)
    found = np.concatenate([stream.run({"x": part.numpy()})["y"] for part in x.split(1, 1)], 1)
    np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-5)


def test_an_input_that_nothing_reads_is_not_the_bundles(tmp_path):
    path = leaky(tmp_path / "f.onnx")
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("sr", TensorProto.INT64, []))
    onnx.save(model, path)
    assert [entry.name for entry in txl_export.export(path, tmp_path / "b").manifest.given] == ["x"]


def test_a_file_in_half_precision_is_judged_by_fp16_unless_another_precision_is_asked_for(tmp_path):
    """Its weights are float16; h' = tanh(h + x W)."""
    weights = numpy_helper.from_array(np.random.default_rng(0).normal(size=(4, 4)).astype(np.float16), "W")
    nodes = [helper.make_node("MatMul", ["x", "W"], ["seen"]), helper.make_node("Add", ["seen", "h"], ["sum"])]
    nodes.append(helper.make_node("Tanh", ["sum"], ["h_out"]))
    sides = [[value(name, [1, 4], TensorProto.FLOAT16) for name in names] for names in (("x", "h"), ("h_out",))]
    nodes.append(helper.make_node("Identity", ["h_out"], ["y"]))
    sides[1].append(value("y", [1, 4], TensorProto.FLOAT16))
    onnx.save(model(nodes, *sides, [weights]), path := tmp_path / "f.onnx")
    for asked, precision in ((None, "fp16"), ("fp32", "fp32")):
        out = tmp_path / f"{asked}.txl"
        manifest = txl_export.export(path, out, precision=asked, verify=False).manifest
        assert manifest.precision == precision
    assert txl_export.verify(tmp_path / "None.txl", checkpoint=path).passed


def test_windows_and_outputs_that_were_asked_for_are_taken_up_again(tmp_path):
    """A cache that gains a row in each call, its sum, and noise beside it."""
    nodes = [
        helper.make_node("Concat", ["past", "x"], ["present"], axis=1),
        helper.make_node("ReduceSum", ["present", "rows"], ["sum"], keepdims=0),
        helper.make_node("RandomNormalLike", ["sum"], ["noise"]),
    ]
    given = [value("x", [1, 1, 2]), value("past", [1, "P", 2])]
    returned = [value("sum", [1, 2]), value("noise", [1, 2]), value("present", [1, "P1", 2])]
    rows = numpy_helper.from_array(np.array([1], np.int64), "rows")
    onnx.save(model(nodes, given, returned, [rows]), path := tmp_path / "f.onnx")
    made = txl_export.export(path, tmp_path / "b", windows={"past": 3}, outputs=["sum"]).manifest
    assert [one.name for one in made.outputs] == ["sum"]
    assert (made.family["windows"], made.family["outputs"]) == ({"past": 3}, ["sum"])
    stream, x = txl_runtime.load(tmp_path / "b", "cpu").stream(), np.random.default_rng(0).normal(size=(6, 1, 1, 2))
    found = [stream.run({"x": each.astype(np.float32)})["sum"] for each in x]
    np.testing.assert_allclose(found[-1][0], x[-4:].sum((0, 1, 2)), rtol=1e-5)
    parity = txl_export.verify(tmp_path / "b", checkpoint=path)
    assert parity.passed
    assert parity.reference.startswith("the file itself")


def test_a_file_whose_small_weights_lie_beside_it_is_known_again(tmp_path):
    """Its bundle is held against it as the file that it was made of, and not as one from elsewhere."""
    path = written(STATEFUL["gru cell"], tmp_path)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    txl_export.export(path, tmp_path / "b")
    found = txl_export.verify(tmp_path / "b", checkpoint=path)
    assert (found.passed, found.reference.startswith("the file itself")) == (True, True)


def quantised(path: Path, batch: int) -> Path:
    """h = tanh(x · w + h / 2), where the product is of integers with a scale that is computed of all sequences."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["code", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["code", "w", "zero", "none"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["whole"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["scale", "step"], ["both"]),
        helper.make_node("Mul", ["whole", "both"], ["real"]),
        helper.make_node("Mul", ["h", "half"], ["kept"]),
        helper.make_node("Add", ["real", "kept"], ["added"]),
        helper.make_node("Tanh", ["added"], ["h_out"]),
        helper.make_node("Neg", ["h_out"], ["y"]),
    ]
    weight = np.random.default_rng(0).integers(-128, 128, (6, 4), np.int8)
    constants = {"w": weight, "none": np.int8(0), "step": np.float32(0.002), "half": np.float32(0.5)}
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    sides = [value("x", [batch, 6]), value("h", [batch, 4])], [value("y", [batch, 4]), value("h_out", [batch, 4])]
    onnx.save(model(nodes, *sides, tensors), path)
    return path


@pytest.mark.parametrize("batch", [1, 2])
def test_a_file_of_int8_with_computed_scales_is_its_bundle_to_the_bit(batch, tmp_path):
    path, heard = quantised(tmp_path / "q.onnx", batch), Heard()
    manifest = txl_export.export(path, tmp_path / "b", listener=heard).manifest
    assert set(manifest.parity.values()) == {0}
    assert manifest.streams == ("independent" if batch == 1 else "lockstep")
    assert any("one scale for all sequences" in note for note in heard.warnings) is (batch > 1)
