"""The ONNX files: what the manifest says of them, nothing of the machine that wrote them, weights in one place."""

import gc
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from google.protobuf.message import Message
from onnx.external_data_helper import uses_external_data
from support import cli, random_state, save_checkpoint, small_config
from txl_export.checkpoints import read_checkpoint
from txl_export.families.transformer_xl.settings import resolve
from txl_export.families.transformer_xl.tables import expected_states
from txl_export.families.transformer_xl.weights import check_weights, model_id
from txl_export.graphs import tracing
from txl_export.graphs.checking import check_graph
from txl_export.options import ExportOptions
from txl_runtime.bundle.reading import SELFTEST, WEIGHTS, open_bundle
from txl_runtime.bundle.transformer_xl import ModelConfig
from txl_runtime.errors import TxlError

# Between them: both forms of memory, several streams, many gathers, and tables of positions too large to be folded.
BUNDLES: dict[str, dict[str, Any]] = {
    "default": {"verify": False},
    "hidden, 3 streams": {"memory": "hidden", "batch_size": 3, "verify": False},
    "adaptive, pre-norm": {
        "config": {"cutoffs": (20, 40), "div_val": 2, "pre_lnorm": True, "memory_start": "zeros"},
        "verify": False,
    },
    "without memory": {"config": {"memory_length": 0}, "verify": False, "segment_length": 4},
    "large": {"config": {"memory_length": 512, "n_head": 8}, "verify": False, "segment_length": 64},
}


@pytest.fixture(
    params=[pytest.param(BUNDLES[name], marks=pytest.mark.slow if name == "large" else ()) for name in BUNDLES],
    ids=BUNDLES,
)
def bundle(request: pytest.FixtureRequest, make_bundle: Callable[..., Path]) -> Path:
    return make_bundle(**request.param)


def graphs(bundle: Path) -> Iterator[tuple[Any, onnx.ModelProto]]:
    """Each file of a bundle and its program, of several the one of the longest segment; weights left where they are."""
    programs = open_bundle(bundle).manifest.programs
    for program in sorted({program.file: program for program in reversed(programs)}.values(), key=programs.index):
        assert program.segment_length == max(p.segment_length for p in programs if p.file == program.file)
        yield program, onnx.load(bundle / program.file, load_external_data=False)


def spec(value: onnx.ValueInfoProto) -> tuple[str, str, tuple[int | str, ...]]:
    """Name, dtype and shape; every size is a number or has a name."""
    kind = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    assert all(dim.WhichOneof("value") for dim in kind.shape.dim)
    return value.name, dtype, tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)


def promised(program: Any, tensor: Any) -> tuple[str, str, tuple[int | str, ...]]:
    """A tensor as the manifest has it; B above 1 is open, the segment in a ring, rows in the softmax, nothing else."""
    shape = ("batch", *tensor.shape[1:]) if program.open_batch else tensor.shape
    assert program.open_batch == (program.segment_length > 0 and tensor.shape[0] > 1)
    if program.update == "ring" and tensor.name in ("tokens", "hidden"):
        assert shape[1] == program.segment_length
        shape = (shape[0], "segment" if program.segment_length > 1 else 1, *shape[2:])
    return tensor.name, tensor.dtype, shape


def strings(message: Message) -> Iterator[str]:
    """Every text in a protobuf message; tensor data is bytes and not among them."""
    for _, value in message.ListFields():
        for item in value if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [value]:
            if isinstance(item, Message):
                yield from strings(item)
            elif isinstance(item, str):
                yield item


def test_inputs_and_outputs_are_the_manifests_in_its_order(bundle):
    for program, model in graphs(bundle):
        assert [spec(value) for value in model.graph.input] == [promised(program, s) for s in program.inputs]
        assert [spec(value) for value in model.graph.output] == [promised(program, s) for s in program.outputs]
        assert model.graph.name == program.name
        (fact,) = model.metadata_props
        assert fact.key == "txl-deploy.program"
        assert msgspec.json.decode(fact.value, type=type(program)) == msgspec.structs.replace(program, opset={})


def test_one_opset_of_the_standard_alone_and_the_oldest_ir_that_has_it(bundle):
    for program, model in graphs(bundle):
        opset, ir_version = (24, 12) if program.update == "ring" else (18, 10)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
        assert model.ir_version <= ir_version
        assert not model.functions
        scatters = [node for node in model.graph.node if node.op_type == "TensorScatter"]
        assert len(scatters) == (len(program.outputs) - 1 if program.update == "ring" else 0)
        assert {node.input[0] for node in scatters} <= {value.name for value in model.graph.input}
        assert {node.output[0] for node in scatters} <= {value.name for value in model.graph.output}
        assert not {node.domain for node in model.graph.node} - {""}


