"""Weights for a module of the user's own are read from a file, and nothing in it is run."""

from __future__ import annotations

import functools
import io
import os
import pickle  # noqa: TID251 - the tests write what others wrote with it
import pickletools
import random
import sys
import warnings
import zipfile
from collections import OrderedDict
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins.small_steps import Policy
from torch import nn
from txl_export import read_weights
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.plain_weights import read_stored
from txl_runtime.errors import CheckpointError, UsageError


def test_a_state_dict_is_read(tmp_path):
    path = tmp_path / "model.pt"
    module = Policy()
    torch.save({"model": module.state_dict(), "step": 3}, path)
    found = read_weights(str(path))
    assert found["step"] == 3
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in module.state_dict().items())


def test_a_whole_module_of_an_unknown_class_gives_its_state_dict(tmp_path):
    path = tmp_path / "whole.pt"
    module = nn.DataParallel(Policy())
    torch.save(module, path)
    found = read_weights(path)
    assert list(found) == list(module.module.state_dict())
    assert all(torch.equal(found[name], tensor) for name, tensor in module.module.state_dict().items())


def test_what_holds_no_weights_is_refused(tmp_path):
    path = tmp_path / "list.pt"
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="holds a list, expected a state dict"):
        read_weights(path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_weights(tmp_path / "none.pt")
    with pytest.raises(UsageError, match="no weights were given"):
        read_weights(None)


def test_a_dictionary_with_objects_of_unknown_classes_is_refused(tmp_path):
    path = tmp_path / "mixed.pt"
    torch.save({"model": Policy().state_dict(), "module": Policy()}, path)
    with pytest.raises(CheckpointError, match=r"refers to stand_ins\.small_steps\.Policy, not known here"):
        read_weights(path)


class Runs:
    """An object whose pickle runs a command where pickles are run."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class Named:
    """An object that is made with arguments by name."""

    def __new__(cls, *, size):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"size": 3}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_plain_pickle_of_weights_and_config_is_read(tmp_path, protocol):
    path, module = tmp_path / "run.nn", Policy()
    whole = torch.arange(12.0).reshape(3, 4)
    state = OrderedDict(
        module.state_dict(), tied=whole, column=whole[:, 1], half=whole.half(), parameter=nn.Parameter(whole)
    )
    config = {"environment": {"name": "T", "sizes": [1, (2.5, None)]}, "rate": np.float32(0.5), "steps": np.int64(3)}
    path.write_bytes(pickle.dumps((state, config), protocol))
    found, beside = read_stored(path)
    assert list(found) == list(state)
    assert all(type(found[name]) is torch.Tensor and torch.equal(found[name], state[name]) for name in state)
    assert beside == {"environment": {"name": "T", "sizes": [1, (2.5, None)]}, "rate": 0.5, "steps": 3}
    with pytest.raises(CheckpointError, match="holds a tuple, expected a state dict"):
        read_weights(path)


def test_one_tensor_under_two_names_in_a_plain_pickle_stays_one(tmp_path):
    (tmp_path / "tied.pkl").write_bytes(pickle.dumps(dict.fromkeys("ab", torch.arange(6.0)) | {"c": torch.ones(6)}))
    found = read_stored(tmp_path / "tied.pkl")
    assert found["a"] is found["b"]
    assert found["c"].tolist() == [1.0] * 6


def classes(monkeypatch, package, kinds):
    """Classes of a package that is not there, by the last part of their names, each with its base."""
    made = {}
    for name, base in kinds.items():
        module, own = f"{package}.{name.partition('.')[0]}", name.partition(".")[2]
        made[own] = type(own, (base,), {"__module__": module})
        for home in (package.partition(".")[0], package, module):
            monkeypatch.setitem(sys.modules, home, sys.modules.get(home, ModuleType(home)))
        setattr(sys.modules[module], own, made[own])
    return made


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_config_that_ruamel_read_from_yaml_is_plain_data(tmp_path, monkeypatch, protocol):
    """Its maps, lists and numbers are classes that know their lines as well; trainers pickle them as they are."""
    kinds = {"comments.CommentedMap": OrderedDict, "comments.CommentedSeq": list, "scalarfloat.ScalarFloat": float}
    seen, listed, number = classes(monkeypatch, "ruamel.yaml", kinds).values()
    whole, rows, rate = seen(embed_dim=8), listed([4, 2]), number(0.5)
    for value in (whole, rows, rate):
        value._yaml_line_col = {"line": 3, "data": whole}
    whole.update(rows=rows, rate=rate)
    path = tmp_path / "run.nn"
    path.write_bytes(pickle.dumps((Policy().state_dict(), {"transformer": whole}), protocol))
    _, config = read_stored(path)
    assert config == {"transformer": {"embed_dim": 8, "rows": [4, 2], "rate": 0.5}}
    assert [type(config["transformer"][name]) for name in ("rows", "rate")] == [list, float]


class Node:
    """A node as OmegaConf keeps it: its place, and its value."""

    def __init__(self, parent, held, name="_val"):
        self._metadata, self._parent = {"ref_type": Any, "object_type": str}, parent
        setattr(self, name, held)


@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_a_config_of_omegaconf_is_plain_data_though_its_nodes_know_what_they_stand_in(tmp_path, monkeypatch, write):
    """As Lightning stores what `save_hyperparameters` was given."""
    names = ("dictconfig.DictConfig", "listconfig.ListConfig", "nodes.AnyNode")
    made = classes(monkeypatch, "omegaconf", dict.fromkeys(names, Node))
    config = made["DictConfig"](None, {}, "_content")
    sizes = made["ListConfig"](config, [], "_content")
    sizes._content += [made["AnyNode"](sizes, 4), made["AnyNode"](sizes, "${dim}")]
    config._content |= {"dim": made["AnyNode"](config, 8), "sizes": sizes, "none": made["DictConfig"](config, None)}
    stored = {"state_dict": Policy().state_dict(), "hyper_parameters": config, "hparams_type": made["DictConfig"]}
    with (tmp_path / "last.ckpt").open("wb") as file:
        write(stored, file)
    for read in (read_weights, read_stored):
        found = read(tmp_path / "last.ckpt")
        assert found["hyper_parameters"] == {"dim": 8, "sizes": [4, "${dim}"], "none": None}
        assert list(found["state_dict"]) == list(stored["state_dict"])


class Outer:
    """A class with one inside, whose name has a dot."""

    class Inner(dict):
        """It is filled like a dictionary."""


@pytest.mark.parametrize("write", [lambda content, file: pickle.dump(content, file, 4), torch.save])
def test_objects_of_classes_inside_of_classes_are_stand_ins_beside_weights(tmp_path, write):
    canary, path = tmp_path / "canary", tmp_path / "a.pkl"
    content = {"weights": {"a": torch.ones(2)}, "config": Outer.Inner(a=1), "runs": Runs(f"touch {canary}")}
    with path.open("wb") as file:
        write(content, file)
    found = read_stored(path)
    assert torch.equal(found["weights"]["a"], torch.ones(2))
    assert isinstance(found["config"], Stub)
    with pytest.raises(CheckpointError, match=r"refers to .*(Outer\.Inner|getattr).* not known here"):
        read_weights(path)
    path.write_bytes(b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.system\x93\x8c\x04true\x85R.")
    with pytest.raises(CheckpointError, match=r"refers to torch\.serialization\.os\.system, not known here"):
        read_stored(path)
    assert not canary.exists()


@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_an_object_that_is_no_module_is_named_and_not_run(tmp_path, write):
    canary, path = tmp_path / "canary", tmp_path / "runs.pkl"
    with path.open("wb") as file:
        write(Runs(f"touch {canary}"), file)
    words = r"runs\.pkl: refers to \w+\.system, not known here \(nothing was imported or run\); load the file where"
    for read in (read_weights, read_stored):
        with pytest.raises(CheckpointError, match=words):
            read(path)
    assert not canary.exists()


class Own(nn.Module):
    """A module that pickles what it likes."""

    def __getstate__(self):
        return {"pattern": "b n -> n b"}


def test_a_whole_module_is_read_beside_attributes_of_any_kind(tmp_path):
    path, module = tmp_path / "whole.pt", Policy()
    module.activation = functools.partial(torch.clamp, min=0)
    torch.save(module, path)
    found = read_stored(path)
    assert list(found) == list(module.state_dict())
    module.own = Own()
    torch.save(module, path)
    with pytest.raises(
        CheckpointError, match=r"whole\.pt: .*test_plain_weights\.Own has no _buffers, .*state_dict\(\)"
    ):
        read_stored(path)


def test_layers_of_einops_in_a_whole_module_hold_no_tensors(tmp_path, monkeypatch):
    """They pickle what they were made of, and nothing that a module has."""
    rearrange = type("Rearrange", (Own,), {"__module__": "einops.layers.torch"})
    for name in ("einops", "einops.layers", "einops.layers.torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["einops.layers.torch"].Rearrange = rearrange
    module = nn.Sequential(nn.Linear(2, 2), rearrange())
    torch.save(module, tmp_path / "whole.pt")
    assert list(read_weights(tmp_path / "whole.pt")) == ["0.weight", "0.bias"]


def test_what_else_torch_writes_as_a_zip_archive_is_named(tmp_path):
    """Some of its entries are compressed, as no checkpoint's are."""
    path, module = tmp_path / "model.pt2", nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, (torch.zeros(2),)), path)
    with pytest.raises(CheckpointError, match=r"is a program of torch\.export, expected a checkpoint; save it again"):
        read_weights(path)


