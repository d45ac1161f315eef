"""Writes the shared corpus of bad bundles: `python -m fuzz.bad_bundles`, with --bases its good bundles as well.

The list of cases and the files they need are the same, byte for byte, each time they are written: a test holds that.
The good bundles are exported once and kept: they stand for what users have.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from bad_bundles import CORPUS
from onnx import TensorProto, helper

from fuzz.edits import parsed, written

BASES = {
    "step": "bases/step",
    "transformer_xl": "bases/transformer_xl",
    "format1": "bases/format1",
    "engines": "../bundles/format1",
    "half": "../bundles/half",
}
REFUSED, WHEN_USED, SELF_TEST, LOADS = "refused", "refused when used", "self-test fails", "loads"
HARMLESS = "loads or refused"
CLOSED = "an engine sees only graphs of a closed list of operators and attributes, with bounded sizes"
PROPORTION = "reading a file takes time and memory in proportion to its size"
NEEDS = {
    "strangers": [
        CLOSED,
        PROPORTION,
        "the tables of a manifest agree",
        "a weight file has a sound header, and what graphs read lies inside it",
        "stored vectors are arrays of plain numbers whose size is in proportion to the file",
        "a vocabulary has at most V words, and ids among them",
    ],
    "format1": ["format1", "engines"],
}
"""The promises and bases with which a reader is tried that keeps a promise of the conformance list."""
Change = dict[str, Any]
MANIFEST, WEIGHTS, GRAPH, VECTORS = "manifest.json", "weights.safetensors", "step-1.onnx", "selftest.npz"
NEWER_VECTORS = "selftest.safetensors"
MANY_AXES = [2, *[1] * 14, 2]


def main() -> None:
    """Write it all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", action="store_true", help="export the good bundles anew")
    if parser.parse_args().bases:
        write_bases()
    write(CORPUS)


def write(folder: Path) -> None:
    """The list of cases, and the files they need."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    for name, data in files().items():
        (folder / "files" / name).write_bytes(data)
    listed = list(cases())
    assert len({case["name"] for case in listed}) == len(listed)
    document = {
        "format": "txl-deploy.bad-bundles",
        "version": 1,
        "bases": BASES,
        "needs": NEEDS,
        "cases": listed,
    }
    lines = json.dumps(document, indent=1, ensure_ascii=True)
    (folder / "index.json").write_text(lines + "\n", "utf-8")


def case(name: str, base: str, wrong: str, promise: str, expected: str, *changes: Change) -> dict[str, Any]:
    """A row of the list."""
    row = {"name": name, "base": base, "wrong": wrong, "promise": promise, "expected": expected}
    return row | {"changes": list(changes)}


def change(do: str, file: str, **more: Any) -> Change:
    """One change of a bundle's folder."""
    return {"do": do, "file": file, **more}


def set_(at: str, to: Any) -> Change:
    """A value of the manifest."""
    return change("set", MANIFEST, at=at, to=to)


def many(at: str, each: str, times: int) -> Change:
    """A list in the manifest, of parts in which # stands for 1, 2, 3 …"""
    return change("many", MANIFEST, at=at, each=each, times=times)


def files() -> dict[str, bytes]:
    """What no short change can say: hostile graphs and archives."""
    return {**{f"{name}.onnx": data for name, data in {**graphs(), **fitting()}.items()}, **archives(), **weights()}


def cases() -> Iterator[dict[str, Any]]:
    """All of them."""
    yield from _files()
    yield from _names()
    yield from _manifests()
    yield from _graphs()
    yield from _others()


def _files() -> Iterator[dict[str, Any]]:
    """Files that are missing, cut, longer, altered, or no plain files."""
    whole, plain = "every file has the size and the SHA-256 that the manifest says", "files are plain files"
    step = (GRAPH, WEIGHTS, VECTORS, "report.json")
    rest = ("head.onnx", "tail.1.onnx", "hidden-ring.onnx", "logprobs-1.onnx", "vocabulary.json")
    for base, names in (("step", step), ("transformer_xl", rest), ("format1", ("head.onnx", WEIGHTS))):
        for name in names:
            short = f"{base}-{name}"
            yield case(f"missing-{short}", base, f"{name} is missing", whole, REFUSED, change("delete", name))
            yield case(
                f"altered-{short}", base, f"one bit of {name}", whole, REFUSED, change("flip", name, at=40, bit=2)
            )
    for name in step:
        yield case(f"empty-{name}", "step", f"{name} is empty", whole, REFUSED, change("cut", name, size=0))
        yield case(f"cut-{name}", "step", f"{name} ends early", whole, REFUSED, change("cut", name, size=30))
        yield case(f"longer-{name}", "step", f"{name} goes on", whole, REFUSED, change("append", name, hex="00"))
    yield case("missing-manifest", "step", "no manifest", whole, REFUSED, change("delete", MANIFEST))
    yield case("empty-manifest", "step", "an empty manifest", whole, REFUSED, change("cut", MANIFEST, size=0))
    yield case("cut-manifest", "step", "half a manifest", whole, REFUSED, change("cut", MANIFEST, size=2000))
    for name in (MANIFEST, GRAPH, WEIGHTS, VECTORS, "report.json"):
        yield case(f"folder-{name}", "step", f"{name} is a folder", plain, REFUSED, change("folder", name))
        yield case(f"pipe-{name}", "step", f"{name} is a pipe that nobody writes", plain, REFUSED, change("pipe", name))
        link = change("link", name, to="/dev/zero")
        yield case(f"device-{name}", "step", f"{name} is a link to an endless device", plain, REFUSED, link)
    for name in (GRAPH, WEIGHTS, VECTORS):
        moved = change("copy", f"../outside-{name}", **{"from": name})
        link = change("link", name, to=f"../outside-{name}")
        wrong = f"{name} is a link to the right file, outside of the bundle"
        yield case(f"outside-{name}", "step", wrong, "nothing outside of the bundle is read", REFUSED, moved, link)
    loop = change("link", WEIGHTS, to=WEIGHTS)
    yield case("link-to-itself", "step", "the weight file is a link to itself", plain, REFUSED, loop)