def test_integers_that_come_in_and_indices_are_int32(bundle):
    for program, model in graphs(bundle):
        assert {spec(value)[1] for value in model.graph.input} <= {"int32", "float32"}
        inferred = onnx.shape_inference.infer_shapes(model).graph
        kinds = {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.input)}
        kinds |= {tensor.name: tensor.data_type for tensor in inferred.initializer}
        gathers = [node for node in inferred.node if node.op_type in ("Gather", "GatherElements")]
        assert {node.op_type for node in gathers} == ({"Gather", "GatherElements"} if program.segment_length else set())
        assert {kinds[node.input[1]] for node in gathers} <= {onnx.TensorProto.INT32}


def test_nothing_of_the_exporting_machine_is_in_a_file(bundle):
    for program, model in graphs(bundle):
        found = list(strings(model))
        assert program.name in found
        assert not [text for text in found if "/" in text.removesuffix("/shape")]
        data = (bundle / program.file).read_bytes()
        for trace in (".py", "site-packages", "torch.", "Traceback", "line ", str(Path.home()), str(Path.cwd())):
            assert trace.encode() not in data, trace
        assert str(bundle.parent).encode() not in data
        assert model.producer_name == "txl-deploy"
        assert not model.producer_version
        assert not model.doc_string


def test_all_programs_read_one_weight_file_and_nothing_large_stands_in_a_graph(bundle):
    size = (bundle / WEIGHTS).stat().st_size
    for program, model in graphs(bundle):
        inside = [tensor for tensor in model.graph.initializer if not uses_external_data(tensor)]
        outside = [tensor for tensor in model.graph.initializer if uses_external_data(tensor)]
        assert len(outside) > (20 if program.segment_length else 0)
        for tensor in outside:
            where = {entry.key: entry.value for entry in tensor.external_data}
            assert where["location"] == WEIGHTS
            assert 0 < int(where["offset"]) <= size - int(where["length"])
            assert int(where["length"]) == 4 * np.prod(tensor.dims)
        # The floating-point constants that stay are u and v; the rest is the geometry of the segment.
        floats = [tensor for tensor in inside if tensor.data_type == onnx.TensorProto.FLOAT]
        assert all(np.prod(tensor.dims) <= 4 * 16 for tensor in floats)
        assert all(len(tensor.raw_data) <= 1 << 20 for tensor in inside)
        assert program.file in {path.name for path in bundle.glob("*.onnx")}
    assert {path.name for path in bundle.glob("*.safetensors")} == {WEIGHTS, SELFTEST}


@pytest.mark.parametrize("memory", ["kv", "hidden"])
@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_state_names_sort_alike_and_none_begins_another(memory, update):
    config = msgspec.convert(small_config(n_layer=12), ModelConfig)
    states = expected_states(config, memory, 1, 7, (update,), 4)
    assert len(states) == (24 if memory == "kv" else 12)
    for names in ([s.name for s in states], [s.input for s in states], [s.output for s in states]):
        assert names == sorted(names)
        assert not [(a, b) for a in names for b in names if a != b and b.startswith(a)]
    assert len({s.input for s in states} | {s.output for s in states}) == 2 * len(states)


# ---- a graph that is not what it should be is refused


@pytest.fixture
def broken(make_bundle: Callable[..., Path], tmp_path: Path) -> Callable[..., None]:
    """Break the graph of a program with a function and check it."""
    source = make_bundle(verify=False)
    folder = shutil.copytree(source, tmp_path / "broken.txl")
    programs = {program.name: program for program in open_bundle(source).manifest.programs}

    def check(change: Callable[[onnx.ModelProto], None], name: str) -> None:
        path, program = folder / programs[name].file, programs[name]
        opset = 24 if program.update == "ring" else 18
        check_graph(path, program, opset)
        model = onnx.load(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())
        check_graph(path, program, opset)

    return check


def rename_output(model: onnx.ModelProto) -> None:
    old = model.graph.output[1].name
    for node in model.graph.node:
        node.output[:] = ["another" if name == old else name for name in node.output]
        node.input[:] = ["another" if name == old else name for name in node.input]
    model.graph.output[1].name = "another"


