"""Pickle programs made to do harm: nothing they name is imported or run; each is refused, or plain data."""

import builtins
import collections
import contextlib
import copyreg
import json
import os
import pickle  # noqa: TID251 - the tests write what others wrote with it
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pickle_programs import (
    CONTAINERS,
    WRITERS,
    assert_plain,
    binary,
    call,
    code,
    name,
    program,
    reference,
    refused,
    storage,
    tensor,
    watched_load,
    watching,
    write_legacy,
    write_zip,
)
from txl_export.checkpoints.files import program as reader
from txl_export.checkpoints.files import rebuilding
from txl_export.checkpoints.files.loading import scan_globals
from txl_export.checkpoints.files.pickle_names import Stub, known
from txl_export.checkpoints.modules import module_state
from txl_export.checkpoints.plain_weights import read_stored
from txl_runtime.errors import CheckpointError


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_hand_written_files_are_sound(tmp_path, container):
    WRITERS[container](tmp_path / "ok.pt", [tensor(), tensor(), {"a": 1}], np.arange(4, dtype="<f4").tobytes())
    first, second, mapping = watched_load(tmp_path / "ok.pt").content
    assert first.tolist() == [0, 1, 2, 3]
    assert second is first
    assert mapping == {"a": 1}


COMMAND = "touch canary"


def old_module(cls, **state):
    """An object of a class that is a persistent id, with the attributes torch 1.0 gave modules."""
    backend = call("torch.nn.backends.thnn._get_thnn_function_backend")
    parts = {part: call("collections.OrderedDict") for part in ("_parameters", "_buffers", "_modules")}
    attributes = {"_backend": backend, **parts, "training": True, **state}
    return reference("module", name(cls), "/old/place.py", "class Old: ...") + b")\x81" + code(attributes) + b"b"


def test_a_module_as_torch_1_wrote_it(tmp_path):
    first = call("torch._utils._rebuild_parameter", tensor(storage(extra=(None,))), True, {})
    projections = old_module("torch.nn.modules.container.ParameterList", _parameters={"0": None, "1": first})
    softmax = old_module("proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax", _modules={"out_projs": projections})
    model = old_module("mem_transformer.MemTransformerLM", _modules={"crit": softmax, "none": None}, d_model=4)
    write_legacy(tmp_path / "model.pt", model, np.arange(4, dtype="<f4").tobytes())
    state, plain = module_state(watched_load(tmp_path / "model.pt").content)
    assert {name: tensor.tolist() for name, tensor in state.items()} == {"crit.out_projs.1": [0, 1, 2, 3]}
    assert plain == {"d_model": 4}


def test_where_a_file_was_saved_does_not_matter(tmp_path):
    where = storage(kind="torch.cuda.FloatStorage", location="cuda:3")
    write_zip(tmp_path / "model.pt", [tensor(where)])
    assert watched_load(tmp_path / "model.pt").content[0].device == torch.device("cpu")