def _names() -> Iterator[dict[str, Any]]:
    """Names in the manifest that lead elsewhere, or around the hash."""
    inside = "names lead to files inside the bundle"
    outside = {"parent": "../weights.safetensors", "middle": "a/../../weights.safetensors", "root": "/etc/hostname"}
    outside |= {"dots": "..", "here": ".", "nothing": "", "zero": "weights\0.safetensors", "itself": "manifest.json"}
    outside |= {"backslash": "..\\weights.safetensors", "drive": "C:\\weights.safetensors", "share": "//host/weights"}
    for short, name in outside.items():
        listed = set_("/files/" + name.replace("~", "~0").replace("/", "~1"), {"size": 3192, "sha256": "0" * 64})
        wrong = f"the weight file is called {name!r}"
        yield case(f"name-{short}", "step", wrong, inside, REFUSED, listed, set_("/weights", name))
    hashed = "only files of engines may be checked later than when a bundle is opened"
    for short, name, at, base in (
        ("weights", WEIGHTS, "/weights", "step"),
        ("program", GRAPH, "/programs/0/file", "step"),
        ("vocabulary", "vocabulary.json", "/vocabulary", "transformer_xl"),
    ):
        put = change("copy", f"engines/{name}", **{"from": name})
        listed, used = change("list", f"engines/{name}"), set_(at, f"engines/{name}")
        altered = change("flip", f"engines/{name}", at=60, bit=0)
        wrong = f"the {short} stands under engines/, and is not what was hashed"
        yield case(f"engines-{short}", base, wrong, hashed, REFUSED, put, listed, used, altered)
        wrong = f"the {short} is named and not listed"
        unlisted = change("remove", MANIFEST, at=f"/files/{name}")
        yield case(f"unlisted-{short}", base, wrong, "nothing is read that is not listed", REFUSED, unlisted)
    listed = "the report is not listed, and is not read"
    unlisted = change("remove", MANIFEST, at="/files/report.json")
    hostile = change("write", "report.json", hex="5b", times=1 << 16)
    yield case("unlisted-report", "step", listed, "nothing is read that is not listed", LOADS, unlisted, hostile)


