"""Checkpoint files written by hand, one instruction after the other, and what is asked of whoever reads them."""

import contextlib
import io
import json
import pickle  # noqa: TID251 - the tests write what others wrote with it
import struct
import sys
import threading
import zipfile
from unittest import mock

import pytest
import torch
from txl_export.checkpoints import load
from txl_export.checkpoints.files import program as reader
from txl_export.checkpoints.files import rebuilding
from txl_export.checkpoints.files.pickle_names import Stub
from txl_runtime.errors import CheckpointError
from txl_runtime.sandbox.process import Bounded, Bounds, EndedError

CONTAINERS = {"torch zip": True, "torch legacy": False}


@contextlib.contextmanager
def watching():
    """In here this thread may look for no module that is not a library's own; others are the test runner's."""
    asked, here = [], threading.get_ident()

    class Watch:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if threading.get_ident() == here:
                asked.append(name)

    sys.meta_path.insert(0, Watch)
    try:
        yield
    finally:
        sys.meta_path.remove(Watch)
        assert {name.partition(".")[0] for name in asked} <= {"torch", "safetensors", "numpy", "encodings"}


def watched_load(path, aliases=None):
    """Load a file as an importer gets it, watched."""
    with watching():
        return load(path, aliases)[1]


class OneProcess:
    """Reads pickles as `rebuilding` does, but all in one process, which saves its start; a new one where it died."""

    def __init__(self):
        self._process = None

    def __call__(self, request):
        if self._process is None:
            self._process = Bounded(reader.__file__, Bounds(rebuilding.MEMORY, rebuilding.SECONDS), rebuilding.MEMORY)
        try:
            return self._process.ask(request)
        except EndedError as error:
            self._process = None
            raise CheckpointError(f"the process that reads its pickle {error}; the file is damaged") from None


ONE_PROCESS = OneProcess()


def in_one_process():
    """In here all pickles are read in one process."""
    return mock.patch.object(rebuilding, "_asked", ONE_PROCESS)


def assert_plain(value):
    """Walk everything: only the promised types, everything hashable, finite and short to print."""
    assert type(value) in (dict, list, tuple, str, int, float, bool, bytes, type(None), torch.Tensor) or isinstance(
        value, Stub
    )
    if isinstance(value, torch.Tensor):
        value.clone()
    elif isinstance(value, Stub):
        assert_plain(value.state)
        assert_plain(value.args)
    elif isinstance(value, dict):
        for key, item in value.items():
            assert_plain(key)
            assert_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            assert_plain(item)


def code(value):
    """The instructions that push a value; bytes stand for themselves."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(code, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(code, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(code(key) + code(item) for key, item in value.items()) + b"u"
    return pickle.dumps(value, 2)[2:-1]


def name(dotted):
    module, _, attribute = dotted.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def call(dotted, *args):
    return name(dotted) + code(args) + b"R"


def reference(*args):
    return code(args) + b"Q"


def storage(count=4, key="0", kind="torch.FloatStorage", location="cpu", extra=()):
    return reference("storage", name(kind), key, location, count, *extra)


def tensor(where=None, offset=0, size=(4,), stride=(1,), metadata=()):
    hooks = call("collections.OrderedDict")
    where = storage() if where is None else where
    return call("torch._utils._rebuild_tensor_v2", where, offset, size, stride, False, hooks, *metadata)


def binary(data):
    return b"B" + struct.pack("<I", len(data)) + data


def program(body, protocol=2):
    return bytes([0x80, protocol]) + code(body) + b"."


def write_zip(path, body, data=bytes(16)):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program(body))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", data)
        archive.writestr("archive/version", "3\n")


def write_script(path, body, data=bytes(16)):
    write_zip(path, body, data)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/code/__torch__.py", "raise SystemExit")


def write_legacy(path, body, data=bytes(16), keys=("0",), count=4, magic=0x1950A86A20F9469CFC6C, protocol=1001):
    with path.open("wb") as file:
        for part in (magic, protocol, {"little_endian": True}, body, keys if isinstance(keys, dict) else list(keys)):
            file.write(program(part))
        for _ in keys:
            file.write(struct.pack("<q", count) + data)


WRITERS = {"torch zip": write_zip, "torch legacy": write_legacy, "TorchScript": write_script}


def refused(path, match, canary=None):
    with pytest.raises(CheckpointError, match=match) as refusal:
        watched_load(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    assert len(message) < 3000
    assert canary is None or not canary.exists()
    return message


def patched(data, at, new):
    return data[:at] + new + data[at + len(new) :]


def central(data, number):
    """Return the offset of the directory's entry of that number."""
    at = -1
    for _ in range(number + 1):
        at = data.index(b"PK\x01\x02", at + 1)
    return at


def zip_bytes(entries, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return file.getvalue()


PROGRAM = program(tensor())
ENTRIES = [("a/data.pkl", PROGRAM), ("a/data/0", bytes(16)), ("a/version", "3\n")]


def overlapping(number, other):
    data = zip_bytes(ENTRIES)
    offset = data[central(data, other) + 42 :][:4]
    return patched(data, central(data, number) + 42, offset)


def legacy_bytes(**options):
    path = io.BytesIO()
    path.open = lambda mode: contextlib.nullcontext(path)
    write_legacy(path, options.pop("body", tensor()), **options)
    return path.getvalue()


def safetensors_bytes(header, data=bytes(16)):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def described(dtype="F32", shape=(4,), first=0, last=16):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}
