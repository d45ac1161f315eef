"""Files of a bundle that are not what they should be, and graphs that are not what the manifest says.

Each is refused in one line that says what to do: a `BundleError` from loading the bundle or from running each of its
programs once. `test_bad_bundles.py` has further files, in every place of a bundle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from frozen import frozen
from resealing import reseal
from safetensors.numpy import load_file, save_file
from txl_runtime import BundleError, load
from txl_runtime.bundle.reading import open_bundle

ADVICE = ("export", "copy", "upgrade", "make", "report", "expected")
WEIGHTS = "weights.safetensors"


@pytest.fixture
def bundle(tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(frozen("ring"), tmp_path / "a bundle.txl"))


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


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def moved_outside(path: Path) -> None:
    path.rename(path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, bool]] = {
    "missing": (
        Path.unlink,
        "missing, expected a file of {size} bytes; export the model again, or copy the bundle",
        True,
    ),
    "shorter": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "{less} bytes, expected {size}", True),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"0"), "{more} bytes, expected {size}", True),
    "one bit": (flipped, "its SHA-256 is not the manifest's", False),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "Is a directory, expected a plain file", True),
    "a link to nothing": (lambda path: (path.unlink(), path.symlink_to("nowhere")), "missing", True),
    "a link out": (moved_outside, "a link that leaves the bundle, expected a plain file", True),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [WEIGHTS, "hidden-ring.onnx", "selftest.safetensors"])
def test_a_damaged_file_is_refused_and_without_hashing_all_but_another_content(bundle, name, damage):
    damaged, said, always = DAMAGE[damage]
    size = (bundle / name).stat().st_size
    damaged(bundle / name)
    said = said.format(size=size, less=size - 1, more=size + 1)
    assert_says(refusal(bundle), name, said)
    if always:
        assert_says(refusal(bundle, verify_files=False), name, said)
    elif name != "hidden-ring.onnx":
        use(bundle, verify_files=False)


def test_a_bundle_loads_through_a_link_and_beside_files_that_are_not_listed(bundle, tmp_path):
    use(bundle, verify_files=False)
    (bundle / "notes.txt").write_text("mine")
    (tmp_path / "current").symlink_to(bundle)
    use(tmp_path / "current")
    use(str(bundle), backend="cpu")


def test_what_is_no_bundle_is_refused(bundle, tmp_path):
    (tmp_path / "empty").mkdir()
    assert_says(refusal(bundle / "manifest.json"), "found a file, expected a bundle (a folder)")
    assert_says(refusal(tmp_path / "nothing"), "found nothing, expected a bundle (a folder)", "txl-deploy export")
    assert_says(refusal(tmp_path / "empty"), "no manifest.json", "expected a bundle", "txl-deploy export")
    (bundle / "manifest.json").unlink()
    (bundle / "manifest.json").mkdir()
    assert_says(refusal(bundle), "manifest.json: Is a directory, expected a readable manifest")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\x00", b"null", b"{}", b"[" * 100_000, b'{"format": "\xff"}'])
def test_a_manifest_that_is_no_manifest_is_refused(bundle, data):
    (bundle / "manifest.json").write_bytes(data)
    assert_says(refusal(bundle), "manifest.json", "export the model again")


# --- graphs -------------------------------------------------------------------------------------------------------


def rewrite(bundle: Path, name: str, edit: Callable[[onnx.ModelProto], Any]) -> None:
    """Change a graph and let the manifest expect the change."""
    model = onnx.load(str(bundle / name), load_external_data=False)
    edit(model)
    (bundle / name).write_bytes(model.SerializeToString())
    reseal(bundle)


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
OTHER = onnx.helper.make_tensor_value_info("more", 1, [1])
GRAPHS: list[tuple[str, Callable[[onnx.ModelProto], Any], str]] = [
    (
        ROLLED,
        lambda m: rename(m.graph, "tokens", "ids"),
        "has ids int32[batch, 4] among its inputs, which the manifest does not know",
    ),
    (ROLLED, lambda m: rename(m.graph, "logprobs", "scores"), "lacks logprobs float32[batch, 4, 41] among its outputs"),
    (ROLLED, lambda m: other_shape(m.graph.input[3], 2, 8), ""),
    (ROLLED, lambda m: free_axis(m.graph.input[1], 0), "one of its inputs is valid int32[any], expected valid int32[b"),
    (ROLLED, lambda m: other_shape(m.graph.output[0], 2, 42), ""),
    (
        ROLLED,
        lambda m: m.graph.input.append(OTHER),
        "has more float32[1] among its inputs, which the manifest does not know",
    ),
    (ROLLED, lambda m: m.graph.output.pop(), "lacks new_memory.layers.01.value float32[batch, 2, 6, 4]"),
    (ROLLED, lambda m: setattr(m.graph.node[0], "op_type", "Imagine"), "Imagine"),
    (
        ROLLED,
        lambda m: setattr(m.opset_import[0], "version", 999),
        "in version 999, or twice, expected ONNX's own in 18 to 24",
    ),
    (ROLLED, lambda m: m.graph.ClearField("node"), ""),
    (RING, lambda m: rename(m.graph, "head", "tail"), "lacks head int32[batch] among its inputs"),
    (RING, lambda m: rename(m.graph, "hidden", "logprobs"), "lacks hidden float32[batch, 4, 8] among its outputs"),
    (RING, lambda m: other_shape(m.graph.input[4], 2, 11), ""),
    (RING, lambda m: free_axis(m.graph.input[5], 2), ""),
    (RING, lambda m: other_shape(m.graph.input[0], 1, 4), ""),  # programs that share it are held against it one by one
    (HEAD, lambda m: rename(m.graph, "hidden", "rows"), "lacks hidden float32[rows, 8] among its inputs"),
    (HEAD, lambda m: other_shape(m.graph.input[0], 1, 7), ""),
    (HEAD, lambda m: other_shape(m.graph.output[0], 1, 42), ""),
    (HEAD, lambda m: other_shape(m.graph.input[0], 0, 3), "hidden float32[3, 8], expected hidden float32[rows, 8]"),
]


@pytest.mark.parametrize(("name", "edit", "said"), GRAPHS)
def test_a_graph_that_is_not_what_the_manifest_says_is_refused(bundle, name, edit, said):
    rewrite(bundle, name, edit)
    assert_says(refusal(bundle), name, said)


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_graph_leaves_b_open_where_the_manifest_says_so_and_nowhere_else(bundle, update):
    programs = json.loads((bundle / "manifest.json").read_bytes())["programs"]
    for program in programs:
        assert program["open_batch"] is (program["kind"] != "head")
        program["open_batch"] &= program["update"] != update
    reseal(bundle, programs=programs)
    with pytest.raises(BundleError, match=r"is fill int32\[batch\], expected fill int32\[3\] as in the manifest"):
        load(bundle, update=update)


@pytest.mark.parametrize("name", [ROLLED, RING])
def test_a_graph_of_a_fixed_b_is_refused_where_the_manifest_says_that_it_is_open(bundle, name):
    def fix(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param == "batch":
                    size.dim_value = 3

    rewrite(bundle, name, fix)
    assert_says(refusal(bundle), name, "is fill int32[3], expected fill int32[batch] as in the manifest")


def test_only_what_is_run_is_opened(bundle):
    """A broken graph of the other update rule is found by whoever asks for that."""
    rewrite(bundle, RING, lambda model: model.graph.ClearField("node"))
    model = load(bundle, update="rolled")
    model.stream().step(np.zeros((3, 1), int))
    with pytest.raises(BundleError, match=r"hidden-ring\.onnx"):
        load(bundle)


@pytest.mark.parametrize("data", [b"", b"not a graph", bytes(1000)], ids=["empty", "text", "zeros"])
def test_a_file_that_is_no_graph_is_refused(bundle, data):
    (bundle / "logprobs-1.onnx").write_bytes(data)
    reseal(bundle)
    assert_says(refusal(bundle), "logprobs-1.onnx: has ", ", expected ", "; export the model again")


def test_graphs_in_each_others_place_are_refused(bundle):
    one, four = (bundle / name for name in ("logprobs-1.onnx", "logprobs-4.onnx"))
    one.rename(bundle / "aside")
    four.rename(one)
    (bundle / "aside").rename(four)
    reseal(bundle)
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
    reseal(bundle)
    assert_says(refusal(bundle), ".onnx", "bytes of it, in the graph or in weights.safetensors")


# --- what else is read from a bundle ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (None, "initial.k; expected the bundle's weights"),
        (b"not safetensors", "weights.safetensors: .*expected the bundle's weights"),
        (np.zeros((2, 4), np.float64), r"initial\.k is float64 \[2, 4\], expected float32 \[2, 4\]"),
        (np.zeros((8,), np.float32), r"initial\.k is float32 \[8\], expected float32 \[2, 4\]"),
    ],
    ids=["nothing", "no weights", "another type", "another shape"],
)
def test_initial_rows_that_are_not_there_or_do_not_fit_are_refused(bundle, stored, said):
    states = json.loads((bundle / "manifest.json").read_bytes())["states"]
    for state in states:
        state["initial"] = "initial.k" if state["name"] == "layers.00.key" else None
    if isinstance(stored, bytes):
        (bundle / WEIGHTS).write_bytes(stored)
    elif stored is not None:
        save_file(load_file(bundle / WEIGHTS) | {"initial.k": stored}, bundle / WEIGHTS)
    with pytest.raises(BundleError, match=said):
        load(reseal(bundle, states=states))


def test_a_report_is_read_as_it_was_written_where_it_is_listed(bundle):
    assert open_bundle(frozen("0.8/tokens")).report()["passed"] is True
    (bundle / "report.json").write_text('{"passed": true}')
    assert open_bundle(bundle).report() == {}, "what is not listed is not read"
    assert open_bundle(reseal(bundle)).report() == {"passed": True}
    (bundle / "report.json").write_bytes(b"{")
    with pytest.raises(BundleError, match=r"report\.json: .*expected a report; export the model again"):
        open_bundle(reseal(bundle)).report()