def _manifests() -> Iterator[dict[str, Any]]:
    """Manifests that are none, or whose fields are of the wrong kind, too large, or contradict."""
    typed, agree = "every field has the type and range that the format says", "the tables of a manifest agree"
    bounded = PROPORTION
    for short, data in {"list": b"[]", "text": b'"a"', "zero": b"\0", "cut-utf8": b'{"format":"\xc3"}'}.items():
        bad = change("write", MANIFEST, hex=data.hex())
        yield case(f"manifest-{short}", "step", f"the manifest is {data!r}", typed, REFUSED, bad)
    deep = change("write", MANIFEST, hex="5b", times=1 << 17)
    yield case("manifest-deep", "step", "the manifest is 131,072 open brackets", bounded, REFUSED, deep)
    deep = change("replace", MANIFEST, old='"parity": {', hex=b'"parity": {"a":'.hex())
    yield case("manifest-damaged", "step", "the manifest is damaged in the middle", typed, REFUSED, deep)
    for version in ("3.0", "0", "", "two", "2", "-1.0", "٢.0", "2147483648.0"):
        expected = LOADS if version == "2" else REFUSED
        wrong = f"format_version {version!r}"
        yield case(
            f"version-{len(version)}-{version.encode().hex()}",
            "step",
            wrong,
            typed,
            expected,
            set_("/format_version", version),
        )
    long = change("replace", MANIFEST, old='"2.0"', hex=b'"'.hex() + b"9".hex() * 5000 + b'.0"'.hex())
    yield case("version-long", "step", "format_version of 5,000 digits", typed, REFUSED, long)
    yield case("version-newer", "step", "a newer minor version with a field that is not known", typed, LOADS,
               set_("/format_version", "2.9"), set_("/of_2_9", {"a": [1, 2]}))  # fmt: skip
    yield case("other-format", "step", "another format", typed, REFUSED, set_("/format", "onnx"))
    fields = "model_id batch_size precision inputs outputs states programs streams lengths weights files"
    for field in fields.split():
        gone = change("remove", MANIFEST, at=f"/{field}")
        yield case(f"without-{field}", "step", f"{field} is missing", typed, REFUSED, gone)
        yield case(f"null-{field}", "step", f"{field} is null", typed, REFUSED, set_(f"/{field}", None))
    for value in (0, -1, 2**31, 1.5, True, "2", 3):
        wrong = f"batch_size {value!r}"
        yield case(f"batch-{value}", "step", wrong, agree if value == 3 else typed, REFUSED, set_("/batch_size", value))
    size = 2**31 - 1
    for short, at, to in (
        ("state-shape-negative", "/states/0/shape", [2, -16]),
        ("state-shape-huge", "/states/0/shape", [size] * 4),
        ("state-shape-other", "/states/0/shape", [2, 17]),
        ("state-batch-axis", "/states/0/batch_axis", 9),
        ("state-dtype", "/states/0/dtype", "int32"),
        ("state-update", "/states/0/update", "ring"),
        ("state-initial", "/states/0/initial", "no.such.tensor"),
        ("state-initial-shape", "/states/0/initial", "module.cell.weight_hh"),
        ("state-twice", "/states/1/name", "hidden"),
        ("state-input-twice", "/states/1/input", "state.hidden.in"),
        ("state-rows", "/states/0/rows", [0, size]),
        ("input-name", "/inputs/0/name", "state.hidden.in"),
        ("input-role", "/inputs/0/role", "fill"),
        ("input-shape", "/inputs/0/shape", ["B", size]),
        ("input-vocab", "/inputs/0/vocab", 5),
        ("output-shape", "/outputs/0/shape", ["B", size, size]),
        ("program-length", "/programs/0/segment_length", size),
        ("program-kind", "/programs/0/kind", "tail.1"),
        ("program-update", "/programs/0/update", "rolled"),
        ("program-input", "/programs/0/inputs/0/shape", [2, 4]),
        ("program-output", "/programs/0/outputs/0/dtype", "bool"),
        ("program-file", "/programs/0/file", VECTORS),
        ("no-programs", "/programs", []),
        ("no-states-in-program", "/states", []),
        ("counter", "/counters", {"fill": {"start": 0, "most": size}}),
        ("reach", "/reach", 0),
        ("boundary", "/boundary_token", 12),
        ("file-size", f"/files/{WEIGHTS}/size", 2**63 - 1),
        ("file-hash", f"/files/{WEIGHTS}/sha256", "x" * 64),
        ("vocabulary-without-tokens", "/vocabulary", VECTORS),
    ):
        expected = WHEN_USED if short in ("vocabulary-without-tokens",) else REFUSED
        yield case(short, "step", f"{at[1:]} is {str(to)[:60]}", agree, expected, set_(at, to))
    for short, at, to in (
        ("tokens-vocab", "/inputs/0/vocab", 13),
        ("tokens-huge", "/inputs/0/vocab", size),
        ("memory-most", "/counters/fill/most", size),
        ("memory-start", "/counters/fill/start", 4),
        ("ring-slots", "/states/0/slots", 6),
        ("clusters-many", "/outputs/0/clusters", [[n, n + 1] for n in range(12)]),
        ("clusters-gap", "/outputs/0/clusters", [[0, 4], [5, 12]]),
        ("softmax-width", "/outputs/0/width", 5),
    ):
        yield case(f"xl-{short}", "transformer_xl", f"{at[1:]} is {to}", agree, REFUSED, set_(at, to))
    yield case("old-cutoffs", "format1", "a config of 40,000 cutoffs", bounded, REFUSED,
               many("/config/cutoffs", "#", 40_000), set_("/config/vocab_size", 50_000))  # fmt: skip
    yield case(
        "old-layers", "format1", "a config of 2,147,483,647 layers", agree, REFUSED, set_("/config/n_layer", size)
    )
    yield case(
        "old-vocab", "format1", "a config of 2,147,483,647 ids", agree, REFUSED, set_("/config/vocab_size", size)
    )
    yield case("surrogate", "step", "a name of half a character", typed, REFUSED,
               change("replace", MANIFEST, old='"hidden"', hex=b'"\\ud800"'.hex()))  # fmt: skip
    yield case("escape", "step", "a name of control characters", "messages are one printable line", REFUSED,
               set_("/streams", "\x1b[31m\r\n"))  # fmt: skip
    state = {"name": "s#", "input": "i#", "output": "o#", "dtype": "float32", "shape": [2], "batch_axis": 0}
    state |= {"update": "replace"}
    listed = many("/states", json.dumps(state), 20_000)
    yield case("many-states", "step", "20,000 states that no program has", bounded, REFUSED, listed)
    put, listed = change("put", GRAPH, **{"from": "axes.onnx"}), change("list", GRAPH)
    shapes = [set_("/outputs/0/shape", ["B", *MANY_AXES[1:]]), set_("/programs/0/outputs/0/shape", MANY_AXES)]
    yield case("axes", "step", f"an output of {len(MANY_AXES)} axes", agree, HARMLESS, *shapes, put, listed)
    put = change("put", GRAPH, **{"from": "shared.onnx"})
    alone = [set_("/inputs", [{"name": "features", "dtype": "float32", "shape": [2, 3], "role": "feature"}])]
    alone += [set_("/outputs/0/shape", [2, 2]), change("remove", MANIFEST, at="/programs/0/inputs/1")]
    alone += [set_(f"/states/{place}/batch_axis", None) for place in (0, 1)]
    alone += [set_("/streams", "lockstep"), set_("/batch_size", 2**24)]
    yield case("batch-unseen", "step", "16,777,216 sequences, of which no tensor has an axis", agree, REFUSED, *alone,
               put, listed)  # fmt: skip
    listed = many("/files", "#", 1)
    yield case("files-list", "step", "the files are a list", typed, REFUSED, listed)
    listed = many("/states/0/shape", "1", 100_000)
    yield case("state-shape-long", "step", "a state of 100,000 axes", bounded, REFUSED, listed)
    listed = many("/outputs/0/clusters", "[#, #]", 40_000)
    yield case("clusters-many", "transformer_xl", "40,000 clusters of nothing", bounded, REFUSED, listed)
    listed = many("/programs/0/inputs", '{"name": "i#", "dtype": "int32", "shape": [2]}', 20_000)
    yield case("many-inputs", "step", "20,000 inputs of a program", bounded, REFUSED, listed)


