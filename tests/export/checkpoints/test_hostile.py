"""Configs, states and folders from strangers: one line says what is wrong, at once, whatever stands in them."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import txl_export
from torch import Tensor
from txl_export.checkpoints import identify, import_model, read_checkpoint, read_config
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.imported import MOST_CLUSTERS, Imported
from txl_export.checkpoints.plain_weights import read_weights
from txl_export.checkpoints.vocabularies import read_vocabulary_file, word_vocabulary
from txl_export.describing import describe_checkpoint
from txl_export.families.transformer_xl.weights import SHARED, check_weights
from txl_runtime.errors import CheckpointError, UsageError

ORACLE = Path(__file__).parents[2] / "fixtures" / "oracle"
CASES = {
    "kimiyoung": "k30_adp_div2",
    "learned positions": "k50_attn1",
    "absolute positions": "k70_attn3",
    "nvidia": "n12_adp_div2",
    "hf": "h12_adp_div2",
    "remixl": "x10_remixl",
    "fastai": "x20_fastai_xl",
    "cntxl": "x01_cntxl_prompt",
}
FAMILY = {"learned positions": "kimiyoung", "absolute positions": "kimiyoung"}
SECONDS, BYTES = 2.0, 200 << 20
ODD: list[Any] = [
    0,
    -1,
    1,
    3,
    1000,
    2**31 - 1,
    2**31,
    2**63,
    10**18,
    10**400,
    0.5,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
]
ODD += ["", "\udc80", "ReLU", [], [1], [2**31 - 1], list(range(1, 300)), {}, {"a": 1}, None, True, False, b"x"]
ODD += [torch.zeros(3), torch.tensor(1), Stub("x.Y"), (3, 2, 1), [math.nan], [[1]], {1: 2}]
SHAPES = [(), (0,), (1,), (3,), (2, 0), (1, 1, 1), (4, 4), (1 << 20, 0)]


def case(name: str) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    (path,) = ORACLE.glob(f"*/{CASES[name]}.json")
    facts = json.loads(path.read_text())
    values = next(facts[key] for key in ("ctor", "model_config", "config") if key in facts)
    with np.load(path.with_suffix(".npz")) as arrays:
        state = {key[3:]: torch.from_numpy(arrays[key]) for key in arrays.files if key.startswith("sd/")}
    return FAMILY.get(name, name), {**values, **facts.get("opts", {})}, state


def line(error: Exception) -> str:
    """Return an error's message, which has to be one line that any terminal can show."""
    text = str(error)
    assert text.isprintable()
    return text


def own() -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    family, values, state = case("kimiyoung")
    imported = import_model(family, identify(state, family, "k")[1], values, "k")
    weights = check_weights(imported.config, imported.weights, "k")
    return "txl", msgspec.to_builtins(imported.config), weights


def model(name: str) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    return own() if name == "txl" else case(name)


def attempt(family: str, values: dict[Any, Any], state: dict[Any, Any]) -> Imported | str:
    """The model, or the line that refuses it."""
    start = time.process_time()
    try:
        found, unwrapped = identify(state, family, "the file")
        imported = import_model(found, unwrapped, values, "the file")
        check_weights(imported.config, imported.weights, "the file")
    except (CheckpointError, UsageError) as error:
        return line(error)
    finally:
        assert time.process_time() - start < SECONDS
    return imported


@pytest.fixture(autouse=True)
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES


@pytest.mark.slow(keep=len(CASES) + 1)
@pytest.mark.parametrize("name", [*CASES, "txl"])
def test_any_value_in_a_config_is_taken_or_refused_at_once(name):
    family, values, state = model(name)
    assert isinstance(attempt(family, values, state), Imported)
    for key in values:
        for odd in ODD:
            attempt(family, {**values, key: odd}, state)
    for odd in ("\udc80", "", "x" * 100_000, 7, (1, 2), b"x", None):
        found = attempt(family, {**values, odd: 1}, state)
        assert isinstance(found, Imported)
        assert all(note.isprintable() for note in found.notes)
        json.dumps(found.notes).encode()


@pytest.mark.slow(keep=len(CASES) + 1)
@pytest.mark.parametrize("name", [*CASES, "txl"])
def test_any_tensor_in_a_state_is_taken_or_refused_at_once(name):
    family, values, state = model(name)
    for key, tensor in state.items():
        for shape in SHAPES:
            attempt(family, values, {**state, key: torch.zeros(shape)})
        rest = {other: value for other, value in state.items() if other != key}
        for others in (
            rest,
            {**rest, key + "\udc80": tensor},
            {**rest, "\x1b[31m" + key: tensor},
            {**rest, 7: tensor},
            {**rest, ("x",) * 9: tensor},
        ):
            attempt(family, values, others)
        for value in (None, 3, "x", [tensor], {"a": tensor}, Stub("x.Y"), tensor.to_sparse(), tensor.to("meta")):
            assert isinstance(attempt(family, values, {**state, key: value}), str)
        attempt(family, values, {**state, key: tensor.to(torch.complex64)})
        attempt(family, values, {**state, key: tensor.half()})


