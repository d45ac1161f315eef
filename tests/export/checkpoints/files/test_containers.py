"""Containers that are damaged or made to do harm: a file is read as it was written, or refused in one line."""

import argparse
import collections
import contextlib
import io
import os
import pickle  # noqa: TID251 - the tests write what others wrote with it
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pickle_programs import (
    CONTAINERS,
    ENTRIES,
    PROGRAM,
    assert_plain,
    binary,
    call,
    central,
    code,
    described,
    legacy_bytes,
    name,
    overlapping,
    patched,
    program,
    refused,
    safetensors_bytes,
    storage,
    tensor,
    watched_load,
    zip_bytes,
)
from txl_export.checkpoints.files.loading import Loaded, scan_globals
from txl_runtime.errors import CheckpointError


def tar_bytes():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


HALF_FILE = [tensor(storage(60, key)) for key in "0123456789"]

SOUND = zip_bytes(ENTRIES)
# name → (the file's bytes, what the message says[, the file's name])
FILES = {
    "a zip bomb": (
        zip_bytes([("a/data.pkl", PROGRAM), ("a/data/0", bytes(1 << 20))], zipfile.ZIP_DEFLATED),
        "compressed or encrypted",
    ),
    "encrypted": (patched(SOUND, central(SOUND, 1) + 8, b"\x01"), "or encrypted"),
    "overlapping entries": (overlapping(1, 0), "cannot be read|no directory"),
    "overlapping entries the other way": (overlapping(0, 1), "cannot be read|no directory"),
    "an entry inside another": (
        patched(SOUND, central(SOUND, 1) + 42, struct.pack("<I", 40)),
        "cannot be read",
    ),
    "an entry behind the file": (
        patched(SOUND, central(SOUND, 1) + 42, b"\xff\xff\xff\x7f"),
        "cannot be read|no directory",
    ),
    "an entry into the directory": (
        patched(SOUND, central(SOUND, 2) + 20, struct.pack("<II", 4000, 4000)),
        "overlap, or have one name|no directory",
    ),
    "no local header": (patched(SOUND, SOUND.index(b"PK\x03\x04", 9), b"xx"), "a/data/0 cannot be read"),
    "a wrong checksum": (patched(SOUND, SOUND.index(b"a/data/0") + 8 + 5, b"\x01"), "a/data/0 cannot be read"),
    "a wrong checksum of the pickle": (
        SOUND.replace(b"rebuild_tensor_v2", b"rebuild_tensor_v3", 1),
        "a/data.pkl cannot be read",
    ),
    "a missing storage": (zip_bytes([*ENTRIES[:1], *ENTRIES[2:]]), "the file has no bytes"),
    "a short storage": (zip_bytes([ENTRIES[0], ("a/data/0", bytes(12))]), "the file has 12 bytes"),
    "no pickle": (zip_bytes(ENTRIES[1:]), "with 0 data.pkl"),
    "two pickles": (zip_bytes([*ENTRIES, ("b/data.pkl", b"N.")]), "with 2 data.pkl"),
    "TorchScript without a module": (zip_bytes([*ENTRIES, ("a/code/x.py", "")]), "holds no module"),
    "TorchScript of old": (
        zip_bytes([("a/model.json", "{}"), ("a/code/x.py", ""), ("a/tensors/0", "")]),
        r"a TorchScript archive of torch < 1\.4",
    ),
    "big-endian": (zip_bytes([*ENTRIES, ("a/byteorder", "big")]), "big-endian"),
    "an empty zip archive": (zip_bytes([]), "zip archive"),
    "a magic number that is only text": (
        program({"x": binary(struct.pack("10s", b"") + b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")}),
        "cut short or damaged",
    ),
    "another protocol": (legacy_bytes(protocol=1000), "not protocol 1001"),
    "storages that are not listed": (legacy_bytes(keys=()), "are not those that are listed"),
    "storages that are not used": (legacy_bytes(keys=("0", "1")), "are not those that are listed"),
    "a storage listed twice": (legacy_bytes(keys=("0", "0")), "are not those that are listed"),
    "storages in no list": (legacy_bytes(keys={"0": 1}), "are not those that are listed"),
    "another number of elements": (legacy_bytes(count=3), "does not have 4 elements"),
    "a negative number of elements": (legacy_bytes(count=-1), "does not have 4 elements"),
    "a storage cut short": (legacy_bytes(data=bytes(15)), "a storage ends with the file"),
    "storages larger than the file together": (legacy_bytes(body=HALF_FILE), "storage 5 of 60 .* does not fit"),
    "a part outside its storage": (
        legacy_bytes(body=tensor(storage(extra=(("1", 3, 2),)), size=(2,))),
        "lies outside it",
    ),
    "a part of negative size": (legacy_bytes(body=tensor(storage(extra=(("1", 0, -1),)))), "lies outside it"),
    "a part that is none": (legacy_bytes(body=tensor(storage(extra=("1",)))), "damaged"),
    "a tensor outside its part": (
        legacy_bytes(body=tensor(storage(extra=(("1", 1, 2),)), size=(3,))),
        "does not fit into its storage of 2 elements",
    ),
    "a tar container": (tar_bytes(), "tar archive.*torch < 0.4"),
    "a hostile plain pickle": (program(call("os.system", "true")), r"refers to os\.system"),
    "nothing": (b"", "the file is empty"),
    "text": ("Grüße aus der Höhle\n".encode() * 9, "looks like text .*Gr"),
    "a little text": (b"hello", "looks like text"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "TensorFlow's index": (bytes(40) + bytes.fromhex("57fb808b247547db"), "TensorFlow"),
    "TensorFlow's data": (bytes(40), "TensorFlow", "model.ckpt-7.data-00000-of-00001"),
    "Keras": (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
    "ONNX": (b"\x08\x08\x12\x07pytorch", "ONNX", "model.onnx"),
    "gzip": (b"\x1f\x8b\x08" + bytes(40), "a compressed file; unpack"),
    "something else": (bytes(range(200, 250)), "begins with c8 c9"),
    "safetensors: a header longer than the file": (
        patched(safetensors_bytes({"a": described()}), 0, b"\xff\xff"),
        "not a valid safetensors file",
        "model.safetensors",
    ),
    "safetensors: no JSON": (struct.pack("<Q", 4) + b"{abc" + bytes(16), "not a valid safetensors file"),
    "safetensors: data behind the file": (safetensors_bytes({"a": described(last=1 << 40)}), "not a valid"),
    "safetensors: overlapping": (safetensors_bytes({"a": described(), "b": described()}), "not a valid"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_sound_checkpoint_is_refused(tmp_path, kind):
    data, match, *names = FILES[kind]
    path = tmp_path / (names[0] if names else "model.pt")
    path.write_bytes(data)
    refused(path, match)
    with contextlib.suppress(CheckpointError):  # an answer or a refusal, nothing else
        scan_globals(path)


def test_an_entry_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        (tmp_path / "model.pt").write_bytes(zip_bytes([*ENTRIES, ENTRIES[1]]))
    refused(tmp_path / "model.pt", "have one name")


def test_the_hand_written_containers_are_sound(tmp_path):
    path = tmp_path / "model.pt"
    for data in (zip_bytes(ENTRIES), legacy_bytes(), safetensors_bytes({"a": described()})):
        path.write_bytes(data)
        content = watched_load(path).content
        assert torch.equal(content["a"] if isinstance(content, dict) else content, torch.zeros(4))


def test_a_part_of_a_legacy_storage(tmp_path):
    path = tmp_path / "model.pt"
    part = storage(extra=(("1", 1, 2),))
    body = [tensor(part, size=(2,)), tensor(storage(extra=(None,))), tensor(part, size=(2,))]
    path.write_bytes(legacy_bytes(body=body, data=np.arange(4, dtype="<f4").tobytes()))
    first, whole, again = watched_load(path).content
    assert first.tolist() == [1, 2]
    assert whole.tolist() == [0, 1, 2, 3]
    assert again is first


def test_what_is_no_file_is_refused(tmp_path):
    refused(tmp_path / "missing.pt", "no such file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")
    for path in (tmp_path / "missing.pt", tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError):
            scan_globals(path)


def test_names_of_refused_files_are_shown(tmp_path):
    path = tmp_path / "model.pt"
    evil = call("os.system", "true")
    path.write_bytes(program([evil, name("mem_transformer.MemTransformerLM")]))
    assert scan_globals(path) == ("mem_transformer.MemTransformerLM", "os.system")
    path.write_bytes(program([evil])[:-1] + b"\xff" + name("a.b"))
    assert scan_globals(path) == ("os.system",)
    path.write_bytes(pickle.dumps({"a": collections.Counter(), "b": argparse.Namespace()}, 4))
    assert scan_globals(path) == ("argparse.Namespace", "collections.Counter")
    path.write_bytes(program(code("os") + code("system") + code(1) + b"0\x93"))
    assert scan_globals(path) == ("os.system",)  # put together in an unusual way
    with pytest.raises(CheckpointError, match="looks like text"):
        scan_globals(Path(__file__))


# --- damage


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory):
    """One small file of each container, by name."""
    folder = tmp_path_factory.mktemp("valid")
    content = {
        "model": {f"layers.{i}.weight": torch.arange(12.0).view(3, 4) + i for i in range(3)},
        "args": argparse.Namespace(mem_len=4, name="x"),
        "counter": collections.Counter("hello"),
        "half": torch.ones(2).half(),
    }
    torch.save(content, folder / "torch zip")
    torch.save(content, folder / "torch legacy", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(content["model"], folder / "safetensors")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("container", [*CONTAINERS, "safetensors"])
def test_a_file_cut_short_anywhere_is_refused(tmp_path, valid_files, container):
    path, data = tmp_path / "model.pt", valid_files[container]
    path.write_bytes(data)
    assert watched_load(path).container == container
    for percent in range(100):
        path.write_bytes(data[: len(data) * percent // 100])
        with pytest.raises(CheckpointError):
            watched_load(path)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError):
        watched_load(path)


@pytest.mark.parametrize(
    "start",
    [b"", b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02", b"\x80\x04", b"\x10" + bytes(7) + b"{"],
)
def test_noise_is_refused(tmp_path, start):
    path = tmp_path / "model.pt"
    noise = random.Random(5)
    for length in (1, 30, 500, 5000):
        path.write_bytes(start + noise.randbytes(length))
        with pytest.raises(CheckpointError):
            watched_load(path)


PLACES = st.floats(0, 1, exclude_max=True)
EDITS = st.one_of(
    st.tuples(st.just("change"), PLACES, st.integers(1, 255)),
    st.tuples(st.just("delete"), PLACES, st.integers(1, 40)),
    st.tuples(st.just("insert"), PLACES, st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("splice"), PLACES, PLACES, st.integers(1, 200)),
)


def edited(data, edit, area):
    """The bytes after one edit within the first `area` of them."""
    kind, place, *how = edit
    at = int(place * area)
    if kind == "change":
        return patched(data, at, bytes([data[at] ^ how[0]]))
    if kind == "delete":
        return data[:at] + data[at + how[0] :]
    if kind == "insert":
        return data[:at] + how[0] + data[at:]
    source = int(how[0] * area)
    return patched(data, at, data[source : source + how[1]])[: len(data)]


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    container=st.sampled_from([*CONTAINERS, "pickle in a zip", "safetensors"]),
    edits=st.lists(EDITS, min_size=1, max_size=4),
)
def test_a_damaged_file_loads_or_is_refused(tmp_path, valid_files, container, edits):
    path = tmp_path / "model.pt"
    if container == "pickle in a zip":  # with a checksum that fits, so that the damage reaches the interpreter
        with zipfile.ZipFile(io.BytesIO(valid_files["torch zip"])) as archive:
            entries = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
        for edit in edits:
            entries["data.pkl"] = edited(entries["data.pkl"] + b".", edit, len(entries["data.pkl"]))
        data = zip_bytes([(f"a/{name}", entry) for name, entry in entries.items()])
    else:
        data = valid_files[container]
        for edit in edits:
            data = edited(data + b"\0", edit, len(data))[:-1]
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        loaded = watched_load(path)
        assert isinstance(loaded, Loaded)
        assert_plain(loaded.content)
    with contextlib.suppress(CheckpointError):
        scan_globals(path)


def test_a_plain_pickle_has_no_storages_outside_it(tmp_path):
    """Nothing would ever fill them."""
    (tmp_path / "a.pkl").write_bytes(program(tensor()))
    refused(tmp_path / "a.pkl", "its tensors lie in no file that torch.save wrote")