def _graphs() -> Iterator[dict[str, Any]]:
    """Graphs that are hashed and hostile."""
    promise = CLOSED
    for name in graphs():
        expected = SELF_TEST if name == "good" else REFUSED
        put, listed = change("put", GRAPH, **{"from": f"{name}.onnx"}), change("list", GRAPH)
        more = [change("write", "other.bin", hex="00", times=4096)] if name == "external_unlisted" else []
        yield case(f"graph-{name}", "step", f"the graph: {GRAPH_WORDS[name]}", promise, expected, put, *more, listed)
    promise = "a graph is a graph"
    for short, data in {"text": b"not a graph", "empty": b"", "tail": b"\x3a\xff\xff\xff\xff\x0f"}.items():
        bad = change("write", GRAPH, hex=data.hex())
        yield case(f"graph-{short}", "step", f"the graph is {data!r}", promise, REFUSED, bad, change("list", GRAPH))
    deep = change("write", GRAPH, hex="3a03" * 1, times=20_000)
    yield case("graph-many", "step", "20,000 graphs in one file", promise, REFUSED, deep, change("list", GRAPH))


def _others() -> Iterator[dict[str, Any]]:
    """Vocabularies, stored vectors, weight files, facts of engines."""
    words = "a vocabulary has at most V words, and ids among them"
    good = {"kind": "words", "symbols": [*"abcdefghijkl"], "unknown": 1, "line_end": 0}
    for short, document in {
        "text": "vocabulary",
        "list": [],
        "kind": good | {"kind": "pickle"},
        "bytes": {"kind": "bytes"},
        "many": good | {"symbols": [str(n) for n in range(13)]},
        "none": good | {"symbols": []},
        "numbers": good | {"symbols": [1, 2, 3]},
        "unknown": good | {"unknown": 12},
        "negative": good | {"line_end": -1},
        "huge": good | {"line_start": 2**40},
    }.items():
        bad = change("write", "vocabulary.json", hex=json.dumps(document).encode().hex())
        wrong = f"the vocabulary is {json.dumps(document)[:60]}"
        listed = change("list", "vocabulary.json")
        yield case(f"vocabulary-{short}", "transformer_xl", wrong, words, WHEN_USED, bad, listed)
    stored = "stored vectors are arrays of plain numbers whose size is in proportion to the file"
    for name, expected in {**dict.fromkeys(archives(), WHEN_USED), "wrong_numbers.npz": SELF_TEST}.items():
        put, listed = change("put", VECTORS, **{"from": name}), change("list", VECTORS)
        yield case(
            f"vectors-{name[:-4]}", "step", f"stored vectors: {ARCHIVE_WORDS[name]}", stored, expected, put, listed
        )
    path = CORPUS / BASES["half"] / NEWER_VECTORS
    head = path.read_bytes()
    start = 8 + int.from_bytes(head[:8], "little")
    place = start + json.loads(head[8:start])["reached"]["data_offsets"][0]
    for short, bit in (("negative", 7), ("huge", 6)):  # of the sign, and of the exponent's largest part
        bad = change("flip", NEWER_VECTORS, at=place + 7, bit=bit), change("list", NEWER_VECTORS)
        wrong = f"the difference that the bundle reached where it was made is {short}"
        yield case(f"vectors-reached-{short}", "half", wrong, stored, WHEN_USED, *bad)
    cut = (change("cut", VECTORS, size=1000), change("list", VECTORS))
    yield case("vectors-cut", "step", "stored vectors end early, the hash fits", stored, WHEN_USED, *cut)
    gone = (change("delete", VECTORS), change("remove", MANIFEST, at=f"/files/{VECTORS}"))
    yield case("vectors-none", "step", "there are no stored vectors", stored, WHEN_USED, *gone)
    header = "a weight file has a sound header, and what graphs read lies inside it"
    for name in weights():
        header_alone = (
            "length.safetensors",
            "header.safetensors",
            "backwards.safetensors",
        )  # graphs say where they read
        expected = SELF_TEST if name == "other_numbers.safetensors" else HARMLESS if name in header_alone else REFUSED
        put, listed = change("put", WEIGHTS, **{"from": name}), change("list", WEIGHTS)
        wrong = f"the weight file: {WEIGHT_WORDS[name]}"
        yield case(f"weights-{name.partition('.')[0]}", "step", wrong, header, expected, put, listed)
    lost = "what is wrong with an engine costs the engine, not the model"
    facts = "engines/cuda/logprobs-ring-1.json"
    engine = facts.replace(".json", ".onnx")
    for short, bad in {
        "missing": change("delete", facts),
        "cut": change("cut", facts, size=100),
        "deep": change("write", facts, hex="5b", times=1 << 16),
        "format": change("set", facts, at="/format", to="onnx"),
        "version": change("set", facts, at="/format_version", to="9.0"),
        "size": change("set", facts, at="/bytes", to=-1),
        "hash": change("set", facts, at="/sha256", to="0" * 64),
        "engine": change("flip", engine, at=40, bit=1),
        "lost": change("delete", engine),
        "pipe": change("pipe", facts),
    }.items():
        yield case(f"engine-{short}", "engines", f"the facts beside an engine: {short}", lost, LOADS, bad)


