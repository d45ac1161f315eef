"""Folders that LEAPP wrote: read, and refused in one line where they are damaged, hostile, or do not fit together.

The folders of `leapp_folders` have the form of LEAPP 0.7.2, against which the last test holds them. 0.7.0 writes the
same, and 0.6.1 without the lines on Warp.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import txl_runtime
import yaml
from leapp_folders import D, first_values, layers, right, two_nodes, wrong_from_second_step
from safetensors.numpy import save_file
from support import PACKAGES, package
from txl_export import export, verify
from txl_export.families.graph.take.leapp import MOST_BYTES, is_leapp, read_leapp
from txl_runtime.errors import BackendError, CheckpointError, UsageError

HELPERS = Path(__file__).parents[4] / "helpers"
PAGE = Path(__file__).parents[5] / "docs" / "from" / "leapp.md"


@pytest.fixture
def folder(tmp_path):
    return right(tmp_path / "walk")


def changed(folder: Path, old: str, new: str) -> Path:
    """The folder with another text in its YAML file."""
    (table,) = folder.glob("*.yaml")
    text = table.read_text()
    assert old in text
    table.write_text(text.replace(old, new))
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_leapp(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 600
    return str(refused.value)


# ---- what is read


def test_a_folder_says_which_graph_which_states_and_what_they_start_as(folder):
    found = read_leapp(folder)
    assert found.path == folder / "policy.onnx"
    assert found.states == {"h_in": "h_out", "c_in": "c_out"}
    assert {name: array.tolist() for name, array in found.initial.items()} == {
        f"{name}_in": array.tolist() for name, array in first_values().items()
    }
    assert found.rate == 50.0


def test_a_folder_is_recognised_by_its_yaml_file_and_nothing_else_is(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert is_leapp(folder)
    assert is_leapp(folder / "walk.yaml")
    assert is_leapp(tmp_path / "walk:policy")
    os.mkfifo(folder / "a_pipe.yaml")
    assert is_leapp(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("name: x\nof: models:\n")
    others = ["other", "nothing", "nothing:policy", ":policy", "walk/policy.onnx", "x" * 300, "a_pipe"]
    os.mkfifo(tmp_path / "a_pipe")
    assert [name for name in others if is_leapp(tmp_path / name)] == []


def test_of_several_nodes_one_is_taken_by_name(tmp_path):
    two_nodes(tmp_path / "walk")
    assert "walk: has the nodes encoder, policy, expected one of them: FOLDER:NODE" in refusal(tmp_path / "walk")
    assert "has the nodes encoder, policy" in refusal(tmp_path / "walk:critic")
    policy, encoder = read_leapp(tmp_path / "walk:policy"), read_leapp(tmp_path / "walk:encoder")
    assert (policy.path.name, policy.states, list(policy.initial)) == (
        "policy.onnx",
        {"memory_in": "memory_out"},
        ["memory_in"],
    )
    assert (encoder.path.name, encoder.states, encoder.initial) == ("encoder.onnx", {}, {})
    assert encoder.rate is None


def test_of_several_yaml_files_one_is_taken_by_its_path(folder):
    (folder / "copy.yaml").write_bytes((folder / "walk.yaml").read_bytes())
    assert "2 YAML files of LEAPP's" in refusal(folder)
    assert read_leapp(folder / "walk.yaml").states == read_leapp(folder / "copy.yaml").states


@pytest.mark.parametrize("fast", [True, False])
def test_lists_that_are_referred_to_again_are_read_and_tags_make_nothing(folder, fast, monkeypatch, tmp_path):
    """LEAPP writes both: a list that was given for several tensors, and numbers of NumPy's with Python's tags."""
    monkeypatch.setattr(yaml, "CBaseLoader", yaml.CBaseLoader if fast else yaml.BaseLoader)
    call = f"!!python/object/apply:os.mkdir [{tmp_path / 'made'}]"
    said = f"kind: state/joint/position\n      element_names: &id001 [[hip, knee, foot]]\n      scale: {call}"
    changed(folder, "kind: state/joint/position", said)
    changed(folder, "kind: target/joint/position\n      element_names: [[hip, knee, foot]]", "element_names: *id001")
    assert read_leapp(folder).states == {"h_in": "h_out", "c_in": "c_out"}
    assert not (tmp_path / "made").exists()


def test_states_start_as_zeros_where_the_folder_has_no_first_values(folder):
    assert read_leapp(changed(folder, "initial_values: walk_initial_values.safetensors", "x: y")).initial == {}


# ---- what is refused


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  feedback_flow:", "  feed:", "missing required field `feedback_flow`"),
        ("frequency: 50.0", "frequency: .nan", "Expected `float | null`"),
        ("frequency: 50.0", "frequency: -1", "Expected `float"),
        ("policy/h_out: [policy/h_in]", "policy/h_out: policy/h_in", "Expected `array`"),
        ("models:\n", "models:\n - [", "while parsing"),
        ("models:\n", "models: {}\nothers:\n", "length >= 1"),
        ("models:\n", f"x: {'[' * 100_000}\nmodels:\n", "expected YAML of LEAPP's"),
        ("\npipeline", "\n---\npipeline", "expected a single document"),
        ("backend: onnx", "backend: jit", "policy is saved as jit, expected onnx"),
        ("backend: onnx", "back: onnx", "policy is saved as None, expected onnx"),
        ("sha256sum: ", "sha256sum: 0", "its SHA-256 is not the one in walk.yaml"),
        ("policy/h_out: [policy/h_in]", "policy/h_out: [policy/x]", "leads policy/h_out to policy/x, expected one"),
        ("policy/h_out: [policy/h_in]", "policy/x: [policy/h_in]", "leads policy/x to policy/h_in, expected one"),
        ("policy/h_out: [policy/h_in]", "policy/h_out: [policy/c_in]", "to policy/c_in, expected one output"),
        ("model_path: policy.onnx", "model_path: ../walk/../policy.onnx", "expected a file in its folder"),
        ("model_path: policy.onnx", "model_path: /etc/passwd", "expected a file in its folder"),
        ("model_path: policy.onnx", r'model_path: "a\0b"', "expected a file in its folder"),
        ("model_path: policy.onnx", f"model_path: {'./' * 200}policy.onnx", "expected a file in its folder"),
        ("model_path: policy.onnx", "model_path: policies.onnx", "policies.onnx: No such file"),
        ("model_path: policy.onnx", "model_path: .", "not a regular file"),
        ("walk_initial_values", "other", "other.safetensors: No such file"),
        ("walk_initial_values.safetensors", "policy.onnx", "policy.onnx: it has"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(old, new, said, folder):
    assert said in refusal(changed(folder, old, new))


def test_a_node_that_returns_nothing_but_its_states_is_refused(tmp_path):
    """LEAPP writes it where the actions themselves are fed back: its own runtime then returns nothing at all."""
    two_nodes(tmp_path / "walk")
    changed(tmp_path / "walk", "policy/actions: [encoder/last]", "encoder/features: [encoder/last]")
    assert "all that encoder returns is given to it again (features)" in refusal(tmp_path / "walk:encoder")


def bomb(depth: int, width: int, merge: str) -> str:
    lines = ["a0: &a0 {x: y}"] + [
        f"a{n}: &a{n} {merge.format(', '.join([f'*a{n - 1}'] * width))}" for n in range(1, depth)
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        bomb(30, 9, "[{}]"),
        bomb(30, 9, "{{<<: [{}]}}"),
        "a: &a [*a]\n",
        "a: *nobody\n",
        "a: " + "{b: " * 40 + "\n",
        "a:\n" + "".join(f"{'  ' * n}- b:\n" for n in range(1, 60)),
        "a: [" + "x," * 100_000 + "]\n",
    ],
)
def test_bombs_do_not_go_off(text, folder):
    assert "more than 65536 parts" in refusal(changed(folder, "models:", f"{text}models:"))


@pytest.mark.parametrize("text", ["a: !!int " + "9" * 500_000, "frequency: " + ":".join(["59"] * 100_000)])
def test_numbers_that_would_take_minutes_stay_texts(text, folder):
    assert read_leapp(changed(folder, "models:", f"{text}\nmodels:")).states


def test_a_file_that_is_too_large_or_no_text_is_not_one_of_leapps(folder):
    table = folder / "walk.yaml"
    text = table.read_bytes()
    for data in (text + b"#" * MOST_BYTES, text + b"\xff"):
        table.write_bytes(data)
        assert not is_leapp(folder)
        assert "0 YAML files of LEAPP's" in refusal(folder)


@pytest.mark.parametrize("name", ["policy.onnx", "walk_initial_values.safetensors"])
def test_files_that_are_links_out_of_the_folder_are_refused(name, folder, tmp_path):
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    assert f"names {name}, expected a file in its folder" in refusal(folder)
    (folder / "inside").write_bytes((tmp_path / "outside").read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to("inside")
    assert read_leapp(folder).states
    (folder / name).unlink()
    (folder / name).symlink_to(name)  # a circle
    assert f"{name}: " in refusal(folder)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder):
    (folder / "policy.onnx").unlink()
    os.mkfifo(folder / "policy.onnx")
    assert "not a regular file" in refusal(folder)


def test_first_values_that_do_not_fit_are_refused(folder, tmp_path):
    save_file({"policy/h_in": first_values()["h"]}, folder / "walk_initial_values.safetensors")
    assert "nothing for policy/c_in, expected an array" in refusal(folder)
    arrays = {"policy/h_in": np.zeros((1, 3, 4), np.float32), "policy/c_in": first_values()["c"]}
    save_file(arrays, folder / "walk_initial_values.safetensors")
    with pytest.raises(UsageError, match="h_in starts as a tensor of 1 × 3 × 4, expected one that broadcasts over"):
        export(folder, tmp_path / "b")


def test_without_pyyaml_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(BackendError, match=r"takes PyYAML, not installed here; pip install .*\[leapp\]"):
        read_leapp(folder)


# ---- a folder that goes wrong later


def steps(folder: Path, count: int) -> list[np.ndarray]:
    """The actions that the graph of a folder computes step by step, its states carried as the folder says."""
    found, draws = read_leapp(folder), np.random.default_rng(0)
    session = onnxruntime.InferenceSession(found.path, providers=["CPUExecutionProvider"])
    states, actions = found.initial, []
    for _ in range(count):
        given = {"obs": draws.standard_normal((1, D)).astype(np.float32), **states}
        returned = dict(zip([one.name for one in session.get_outputs()], session.run(None, given), strict=True))
        states = {name: returned[output] for name, output in found.states.items()}
        actions.append(returned["actions"])
    return actions


def test_a_folder_becomes_a_bundle_and_the_wrong_one_does_not(folder, tmp_path):
    manifest = export(folder, tmp_path / "walk.txl").manifest
    stream = txl_runtime.load(tmp_path / "walk.txl", "cpu").stream()
    observed = np.random.default_rng(0).normal(size=(20, 1, D)).astype(np.float32)
    (lstm, head), hidden, found = layers(), tuple(torch.from_numpy(array) for array in first_values().values()), []
    for obs in observed:
        y, hidden = lstm(torch.from_numpy(obs)[None], hidden)
        found.append((stream.run({"obs": obs})["actions"], head(y[0]).detach().numpy()))
    np.testing.assert_allclose(*map(np.stack, zip(*found, strict=True)), atol=1e-6)
    assert (manifest.family["rate"], sorted(manifest.family["initial"])) == (50.0, ["c_in", "h_in"])
    assert verify(tmp_path / "walk.txl", checkpoint=folder).passed
    wrong = wrong_from_second_step(tmp_path / "other")
    with pytest.raises(UsageError, match="h_in is said to come back as h_out, but a recurrent operator starts from it"):
        export(wrong, tmp_path / "other.txl")


def test_one_of_several_nodes_is_exported_by_its_name(tmp_path):
    export(f"{two_nodes(tmp_path / 'two')}:policy", tmp_path / "b")


class Robot:
    """Walks for some steps, and keeps what it was told to do."""

    def __init__(self):
        self.draws, self.moves = np.random.default_rng(0), []

    def walks(self):
        return len(self.moves) < 20

    def observation(self):
        return self.draws.standard_normal((1, D)).astype(np.float32)

    def move(self, actions):
        self.moves.append(actions[None])


def test_the_loop_on_the_page_moves_a_robot_as_the_policy_would(folder, tmp_path, monkeypatch):
    found, robot = read_leapp(folder), Robot()
    export(found.path, tmp_path / "walk.txl", states=found.states, initial=found.initial, verify=False)
    (loop,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    exec(loop, {"robot": robot})
    np.testing.assert_allclose(robot.moves, steps(folder, 20), atol=1e-6)


LEAPP = """
import sys; sys.path[:0], sys.path[len(sys.path):] = [{helpers!r}], [{packages!r}]
import json, pathlib, leapp, torch, leapp_folders as known
from leapp import annotate, TensorSemantics as Said
swapped, place = {swapped!r}, pathlib.Path({place!r})
torch.manual_seed(0)
(lstm, head), (h, c) = known.layers(), map(torch.from_numpy, known.first_values().values())
leapp.start("walk", save_path=str(place))
for _ in range(6):
    said = Said(name="obs", ref=torch.randn(1, known.D), kind="state/joint/position")
    x = annotate.input_tensors("policy", [said])
    y, (h, c) = lstm(x[None], tuple(annotate.state_tensors("policy", {{"h": h, "c": c}})))
    annotate.update_state("policy", {{"h": c, "c": h}} if swapped else {{"h": h, "c": c}})
    acted = Said(name="actions", ref=head(y[0]), kind="target/joint/position", element_names=[*known.JOINTS])
    annotate.output_tensors("policy", [acted], export_with="onnx-torchscript")
    h, c = h.detach().clone(), c.detach().clone()
leapp.stop()
passed = leapp.compile_graph(visualize=False, graph_configs=leapp.GraphConfigs(frequency=50.0))
print(json.dumps(passed))
"""


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
def test_leapp_itself_writes_these_folders_and_passes_the_wrong_one(swapped, tmp_path):
    package("leapp")
    program = LEAPP.format(helpers=str(HELPERS), packages=str(PACKAGES), swapped=swapped, place=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"policy": True}
    own = (wrong_from_second_step if swapped else right)(tmp_path / "own" / "walk")
    masks = r"(md5sum|sha256sum|(?:cuda|leapp|python|torch) version|os): .*"
    texts = [(path / "walk.yaml").read_text() for path in (tmp_path / "walk", own)]
    assert re.sub(masks, r"\1", texts[0]) == re.sub(masks, r"\1", texts[1])
    np.testing.assert_allclose(steps(tmp_path / "walk", 20), steps(own, 20), atol=1e-6)
