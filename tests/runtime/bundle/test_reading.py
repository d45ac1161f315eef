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
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.manifest import decode_manifest
from txl_runtime.bundle.reading import open_bundle

B = 3
GRAPHS = ["head.onnx", "hidden-ring.onnx", "logprobs-1.onnx", "logprobs-4.onnx"]
FILES = [*GRAPHS, "report.html", "report.json", "selftest.safetensors", "weights.safetensors"]
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
    """Load a bundle and run each of its programs, by either update rule."""
    for update in ("ring", "rolled"):
        model = load(path, update=update, **options)
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
    assert_says(refusal(bundle), name, "Is a directory", "expected a plain file")


def test_a_link_out_of_the_bundle_is_refused(bundle, tmp_path):
    outside = tmp_path / "outside"
    (bundle / "weights.safetensors").rename(outside)
    (bundle / "weights.safetensors").symlink_to(outside)
    for verify_files in (True, False):
        message = refusal(bundle, verify_files=verify_files)
        assert_says(message, "weights.safetensors", "a link that leaves the bundle", "plain file")


def test_a_dangling_link_is_refused(bundle):
    (bundle / "selftest.safetensors").unlink()
    (bundle / "selftest.safetensors").symlink_to("nowhere")
    assert_says(refusal(bundle), "selftest.safetensors", "missing")


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


def reach(node: Any, keys: tuple[Any, ...]) -> tuple[Any, Any]:
    """What the last of some keys is in, and that key; an entry of a list may be given by its name.

    Of states that have one name, ring and rolled, the first is meant, which is the ring's.
    """
    for depth, key in enumerate(keys):
        place = key
        if isinstance(node, list) and isinstance(key, str):
            place = next(index for index, entry in enumerate(node) if entry["name"] == key)
        if depth == len(keys) - 1:
            return node, place
        node = node[place]
    raise AssertionError("no key")


def put(*keys: Any, to: Any) -> Callable[[Manifest], None]:
    """Set one field, however deep."""

    def edit(manifest: Manifest) -> None:
        node, place = reach(manifest, keys)
        node[place] = to

    return edit


def drop(*keys: Any) -> Callable[[Manifest], None]:
    def edit(manifest: Manifest) -> None:
        node, place = reach(manifest, keys)
        del node[place]

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
    manifest["programs"].append(dict(manifest["programs"][-1]))


def one_more_length(manifest: Manifest) -> None:
    """A further program of a longer segment, for which the ring has no room."""
    node, place = reach(manifest, ("programs", "hidden-ring-4"))
    longer = json.loads(json.dumps(node[place])) | {"name": "hidden-ring-8", "segment_length": 8}
    longer["inputs"][0]["shape"], longer["outputs"][0]["shape"] = [3, 8], [3, 8, 16]
    node.append(longer)


def rename_input(manifest: Manifest) -> None:
    manifest["inputs"][0]["name"] = "ids"


def input_twice(manifest: Manifest) -> None:
    manifest["inputs"].append(dict(manifest["inputs"][0]))


def swap(*names: str) -> Callable[[Manifest], None]:
    """Let two programs be called by each other's names."""

    def edit(manifest: Manifest) -> None:
        for program in manifest["programs"]:
            if program["name"] in names:
                program["name"] = names[1 - names.index(program["name"])]

    return edit


def start_as(state: str, tensor: str) -> Callable[[Manifest], None]:
    """Let a state start as a tensor of the weight file, by every update rule."""

    def edit(manifest: Manifest) -> None:
        for entry in manifest["states"]:
            if entry["name"] == state:
                entry["initial"] = tensor

    return edit


def without_rule(rule: str) -> Callable[[Manifest], None]:
    """Leave out the programs of one update rule, but not its states."""

    def edit(manifest: Manifest) -> None:
        manifest["programs"] = [program for program in manifest["programs"] if program["update"] != rule]

    return edit