# --- graphs ---------------------------------------------------------------------------------------------------------

FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
GRAPH_WORDS = {
    "good": "good in form, of another model",
    "loop": "an endless Loop",
    "if": "an If with two subgraphs",
    "scan": "a Scan",
    "constant_of_shape": "a ConstantOfShape of 3 GB",
    "expand": "an Expand to 4 GB",
    "tile": "a Tile to 16 GB",
    "range": "a Range of 8 GB",
    "function": "a function of its own",
    "custom_domain": "an operator of a domain of its own",
    "unknown_operator": "an operator that ONNX does not have",
    "forbidden_operator": "an operator that no model here needs",
    "subgraph_attribute": "a graph in an attribute of an operator that has none",
    "external_parent": "parameters in ../outside.bin",
    "external_root": "parameters in /etc/hostname",
    "external_unlisted": "parameters in a file that is not listed",
    "external_beyond": "parameters behind the end of the weight file",
    "external_negative": "parameters at a negative place",
    "external_long": "parameters longer than their shape",
    "external_huge": "parameters of 2^40 values",
    "false_shape": "a declared shape that is false",
    "huge_shape": "a declared shape of 2^62 values",
    "missing_output": "without one of the outputs",
    "other_dtype": "an output of another type",
    "surplus_input": "an input that the manifest does not know",
    "huge_initializer": "a constant of 2^40 values without data",
    "short_initializer": "a constant with fewer values than its shape",
    "string_tensor": "a constant of texts",
    "sparse_initializer": "a sparse constant",
    "sequence": "a sequence",
    "opset": "an operator set of the year 9999",
    "training": "a graph for training",
    "cycle": "a node that reads what it makes",
    "missing_input": "a node that reads what nobody makes",
    "name_bytes": "a name that is no UTF-8",
    "shadow": "a constant that has the name of an input",
    "two_graphs": "two graphs, of which readers take different ones",
    "random": "random numbers",
    "deep_attribute": "subgraphs 400 levels deep",
    "split": "a Split into another number of parts than it names, which ends ONNX Runtime's process",
    "missing_operand": "a Max one of whose values is missing, which ends ONNX Runtime's process",
    "dots": "an Einsum whose dots stand for different numbers of axes, which ends ONNX Runtime's process",
}