def test_beside_weights_other_objects_are_stand_ins_and_nothing_runs(tmp_path):
    canary, path = tmp_path / "canary", tmp_path / "state.pkl"
    content = {"weights": {"a": np.ones(2, np.float32)}, "policy": Policy(), "runs": Runs(f"touch {canary}")}
    path.write_bytes(pickle.dumps(content))
    found = read_stored(path)
    assert torch.equal(found["weights"]["a"], torch.ones(2))
    assert isinstance(found["policy"], Stub)
    assert isinstance(found["runs"], Stub)
    with pytest.raises(CheckpointError, match=r"refers to .*system.* not known here \(nothing was imported or run\)"):
        read_weights(path)
    assert not canary.exists()
    path.write_bytes(pickle.dumps({"weights": 1, "named": Named(size=3)}, 4))
    assert isinstance(read_stored(path)["named"], Stub)
    path.write_bytes(b"\x80\x04N0}.")  # what is put on the stack and dropped, as cloudpickle writes functions
    assert read_stored(path) == {}


def nested(data):
    """A pickle of a tensor whose storage is this file."""
    pickled = pickle.dumps(torch.ones(4), 4)
    inside = next(argument for code, argument, _ in pickletools.genops(pickled) if code.name == "BINBYTES")
    at = pickled.index(inside)
    before = pickled[: at - 5] if pickled[at - 5 : at - 4] == b"B" else pickled[: at - 2]
    before = before.replace(b"\x95" + pickled[3:11], b"")  # the frame, whose length would be wrong
    return before + b"B" + len(data).to_bytes(4, "little") + data + pickled[at + len(inside) :]


