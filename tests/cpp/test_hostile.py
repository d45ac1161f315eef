"""Bundles that are replaced while they load, that take time out of proportion, or that no caller has room for."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from frozen import frozen
from resealing import copied, reseal

from conformance.driver import packed
from conformance.run import FOLDER
from conformance.spoiling import build, index
from conformance.talking import Talk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # whoever comes first builds
TOKENS = {"tokens": packed(np.arange(8, dtype=np.int32)[None])}


def other_weights(path: Path) -> Path:
    """The bundle with weights that are a tenth larger, and a `model_id` of its own."""
    data = (path / "weights.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    larger = np.frombuffer(data[start:], np.float32) * np.float32(1.1)
    (path / "weights.safetensors").write_bytes(data[:start] + larger.tobytes())
    return reseal(path, model_id="b" * 64)


def test_a_bundle_that_is_replaced_while_it_loads_is_wholly_one_or_refused(
    built: Path, engine: Path, tmp_path: Path
) -> None:
    """By exchanges of two folders, there and back, as `export --force` does one: a third of all loads were of both."""
    first, second = copied(FOLDER / "bundles" / "ring", tmp_path / "a"), tmp_path / "b"
    other_weights(copied(first, second))
    exchange, over = ctypes.CDLL(None, use_errno=True).renameat2, threading.Event()

    def replace() -> None:
        while not over.wait(0.01):
            assert exchange(-100, os.fsencode(first), -100, os.fsencode(second), 2) == 0

    with Talk([str(built / "txl-driver")], 60.0) as talk:

        def loaded(path: Path) -> str:
            """Return the result of a load: numbers, or the line that refuses it."""
            found = talk.ask({"do": "load", "path": str(path), "update": "rolled"})
            if "ok" not in found:
                return f"refused: {found['refused']}"
            talk.ask({"do": "open", "b": 1, "memory_length": None})
            return str(talk.ask({"do": "feed", "inputs": TOKENS, "counts": None, "last": True})["ok"]["outputs"])

        right = {loaded(first), loaded(second)}
        assert len(right) == 2
        writer = threading.Thread(target=replace)
        writer.start()
        try:
            found = [loaded(first) for _ in range(40)]
        finally:
            over.set()
            writer.join()
    refused = [said for said in found if said.startswith("refused: ")]
    assert {*found} - {*refused} <= right, "whatever has loaded is one of the two"
    assert any("replaced while it was loaded" in said for said in refused)


def test_a_manifest_takes_time_as_its_length(built: Path, engine: Path, tmp_path: Path) -> None:
    """80,000 empty objects took 21 seconds, and 16 MiB of them would have taken hours."""
    path = copied(FOLDER / "bundles" / "policy-1", tmp_path / "wide.txl")
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(manifest | {"more": {f"{n:x}": {} for n in range(80_000)}}))
    with Talk([str(built / "txl-driver")], 15.0) as talk:
        assert "ok" in talk.ask({"do": "load", "path": str(path), "update": None})


def test_a_program_of_kind_attention_is_ignored_whatever_it_says(built: Path, engine: Path, tmp_path: Path) -> None:
    """Bundles of 0.8 may have one."""
    path = copied(frozen("0.8/tokens"), tmp_path / "looking.txl")
    programs = json.loads((path / "manifest.json").read_bytes())["programs"]
    (look,) = (program for program in programs if program["kind"] == "attention")
    with Talk([str(built / "txl-driver")], 60.0) as talk:
        for changed in ({}, {"update": "rolled", "segment_length": 0, "file": "nowhere.onnx", "outputs": []}):
            look |= changed
            (path / "manifest.json").write_text(
                json.dumps(json.loads((path / "manifest.json").read_bytes()) | {"programs": programs})
            )
            assert "ok" in talk.ask({"do": "load", "path": str(path), "update": "rolled"})


def test_a_table_of_more_axes_than_a_caller_has_room_for_is_refused(built: Path, engine: Path, tmp_path: Path) -> None:
    """Whoever described an output of 16 axes wrote behind the end of a struct."""
    (case,) = (each for each in index()["cases"] if each["name"] == "axes")
    with Talk([str(built / "txl-driver")], 60.0) as talk:
        found = talk.ask({"do": "load", "path": str(build(case, tmp_path / "bundle.txl")), "update": None})
    assert found["kind"] == "unsupported"
    assert "has 16 axes, this library takes at most 8" in found["refused"]
