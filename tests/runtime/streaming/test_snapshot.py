"""Snapshots that do not fit are refused before anything is changed; files that are none are refused by name."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frozen import frozen
from mutated_states import mutated
from opcodes import bits
from safetensors.torch import save_file as save_torch
from step_models import FEATURES, recurrent
from txl_runtime import StreamState, TxlError, UsageError, load
from txl_runtime.streaming import state_files

B = 3


@pytest.fixture(scope="module")
def model():
    return load(frozen("ring"), backend="cpu", threads=1)


def with_key(change: Callable[[np.ndarray], Any]) -> Callable[[StreamState], StreamState]:
    """A state whose first tensor is changed."""
    return lambda s: replace(s, memory=s.memory | {"layers.00.key": change(s.memory["layers.00.key"])})


def without(state: StreamState, name: str) -> dict[str, Any]:
    return {key: rows for key, rows in state.memory.items() if key != name}


MISFITS: dict[str, tuple[Callable[[StreamState], StreamState], str]] = {
    "a surplus tensor": (
        lambda s: replace(s, memory={**s.memory, "layers.99.key": s.memory["layers.00.key"]}),
        r"the state's layers\.99\.key is float32 \[.*\], expected no such tensor",
    ),
    "a missing tensor": (
        lambda s: replace(s, memory=without(s, "layers.01.value")),
        r"layers\.01\.value is absent, .* restore a state of a bundle that keeps the same form of memory",
    ),
    "another dtype": (with_key(lambda rows: rows.astype(np.float64)), r"float64 \[3, 3, 2, 4\], expected float32"),
    "another shape": (with_key(lambda rows: rows[:, 1:]), r"\[3, 2, 2, 4\], expected float32 \[3, 3, 2, 4\]"),
    "a tensor that is no array": (with_key(lambda rows: "rows"), "layers.00.key is str, expected"),
    "fewer sequences": (lambda s: replace(s, fill=s.fill[:2]), "2 sequences, expected 3; open a stream of as many"),
    "a fill beyond the memory": (lambda s: replace(s, fill=s.fill + 4), r"fill is \[7, 7, 7\], .*0 … 6"),
    "a negative fill": (lambda s: replace(s, fill=np.subtract(s.fill, [0, 4, 0])), r"fill is \[3, -1, 3\], .*0 … 6"),
    "another fill": (lambda s: replace(s, fill=np.add(s.fill, [0, 1, 0])), r"\[3, 3, 2, 4\], expected float32 \[3, 4,"),
    "a fill of floats": (lambda s: replace(s, fill=s.fill.astype(np.float32)), "fill is float32"),
    "a fill that is no array": (lambda s: replace(s, fill=[1, 2, 3]), "fill is list"),
    "fewer heads": (lambda s: replace(s, head=s.head[:2]), r"head is int32 \[2\], expected int32 \[3\]"),
    "heads of two axes": (lambda s: replace(s, head=s.head[None]), r"head is int32 \[1, 3\]"),
    "heads of floats": (lambda s: replace(s, head=s.head + 0.5), r"head is float64 \[3\], expected int32"),
    "another model": (lambda s: replace(s, model_id="0" * 64), "model 000000000000, .*restore it in the model"),
    "no model": (lambda s: replace(s, model_id=""), "model unknown"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_and_the_memory_is_what_it_was(model, misfit):
    change, said = MISFITS[misfit]
    stream = model.stream()
    stream.feed(np.arange(3 * B).reshape(B, 3))
    state = stream.snapshot()
    stream.feed(np.arange(5 * B).reshape(B, 5) + 1)
    before = bits(stream)
    with pytest.raises(UsageError, match=said) as caught:
        stream.restore(change(state))
    assert "\n" not in str(caught.value)
    assert bits(stream) == before


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
def test_a_file_with_tensors_that_numpy_has_no_type_for_is_refused(model, tmp_path, kind):
    path, dtype = tmp_path / "odd.state", getattr(torch, kind)
    tensors = {"fill": torch.zeros(B, dtype=torch.int32), "layers.00.key": torch.zeros(2).to(dtype)}
    save_torch(tensors, path, metadata={"format": "txl-deploy.state/1", "model_id": model.manifest.model_id})
    with pytest.raises(UsageError, match="expected"):
        model.stream().restore(StreamState.load(path))


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"txl-deploy.state/1", b"txl-deploy.state/2"), (b'"fill"', b'"fuel"'), (b"txl-deploy", b"else-where")],
)
def test_a_file_of_another_kind_or_version_is_refused(model, tmp_path, old, new):
    path = tmp_path / "a.state"
    model.stream().snapshot().save(path)
    path.write_bytes(path.read_bytes().replace(old, new))
    for wrong in (path, frozen("ring") / "weights.safetensors", frozen("ring") / "manifest.json"):
        with pytest.raises(UsageError, match="expected a saved state"):
            StreamState.load(wrong)


def test_a_state_that_cannot_be_written_leaves_nothing_behind(model, tmp_path):
    with pytest.raises(TxlError, match="there is no folder"):
        model.stream().snapshot().save(tmp_path / "no such folder" / "a.state")
    assert not [*tmp_path.iterdir()]


MUTANTS = int(os.environ.get("TXL_MUTANTS", "150"))
"""Mutants of each kind of state; the sweep tries some, `TXL_MUTANTS=3000` very many."""


@pytest.mark.parametrize("kind", ["rows", "whole"])
def test_a_damaged_file_is_refused_or_restored_bit_for_bit(model, tmp_path, tmp_path_factory, kind):
    if kind == "rows":
        stream = model.stream()
        stream.feed(np.arange(3 * 5).reshape(B, 5))
    else:
        stream = load(recurrent().write(tmp_path_factory.mktemp("step") / "r.txl"), "cpu", threads=1).stream()
        stream.run({"obs": np.ones((B, 4, FEATURES)), "starts": np.zeros(B, np.bool_)})
    start, path = stream.snapshot(), tmp_path / "a.state"
    start.save(path)
    whole, before, draws, taken = path.read_bytes(), bits(stream), np.random.default_rng(0), 0
    for number in range(MUTANTS):
        path.write_bytes(mutated(whole, draws))
        tracemalloc.start()
        try:
            state = StreamState.load(path)
        except UsageError as error:
            said = str(error)
        else:
            said = ""
        most, size = tracemalloc.get_traced_memory()[1], path.stat().st_size
        tracemalloc.stop()
        assert most < 3 * size + 2**23, f"mutant {number}: {size} bytes took {most}"
        if not said:
            try:
                stream.restore(state)
            except UsageError as error:
                said = str(error)
        if said:
            assert "expected" in said or "restore it in the model" in said or "open it with" in said
            assert bits(stream) == before, f"mutant {number} was refused and changed the stream"
            continue
        taken += 1
        again = stream.snapshot()
        assert again.fill.tolist() == state.fill.tolist()
        for name, array in (again.states if state.states is not None else again.memory).items():  # type: ignore[union-attr]
            wanted = (state.states if state.states is not None else state.memory)[name]
            for row, count in enumerate(state.fill.tolist() if state.states is None else []):
                assert (
                    array[row, len(array[row]) - count :].tobytes() == wanted[row, wanted.shape[1] - count :].tobytes()
                )
            assert state.states is None or array.tobytes() == wanted.tobytes()
        stream.restore(start)
    print(f"{kind}: {MUTANTS} damaged files, {taken} of them whole states")
    assert 0 < taken < MUTANTS / 2


ODD_FILES: dict[str, Any] = {
    "a pipe": os.mkfifo if hasattr(os, "mkfifo") else None,
    "a folder": lambda path: path.mkdir(),
    "a link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "nothing": lambda path: None,
    "no bytes": lambda path: path.write_bytes(b""),
    "ten gigabytes of zeros": lambda path: _sparse(path, b"", 10 * 2**30),
    "a header of 100 MB": lambda path: _sparse(path, (100 * 2**20).to_bytes(8, "little") + b"{", 2**28),
    "a header longer than the file": lambda path: path.write_bytes((2**62).to_bytes(8, "little") + b"{}"),
}


def _sparse(path: Path, begin: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(size)


@pytest.mark.parametrize("name", ODD_FILES)
def test_what_is_no_saved_state_is_refused_at_once_and_takes_no_memory(tmp_path, name):
    if ODD_FILES[name] is None:
        pytest.skip("there are no pipes here")
    path = tmp_path / "odd.state"
    ODD_FILES[name](path)
    tracemalloc.start()
    with pytest.raises(UsageError, match="expected a saved state"):
        StreamState.load(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**21


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(model, tmp_path, monkeypatch):
    """A mapped file would kill the process there."""
    path = tmp_path / "a.state"
    stream = model.stream()
    stream.feed(np.arange(3 * 5).reshape(B, 5))
    stream.snapshot().save(path)
    read = state_files.read_whole

    def cut(file: Any, size: int, most: int) -> Any:
        os.truncate(path, size - 100)
        return read(file, size, most)

    monkeypatch.setattr(state_files, "read_whole", cut)
    with pytest.raises(UsageError, match=r"became shorter while it was read; expected a saved state"):
        StreamState.load(path)


def test_nan_and_infinities_are_restored_as_they_are(model):
    stream = model.stream()
    stream.feed(np.arange(3 * 5).reshape(B, 5))
    state = stream.snapshot()
    for number, value in enumerate((np.nan, np.inf, -np.inf)):
        state.memory["layers.00.key"][number, -1] = value
    stream.restore(state)
    assert stream.snapshot().memory["layers.00.key"].tobytes() == state.memory["layers.00.key"].tobytes()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_file_that_becomes_a_pipe_before_it_is_opened_is_refused_at_once(tmp_path, monkeypatch):
    path, opened = tmp_path / "a.state", os.open
    path.write_bytes(b"data")

    def switched(place: Any, flags: int, *more: Any, **options: Any) -> int:
        if Path(place) == path:
            assert flags & os.O_NONBLOCK, "it would wait for a writer"
            path.unlink()
            os.mkfifo(path)
        return opened(place, flags, *more, **options)

    monkeypatch.setattr(os, "open", switched)
    with pytest.raises(UsageError, match="no plain file; expected a saved state"):
        StreamState.load(path)


LONG = "a long name " * 1000


def test_a_message_quotes_the_begin_of_a_long_name(model, tmp_path):
    def misnamed(dtype: str, offsets: list[int], size: int) -> StreamState:
        header = json.dumps({LONG: {"dtype": dtype, "shape": [1], "data_offsets": offsets}}).encode()
        (tmp_path / "state").write_bytes(len(header).to_bytes(8, "little") + header + bytes([2]) * size)
        return StreamState.load(tmp_path / "state")

    rows, whole = model.stream(1), load(recurrent().write(tmp_path / "r.txl"), "cpu", threads=1).stream()
    more = {LONG: np.zeros(1, np.float32)}
    state, states, taken = rows.snapshot(), whole.snapshot(), rows.take(0)
    for call in (
        lambda: misnamed("BF16", [0, 2], 2),
        lambda: misnamed(LONG, [0, 2], 2),
        lambda: misnamed("F32", [0, 5], 5),
        lambda: misnamed("BOOL", [0, 1], 1),
        lambda: rows.restore(replace(state, memory={**state.memory, **more})),
        lambda: whole.restore(replace(states, states={**states.states, **more})),
        lambda: rows.put(0, replace(taken, tensors={**taken.tensors, **more})),
    ):
        with pytest.raises(UsageError) as refused:
            call()
        assert "a long name" in str(refused.value)
        assert len(str(refused.value)) < 600