def wrong_shape(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 61


def inner_shape(model: onnx.ModelProto) -> None:
    (softmax,) = [node for node in model.graph.node if node.op_type == "LogSoftmax"]
    value = next(value for value in model.graph.value_info if value.name == softmax.input[0])
    value.type.tensor_type.shape.dim[-1].dim_value = 61


def unknown_dimension(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "length"


def open_segment(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "segment"


def open_rows(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "rows"


def fixed_rows(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3


def newer_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version += 1


def second_domain(model: onnx.ModelProto) -> None:
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))


def unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "Sbu"


def missing_node(model: onnx.ModelProto) -> None:
    del model.graph.node[5]


def wide_index(model: onnx.ModelProto) -> None:
    gather = next(node for node in model.graph.node if node.op_type == "GatherElements")
    index = next(tensor for tensor in model.graph.initializer if tensor.name == gather.input[1])
    stated = [value for value in model.graph.value_info if value.name == index.name]
    for value in stated:
        model.graph.value_info.remove(value)
    index.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(index).astype(np.int64), index.name))


def other_file(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if uses_external_data(tensor))
    next(entry for entry in tensor.external_data if entry.key == "location").value = "selftest.safetensors"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("logprobs-4", rename_output, "another .*among its outputs"),
        ("logprobs-4", wrong_shape, "61"),
        ("logprobs-4", inner_shape, "61"),
        ("logprobs-4", unknown_dimension, "inputs is .*length"),
        ("logprobs-4", open_segment, "inputs is .*segment"),
        ("logprobs-4", open_rows, "inputs is .*rows"),
        ("logprobs-4", newer_opset, "opset.*18"),
        ("logprobs-4", second_domain, "com.example"),
        ("logprobs-4", unknown_operator, "Sbu"),
        ("logprobs-4", missing_node, "logprobs-4.onnx"),
        ("logprobs-4", wide_index, "gather by other indices than int32"),
        ("logprobs-4", other_file, "selftest.safetensors"),
        ("hidden-ring-4", rename_output, "another .*among its outputs"),
        ("hidden-ring-4", open_rows, "inputs is .*rows"),
        ("hidden-ring-4", newer_opset, "opset.*24"),
        ("head", fixed_rows, "head.onnx"),
        ("head", newer_opset, "opset.*18"),
    ],
)
def test_a_broken_graph_is_refused(broken, name, change, reason):
    with pytest.raises(TxlError, match=reason) as refused:
        broken(change, name)
    assert "\n" not in str(refused.value)


# ---- the same model gives the same bytes, and has one name


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(make_bundle, tmp_path):
    bundle, values = make_bundle(verify=False), small_config()
    checkpoint = save_checkpoint(tmp_path / "model.pt", values)
    again = tmp_path / "again.txl"
    lengths = ("--segment-length", 4, "--segment-length", 1)
    done = cli("export", checkpoint, "-o", again, *lengths, "--no-verify", env={"PYTHONHASHSEED": "12345"})
    assert done.returncode == 0, done.stderr
    assert os.environ.get("PYTHONHASHSEED") != "12345"
    names = {path.name for path in bundle.iterdir()}
    assert names == {path.name for path in again.iterdir()}
    for name in names - {"manifest.json", "report.json", "report.html"}:  # these say how each was made
        assert (again / name).read_bytes() == (bundle / name).read_bytes(), name
    first, second = (open_bundle(path).manifest for path in (bundle, again))
    aside = {"provenance": {}, "parity": {}, "files": {}}
    assert msgspec.structs.replace(first, **aside) == msgspec.structs.replace(second, **aside)


def name_of(values: dict[str, Any], state: dict[str, Any] | None = None, **asked: Any) -> str:
    imported, _ = read_checkpoint(state or random_state(values), config=values)
    dialect, sizes, _ = resolve(imported, ExportOptions(**asked))
    return model_id(
        imported.config, dialect, sizes.memory_length, check_weights(imported.config, imported.weights, "test")
    )


@pytest.mark.slow
def test_form_of_memory_streams_and_segments_leave_the_models_name(make_bundle):
    plain = name_of(small_config())
    for kind in ("default", "hidden, 3 streams"):
        assert open_bundle(make_bundle(**BUNDLES[kind])).manifest.model_id == plain
    adaptive = BUNDLES["adaptive, pre-norm"]
    assert open_bundle(make_bundle(**adaptive)).manifest.model_id == name_of(small_config(**adaptive["config"]))
    assert name_of(small_config(), segment_length=(9,), batch_size=7) == plain


def test_memory_window_clamp_start_and_every_weight_are_in_the_models_name():
    values = small_config()
    names = {
        "plain": name_of(values),
        "M": name_of(values, memory_length=8),
        "window": name_of(values, same_length=True),
        "clamp": name_of(values, clamp_length=4),
        "single steps": name_of(values, lookup=True),
        "start": name_of(small_config(memory_start="zeros")),
        "epsilon": name_of(small_config(layer_norm_epsilon=1e-6), random_state(values)),
    }
    for name, tensor in random_state(values).items():
        altered = random_state(values)
        altered[name] = tensor.clone()
        altered[name].view(-1)[-1] += 1e-4
        names[name] = name_of(values, altered)
    assert len(set(names.values())) == len(names)


def test_a_capture_builds_torchs_table_once_and_leaves_the_process_as_it_was(monkeypatch):
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    built, threshold = [], gc.get_threshold()

    def build():
        built.append(ONNXRegistry())
        return built[-1]

    monkeypatch.setattr(ONNXRegistry, "from_torchlib", build)
    with tracing.quick():
        one, two = ONNXRegistry.from_torchlib(), ONNXRegistry.from_torchlib()
        one.functions["own::operator"] = []
        assert gc.get_threshold() == (100_000, 20, 100)
    assert len(built) == 1
    assert "own::operator" not in two.functions
    assert "own::operator" not in built[0].functions
    assert ONNXRegistry.from_torchlib is build
    assert gc.get_threshold() == threshold