DAMAGE: list[tuple[str, Callable[[Manifest], None], list[str]]] = [
    ("another format", put("format", to="txl-deploy.checkpoint"), ["'txl-deploy.checkpoint'", "'txl-deploy.bundle'"]),
    ("no format", drop("format"), ["`format`"]),
    ("format is a number", put("format", to=1), ["`str`", "`int`", "$.format"]),
    ("version is a number", put("format_version", to=1.0), ["`str`", "`float`", "$.format_version"]),
    ("version is no version", put("format_version", to="latest"), ["format_version is 'latest'", "'2.1'"]),
    ("version is empty", put("format_version", to=""), ["format_version is ''"]),
    ("newer major version", put("format_version", to="3.0"), ["format 3.0", "up to 2.x", "upgrade txl-deploy"]),
    ("much newer version", put("format_version", to="10.3.1"), ["format 10.3.1", "up to 2.x"]),
    ("B is text", put("batch_size", to="3"), ["`int`", "`str`", "$.batch_size"]),
    ("B is a fraction", put("batch_size", to=3.5), ["$.batch_size"]),
    ("B is negative", put("batch_size", to=-3), [">= 1", "$.batch_size"]),
    ("B is zero", put("batch_size", to=0), [">= 1", "$.batch_size"]),
    ("B is huge", put("batch_size", to=2**40), ["$.batch_size"]),
    ("B changed", put("batch_size", to=4), ["state table", "B 4"]),
    ("M is negative", put("counters", "fill", "most", to=-1), [">= 0", "$.counters[...].most"]),
    ("M is null", put("counters", "fill", "most", to=None), ["`null`", "$.counters[...].most"]),
    ("M changed", put("counters", "fill", "most", to=8), ["state table", "8 rows"]),
    ("M is none", put("counters", "fill", "most", to=0), ["state table", "0 rows"]),
    ("L is negative", put("programs", 0, "segment_length", to=-4), [">= 0", "$.programs[0].segment_length"]),
    (
        "L is zero",
        put("programs", "hidden-ring-4", "segment_length", to=0),
        ["program hidden-ring-4", "segments of 0"],
    ),
    ("L changed", put("programs", "logprobs-1", "segment_length", to=2), ["program hidden-ring-2 is missing"]),
    ("L is longer", put("programs", "logprobs-4", "segment_length", to=5), ["state table"]),
    (
        "L in a shared file",
        put("programs", "hidden-ring-1", "segment_length", to=4),
        ["program hidden-ring-1 is missing"],
    ),
    ("L of one rule alone", one_more_length, ["state table"]),
    ("no counter", put("counters", to={}), ["no counter is called fill"]),
    ("another counter", put("counters", "laps", to={"start": 0, "most": 1}), ["counter 'laps'"]),
    ("more rows at first than ever", put("counters", "fill", "start", to=8), ["starts at 8"]),
    ("unknown precision", put("precision", to="fp64"), ["'fp64'", "$.precision"]),
    ("model id is no hash", put("model_id", to="the one of last week"), ["$.model_id"]),
    ("no inputs", drop("inputs"), ["`inputs`"]),
    ("inputs are text", put("inputs", to="tokens"), ["`array`", "$.inputs"]),
    ("another input", rename_input, ["inputs of program hidden-ring-4"]),
    ("an input twice", input_twice, ["two inputs are called tokens"]),
    ("unknown role", put("inputs", "tokens", "role", to="words"), ["'words'", "$.inputs[0].role"]),
    ("no vocabulary", put("inputs", "tokens", "vocab", to=None), ["input tokens of role tokens has vocab None"]),
    ("larger vocabulary", put("inputs", "tokens", "vocab", to=61), ["logprobs has 60 columns", "61"]),
    ("a count of two axes", put("inputs", "fill", "shape", to=["B", "L"]), ["input fill", "expected a count"]),
    ("a count that is missing", drop("inputs", "valid"), ["valid"]),
    ("columns", put("outputs", 0, "shape", to=["B", "L", 61]), ["logprobs has 61 columns"]),
    ("no size", put("outputs", 0, "shape", to=["B", "T", 60]), ["'T'", "$.outputs[0].shape"]),
    (
        "clusters out of order",
        put("outputs", 0, "clusters", to=[[0, 30], [30, 20], [20, 60]]),
        ["clusters [[0, 30], [30, 20]", "vocabulary of 60"],
    ),
    ("clusters too large", put("outputs", 0, "clusters", to=[[0, 61]]), ["clusters [[0, 61]]", "vocabulary of 60"]),
    ("another cluster", put("outputs", 0, "clusters", to=[[0, 20], [20, 60]]), ["program tail.1 is missing"]),
    ("another width", put("outputs", 0, "width", to=17), ["program hidden-ring-4 do not fit"]),
    ("no width", put("outputs", 0, "width", to=None), ["clusters"]),
    ("unknown lengths", put("lengths", to="any"), ["'any'", "$.lengths"]),
    ("unknown streams", put("streams", to="some"), ["'some'", "$.streams"]),
    ("a boundary outside of the vocabulary", put("boundary_token", to=60), ["boundary_token is 60"]),
    ("family is text", put("family", to="transformer_xl"), ["`object`", "$.family"]),
    ("no states", put("states", to=[]), ["state table"]),
    ("a state missing", drop("states", 1), ["state table"]),
    ("state table shape", put("states", 0, "shape", to=[3, 2, 8, 8]), ["state table"]),
    ("state table axis", put("states", 0, "row_axis", to=1), ["state table"]),
    ("state table name", put("states", 0, "name", to="layers.09.key"), ["state table"]),
    ("state dtype", put("states", 0, "dtype", to="float64"), ["'float64'", "$.states[0].dtype"]),
    ("state of another precision", put("states", 0, "dtype", to="float16"), ["state table"]),
    (
        "unknown update rule",
        put("states", 2, "update", to="spiral"),
        ["layers.01.key", "rule 'spiral'", "ring, rolled"],
    ),
    ("a ring of other slots", put("states", 0, "slots", to=10), ["state table"]),
    ("a ring without slots", put("states", 3, "slots", to=None), ["state table"]),
    ("a ring of no slots", put("states", 3, "slots", to=0), [">= 1", "$.states[3].slots"]),
    ("a ring without room to spill", put("states", 0, "shape", to=[3, 2, 11, 8]), ["state table"]),
    ("slots of what is rolled", put("states", 4, "slots", to=7), ["state table"]),
    ("state table axis beyond", put("states", 0, "row_axis", to=4), ["state table"]),
    ("state without rows", put("states", 0, "row_axis", to=None), ["state table"]),
    ("another batch axis", put("states", 0, "batch_axis", to=1), ["state table"]),
    ("a state that is shared", put("states", 0, "batch_axis", to=None), ["state table"]),
    ("a memory that grows", put("states", 0, "rows", to=[0, 15]), ["state table"]),
    ("a memory that is absent at first", put("states", 0, "absent", to=True), ["state table"]),
    ("a memory of whole numbers", put("states", 0, "dtype", to="int32"), ["state table"]),
    ("more values than memory has", put("states", 4, "shape", to=[3, 2**30, 7, 2**30]), ["state table", "values"]),
    ("a state of both rules twice", put("states", 0, "update", to="rolled"), ["two states of rule rolled"]),
    ("no row of that name", start_as("layers.00.key", "initial.nothing"), ["initial.nothing", "weights"]),
    (
        "initial row of one rule alone",
        put("states", 0, "initial", to="layers.00.attention.norm.weight"),
        ["layers.00.key starts as layers.00.attention.norm.weight and as None"],
    ),
    (
        "initial row of another shape",
        start_as("layers.00.key", "layers.00.attention.norm.weight"),
        ["layers.00.attention.norm.weight", "[16]", "[2, 8]"],
    ),
    ("programs are no list", put("programs", to={}), ["`array`", "$.programs"]),
    ("no programs", put("programs", to=[]), ["$.programs"]),
    ("unknown program kind", put("programs", "logprobs-1", "kind", to="tail.3"), ["program logprobs-1", "kind tail.3"]),
    ("unknown program rule", put("programs", 1, "update", to="spiral"), ["hidden-ring-1", "'spiral'", "ring, rolled"]),
    ("a program's rule", put("programs", "logprobs-1", "update", to="ring"), ["programs of rule ring are of kinds"]),
    (
        "a softmax that keeps memory",
        put("programs", "head", "update", to="ring"),
        ["program head has update rule 'ring'"],
    ),
    ("a program twice", same_program_twice, ["program another", "segments of 4"]),
    ("a program's name twice", same_name_twice, ["two programs are called logprobs-1"]),
    (
        "programs in each other's place",
        swap("hidden-ring-4", "hidden-ring-1"),
        ["program hidden-ring-1 has segments of 4"],
    ),
    ("a program missing", drop("programs", "logprobs-1"), ["program logprobs-1 is missing"]),
    ("a program of the ring missing", drop("programs", "hidden-ring-1"), ["program hidden-ring-1 is missing"]),
    ("no softmax", drop("programs", "head"), ["program head is missing"]),
    ("a rule without programs", without_rule("ring"), ["state table"]),
    ("a rule without its states", without_rule("rolled"), ["state table"]),
    (
        "program file not listed",
        put("programs", "hidden-ring-1", "file", to="other.onnx"),
        ["other.onnx is used but not in the list"],
    ),
    ("an input missing", drop("programs", "logprobs-4", "inputs", "fill"), ["inputs of program logprobs-4"]),
    ("no head", drop("programs", "hidden-ring-4", "inputs", "head"), ["inputs of program hidden-ring-4"]),
    (
        "an input renamed",
        put("programs", "logprobs-1", "inputs", 0, "name", to="ids"),
        ["inputs of program logprobs-1"],
    ),
    (
        "an output's shape",
        put("programs", "logprobs-1", "outputs", 0, "shape", to=[3, 1, 61]),
        ["outputs of program logprobs-1"],
    ),
    ("rows that are fixed", put("programs", "head", "inputs", 0, "shape", to=[3, 16]), ["inputs of program head"]),
    ("a size of words", put("programs", "head", "inputs", 0, "shape", to=["some", 16]), ["'some'", "shape"]),
    (
        "a batch of any size",
        put("programs", 0, "inputs", 0, "shape", to=["rows", 4]),
        ["inputs of program hidden-ring-4"],
    ),
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
    assert_says(refusal(bundle), "format 3.1", "up to 2.x", "upgrade txl-deploy")


def test_a_newer_minor_version_with_unknown_fields_loads(bundle):
    manifest = read_manifest(bundle)
    manifest["format_version"] = "2.99"

    def add_unknown_fields(node: object) -> None:
        if isinstance(node, dict):
            for name, child in list(node.items()):
                if name not in ("files", "counters", "opset"):
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
    assert_says(refusal(bundle), "layers.00.key has update rule 'ring-7', this version knows ring, rolled")


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


ROLLED, RING, HEAD = "logprobs-4.onnx", "hidden-ring.onnx", "head.onnx"
GRAPH_DAMAGE: list[tuple[str, str, Callable[[onnx.ModelProto], None], list[str]]] = [
    (
        "input renamed",
        ROLLED,
        lambda m: rename(m.graph, "tokens", "ids"),
        ["has ids of 2 axes among its inputs"],
    ),
    (
        "output renamed",
        ROLLED,
        lambda m: rename(m.graph, "logprobs", "scores"),
        ["lacks logprobs float32[batch, 4, 60] among its outputs"],
    ),
    ("input of another length", ROLLED, lambda m: other_shape(m.graph.input[3], 2, 8), []),
    (
        "input of any length",
        ROLLED,
        lambda m: free_axis(m.graph.input[1], 0),
        ["one of its inputs is valid int32[any]", "valid int32[batch]"],
    ),
    ("output of another shape", ROLLED, lambda m: other_shape(m.graph.output[0], 2, 61), []),
    (
        "one more input",
        ROLLED,
        lambda m: m.graph.input.append(onnx.helper.make_tensor_value_info("more", 1, [1])),
        ["has more of 1 axes among its inputs", "expected those of the manifest"],
    ),
    (
        "an output fewer",
        ROLLED,
        lambda m: m.graph.output.pop(),
        ["lacks new_memory.layers.01.value", "[batch, 2, 7, 8]"],
    ),
    ("unknown operator", ROLLED, lambda m: setattr(m.graph.node[0], "op_type", "Imagine"), ["Imagine"]),
    (
        "unknown opset",
        ROLLED,
        lambda m: setattr(m.opset_import[0], "version", 999),
        ["operators of '' in version 999", "expected ONNX's own in 18 to 24"],
    ),
    ("no nodes", ROLLED, lambda m: m.graph.ClearField("node"), []),
    (
        "ring: no head",
        RING,
        lambda m: rename(m.graph, "head", "tail"),
        ["has tail of 1 axes among its inputs"],
    ),
    (
        "ring: other result",
        RING,
        lambda m: rename(m.graph, "hidden", "logprobs"),
        ["lacks hidden float32[batch, 4, 16] among its outputs"],
    ),
    ("ring: other slots", RING, lambda m: other_shape(m.graph.input[4], 2, 11), []),
    (
        "ring: any batch",
        RING,
        lambda m: free_axis(m.graph.input[1], 0),
        ["one of its inputs is valid int32[any]", "valid int32[batch]"],
    ),
    ("ring: any slots", RING, lambda m: free_axis(m.graph.input[5], 2), []),
    ("ring: a state fewer", RING, lambda m: m.graph.output.pop(), ["lacks new_memory.layers.01.value", "15, 8]"]),
    (
        "head: other input",
        HEAD,
        lambda m: rename(m.graph, "hidden", "rows"),
        ["has rows of 2 axes among its inputs"],
    ),
    ("head: other width", HEAD, lambda m: other_shape(m.graph.input[0], 1, 15), []),
    ("head: other vocabulary", HEAD, lambda m: other_shape(m.graph.output[0], 1, 61), []),
    (
        "head: rows of a number",
        HEAD,
        lambda m: other_shape(m.graph.input[0], 0, 3),
        ["one of its inputs is hidden float32[3, 16], expected hidden float32[rows, 16]"],
    ),
]


@pytest.mark.parametrize(
    ("name", "edit", "words"), [row[1:] for row in GRAPH_DAMAGE], ids=[row[0] for row in GRAPH_DAMAGE]
)
def test_a_graph_that_is_not_what_the_manifest_says_is_refused(bundle, name, edit, words):
    rewrite(bundle, name, edit)
    assert_says(refusal(bundle), name, *words)


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_graph_leaves_b_open_where_the_manifest_says_so_and_nowhere_else(bundle, update):
    manifest = read_manifest(bundle)
    for program in manifest["programs"]:
        if program["update"] == update:
            assert program["open_batch"] is True
            program["open_batch"] = False
    write_manifest(bundle, manifest)
    with pytest.raises(BundleError, match=r"is fill int32\[batch\], expected fill int32\[3\] as in the manifest"):
        load(bundle, update=update)


@pytest.mark.parametrize("name", [ROLLED, RING])
def test_a_graph_of_a_fixed_b_is_refused_where_the_manifest_says_that_it_is_open(bundle, name):
    def fix(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param == "batch":
                    size.dim_value = B

    rewrite(bundle, name, fix)
    assert_says(refusal(bundle), name, "is fill int32[3], expected fill int32[batch] as in the manifest")


@pytest.mark.parametrize(("axis", "length"), [(1, 1), (1, 4), (1, 3)])
def test_a_ring_of_one_fixed_segment_length_does_for_no_other(bundle, axis, length):
    """Programs that share a file are held against it one by one."""
    rewrite(bundle, RING, lambda model: other_shape(model.graph.input[0], axis, length))
    message = refusal(bundle)
    assert_says(message, RING)
    assert "one of its inputs is tokens int32" in message or "expected a graph ONNX Runtime can load" in message


def test_only_what_is_run_is_opened(bundle):
    """A broken graph of the other update rule is found by whoever asks for that."""
    rewrite(bundle, RING, lambda model: model.graph.ClearField("node"))
    model = load(bundle, update="rolled")
    model.stream().step(np.zeros((B, 1), int))
    with pytest.raises(BundleError, match=r"hidden-ring\.onnx"):
        load(bundle)


@pytest.mark.parametrize("data", [b"", b"not a graph", bytes(1000)], ids=["empty", "text", "zeros"])
def test_a_file_that_is_no_graph_is_refused(bundle, data):
    (bundle / "logprobs-1.onnx").write_bytes(data)
    accept(bundle, "logprobs-1.onnx")
    assert_says(refusal(bundle), "logprobs-1.onnx: has ", ", expected ", "; export the model again")


def test_graphs_in_each_others_place_are_refused(bundle):
    one, four = (bundle / name for name in ("logprobs-1.onnx", "logprobs-4.onnx"))
    one.rename(bundle / "aside")
    four.rename(one)
    (bundle / "aside").rename(four)
    for path in (one, four):
        accept(bundle, path.name)
    assert_says(refusal(bundle), "logprobs-4.onnx", "tokens int32[batch, 1], expected tokens int32[batch, 4]")


@pytest.mark.parametrize("location", ["../outside", "{folder}/outside", "not there"])
def test_a_graph_that_reads_weights_from_elsewhere_is_refused(bundle, tmp_path, location):
    shutil.copy(bundle / "weights.safetensors", tmp_path / "outside")

    def point_elsewhere(model: onnx.ModelProto) -> None:
        entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
        (first, *_) = (entry for entry in entries if entry.key == "location")
        first.value = location.format(folder=tmp_path)

    rewrite(bundle, "logprobs-4.onnx", point_elsewhere)
    assert_says(refusal(bundle), "logprobs-4.onnx", "bytes of it, in the graph or in weights.safetensors")


def test_weights_of_other_sizes_are_refused(bundle):
    path = bundle / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-2000])
    accept(bundle, path.name)
    assert_says(refusal(bundle), ".onnx", "bytes of it, in the graph or in weights.safetensors")


