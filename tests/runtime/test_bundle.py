"""Every kind of damage a bundle can have, and that each is refused in one line that says what to do.

A refusal is a `BundleError` from loading the bundle or from running each of its programs once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file
from txl_runtime import BundleError, load
from txl_runtime.bundle import open_bundle
from txl_runtime.encoding import file_sha256
from txl_runtime.manifest import decode_manifest

B = 3
FILES = ["logprobs-1.onnx", "logprobs-4.onnx", "report.json", "selftest.npz", "weights.safetensors"]
ADVICE = ("export", "copy", "upgrade", "make", "report", "expected")
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def intact(make_bundle):
    return make_bundle(batch_size=B, config={})


@pytest.fixture
def bundle(intact, tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(intact, tmp_path / "a bundle.txl"))


def read_manifest(bundle: Path) -> Manifest:
    return json.loads((bundle / "manifest.json").read_text("utf-8"))


def write_manifest(bundle: Path, manifest: object) -> None:
    (bundle / "manifest.json").write_text(json.dumps(manifest), "utf-8")


def accept(bundle: Path, name: str) -> None:
    """Give a changed file the size and hash the manifest expects of it."""
    manifest = read_manifest(bundle)
    manifest["files"][name] = {"size": (bundle / name).stat().st_size, "sha256": file_sha256(bundle / name)}
    write_manifest(bundle, manifest)


def use(path: Path, **options: Any) -> None:
    """Load a bundle and run each of its programs."""
    model = load(path, **options)
    for length in model.segment_lengths:
        stream = model.stream()
        stream.step(np.zeros((stream.batch_size, length), int))


def refusal(path: Path, **options: Any) -> str:
    """The message a bundle is refused with: one line, beginning with a path and ending in what to do."""
    with pytest.raises(BundleError) as caught:
        use(path, **options)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert len(message.splitlines()) == 1
    assert message.split("; ")[-1].startswith(ADVICE), message
    return message


def assert_says(message: str, *words: str) -> None:
    for word in words:
        assert word in message, message


def test_the_intact_bundle_loads_and_runs(bundle):
    use(bundle)
    use(bundle, verify_files=False)
    use(str(bundle), backend="cpu")


def test_this_file_knows_all_files_of_a_bundle(bundle):
    assert sorted(path.name for path in bundle.iterdir()) == sorted([*FILES, "manifest.json"])
    assert sorted(read_manifest(bundle)["files"]) == FILES


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(bundle, name):
    size = (bundle / name).stat().st_size
    (bundle / name).unlink()
    for verify_files in (True, False):
        assert_says(refusal(bundle, verify_files=verify_files), name, "missing", f"{size} bytes", "copy the bundle")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [-1, -100, 1])
def test_a_file_of_another_size_is_refused_with_and_without_hashing(bundle, name, change):
    data = (bundle / name).read_bytes()
    (bundle / name).write_bytes(data[:change] if change < 0 else data + b"\0" * change)
    for verify_files in (True, False):
        message = refusal(bundle, verify_files=verify_files)
        assert_says(message, name, f"{len(data) + change} bytes, expected {len(data)}")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_file_with_one_bit_flipped_is_refused(bundle, name, place):
    data = bytearray((bundle / name).read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    (bundle / name).write_bytes(data)
    assert_says(refusal(bundle), name, "SHA-256 is not the manifest's", "altered")


def test_without_hashing_an_altered_file_is_not_noticed(bundle):
    data = bytearray((bundle / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (bundle / "weights.safetensors").write_bytes(data)
    use(bundle, verify_files=False)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_the_place_of_a_file_is_refused(bundle, name):
    (bundle / name).unlink()
    (bundle / name).mkdir()
    assert_says(refusal(bundle), name, "missing")


def test_a_link_out_of_the_bundle_is_refused(bundle, tmp_path):
    outside = tmp_path / "outside"
    (bundle / "weights.safetensors").rename(outside)
    (bundle / "weights.safetensors").symlink_to(outside)
    for verify_files in (True, False):
        message = refusal(bundle, verify_files=verify_files)
        assert_says(message, "weights.safetensors", "a link that leaves the bundle", "plain file")


def test_a_dangling_link_is_refused(bundle):
    (bundle / "selftest.npz").unlink()
    (bundle / "selftest.npz").symlink_to("nowhere")
    assert_says(refusal(bundle), "selftest.npz", "missing")


def test_a_bundle_may_be_reached_through_a_link(bundle, tmp_path):
    (tmp_path / "current").symlink_to(bundle)
    use(tmp_path / "current")


def test_files_that_the_manifest_does_not_list_do_not_matter(bundle):
    (bundle / "notes.txt").write_text("mine")
    use(bundle)


def test_a_path_to_a_file_is_refused(bundle):
    assert_says(refusal(bundle / "manifest.json"), "found a file", "expected a bundle (a folder)")


def test_a_path_to_nothing_is_refused(tmp_path):
    assert_says(refusal(tmp_path / "nothing"), "found nothing", "expected a bundle (a folder)", "txl-deploy export")


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    assert_says(refusal(tmp_path), "no manifest.json", "expected a bundle", "txl-deploy export")


def test_a_manifest_that_cannot_be_read_is_refused(bundle):
    (bundle / "manifest.json").unlink()
    (bundle / "manifest.json").mkdir()
    assert_says(refusal(bundle), "manifest.json: Is a directory", "expected a readable manifest")


# --- the manifest -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"not JSON",
        b"\xff\xfe\x00",
        b'"text"',
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"format": "\xff"}',
        b"PK\x03\x04",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_manifest_that_is_no_manifest_is_refused(bundle, data):
    (bundle / "manifest.json").write_bytes(data)
    assert_says(refusal(bundle), "manifest.json", "export the model again")


def put(*keys: Any, to: Any) -> Callable[[Manifest], None]:
    """Set one field, however deep."""

    def edit(manifest: Manifest) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = to

    return edit


def drop(*keys: Any) -> Callable[[Manifest], None]:
    def edit(manifest: Manifest) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        del manifest[keys[-1]]

    return edit


def list_as(name: str) -> Callable[[Manifest], None]:
    """List a file under another name, which leads to the same file or to one outside."""

    def edit(manifest: Manifest) -> None:
        manifest["files"][name] = manifest["files"]["report.json"]

    return edit


def rename_weights(name: str) -> Callable[[Manifest], None]:
    def edit(manifest: Manifest) -> None:
        manifest["weights"] = name
        manifest["files"][name] = manifest["files"].pop("weights.safetensors")

    return edit


def same_program_twice(manifest: Manifest) -> None:
    manifest["programs"].append(manifest["programs"][0] | {"name": "another"})


def same_name_twice(manifest: Manifest) -> None:
    manifest["programs"][1]["name"] = manifest["programs"][0]["name"]


DAMAGE: list[tuple[str, Callable[[Manifest], None], list[str]]] = [
    ("another format", put("format", to="txl-deploy.checkpoint"), ["'txl-deploy.checkpoint'", "'txl-deploy.bundle'"]),
    ("no format", drop("format"), ["`format`"]),
    ("format is a number", put("format", to=1), ["`str`", "`int`", "$.format"]),
    ("version is a number", put("format_version", to=1.0), ["`str`", "`float`", "$.format_version"]),
    ("version is no version", put("format_version", to="latest"), ["format_version is 'latest'", "'1.0'"]),
    ("version is empty", put("format_version", to=""), ["format_version is ''"]),
    ("newer major version", put("format_version", to="2.0"), ["format 2.0", "up to 1.x", "upgrade txl-deploy"]),
    ("much newer version", put("format_version", to="10.3.1"), ["format 10.3.1", "up to 1.x"]),
    ("B is text", put("batch_size", to="3"), ["`int`", "`str`", "$.batch_size"]),
    ("B is a fraction", put("batch_size", to=3.5), ["$.batch_size"]),
    ("B is negative", put("batch_size", to=-3), [">= 1", "$.batch_size"]),
    ("B is zero", put("batch_size", to=0), [">= 1", "$.batch_size"]),
    ("B is huge", put("batch_size", to=2**40), ["$.batch_size"]),
    ("B changed", put("batch_size", to=4), ["state table", "B 4, M 7"]),
    ("M is negative", put("memory_length", to=-1), [">= 0", "$.memory_length"]),
    ("M is null", put("memory_length", to=None), ["`null`", "$.memory_length"]),
    ("M changed", put("memory_length", to=8), ["state table", "B 3, M 8"]),
    ("M is none", put("memory_length", to=0), ["state table", "M 0"]),
    ("L is negative", put("programs", 0, "segment_length", to=-4), [">= 1", "$.programs[0].segment_length"]),
    ("L is zero", put("programs", 0, "segment_length", to=0), [">= 1", "$.programs[0].segment_length"]),
    ("L changed", put("programs", 0, "segment_length", to=5), ["inputs of program logprobs-4 do not fit"]),
    ("other form of memory", put("memory", to="hidden"), ["state table", "hidden memory"]),
    ("unknown form of memory", put("memory", to="both"), ["'both'", "$.memory"]),
    ("unknown precision", put("precision", to="fp64"), ["'fp64'", "$.precision"]),
    ("model id is no hash", put("model_id", to="the one of last week"), ["$.model_id"]),
    ("no config", drop("config"), ["`config`"]),
    ("config is text", put("config", to="small"), ["`object`", "$.config"]),
    ("more layers", put("config", "n_layer", to=3), ["state table"]),
    ("no heads", put("config", "n_head", to=0), [">= 1", "$.config.n_head"]),
    ("larger vocabulary", put("config", "vocab_size", to=61), ["outputs of program logprobs-4 do not fit"]),
    ("cutoffs out of order", put("config", "cutoffs", to=[30, 20]), ["cutoffs [30, 20]", "vocabulary of 60"]),
    ("cutoffs too large", put("config", "cutoffs", to=[60]), ["cutoffs [60]", "vocabulary of 60"]),
    ("unknown start", put("dialect", "memory_start", to="noise"), ["'noise'", "$.dialect.memory_start"]),
    ("window of nothing", put("dialect", "window", to=0), [">= 1", "$.dialect.window"]),
    ("no states", put("states", to=[]), ["state table"]),
    ("a state missing", drop("states", 1), ["state table"]),
    ("state table shape", put("states", 0, "shape", to=[3, 2, 8, 8]), ["state table"]),
    ("state table axis", put("states", 0, "axis", to=1), ["state table"]),
    ("state table name", put("states", 0, "name", to="layers.09.key"), ["state table"]),
    ("state dtype", put("states", 0, "dtype", to="float16"), ["'float16'", "$.states[0].dtype"]),
    ("unknown update rule", put("states", 2, "update", to="spiral"), ["layers.01.key", "rule 'spiral'", "rolled"]),
    ("no row of that name", put("states", 0, "initial", to="initial.nothing"), ["initial.nothing", "weights"]),
    (
        "initial row of another shape",
        put("states", 0, "initial", to="layers.00.attention.norm.weight"),
        ["layers.00.attention.norm.weight", "[16]", "[2, 8]"],
    ),
    ("programs are no list", put("programs", to={}), ["`array`", "$.programs"]),
    ("no programs", put("programs", to=[]), ["$.programs"]),
    ("unknown program kind", put("programs", 1, "kind", to="tail.3"), ["logprobs-1", "'tail.3'", "logprobs"]),
    ("unknown program rule", put("programs", 1, "update", to="spiral"), ["logprobs-1", "'spiral'", "rolled"]),
    ("a program twice", same_program_twice, ["two programs are logprobs of segment length 4"]),
    ("a program's name twice", same_name_twice, ["two programs are called logprobs-4"]),
    (
        "program file not listed",
        put("programs", 0, "file", to="other.onnx"),
        ["other.onnx is used but not in the list"],
    ),
    ("an input missing", drop("programs", 0, "inputs", 2), ["inputs of program logprobs-4"]),
    ("an input renamed", put("programs", 1, "inputs", 0, "name", to="ids"), ["inputs of program logprobs-1"]),
    ("an output's shape", put("programs", 1, "outputs", 0, "shape", to=[3, 1, 61]), ["outputs of program logprobs-1"]),
    ("weights not listed", put("weights", to="other.bin"), ["other.bin is used but not in the list"]),
    ("vocabulary not listed", put("vocabulary", to="vocabulary.json"), ["vocabulary.json is used but not in the list"]),
    ("files are a list", put("files", to=[]), ["`object`", "$.files"]),
    ("a negative size", put("files", "report.json", "size", to=-1), [">= 0", "$.files"]),
    ("a hash too short", put("files", "report.json", "sha256", to="abc"), ["$.files"]),
    ("provenance is text", put("provenance", to="from a friend"), ["`object`", "$.provenance"]),
]


@pytest.mark.parametrize(("edit", "words"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_a_damaged_manifest_is_refused(bundle, edit, words):
    manifest = read_manifest(bundle)
    edit(manifest)
    write_manifest(bundle, manifest)
    assert_says(refusal(bundle), *words)


PATHS_THAT_LEAVE = ["../x", "/abs", "a\\..\\b", "..", "a/../../b", "a/../report.json", "C:x", "./report.json", ".", ""]


@pytest.mark.parametrize("path", [*PATHS_THAT_LEAVE, "a//b", "a\0b", "report.json/"])
def test_a_path_that_is_not_plainly_inside_the_bundle_is_refused(bundle, path):
    for edit in (list_as(path), rename_weights(path)):
        manifest = read_manifest(bundle)
        edit(manifest)
        with pytest.raises(BundleError) as caught:
            decode_manifest(json.dumps(manifest).encode(), "manifest.json")
        assert_says(str(caught.value), repr(path), "leaves the bundle", "export the model again")


def test_a_file_outside_is_not_even_looked_at(bundle, tmp_path):
    (bundle / "report.json").rename(tmp_path / "x")
    manifest = read_manifest(bundle)
    manifest["files"]["../x"] = manifest["files"].pop("report.json")
    write_manifest(bundle, manifest)
    assert_says(refusal(bundle), "'../x' leaves the bundle")


def test_a_newer_major_version_is_named_even_when_nothing_else_is_understood(bundle):
    write_manifest(bundle, {"format": "txl-deploy.bundle", "format_version": "3.1", "everything": "is different"})
    assert_says(refusal(bundle), "format 3.1", "up to 1.x", "upgrade txl-deploy")


def test_a_newer_minor_version_with_unknown_fields_loads(bundle):
    manifest = read_manifest(bundle)
    manifest["format_version"] = "1.99"

    def add_unknown_fields(node: object) -> None:
        if isinstance(node, dict):
            for name, child in list(node.items()):
                if name != "files":
                    add_unknown_fields(child)
            node["from the future"] = {"nested": [1, None]}
        elif isinstance(node, list):
            for child in node:
                add_unknown_fields(child)

    add_unknown_fields({name: part for name, part in manifest.items() if name not in ("parity", "provenance")})
    manifest["from the future"] = True
    for record in manifest["files"].values():
        record["compressed"] = False
    write_manifest(bundle, manifest)
    use(bundle)
    known = msgspec.to_builtins(open_bundle(bundle).manifest)
    assert "from the future" not in known


def test_states_named_with_another_update_rule_are_refused_before_anything_else(bundle):
    manifest = read_manifest(bundle)
    for state in manifest["states"]:
        state["update"] = "ring-7"
        state["shape"] = [3, 2, 11, 8]
    write_manifest(bundle, manifest)
    assert_says(refusal(bundle), "layers.00.key has update rule 'ring-7', this version knows rolled")


# --- graphs -------------------------------------------------------------------------------------------------------


def rewrite(bundle: Path, name: str, edit: Callable[[onnx.ModelProto], None]) -> None:
    """Change a graph and let the manifest expect the change."""
    model = onnx.load(str(bundle / name), load_external_data=False)
    edit(model)
    (bundle / name).write_bytes(model.SerializeToString())
    accept(bundle, name)


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for value in (*graph.input, *graph.output):
        if value.name == old:
            value.name = new
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new


def other_shape(value: onnx.ValueInfoProto, axis: int, size: int) -> None:
    value.type.tensor_type.shape.dim[axis].dim_value = size


def free_axis(value: onnx.ValueInfoProto, axis: int) -> None:
    value.type.tensor_type.shape.dim[axis].dim_param = "any"


GRAPH_DAMAGE: list[tuple[str, Callable[[onnx.ModelProto], None], list[str]]] = [
    ("input renamed", lambda m: rename(m.graph, "tokens", "ids"), ["inputs, ids is int32 [3, 4]", "says absent"]),
    ("output renamed", lambda m: rename(m.graph, "logprobs", "scores"), ["outputs, logprobs is absent"]),
    ("input of another length", lambda m: other_shape(m.graph.input[3], 2, 8), ["logprobs-4.onnx"]),
    ("input of any length", lambda m: free_axis(m.graph.input[1], 0), ["inputs, valid is int32 ['any']", "[3]"]),
    ("output of another shape", lambda m: other_shape(m.graph.output[0], 2, 61), ["logprobs-4.onnx"]),
    ("one more input", lambda m: m.graph.input.append(onnx.helper.make_tensor_value_info("more", 1, [1])), ["more is"]),
    ("an output fewer", lambda m: m.graph.output.pop(), ["new_memory.layers.01.value is absent", "[3, 2, 7, 8]"]),
    ("unknown operator", lambda m: setattr(m.graph.node[0], "op_type", "Imagine"), ["Imagine"]),
    ("unknown opset", lambda m: setattr(m.opset_import[0], "version", 999), ["expected a graph ONNX Runtime can load"]),
    ("no nodes", lambda m: m.graph.ClearField("node"), ["logprobs-4.onnx"]),
]


@pytest.mark.parametrize(("edit", "words"), [row[1:] for row in GRAPH_DAMAGE], ids=[row[0] for row in GRAPH_DAMAGE])
def test_a_graph_that_is_not_what_the_manifest_says_is_refused(bundle, edit, words):
    rewrite(bundle, "logprobs-4.onnx", edit)
    assert_says(refusal(bundle), "logprobs-4.onnx", *words)


@pytest.mark.parametrize("data", [b"", b"not a graph", bytes(1000)], ids=["empty", "text", "zeros"])
def test_a_file_that_is_no_graph_is_refused(bundle, data):
    (bundle / "logprobs-1.onnx").write_bytes(data)
    accept(bundle, "logprobs-1.onnx")
    assert_says(refusal(bundle), "logprobs-1.onnx", "expected a graph ONNX Runtime can load")


def test_graphs_in_each_others_place_are_refused(bundle):
    one, four = (bundle / name for name in ("logprobs-1.onnx", "logprobs-4.onnx"))
    one.rename(bundle / "aside")
    four.rename(one)
    (bundle / "aside").rename(four)
    for path in (one, four):
        accept(bundle, path.name)
    assert_says(refusal(bundle), "logprobs-4.onnx", "tokens is int32 [3, 1], the manifest says int32 [3, 4]")


@pytest.mark.parametrize("location", ["../outside", "{folder}/outside", "not there"])
def test_a_graph_that_reads_weights_from_elsewhere_is_refused(bundle, tmp_path, location):
    shutil.copy(bundle / "weights.safetensors", tmp_path / "outside")

    def point_elsewhere(model: onnx.ModelProto) -> None:
        entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
        (first, *_) = (entry for entry in entries if entry.key == "location")
        first.value = location.format(folder=tmp_path)

    rewrite(bundle, "logprobs-4.onnx", point_elsewhere)
    assert_says(refusal(bundle), "logprobs-4.onnx", "expected a graph ONNX Runtime can load")


def test_weights_of_other_sizes_are_refused(bundle):
    path = bundle / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-2000])
    accept(bundle, path.name)
    assert_says(refusal(bundle), ".onnx", "expected a graph ONNX Runtime can load")


# --- what else is read from a bundle ------------------------------------------------------------------------------


def test_initial_rows_that_cannot_be_read_are_refused(bundle):
    manifest = read_manifest(bundle)
    manifest["states"][0]["initial"] = "initial.layers.00.key"
    write_manifest(bundle, manifest)
    (bundle / "weights.safetensors").write_bytes(b"not safetensors")
    accept(bundle, "weights.safetensors")
    assert_says(refusal(bundle), "weights.safetensors", "expected the bundle's weights")


def test_initial_rows_of_another_kind_are_refused(bundle):
    path = bundle / "weights.safetensors"
    save_file(load_file(path) | {"initial.layers.00.key": np.zeros((2, 8), np.float64)}, path)
    accept(bundle, path.name)
    manifest = read_manifest(bundle)
    manifest["states"][0]["initial"] = "initial.layers.00.key"
    write_manifest(bundle, manifest)
    assert_says(refusal(bundle), "initial.layers.00.key", "float64 [2, 8]", "float32 [2, 8]")


def test_the_report_is_read_as_it_was_written(bundle):
    report = open_bundle(bundle).report()
    assert report["passed"] is True
    assert report == json.loads((bundle / "report.json").read_bytes())


def test_a_bundle_without_a_report_has_an_empty_one(bundle):
    opened = open_bundle(bundle)
    (bundle / "report.json").unlink()
    assert opened.report() == {}


@pytest.mark.parametrize(
    "data", [b"{", b"\xff", b'{"passed": "\xff"}', b"[" * 100_000], ids=lambda data: repr(data[:9])
)
def test_a_report_that_cannot_be_read_is_refused(bundle, data):
    opened = open_bundle(bundle)
    (bundle / "report.json").write_bytes(data)
    with pytest.raises(BundleError, match=r"report\.json: .*expected a report; export the model again"):
        opened.report()
