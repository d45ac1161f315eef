"""Pickle programs made to do harm: nothing they name is imported or run, and every one is refused."""

import contextlib
import pickle  # noqa: TID251 - the tests write what others wrote with it
import struct

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
from txl_export.checkpoints.files.loading import module_state, scan_globals
from txl_export.checkpoints.files.pickle_names import KNOWN
from txl_export.checkpoints.plain_weights import read_stored
from txl_runtime.errors import CheckpointError


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_hand_written_files_are_sound(tmp_path, container):
    WRITERS[container](tmp_path / "ok.pt", [tensor(), tensor(), {"a": 1}], np.arange(4, dtype="<f4").tobytes())
    first, second, mapping = watched_load(tmp_path / "ok.pt").content
    assert first.tolist() == [0, 1, 2, 3]
    assert second is first
    assert mapping == {"a": 1}


def shell(canary):
    return f"touch {canary}"


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


# name → (the instructions, given the command that would betray them; what the message says)
ATTACKS = {
    "os.system": (lambda command: call("os.system", command), r"refers to os\.system"),
    "posix.system": (lambda command: call("posix.system", command), r"refers to posix\.system"),
    "subprocess": (lambda command: call("subprocess.getoutput", command), r"subprocess\.getoutput"),
    "builtins.eval": (
        lambda command: call("builtins.eval", f"__import__('os').system({command!r})"),
        r"refers to builtins\.eval",
    ),
    "python 2's eval": (lambda command: call("__builtin__.eval", "1"), r"refers to __builtin__\.eval"),
    "inside a list in a dict": (lambda command: {"model": [tensor(), call("os.system", command)]}, r"os\.system"),
    "getattr": (
        lambda command: call("builtins.getattr", name("torch.Tensor"), "__class__"),
        r"refers to builtins\.getattr",
    ),
    "getattr of an allowed name": (
        lambda command: call("operator.attrgetter", "__globals__"),
        r"refers to operator\.attrgetter",
    ),
    "a class of the right name elsewhere": (
        lambda command: name("evil.MemTransformerLM") + b")\x81}b",
        r"refers to evil\.MemTransformerLM",
    ),
    "a longer path to an allowed name": (lambda command: name("x.torch._utils._rebuild_tensor_v2"), r"refers to x\."),
    "a path of attributes": (
        lambda command: code("torch") + code("serialization.os.system") + b"\x93" + code((command,)) + b"R",
        r"refers to torch\.serialization\.os\.system",
    ),
    "a known function by a path of attributes": (
        lambda command: code("torch") + code("_utils._rebuild_tensor_v2") + b"\x93",
        r"refers to torch\._utils\._rebuild_tensor_v2",
    ),
    "a name that is no text": (lambda command: code(3) + code("x") + b"\x93", "computes a name"),
    "a nested file": (
        lambda command: call("torch.storage._load_from_bytes", binary(program(call("os.system", command)))),
        "saved by pickle, not by torch.save",
    ),
    "a tensor by pickle": (lambda command: pickle.dumps(torch.ones(3), 2)[2:-1], "saved by pickle, not by torch.save"),
    "INST": (lambda command: b"(" + code(command) + b"ios\nsystem\n", "instruction INST"),
    "OBJ": (lambda command: b"(" + name("argparse.Namespace") + code(command) + b"o", "instruction OBJ"),
    "NEWOBJ_EX": (lambda command: name("argparse.Namespace") + b")}\x92", "instruction NEWOBJ_EX"),
    "NEWOBJ of a function": (lambda command: name("os.system") + code((command,)) + b"\x81", r"os\.system"),
    "EXT1": (lambda command: b"\x82\x01", "instruction EXT1"),
    "EXT4": (lambda command: b"\x84\x01\x00\x00\x00", "instruction EXT4"),
    "PERSID": (lambda command: b"Pstorage\n", "instruction PERSID"),
    "NEXT_BUFFER": (lambda command: b"\x97", "instruction NEXT_BUFFER"),
    "DUP": (lambda command: code(1) + b"2", "instruction DUP"),
    "a call of an object": (lambda command: name("argparse.Namespace") + b")R)R", "calls something that is not a name"),
    "a call of text": (lambda command: code("os.system") + code((command,)) + b"R", "calls something"),
    "a call of a storage": (lambda command: call("torch.FloatStorage", 4), r"calls torch\.FloatStorage"),
    "a call without a tuple": (lambda command: name("argparse.Namespace") + code([1]) + b"R", "calls something"),
    "attributes of a tensor": (lambda command: tensor() + code({"__class__": 1}) + b"b", "attributes of a Tensor"),
    "attributes of a size": (
        lambda command: call("torch.Size", (1, 2)) + code({"x": 1}) + b"b",
        "attributes of a tuple",
    ),
    "attributes of a class": (
        lambda command: name("mem_transformer.MemTransformerLM") + code({"forward": 1}) + b"b",
        "attributes of a Name",
    ),
    "attributes that are no names": (
        lambda command: name("argparse.Namespace") + b")\x81" + code({1: 2}) + b"b",
        "not a dictionary of names",
    ),
    "attributes that are no dictionary": (
        lambda command: name("argparse.Namespace") + b")\x81" + code([1]) + b"b",
        "not a dictionary of names",
    ),
    "items of an object": (
        lambda command: name("argparse.Namespace") + b")\x81" + code("a") + code(1) + b"s",
        "sets items of a Stub",
    ),
    "items of a tuple": (lambda command: code((1,)) + code(1) + b"a", "appends to a tuple"),
    "a deep key": (lambda command: b"}" + b")" + b"\x85" * 99 + code(1) + b"s", "key of type tuple"),
    "a list as key": (lambda command: b"}]Ns", "key of type list"),
    "a tensor as key": (lambda command: b"}" + tensor() + b"Ns", "key of type Tensor"),
    "a bare storage": (lambda command: storage(), "has a Storage where plain data was expected"),
    "persistent id that is a number": (lambda command: code(7) + b"Q", "not a storage of a known type"),
    "persistent id of another kind": (lambda command: reference("file", "/etc/passwd"), "not a storage"),
    "a module that is no class": (lambda command: reference("module", "os", "a", "b"), "not a storage"),
    "a storage of no type": (lambda command: storage(kind="argparse.Namespace"), "not a storage of a known type"),
    "a storage of text type": (
        lambda command: reference("storage", "torch.FloatStorage", "0", "cpu", 4),
        "not a storage of a known type",
    ),
    "a quantised storage": (
        lambda command: storage(kind="torch.QInt8Storage"),
        "quantised and complex tensors are not",
    ),
    "a sparse tensor": (lambda command: call("torch._utils._rebuild_sparse_tensor", 1), "_rebuild_sparse_tensor"),
    "a meta tensor": (
        lambda command: call("torch._utils._rebuild_meta_tensor_no_storage", 1),
        "_rebuild_meta_tensor_no_storage",
    ),
    "a storage of two types": (
        lambda command: [tensor(), tensor(storage(kind="torch.IntStorage"))],
        "at once",
    ),
    "a storage larger than the file": (lambda command: tensor(storage(1 << 50)), r"does not fit|the file has 16 bytes"),
    "a storage of negative size": (lambda command: tensor(storage(-4)), "has -4 elements"),
    "a storage of size True": (lambda command: tensor(storage(True)), "not a storage|has True elements"),
    "a tensor of negative size": (lambda command: tensor(size=(-1,)), "the shape of a tensor"),
    "a negative stride": (lambda command: tensor(size=(2,), stride=(-1,), offset=2), "the stride of a tensor"),
    "a negative offset": (lambda command: tensor(offset=-1), "the offset of a tensor"),
    "a tensor behind its storage": (lambda command: tensor(offset=1), "does not fit into its storage"),
    "an offset behind the storage": (lambda command: tensor(offset=5, size=(0,)), "does not fit into its storage"),
    "a stride out of its storage": (
        lambda command: tensor(size=(2, 2), stride=(3, 1)),
        "does not fit into its storage",
    ),
    "an expanded tensor": (lambda command: tensor(size=(1 << 40,), stride=(0,)), "does not fit into its storage"),
    "a huge stride": (lambda command: tensor(size=(1,), stride=(1 << 70,)), "the stride of a tensor"),
    "strides that overflow": (
        lambda command: tensor(size=(2, 2), stride=(1 << 61, 1 << 61)),
        "does not fit into its storage",
    ),
    "an empty tensor of a huge shape": (lambda command: tensor(size=(0, 1 << 50), stride=(1, 1)), "does not fit"),
    "sizes without strides": (lambda command: tensor(size=(2, 2)), "2 sizes and 1 strides"),
    "a tensor of text": (lambda command: tensor(code("storage")), "not described by storage"),
    "a conjugate view": (
        lambda command: tensor(metadata=({"conj": True},)),
        "conjugate",
    ),
    "a parameter of text": (
        lambda command: call("torch._utils._rebuild_parameter", "x", True, {}),
        "not made of a tensor",
    ),
    "a tensor of a class": (
        lambda command: call("torch._tensor._rebuild_from_type_v2", name("argparse.Namespace"), 1, (), {}),
        "a kind that is not read here",
    ),
    "pairs that are none": (lambda command: call("collections.OrderedDict", ["ab"]), "not made of pairs"),
    "bytes in another encoding": (lambda command: call("_codecs.encode", "x", "rot13"), "other than latin1"),
    "lists in lists without end": (lambda command: b"]" * 200_000 + b"a" * 199_999, "levels deep"),
    "tuples in tuples without end": (lambda command: b")" + b"\x85" * 200_000, "levels deep"),
    "a list of itself": (lambda command: b"]q\x01h\x01a", "contains itself"),
    "a dictionary of itself": (lambda command: b"}q\x01" + code("a") + b"h\x01s", "contains itself"),
    "doubling": (
        lambda command: b"]" + b"".join(b"q\x01h\x01\x86" for _ in range(100)),
        "stands for more than",
    ),
    "an integer of a million bits": (
        lambda command: b"\x8b" + struct.pack("<i", 125_000) + b"\x7f" * 125_000,
        "an integer of",
    ),
    "an integer as digits": (lambda command: b"L" + b"9" * 5000 + b"L\n", "damaged|instruction LONG"),
    "text longer than the file": (lambda command: b"X\xff\xff\xff\x7fabc", "cut short or damaged"),
    "bytes longer than memory": (lambda command: b"\x8e" + b"\xff" * 7 + b"\x7f", "cut short or damaged"),
    "nothing on the stack": (lambda command: b"a", "cut short or damaged"),
    "no mark": (lambda command: b"t", "cut short or damaged"),
    "two contents": (lambda command: b"NN", "cut short or damaged"),
    "a memo that is not there": (lambda command: b"h\x07", "cut short or damaged"),
    "an unknown instruction": (lambda command: b"\xff", "cut short or damaged"),
    "a name with an odd escape": (lambda command: name("mem\\hx.M"), r"refers to .*M"),
    "an unprintable name": (lambda command: code("a\nb\x1b[2J") + code("c" * 999) + b"\x93", r"refers to 'a\\nb"),
}


@pytest.mark.parametrize("container", WRITERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused(tmp_path, container, attack):
    body, match = ATTACKS[attack]
    canary, path = tmp_path / "canary", tmp_path / "model.pt"
    body = code(body(shell(canary)))
    WRITERS[container](path, body)
    refused(path, match, canary)
    # The names are still shown, whatever else is wrong with the file.
    assert all(shown.isprintable() for shown in scan_globals(path))
    if match.startswith("refers to") and "path of attributes" not in attack:
        assert not set(scan_globals(path)) <= KNOWN


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_in_a_plain_pickle_runs_nothing(tmp_path, attack):
    """Where other objects are stand-ins, much of this is harmless data; nothing of it may be run or imported."""
    body, _ = ATTACKS[attack]
    canary, path = tmp_path / "canary", tmp_path / "model.pkl"
    path.write_bytes(program(body(shell(canary)), protocol=4))
    with contextlib.suppress(CheckpointError), watching():
        assert_plain(read_stored(path))
    assert not canary.exists()