# --- what else is read from a bundle ------------------------------------------------------------------------------


def test_initial_rows_that_cannot_be_read_are_refused(bundle):
    manifest = read_manifest(bundle)
    start_as("layers.00.key", "initial.layers.00.key")(manifest)
    write_manifest(bundle, manifest)
    (bundle / "weights.safetensors").write_bytes(b"not safetensors")
    accept(bundle, "weights.safetensors")
    assert_says(refusal(bundle), "weights.safetensors", "expected the bundle's weights")


def test_initial_rows_of_another_kind_are_refused(bundle):
    path = bundle / "weights.safetensors"
    save_file(load_file(path) | {"initial.layers.00.key": np.zeros((2, 8), np.float64)}, path)
    accept(bundle, path.name)
    manifest = read_manifest(bundle)
    start_as("layers.00.key", "initial.layers.00.key")(manifest)
    write_manifest(bundle, manifest)
    assert_says(refusal(bundle), "initial.layers.00.key", "float64 [2, 8]", "float32 [2, 8]")


def test_the_report_is_read_as_it_was_written(bundle):
    report = open_bundle(bundle).report()
    assert report["passed"] is True
    assert report == json.loads((bundle / "report.json").read_bytes())


def test_a_bundle_without_a_report_has_an_empty_one(bundle):
    manifest = read_manifest(bundle)
    del manifest["files"]["report.json"]
    write_manifest(bundle, manifest)
    assert open_bundle(bundle).report() == {}, "what is not listed is not read"
    (bundle / "report.json").unlink()
    assert open_bundle(bundle).report() == {}


@pytest.mark.parametrize(
    "data", [b"{", b"\xff", b'{"passed": "\xff"}', b"[" * 100_000], ids=lambda data: repr(data[:9])
)
def test_a_report_that_cannot_be_read_is_refused(bundle, data):
    (bundle / "report.json").write_bytes(data)
    accept(bundle, "report.json")
    opened = open_bundle(bundle)
    with pytest.raises(BundleError, match=r"report\.json: .*expected a report; export the model again"):
        opened.report()
