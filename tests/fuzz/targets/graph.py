"""Graphs: what the runtime's own walk lets through, held against onnx's reading of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.guard.forms import FORMS
from txl_runtime.guard.graph_check import check_graph

from fuzz.choices import Choices
from fuzz.edits import Message, edited_message, parsed
from fuzz.edits import written as encoded
from fuzz.targets.places import BASES

FILE = "weights.safetensors"
LONGEST = 1 << 15
PLAIN = {AttributeProto.FLOAT, AttributeProto.INT, AttributeProto.STRING, AttributeProto.TENSOR}
PLAIN |= {AttributeProto.FLOATS, AttributeProto.INTS}


def one_input(data: bytes) -> None:
    """Check a graph, as it is or a good one after some changes; what passes has to be what onnx reads."""
    choices = Choices(data)
    manifest, program, base = choices.pick(_bases())
    graph = choices.rest() if choices.number(7) == 7 else encoded(edited_message(base, choices))
    check_graph(graph, "graph.onnx", program, manifest)
    try:
        model = onnx.load_model_from_string(graph)
    except DecodeError:  # notes that no engine reads, and that it cannot read: it refuses the graph
        return
    assert not model.functions, "functions"
    assert not model.training_info, "training"
    assert not model.graph.sparse_initializer, "sparse constants"
    assert not model.graph.quantization_annotation, "quantisation"
    assert all(opset.domain in FORMS for opset in model.opset_import)
    seen = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        assert tensor.name not in seen, tensor.name
        seen.add(tensor.name)
        _constant(tensor, manifest)
    for node in model.graph.node:
        assert node.op_type in FORMS[node.domain], node.op_type
        assert all(name in seen for name in node.input if name), node.input
        names = [attribute.name for attribute in node.attribute]
        assert len(set(names)) == len(names), names
        for attribute in node.attribute:
            assert attribute.type in PLAIN, attribute.type
            assert not attribute.HasField("g"), "a subgraph"
            assert not attribute.graphs, "subgraphs"
            assert not attribute.ref_attr_name, "a reference"
            if attribute.type == AttributeProto.TENSOR:
                _constant(attribute.t, manifest)
        made = [name for name in node.output if name]
        assert not seen & set(made), made
        seen |= set(made)
    assert {value.name for value in model.graph.output} <= seen


def seeds() -> Iterator[bytes]:
    """Good graphs as they are, and with a change of each kind."""
    for number, (_, _, _) in enumerate(_bases()):
        yield bytes([number, 0, 0])
        for kind in range(9):
            yield bytes([number, 0, 1, kind * 11, kind * 3, kind, 1, kind, 0, 5])
            yield bytes([number, 0, 2, kind * 7, 0, kind, kind, 1, 255, 1, kind, 0, 5, 3])
    _, _, base = _bases()[0]
    yield bytes([0, 7]) + encoded(base)


def _constant(tensor: TensorProto, manifest: Manifest) -> None:
    """A constant lies in the graph, or wholly in the weight file."""
    assert tensor.data_type != TensorProto.STRING, "texts"
    if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
        places = {entry.key: entry.value for entry in tensor.external_data}
        assert len(places) == len(tensor.external_data)
        assert places["location"] == FILE, places
        first, length = int(places["offset"]), int(places["length"])
        assert 0 <= first <= first + length <= manifest.files[FILE].size, places
    else:
        onnx.numpy_helper.to_array(tensor)


@cache
def _bases() -> tuple[tuple[Manifest, Program, Message], ...]:
    found = []
    small = (BASES.parent / "files" / "good.onnx").read_bytes()  # a step's, too
    for name, files in {
        "step": (small, None),
        "transformer_xl": ("head", "tail.1", "hidden-ring", "logprobs-1"),
    }.items():
        bundle = BASES / name
        manifest = decode_manifest((bundle / "manifest.json").read_bytes(), name)
        for file in files:
            stem = file if isinstance(file, str) else "step-1"
            program = next(program for program in manifest.programs if program.file == f"{stem}.onnx")
            graph = file if isinstance(file, bytes) else (bundle / program.file).read_bytes()
            found.append((manifest, program, parsed(graph)))
    return tuple(found)
