"""A small program that asks for much is refused, or its process ends: in one line, and within bounds."""

from __future__ import annotations

import json
import sys
import time
import tracemalloc

import pytest
import torch
from amplifiers import AMPLIFIERS
from pickle_programs import code, legacy_bytes, name, program, refused, tensor, write_zip, zip_bytes
from txl_export.checkpoints.files import program as reader
from txl_export.checkpoints.files import rebuilding
from txl_export.checkpoints.files.loading import load_file
from txl_export.checkpoints.plain_weights import read_stored
from txl_runtime.errors import CheckpointError

SIZE = 1 << 15


def answered(body, protocol=2):
    """Return the reader's answer to a program, and the bytes behind it."""
    written = reader.answer(bytes([1]) + program(body, protocol))
    behind = 8 + int.from_bytes(written[:8], "little")
    return json.loads(written[8:behind]), written[behind:]


def test_what_a_program_makes_is_written_as_lists_and_the_rest_stands_for_itself():
    made = name("m.C") + code((1,)) + b"R" + code({"a": None}) + b"b"
    found, blob = answered([2, {"a": 0.5}, ("é", True), b"C\x02\x00\xff", made, b"\x8f(K\x08K\x01\x90", tensor()], 5)
    assert found["error"] == ""
    assert found["names"] == ["m.C", "torch._utils._rebuild_tensor_v2", "torch.FloatStorage", "collections.OrderedDict"]
    (content,) = found["contents"]
    assert content[:4] == [reader.LIST, 2, [reader.DICT, "a", 0.5], [reader.TUPLE, "é", True]]
    assert content[4] == [reader.BYTES, 0, 2]
    assert blob == b"\x00\xff"
    assert content[5] == [reader.MADE, "m.C", [1], [[reader.DICT, "a", None]], [], []]
    assert content[6] == [reader.LIST, 1, 8]
    assert content[7][2][0][:1] == [reader.OUTSIDE]


@pytest.mark.parametrize("amplifier", AMPLIFIERS)
def test_a_program_that_asks_for_much_is_refused(tmp_path, amplifier):
    body, match = AMPLIFIERS[amplifier]
    path = tmp_path / "model.pkl"
    path.write_bytes(program(body(SIZE), 4))
    if amplifier == "views":
        path.write_bytes(zip_bytes([("a/data.pkl", program(body(SIZE))), ("a/data/0", bytes(SIZE // 2))]))
    elif amplifier == "long names of parts":
        write_zip(path, body(SIZE))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=match):
            read_stored(path)
        assert tracemalloc.get_traced_memory()[1] < 256 * path.stat().st_size + (16 << 20)
    finally:
        tracemalloc.stop()


DYING = {
    "a tuple of a tuple twice, sixty times, as a key": (b"}N" + b"\x85q\x01h\x01\x86" * 60 + b"Ns", "processor time"),
    "a key of 200,000 tuples in one another": (b"})" + b"\x85" * 200_000 + b"Ns", ""),
    "a memo of four thousand million places": (b"Nr\xff\xff\xff\xff", "bytes of memory"),
    "bytes of four gigabytes": (b"\x8e\xff\xff\xff\xff" + bytes(4), "bytes of memory"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="has no limits")
@pytest.mark.parametrize("case", DYING)
@pytest.mark.usefixtures("own_processes")
def test_a_process_that_dies_of_a_program_is_one_line(tmp_path, monkeypatch, case):
    body, match = DYING[case]
    monkeypatch.setattr(rebuilding, "SECONDS", 1)
    for path, data in (("a.pt", zip_bytes([("a/data.pkl", program(body))])), ("b.pt", legacy_bytes(body=body))):
        (tmp_path / path).write_bytes(data)
        own = time.process_time()
        refused(tmp_path / path, f"the process that reads its pickle .*{match}")
        assert time.process_time() - own < 1


@pytest.mark.usefixtures("own_processes")
def test_much_that_is_honest_is_read(tmp_path):
    """A hundred thousand names, and texts that many entries share."""
    path = tmp_path / "model.pt"
    write_zip(path, b"(" + b"".join(b"cm\nn%d\n" % number for number in range(100_000)) + b"t")
    assert len(load_file(path).global_names) == 100_000
    words = [f"word{number}" for number in range(9000)]
    content = {"words": words, "ids": dict.fromkeys(words, 1), "pairs": [(words[0], words[1])] * 9000}
    torch.save(content, path)
    assert load_file(path).content == content