def graphs() -> dict[str, bytes]:
    """One step that fits the manifest, and what is hostile in it, by name."""
    found: dict[str, onnx.ModelProto | bytes] = {"good": _good_graph()}
    values = helper.make_node("MatMul", ["features", "weight"], ["product"])

    def add(name: str, *nodes: onnx.NodeProto, tensors: Any = (), **more: Any) -> onnx.ModelProto:
        """`product` plus what the nodes make, `hostile`, is what the step returns."""
        last = helper.make_node("Add", ["product", "hostile"], ["values"])
        model = _graph([values, *nodes, last], [_weight(), *tensors], **more)
        found[name] = model
        return model

    def constant(name: str, data: Any, kind: int = INT64) -> onnx.TensorProto:
        return helper.make_tensor(name, kind, np.shape(data), np.ravel(data))

    def body(inputs: Any, outputs: Any, *nodes: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(list(nodes), "body", inputs, outputs)

    value = helper.make_tensor_value_info
    state = [value("i", INT64, []), value("c", TensorProto.BOOL, []), value("x", FLOAT, [2, 2])]
    same = [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Identity", ["x"], ["x2"])]
    endless = body(state, [value("c2", TensorProto.BOOL, []), value("x2", FLOAT, [2, 2])], *same)
    start = [constant("many", np.int64(2**62)), constant("true", np.True_, TensorProto.BOOL)]
    add("loop", helper.make_node("Loop", ["many", "true", "product"], ["hostile"], body=endless), tensors=start)
    branch = body([], [value("b", FLOAT, [2, 2])], helper.make_node("Identity", ["product"], ["b"]))
    branches = {"then_branch": branch, "else_branch": branch}
    add("if", helper.make_node("If", ["true"], ["hostile"], **branches), tensors=start[1:])
    one = body([value("x", FLOAT, [2])], [value("y", FLOAT, [2])], helper.make_node("Identity", ["x"], ["y"]))
    add("scan", helper.make_node("Scan", ["product"], ["hostile"], body=one, num_scan_inputs=1))

    def large(name: str, node: onnx.NodeProto, *tensors: onnx.TensorProto) -> None:
        reduce = helper.make_node("ReduceMax", ["large"], ["hostile"], keepdims=0)
        add(name, node, reduce, tensors=tensors)

    three = constant("size", [3 << 28])
    large("constant_of_shape", helper.make_node("ConstantOfShape", ["size"], ["large"]), three)
    large("expand", helper.make_node("Expand", ["product", "size"], ["large"]), constant("size", [1 << 28, 2, 2]))
    large("tile", helper.make_node("Tile", ["product", "size"], ["large"]), constant("size", [1 << 15, 1 << 15]))
    limits = [constant("zero", np.float32(0), FLOAT), constant("end", np.float32(2**31), FLOAT)]
    limits += [constant("one", np.float32(1), FLOAT)]
    large("range", helper.make_node("Range", ["zero", "end", "one"], ["large"]), *limits)
    function = helper.make_function("own", "F", ["x"], ["y"], [helper.make_node("Identity", ["x"], ["y"])],
                                    [helper.make_opsetid("", 18)])  # fmt: skip
    own = helper.make_node("F", ["product"], ["hostile"], domain="own")
    add("function", own, domains=["own"]).functions.append(function)
    add("custom_domain", helper.make_node("Gelu", ["product"], ["hostile"], domain="com.other"), domains=["com.other"])
    add("unknown_operator", helper.make_node("Shellcode", ["product"], ["hostile"]))
    add("forbidden_operator", helper.make_node("SequenceMap", ["product"], ["hostile"], body=branch))
    add("subgraph_attribute", helper.make_node("Identity", ["product"], ["hostile"], body=branch))
    for name, location, offset, length, shape in (
        ("external_parent", "../outside.bin", 0, 16, [2, 2]),
        ("external_root", "/etc/hostname", 0, 16, [2, 2]),
        ("external_unlisted", "other.bin", 0, 16, [2, 2]),
        ("external_beyond", WEIGHTS, 3190, 16, [2, 2]),
        ("external_negative", WEIGHTS, -16, 16, [2, 2]),
        ("external_long", WEIGHTS, 120, 3072, [2, 2]),
        ("external_huge", WEIGHTS, 120, 4 << 40, [1 << 20, 1 << 20]),
    ):
        tensor = TensorProto(name="hostile", data_type=FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, text in {"location": location, "offset": str(offset), "length": str(length)}.items():
            tensor.external_data.add(key=key, value=text)
        add(name, tensors=[tensor])
    identity = helper.make_node("Identity", ["product"], ["hostile"])
    add("false_shape", identity).graph.value_info.append(value("hostile", FLOAT, [2, 7]))
    add("huge_shape", identity).graph.value_info.append(value("hostile", FLOAT, [1 << 31, 1 << 31]))
    del add("missing_output", identity).graph.output[-1]
    add("other_dtype", identity).graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    add("surplus_input", identity).graph.input.append(value("more", FLOAT, [1]))
    add("huge_initializer", tensors=[TensorProto(name="hostile", data_type=FLOAT, dims=[1 << 20, 1 << 20])])
    short = TensorProto(name="hostile", data_type=FLOAT, dims=[2, 2], raw_data=b"\0" * 4)
    add("short_initializer", tensors=[short])
    texts = helper.make_tensor("texts", TensorProto.STRING, [2], [b"a", b"b"])
    add("string_tensor", identity, tensors=[texts])
    sparse = helper.make_sparse_tensor(constant("s", [1.0], FLOAT), constant("s.at", [0]), [1 << 40])
    add("sparse_initializer", identity).graph.sparse_initializer.append(sparse)
    made = [helper.make_node("SequenceConstruct", ["product"], ["list"])]
    add("sequence", *made, helper.make_node("ConcatFromSequence", ["list"], ["hostile"], axis=0))
    add("opset", identity).opset_import[0].version = 9999
    add("training", identity).training_info.add().algorithm.CopyFrom(branch)
    add("cycle", helper.make_node("Add", ["hostile", "product"], ["hostile"]))
    add("missing_input", helper.make_node("Add", ["nobody", "product"], ["hostile"]))
    named = add("name_bytes", identity)
    found["name_bytes"] = named.SerializeToString(deterministic=True).replace(b"hostile", b"hos\xff\xfele")
    add("shadow", identity, tensors=[helper.make_tensor("features", FLOAT, [2, 3], [0.0] * 6)])
    add("random", helper.make_node("RandomNormalLike", ["product"], ["hostile"]))
    found["two_graphs"] = _serialised(_good_graph()) + _serialised(found["loop"])
    node = level = written([[1, 2, b"product"], [2, 2, b"hostile"], [4, 2, b"Identity"]])
    for _ in range(400):  # more than the library that writes messages has
        inner = written([[1, 2, b"g"], [20, 0, onnx.AttributeProto.GRAPH], [6, 2, [[1, 2, level]]]])
        level = node + written([[5, 2, inner]])
    plain = parsed(_serialised(add("deep_attribute", identity)))
    next(value for number, _, value in plain if number == 7).insert(1, [1, 2, level])
    found["deep_attribute"] = written(plain)
    add("split", helper.make_node("Split", ["product"], ["hostile", "more"], axis=1, num_outputs=1))
    add("missing_operand", helper.make_node("Max", ["product", "", "product"], ["hostile"]))
    sums = helper.make_node("Einsum", ["row", "product"], ["hostile"], equation="...i,...i->...i")
    add("dots", sums, tensors=[constant("row", [1.0, 1.0], FLOAT)])
    assert found.keys() == GRAPH_WORDS.keys(), found.keys() ^ GRAPH_WORDS.keys()
    return {name: _serialised(model) for name, model in found.items()}


def fitting() -> dict[str, bytes]:
    """Graphs that are right for a manifest that is changed with them."""
    axes = onnx.load(CORPUS / BASES["step"] / GRAPH, load_external_data=False)
    for node in axes.graph.node:
        node.output[:] = ["flat" if name == "values" else name for name in node.output]
    axes.graph.node.append(helper.make_node("Reshape", ["flat", "axes"], ["values"]))
    axes.graph.initializer.append(helper.make_tensor("axes", INT64, [len(MANY_AXES)], MANY_AXES))
    axes.graph.output[0].CopyFrom(helper.make_tensor_value_info("values", FLOAT, MANY_AXES))
    shared = _good_graph()
    del shared.graph.input[1]
    return {"axes": _serialised(axes), "shared": _serialised(shared)}


def _good_graph() -> onnx.ModelProto:
    return _graph([helper.make_node("MatMul", ["features", "weight"], ["values"])], [_weight()])


def _weight() -> onnx.TensorProto:
    return helper.make_tensor("weight", FLOAT, [3, 2], [0.5] * 6)


def _graph(nodes: Any, tensors: Any, domains: Any = ()) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    carried = [("hidden", FLOAT, [2, 16]), ("count", INT32, [2])]
    states = [helper.make_node("Identity", [f"state.{name}.in"], [f"state.{name}.out"]) for name, _, _ in carried]
    inputs = [value("features", FLOAT, [2, 3]), value("valid", INT32, [2])]
    inputs += [value(f"state.{name}.in", kind, shape) for name, kind, shape in carried]
    outputs = [value("values", FLOAT, [2, 2]), *(value(f"state.{name}.out", kind, s) for name, kind, s in carried)]
    graph = helper.make_graph([*nodes, *states], "step", inputs, outputs, list(tensors))
    opsets = [helper.make_opsetid("", 18), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _serialised(model: onnx.ModelProto | bytes) -> bytes:
    return model if isinstance(model, bytes) else model.SerializeToString(deterministic=True)


# --- archives and weight files --------------------------------------------------------------------------------------

ARCHIVE_WORDS = {
    "bomb.npz": "64 KB of zeros that become 64 MB",
    "lying.npz": "an array that says it has 2^28 values and has none",
    "objects.npz": "an array of pickled objects",
    "text.npz": "a file that is no archive",
    "empty.npz": "an archive of nothing",
    "member.npz": "a member that is no array",
    "shapes.npz": "arrays of other shapes",
    "twice.npz": "the same array twice",
    "wrong_numbers.npz": "other numbers than the model computes",
}
WEIGHT_WORDS = {
    "length.safetensors": "a header of 2^63 bytes",
    "header.safetensors": "a header that is no JSON",
    "beyond.safetensors": "a tensor behind the end of the file",
    "backwards.safetensors": "a tensor that ends before it begins",
    "short.safetensors": "a file of three bytes",
    "other_numbers.safetensors": "other numbers",
}


def weights() -> dict[str, bytes]:
    """Weight files of the step's bundle that are hashed and wrong."""
    data = (CORPUS / BASES["step"] / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]

    def made(changed: bytes) -> bytes:
        return length.to_bytes(8, "little") + changed.ljust(length) + rest

    other = bytearray(data)
    other[-2] ^= 0x40
    return {
        "length.safetensors": (2**63).to_bytes(8, "little") + data[8:],
        "header.safetensors": made(header.replace(b"{", b"[", 1)),
        "beyond.safetensors": data[:-64],
        "backwards.safetensors": made(header.replace(b"[0,", b"[9,").replace(b",3072]", b",3]")),
        "short.safetensors": data[:3],
        "other_numbers.safetensors": bytes(other),
    }


def archives() -> dict[str, bytes]:
    """Archives of stored vectors that are hashed and wrong."""
    with np.load(CORPUS / BASES["step"] / VECTORS) as stored:
        good = dict(stored)

    def array(descr: str, shape: Any, data: bytes) -> bytes:
        text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".ljust(117).encode() + b"\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data

    def archive(members: Any) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as written:
            for name, content in members:
                written.writestr(zipfile.ZipInfo(name), content)
        return file.getvalue()

    def npz(arrays: dict[str, Any]) -> bytes:
        return archive((f"{name}.npy", array(a.dtype.str, a.shape, a.tobytes())) for name, a in arrays.items())

    wrong = good | {"output/values": good["output/values"] + np.float32(1)}
    pickled = bytes.fromhex("80025d7100286301") + b"o"
    return {
        "bomb.npz": _bomb(64 << 20),
        "lying.npz": archive([("length.npy", array("<i4", (1 << 28,), b""))]),
        "objects.npz": archive([("length.npy", array("|O", (1,), pickled))]),
        "text.npz": b"no archive",
        "empty.npz": archive([]),
        "member.npz": archive([("length", b"no array"), ("counts.npy", b"no array either")]),
        "shapes.npz": npz(good | {"counts": good["counts"][:, :1], "length": good["length"][:, None]}),
        "twice.npz": _doubled(npz({"length": good["length"], "lengtj": good["length"][:1]})),
        "wrong_numbers.npz": npz(wrong),
    }


def _doubled(data: bytes) -> bytes:
    return data.replace(b"lengtj.npy", b"length.npy")


def _bomb(size: int) -> bytes:
    """An archive with one array of zeros, packed by hand: what packs it otherwise differs from machine to machine."""
    import zlib

    text = f"{{'descr': '|b1', 'fortran_order': False, 'shape': ({size},), }}".ljust(117).encode() + b"\n"
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    matches = (size - 1) // 258
    bits: list[int] = []

    def put(value: int, count: int) -> None:
        bits.extend(value >> place & 1 for place in range(count))

    def code(text: str) -> None:
        bits.extend(map(int, text))

    # A block of codes of its own: the byte 0 is 10, a copy of 258 bytes is 0, the end is 11; one distance, 0.
    put(1, 1), put(2, 2), put(286 - 257, 5), put(0, 5), put(18 - 4, 4)
    order = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1)
    lengths = {18: 1, 1: 2, 2: 2}
    for symbol in order:
        put(lengths.get(symbol, 0), 3)
    for symbol, more in ((2, None), (18, 138), (18, 117), (2, None), (18, 28), (1, None), (1, None)):
        code({18: "0", 1: "10", 2: "11"}[symbol])
        if more is not None:
            put(more - 11, 7)
    code("10")
    bits.extend([0, 0] * matches)
    for _ in range(size - 1 - 258 * matches):
        code("10")
    code("11")
    bits.extend([0] * (-len(bits) % 8))
    zeros = np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()
    stored = b"\x00" + len(head).to_bytes(2, "little") + (len(head) ^ 0xFFFF).to_bytes(2, "little") + head
    packed = stored + zeros
    crc = zlib.crc32(bytes(size), zlib.crc32(head))
    info = zipfile.ZipInfo("length.npy")
    info.compress_type, info.CRC = zipfile.ZIP_DEFLATED, crc
    info.compress_size, info.file_size = len(packed), len(head) + size
    local = info.FileHeader()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        info.header_offset = 0
        file.write(local + packed)
        archive.filelist.append(info)
        archive.start_dir = file.tell()
        archive._didModify = True  # type: ignore[attr-defined]
    return file.getvalue()


# --- good bundles ---------------------------------------------------------------------------------------------------


def write_bases() -> None:
    """Export a step with two states, and a Transformer-XL of two clusters with its words."""
    import torch
    import txl_export
    from support import save_checkpoint, small_config
    from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

    torch.manual_seed(0)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.GRUCell(3, 16)
            self.head = torch.nn.Linear(16, 2)

        def forward(self, features: Any, hidden: Any, count: Any) -> Any:
            hidden = self.cell(features, hidden)
            return self.head(hidden), hidden, count + 1

    states = [StateSpec("hidden", ("B", 16)), StateSpec("count", ("B",), "int32", 0)]
    step = StepSpec(Step(), [InputSpec("features", ("B", 3))], states, [OutputSpec("values")])
    txl_export.export(step, CORPUS / BASES["step"], batch_size=2, force=True)
    config = small_config(vocab_size=12, n_layer=1, n_head=1, d_model=4, d_head=4, d_inner=4, d_embed=4)
    config |= {"memory_length": 3, "cutoffs": (4,), "embedding_scale": 2.0}
    words = {"kind": "words", "symbols": ["<eos>", "<unk>", *"abcdefghij"], "unknown": 1, "line_end": 0}
    with tempfile.TemporaryDirectory() as folder:
        file = save_checkpoint(Path(folder) / "model.pt", config, vocabulary=words)
        txl_export.export(file, CORPUS / BASES["transformer_xl"], segment_length=(2, 1), batch_size=2, force=True)
    for name in ("step", "transformer_xl"):
        _shorten(CORPUS / BASES[name])


def _shorten(bundle: Path) -> None:
    """Leave of the report what is no list of chains: nobody here reads those."""
    from txl_deploy.conformance.bad_bundles import apply

    report = json.loads((bundle / "report.json").read_text("utf-8"))
    kept = {key: value for key, value in report.items() if not isinstance(value, list)}
    (bundle / "report.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    shutil.rmtree(bundle / "engines", ignore_errors=True)
    apply(CORPUS, change("list", "report.json"), bundle)


if __name__ == "__main__":
    main()