@pytest.mark.parametrize("name", [*CASES, "txl"])
def test_more_layers_than_tensors_are_refused_before_any_is_looked_for(name):
    family, values, state = model(name)
    for key in ("n_layer", "n_layers", "num_layers"):
        for many in (3_000_000, 2**31 - 1):
            if key in values:
                assert f"n_layer is {many}, expected no more than" in attempt(family, {**values, key: many}, state)


ADAPTIVE = ["kimiyoung", "nvidia", "hf", "txl"]
"""The importers whose models may have clusters of different widths: the others' configs have no div_val, or no use."""
EMPTY = r"the embedding of cluster 2 has width 0, d_embed 16 // div_val 8\^2"


def without_width(name: str) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """A sound model but for its width of clusters: 16, 2, 0 and 0, in its config and its tensors alike."""
    family, values, state = model(name)
    made = {}
    for key, tensor in state.items():
        cluster = int(key.split(".")[-2 if key.endswith(("weight", "bias")) else -1]) if re.search(WIDE, key) else 0
        made[key] = tensor[..., : 16 // 8**cluster].clone()
        if not cluster:
            made[key] = tensor
    return family, {**values, "div_val": 8}, made


WIDE = r"(emb_layers|out_layers)\.\d\.weight$|(emb_projs|out_projs|tables|projections)\.\d$"


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_cluster_of_width_0_is_refused_by_name_wherever_a_model_is_given(name, tmp_path):
    family, values, state = without_width(name)
    assert any(not tensor.numel() for tensor in state.values())
    with pytest.raises(CheckpointError, match=EMPTY):
        read_checkpoint(state, family, values)
    torch.save(state, tmp_path / "model.pt")
    assert re.search(EMPTY, describe_checkpoint(tmp_path / "model.pt", family, values)["refused"])
    with pytest.raises(CheckpointError, match=EMPTY):
        txl_export.export(tmp_path / "model.pt", tmp_path / "model.txl", family=family, config=values)
    assert not (tmp_path / "model.txl").exists()


def test_a_cluster_of_width_0_in_a_folder_or_an_own_file_is_refused_by_name(tmp_path):
    _, values, state = without_width("hf")
    made = folder(tmp_path, values, state)
    _, values, state = without_width("txl")
    own_file = tmp_path / "own.pt"
    torch.save({"format": "txl-deploy.checkpoint", "version": 1, "config": values, "state": state}, own_file)
    for path in (made, own_file):
        with pytest.raises(CheckpointError, match=EMPTY):
            read_checkpoint(path)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_clusters_without_end_are_refused(name):
    family, values, state = model(name)
    many = list(range(1, MOST_CLUSTERS + 1))
    size = "vocab_size" if "vocab_size" in values else "n_token"
    found = attempt(family, {**values, "cutoffs": many, size: 10**6}, state)
    assert f"has {MOST_CLUSTERS} cutoffs, expected fewer than {MOST_CLUSTERS}" in found


@pytest.mark.parametrize("name", ["remixl", "cntxl"])
def test_more_heads_than_the_model_is_wide_are_refused(name):
    family, values, state = model(name)
    key = "n_head" if name == "remixl" else "num_attention_heads"
    assert "d_head comes out as 0" in attempt(family, {**values, key: 10**6}, state)


def test_layers_that_share_one_tensor_do_not_make_a_bundle_of_many(tmp_path):
    """A file of half a megabyte whose thousand layers are one would be a bundle of gigabytes."""
    family, values, state = own()
    layer = {name: tensor for name, tensor in state.items() if name.startswith("layers.00.")}
    shared = {name: tensor for name, tensor in state.items() if not name.startswith("layers.")}
    wide = {**values, "d_inner": 1 << 12}
    width = values["d_model"]
    sizes = {"inner.weight": (1 << 12, width), "inner.bias": (1 << 12,), "outer.weight": (width, 1 << 12)}
    inner = {f"layers.00.feed_forward.{part}": torch.zeros(size) for part, size in sizes.items()}
    for many in (SHARED // 2, 20 * SHARED):
        layers = {
            name.replace("layers.00", f"layers.{i:02d}"): tensor
            for i in range(many)
            for name, tensor in {**layer, **inner}.items()
        }
        found = attempt(family, {**wide, "n_layer": many}, {**shared, **layers})
        assert isinstance(found, Imported) == (many < SHARED), found
        if many > SHARED:
            assert f"share their weights at most {SHARED} times" in found


@pytest.mark.parametrize("key", ["format", "version", "config", "state", "vocabulary"])
def test_an_own_file_with_anything_in_it_is_read_or_refused(tmp_path, key):
    _, values, state = own()
    whole = {"format": "txl-deploy.checkpoint", "version": 1, "config": values, "state": state, "vocabulary": None}
    for odd in ODD:
        try:
            read_checkpoint({**whole, key: odd})
        except (CheckpointError, UsageError) as error:
            line(error)


def test_a_vocabulary_of_anything_is_read_or_refused():
    for odd in [*ODD, ["a", "\udc80"], ["a", 3], [torch.zeros(2)]]:
        for attributes in (
            {"idx2sym": odd},
            *({"idx2sym": ["a", "<unk>"], key: odd} for key in ("unk_idx", "UNK_idx", "lower_case", "delimiter")),
        ):
            try:
                found = msgspec.json.decode(word_vocabulary(attributes, "the file"))
            except CheckpointError as error:
                line(error)
            else:
                assert found["unknown"] in (None, 0, 1)


def test_a_config_file_of_anything_is_refused_in_one_line(tmp_path):
    path = tmp_path / "config.json"
    for data in (b"", b"[1]", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"\\udc80": 1}', b"nan"):
        path.write_bytes(data)
        try:
            read_config(path)
        except UsageError as error:
            line(error)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for strange in (pipe, Path("/dev/zero")):
        with pytest.raises(UsageError):
            read_config(strange)


def folder(tmp_path: Path, values: dict[str, Any] | None = None, state: dict[str, Tensor] | None = None) -> Path:
    """A Hugging Face folder; a sound one unless told otherwise."""
    if values is None or state is None:
        _, values, state = case("hf")
    made = tmp_path / "hf"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(values))
    torch.save(state, made / "pytorch_model.bin")
    return made


def test_a_pipe_or_a_device_in_place_of_any_file_is_refused_at_once(tmp_path):
    made = folder(tmp_path)
    assert read_checkpoint(made)[0].family == "hf"
    for name in ("config.json", "pytorch_model.bin", "vocab.bin", "vocab.txt"):
        path = made / name
        kept = path.read_bytes() if path.exists() else None
        for target in ("pipe", "/dev/zero", "missing"):
            path.unlink(missing_ok=True)
            if target == "pipe":
                os.mkfifo(path)
            else:
                path.symlink_to(target)
            if kept is None:
                assert read_checkpoint(made)[0].vocabulary is None
            else:
                with pytest.raises(CheckpointError):
                    read_checkpoint(made)
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    for strange in (Path("/dev/zero"), Path("/dev/null"), tmp_path / "pipe"):
        if not strange.exists():
            os.mkfifo(strange)
        for reader in (read_checkpoint, read_weights, describe_checkpoint, read_vocabulary_file):
            with pytest.raises(CheckpointError, match="not a regular file"):
                reader(strange)


@pytest.fixture
def opened():
    """The paths that are opened or listed from here on."""
    paths: list[str] = []

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and paths is HEARD[-1]:
            paths.append(str(arguments[0]))

    HEARD.append(paths)
    sys.addaudithook(hear)  # for good, so it hears nothing once the test is over
    yield paths
    HEARD.pop()


HEARD: list[list[str]] = [[]]


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_the_list_of_shards_is_never_opened_nor_followed(tmp_path, opened, weights):
    made = folder(tmp_path)
    (made / "pytorch_model.bin").rename(tmp_path / "secret.bin")
    index = made / f"{weights}.index.json"
    said = f"{weights} in several parts, which are not read, expected one file.*max_shard_size"
    for target in ("list", "pipe", "/dev/zero", "../secret.bin"):
        index.unlink(missing_ok=True)
        if target == "list":
            index.write_text(json.dumps({"weight_map": {"a": "../secret.bin"}}))
        elif target == "pipe":
            os.mkfifo(index)
        else:
            index.symlink_to(target)
        opened.clear()
        for reader in (read_checkpoint, describe_checkpoint):
            with pytest.raises(CheckpointError, match=said):
                reader(made)
        with pytest.raises(CheckpointError, match=said):
            txl_export.export(made, tmp_path / "model.txl")
        with pytest.raises(CheckpointError, match="this is a folder, expected a checkpoint file"):
            read_weights(made)
        assert not [path for path in opened if str(tmp_path) in path], "nothing in the folder is opened or listed"


def test_a_list_of_shards_beside_whole_weights_is_not_opened(tmp_path, opened):
    made = folder(tmp_path)
    index = made / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.bin"}}))
    opened.clear()
    assert read_checkpoint(made)[0].family == "hf"
    assert str(made / "config.json") in opened
    assert str(index) not in opened
    for reader in (read_weights, read_checkpoint, describe_checkpoint):
        with pytest.raises(CheckpointError, match="looks like text"):
            reader(index)


def test_a_file_that_is_written_to_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(9)}, path)
    from txl_export.checkpoints.files import loading

    def during(file, own=loading._sha256):
        with path.open("ab") as more:
            more.write(b"x")
        return own(file)

    monkeypatch.setattr(loading, "_sha256", during)
    with pytest.raises(CheckpointError, match="was written to while it was read"):
        loading.load_file(path)