def storage():
    """Four numbers, as a plain pickle has them."""
    return torch.storage.TypedStorage(wrap_storage=torch.ones(4).untyped_storage(), dtype=torch.float32, _internal=True)


def saved(content):
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def test_the_file_in_place_of_a_storage_may_hold_one_and_nothing_else(tmp_path):
    canary, path = tmp_path / "canary", tmp_path / "a.pkl"
    sound = saved(storage())
    path.write_bytes(nested(sound))
    assert torch.equal(read_stored(path), torch.ones(4))
    for data, words in (
        (saved(Runs(f"touch {canary}")), "a nested file holds no storage"),
        (saved(torch.ones(4)), "a nested file holds no storage"),
        (saved({}), "a nested file holds no storage"),
        (saved([storage()]), "has a Storage where plain data was expected"),
        (sound[:-3], "a storage ends with the file"),
        (sound[:40], "cut short or damaged"),
        (pickle.dumps(torch.ones(4)), "cut short or damaged"),
        (b"", "cut short or damaged"),
        (sound.replace(b"K\x04", b"J\xff\xff\xff\x7f"), "does not fit into the"),
    ):
        path.write_bytes(nested(data))
        with pytest.raises(CheckpointError, match=words):
            read_stored(path)
    assert not canary.exists()