PLAIN = ""
# name → (the instructions, what the message says; PLAIN where they make something harmless)
ATTACKS = {
    "os.system": (call("os.system", COMMAND), r"refers to os\.system"),
    "posix.system": (call("posix.system", COMMAND), r"refers to posix\.system"),
    "subprocess": (call("subprocess.getoutput", COMMAND), r"subprocess\.getoutput"),
    "builtins.eval": (call("builtins.eval", f"__import__('os').system({COMMAND!r})"), r"refers to builtins\.eval"),
    "python 2's eval": (call("__builtin__.eval", "1"), r"refers to builtins\.eval"),
    "inside a list in a dict": ({"model": [tensor(), call("os.system", COMMAND)]}, r"os\.system"),
    "getattr": (call("builtins.getattr", name("torch.Tensor"), "__class__"), r"refers to builtins\.getattr"),
    "getattr of an allowed name": (call("operator.attrgetter", "__globals__"), r"refers to operator\.attrgetter"),
    "a class of the right name elsewhere": (
        name("evil.MemTransformerLM") + b")\x81}b",
        r"refers to evil\.MemTransformerLM",
    ),
    "a longer path to an allowed name": (name("x.torch._utils._rebuild_tensor_v2"), r"refers to x\."),
    "a path of attributes": (
        code("torch") + code("serialization.os.system") + b"\x93" + code((COMMAND,)) + b"R",
        r"refers to torch\.serialization\.os\.system",
    ),
    "a known function by a path of attributes": (
        code("torch") + code("_utils._rebuild_tensor_v2") + b"\x93",
        PLAIN,
    ),
    "a name that is no text": (code(3) + code("x") + b"\x93", "damaged"),
    "a nested file": (
        call("torch.storage._load_from_bytes", binary(program(call("os.system", COMMAND)))),
        "damaged",
    ),
    "a tensor by pickle": (pickle.dumps(torch.ones(3), 2)[2:-1], "saved by pickle, not by torch.save"),
    "INST": (b"(" + code(COMMAND) + b"ios\nsystem\n", r"refers to os\.system"),
    "OBJ": (b"(" + name("argparse.Namespace") + code(COMMAND) + b"o", PLAIN),
    "NEWOBJ_EX": (name("argparse.Namespace") + b")}\x92", PLAIN),
    "NEWOBJ of a function": (name("os.system") + code((COMMAND,)) + b"\x81", r"os\.system"),
    "EXT1": (b"\x82\x01", "damaged"),
    "EXT4": (b"\x84\x01\x00\x00\x00", "damaged"),
    "PERSID": (b"Pstorage\n", "no storage of a known type"),
    "NEXT_BUFFER": (b"\x97", "damaged"),
    "DUP": (code(1) + b"2", PLAIN),
    "a call of an object": (name("argparse.Namespace") + b")R)R", "damaged"),
    "a call of text": (code("os.system") + code((COMMAND,)) + b"R", "damaged"),
    "a call of a storage": (call("torch.FloatStorage", 4), PLAIN),
    "a call without a tuple": (name("argparse.Namespace") + code([1]) + b"R", "damaged"),
    "attributes of a tensor": (tensor() + code({"__class__": 1}) + b"b", PLAIN),
    "attributes of a size": (call("torch.Size", (1, 2)) + code({"x": 1}) + b"b", PLAIN),
    "attributes of a class": (
        name("mem_transformer.MemTransformerLM") + code({"forward": 1}) + b"b",
        "damaged",
    ),
    "attributes that are no names": (
        name("argparse.Namespace") + b")\x81" + code({1: 2}) + b"b",
        PLAIN,
    ),
    "attributes that are no dictionary": (
        name("argparse.Namespace") + b")\x81" + code([1]) + b"b",
        PLAIN,
    ),
    "items of an object": (name("argparse.Namespace") + b")\x81" + code("a") + code(1) + b"s", PLAIN),
    "items of a tuple": (code((1,)) + code(1) + b"a", "damaged"),
    "a deep key": (b"}" + b")" + b"\x85" * 99 + code(1) + b"s", PLAIN),
    "a list as key": (b"}]Ns", "damaged"),
    "a tensor as key": (b"}" + tensor() + b"Ns", PLAIN),
    "a bare storage": (storage(), "has a Storage where plain data was expected"),
    "persistent id that is a number": (code(7) + b"Q", "no storage of a known type"),
    "persistent id of another kind": (reference("file", "/etc/passwd"), "no storage"),
    "a module that is no class": (reference("module", "os", "a", "b"), "no storage"),
    "a storage of no type": (storage(kind="argparse.Namespace"), "no storage of a known type"),
    "a storage of text type": (
        reference("storage", "torch.FloatStorage", "0", "cpu", 4),
        "no storage of a known type",
    ),
    "a quantised storage": (storage(kind="torch.QInt8Storage"), "quantised and complex tensors are not"),
    "a sparse tensor": (call("torch._utils._rebuild_sparse_tensor", 1), "_rebuild_sparse_tensor"),
    "a meta tensor": (call("torch._utils._rebuild_meta_tensor_no_storage", 1), "_rebuild_meta_tensor_no_storage"),
    "a storage of two types": ([tensor(), tensor(storage(kind="torch.IntStorage"))], "at once"),
    "a storage larger than the file": (tensor(storage(1 << 50)), r"does not fit|the file has 16 bytes"),
    "a storage of negative size": (tensor(storage(-4)), "no storage of a known type"),
    "a storage of size True": (tensor(storage(True)), "the file has 16 bytes"),
    "a tensor of negative size": (tensor(size=(-1,)), "the shape of a tensor"),
    "a negative stride": (tensor(size=(2,), stride=(-1,), offset=2), "the stride of a tensor"),
    "a negative offset": (tensor(offset=-1), "the offset of a tensor"),
    "a tensor behind its storage": (tensor(offset=1), "does not fit into its storage"),
    "an offset behind the storage": (tensor(offset=5, size=(0,)), "does not fit into its storage"),
    "a stride out of its storage": (tensor(size=(2, 2), stride=(3, 1)), "does not fit into its storage"),
    "an expanded tensor": (tensor(size=(1 << 40,), stride=(0,)), "does not fit into its storage"),
    "a huge stride": (tensor(size=(1,), stride=(1 << 70,)), "the stride of a tensor"),
    "strides that overflow": (tensor(size=(2, 2), stride=(1 << 61, 1 << 61)), "does not fit into its storage"),
    "an empty tensor of a huge shape": (tensor(size=(0, 1 << 50), stride=(1, 1)), "does not fit"),
    "sizes without strides": (tensor(size=(2, 2)), "what it does not take"),
    "a tensor of text": (tensor(code("storage")), "not described by storage"),
    "a conjugate view": (tensor(metadata=({"conj": True},)), "conjugate"),
    "a parameter of text": (call("torch._utils._rebuild_parameter", "x", True, {}), PLAIN),
    "a tensor of a class": (
        call("torch._tensor._rebuild_from_type_v2", name("argparse.Namespace"), 1, (), {}),
        PLAIN,
    ),
    "pairs that are none": (call("collections.OrderedDict", ["ab"]), PLAIN),
    "bytes in another encoding": (call("_codecs.encode", "x", "rot13"), "other than latin1"),
    "lists in lists without end": (b"]" * 200_000 + b"a" * 199_999, "levels deep"),
    "tuples in tuples without end": (b")" + b"\x85" * 200_000, "levels deep"),
    "a list of itself": (b"]q\x01h\x01a", "contains itself"),
    "a dictionary of itself": (b"}q\x01" + code("a") + b"h\x01s", "contains itself"),
    "doubling": (b"]" + b"".join(b"q\x01h\x01\x86" for _ in range(100)), "stands for more than"),
    "an integer of a million bits": (b"\x8b" + struct.pack("<i", 125_000) + b"\x7f" * 125_000, "no plain data"),
    "an integer as digits": (b"L" + b"9" * 5000 + b"L\n", "damaged|instruction LONG"),
    "text longer than the file": (b"X\xff\xff\xff\x7fabc", "needed more than|damaged"),
    "bytes longer than memory": (b"\x8e" + b"\xff" * 7 + b"\x7f", "cut short or damaged"),
    "nothing on the stack": (b"a", "cut short or damaged"),
    "no mark": (b"t", "cut short or damaged"),
    "two contents": (b"NN", PLAIN),
    "a memo that is not there": (b"h\x07", "cut short or damaged"),
    "an unknown instruction": (b"\xff", "cut short or damaged"),
    "a name with an odd escape": (name("mem\\hx.M"), r"refers to .*M"),
    "an unprintable name": (code("a\nb\x1b[2J") + code("c" * 300) + b"\x93", r"refers to 'a\\nb"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_or_makes_plain_data(tmp_path, monkeypatch, attack):
    monkeypatch.chdir(tmp_path)
    (body, match), path = ATTACKS[attack], tmp_path / "model.pt"
    write_zip(path, body)
    if match is PLAIN:
        assert_plain(watched_load(path).content)
        assert not (tmp_path / "canary").exists()
    else:
        refused(path, match, tmp_path / "canary")
    with contextlib.suppress(CheckpointError):  # where the reader died of it
        names = scan_globals(path)  # which are still shown, whatever else is wrong with the file
        assert all(shown.isprintable() for shown in names)
        assert not match.startswith("refers to") or not all(map(known, names))


@pytest.mark.parametrize(
    "attack", ["os.system", "a storage larger than the file", "a tensor behind its storage", "doubling"]
)
@pytest.mark.parametrize("container", ["torch legacy", "TorchScript"])
def test_every_container_is_read_by_the_reader_that_refuses(tmp_path, monkeypatch, container, attack):
    monkeypatch.chdir(tmp_path)
    body, match = ATTACKS[attack]
    WRITERS[container](tmp_path / "model.pt", [tensor(), body] if attack == "os.system" else body)
    refused(tmp_path / "model.pt", match, tmp_path / "canary")


def test_an_attack_in_a_plain_pickle_runs_nothing(tmp_path, monkeypatch):
    """With stand-ins for other objects, much of this is harmless data; nothing of it may be run or imported."""
    monkeypatch.chdir(tmp_path)
    for body, _ in ATTACKS.values():
        Path("model.pkl").write_bytes(program(body, protocol=4))
        with contextlib.suppress(CheckpointError), watching():
            assert_plain(read_stored(Path("model.pkl")))
        assert not Path("canary").exists()


CALLABLES = ["collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch.FloatStorage", "numpy.dtype", "a.B"]
CALLABLES += ["builtins.dict", "copyreg._reconstructor", "torch.nn.modules.linear.Linear", "torch.storage.os.system"]
ALTERED = {
    "attributes": code({"called": "os.system", "args": 1, "__new__": None}) + b"b",
    "slots": code((None, {"called": "os.system", "args": 1, "extend": 3})) + b"b",
    "slots that all objects have": code((None, {"__class__": 2, "__dict__": {}, "__new__": 4})) + b"b",
    "attributes that are a class": name("os.system") + b"b",
    "an item": code("called") + code("os.system") + b"s",
    "items": b"(" + code("called") + code("os.system") + b"u",
    "a value": code(1) + b"a",
    "values": b"(" + code(1) + b"e",
    "more values": b"(" + code(1) + b"\x90",
    "a call of what it made": b")R" + code((1,)) + b"R",
    "a class of what it made": b")R" + code((1,)) + b"\x81",
    "arguments by name": code((1,)) + code({"self": 1, "cls": 2, "__class__": 3}) + b"\x92",
    "no state": b"Nb",
}


def everything():
    """Return all that a program could alter: the reader, its table, and the modules that it names."""
    made = [reader.PickledObject, reader.Programs, reader.Writer, *rebuilding.FUNCTIONS.values(), Stub]
    homes = [reader, rebuilding, torch, torch._utils, torch.nn.Linear, np, np.dtype, pickle, copyreg, collections]
    homes += [collections.OrderedDict, builtins, os, sys.modules]
    return {
        (number, key): id(value)
        for number, place in enumerate([*made, *homes])
        for key, value in (place if isinstance(place, dict) else vars(place)).items()
        if key not in ("_logger_cache",)
    }


def contents(body):
    """Return the reader's content of a program; nothing if it is refused."""
    written = reader.answer(bytes([1]) + program(body, 4))
    return json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])["contents"]


@pytest.mark.parametrize("alteration", ALTERED)
def test_no_program_alters_what_it_is_read_by(tmp_path, monkeypatch, alteration):
    """Here the reader runs in this process, where a test sees what it touches."""
    monkeypatch.chdir(tmp_path)
    sound = bytes([1]) + program([tensor(), call("collections.OrderedDict", [("a", 1)]), name("os.system")])
    before, expected = everything(), reader.answer(sound)
    for dotted in CALLABLES:
        for target in (name(dotted), name(dotted) + b")R", name(dotted) + b")\x81", storage()):
            (alone,) = contents(target)
            with watching():
                found = contents(target + b"q\x07" + ALTERED[alteration] + b"0h\x07")
            assert [content[:3] for content in found] in ([], [alone[:3]])  # kind, name and what it was called with
            assert everything() == before
            assert reader.answer(sound) == expected
    assert not Path("canary").exists()