def test_a_damaged_pickle_is_refused_or_read_and_runs_nothing(tmp_path):
    canary, path, draws = tmp_path / "canary", tmp_path / "a.pkl", random.Random(0)
    content = ({"a": torch.ones(3), "n": np.ones(2)}, {"x": np.float64(1), "runs": Runs(f"touch {canary}")})
    sound = pickle.dumps(content)
    refused = 0
    for _ in range(400):
        data = bytearray(sound)
        for _ in range(draws.randint(1, 4)):
            data[draws.randrange(2, len(data))] = draws.randrange(256)
        path.write_bytes(data[: draws.randint(2, len(data))] if draws.random() < 0.2 else data)
        try:
            read_stored(path)
        except CheckpointError:
            refused += 1
    assert 100 < refused < 400
    assert not canary.exists()


def test_a_pickle_that_contains_itself_is_refused(tmp_path):
    path = tmp_path / "a.pkl"
    own = []
    own.append(own)
    path.write_bytes(pickle.dumps({"a": own}))
    with pytest.raises(CheckpointError, match="contains itself"):
        read_stored(path)
    array = np.empty(1, object)
    array[0] = array
    path.write_bytes(pickle.dumps({"a": array}, 4))
    with pytest.raises(CheckpointError, match="contains itself"):
        read_stored(path)


DEEP = 20_000
DEEP_PICKLES = {
    "lists": (b"]" * DEEP, b"a" * (DEEP - 1) + b"."),
    "dictionaries": (b"}N" * DEEP, b"N" + b"s" * DEEP + b"."),
    "tuples": (b"(" * DEEP, b"t" * DEEP + b"."),
}


@pytest.mark.parametrize("kind", DEEP_PICKLES)
def test_what_is_nested_too_deeply_is_refused(tmp_path, kind):
    path = tmp_path / "deep.pkl"
    first, second = DEEP_PICKLES[kind]
    for data in (first + second, first):
        path.write_bytes(b"\x80\x02" + data)
        with pytest.raises(CheckpointError, match=r"deep\.pkl: the (content is nested|pickle is cut short)"):
            read_stored(path)


def test_what_is_deep_and_wide_within_the_limits_is_read(tmp_path):
    path, deep = tmp_path / "a.pkl", {"many": tuple([] for _ in range(3000)), "end": torch.ones(1)}
    for n in range(120):
        deep = {"a": n, "b": (n, [deep])} if n % 2 else {"b": deep, "a": [n]}
    path.write_bytes(pickle.dumps(deep))
    assert read_stored(path)["a"] == 119


def test_an_archive_of_stable_baselines_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "ppo.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "{}")
        with archive.open("policy.pth", "w", force_zip64=True) as file:
            torch.save(Policy().state_dict(), file)
    for read in (read_weights, read_stored):
        with pytest.raises(CheckpointError, match=r"Stable-Baselines3.* RecurrentPPO\.load\(path\)\.policy.*adapt\("):
            read(path)
