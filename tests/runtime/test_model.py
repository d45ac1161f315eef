"""Loading: one model is of one bundle, whatever happens to the folder meanwhile; what the logger is told."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from txl_runtime import BackendError, BundleError, Model, Stream, UsageError, load
from txl_runtime import model as models
from txl_runtime.host.loop import HostLoop
from txl_runtime.sessions import Request, Sessions


@pytest.fixture
def different(tmp_path) -> tuple[Path, Path]:
    """A bundle that will be loaded, and one of the same sizes and other weights beside it."""
    places = (tmp_path / "model.txl", tmp_path / "other.txl")
    for name, place in zip(("ring", "zeros"), places, strict=True):
        shutil.copytree(frozen(name), place)
    return places


def exchange(first: Path, second: Path) -> None:
    """Swap two folders in one step, as an export with --force does."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    assert renameat2(-100, os.fsencode(first), -100, os.fsencode(second), 2) == 0


linux = pytest.mark.skipif(sys.platform != "linux", reason="folders are exchanged in one step on Linux only")
TOKENS = np.random.default_rng(0).integers(0, 41, (3, 9)).astype(np.int32)


def test_a_model_that_runs_leaves_no_file_anywhere(tmp_path):
    """An engine that reports to its makers keeps what it has to say in the home folder until it is sent."""
    code = """
import sys, txl_runtime
model = txl_runtime.load(sys.argv[1], "cpu")
model.stream().feed([[1, 2, 3]] * model.batch_size)
"""
    places = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"} | places
    command = [sys.executable, "-B", "-c", code, str(frozen("ring"))]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=60)
    assert list(tmp_path.rglob("*")) == []


@linux
def test_a_load_that_spans_a_replacement_is_refused_and_the_next_is_of_the_new_bundle(different, monkeypatch):
    path, other = different
    expected = load(other).stream().feed(TOKENS).tobytes()
    real = models._open

    def replacing(*arguments: Any) -> Any:
        exchange(path, other)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(models, "_open", replacing)
        with pytest.raises(BundleError, match=r"was replaced or removed while it was being loaded, .*; load it again$"):
            load(path)
    assert load(path).stream().feed(TOKENS).tobytes() == expected


@pytest.mark.skipif(sys.platform == "win32", reason="links are not for everybody there")
def test_a_link_that_is_switched_during_a_load_leads_where_it_led(different, tmp_path, monkeypatch):
    """The engine is told a folder for the weights: it has to be the one whose files were checked."""
    path, other = different
    expected = load(path).stream().feed(TOKENS).tobytes()
    current, real = tmp_path / "current", models._open
    current.symlink_to(path)

    def switching(*arguments: Any) -> Any:
        current.unlink()
        current.symlink_to(other)
        return real(*arguments)

    monkeypatch.setattr(models, "_open", switching)
    assert load(current).stream().feed(TOKENS).tobytes() == expected


def test_the_vocabulary_is_the_one_the_model_was_loaded_with(tmp_path):
    path = tmp_path / "model.txl"
    shutil.copytree(frozen("clusters"), path)
    used, unused = load(path), load(path)
    assert used.vocabulary is not None
    (path / "vocabulary.json").write_bytes(b'{"kind":"words","symbols":["a"]}')
    with pytest.raises(BundleError, match="is not the file that the bundle was opened with"):
        _ = unused.vocabulary
    shutil.rmtree(path)
    assert used.vocabulary.encode(b"a").tolist() == [97]
    assert used.vocabulary is used.vocabulary
    with pytest.raises(BundleError, match=r"vocabulary\.json: missing, expected"):
        _ = unused.vocabulary


def test_the_logger_is_silent_until_somebody_listens(capfd, caplog):
    path = frozen("ring")
    load(path)
    assert capfd.readouterr() == ("", "")
    logger = logging.getLogger("txl_runtime")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    with caplog.at_level(logging.INFO, "txl_runtime"):
        model = load(path)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("txl_runtime")]
    assert any(f"loaded {path}" in line and model.backend.description in line for line in said)
    assert any("backend rtx is not taken" in line for line in said)


def test_why_better_backends_were_not_taken_is_said_where_none_runs(monkeypatch):
    def without(*_: object) -> None:
        raise BackendError("onnxruntime is not installed")

    path = frozen("ring")
    monkeypatch.setattr("txl_runtime.model.open_host", without)
    with pytest.raises(BackendError, match=r"onnxruntime is not installed; rtx: the bundle has no engines"):
        load(path)


# --- closing ----------------------------------------------------------------------------------------------------------


CLOSED = "the model was closed, expected it open; load it again"
USES: dict[str, Callable[[Model, Stream], Any]] = {
    "a stream": lambda model, stream: model.stream(1),
    "a loop": lambda model, stream: model.open_loop(),
    "its engine": lambda model, stream: model.backend.description,
    "its rule": lambda model, stream: model.update,
    "step": lambda model, stream: stream.step(TOKENS[:, :1]),
    "run": lambda model, stream: stream.run({"tokens": TOKENS[: stream.batch_size, :1]}),
    "feed": lambda model, stream: stream.feed(TOKENS),
    "feed by name": lambda model, stream: stream.feed({"tokens": TOKENS}),
    "score": lambda model, stream: stream.score(TOKENS),
    "generate": lambda model, stream: stream.generate(TOKENS, 1),
    "fill": lambda model, stream: stream.fill,
    "memory": lambda model, stream: stream.memory(),
    "state": lambda model, stream: stream.state(),
    "take": lambda model, stream: stream.take(0),
    "put": lambda model, stream: stream.put(0, stream.take(0)),
    "reset": lambda model, stream: stream.reset(),
    "select": lambda model, stream: stream.select([0]),
    "snapshot": lambda model, stream: stream.snapshot(),
}


@pytest.mark.parametrize("use", USES)
def test_a_model_that_was_closed_is_used_no_more(use):
    with load(frozen("0.8/tokens"), "cpu", 1) as model:
        stream = model.stream()
        USES[use](model, stream)
    model.close()  # a second time does nothing
    for again in (USES[use], USES[use], USES["run"]):
        with pytest.raises(UsageError, match=f"^{CLOSED}$"):
            again(model, stream)
    assert repr(stream) == f"<Stream of {stream.batch_size} sequences, closed>"
    assert model.batch_size == model.manifest.batch_size == 3
    assert repr(model).startswith("<Model ")


def test_a_generation_over_a_model_that_was_closed_ends_with_a_sentence():
    model = load(frozen("0.8/tokens"), "cpu", 1)
    drawn = model.stream().generate(TOKENS, 5)
    next(drawn)
    model.close()
    with pytest.raises(UsageError, match=CLOSED):
        next(drawn)


def test_closing_gives_back_everything_at_once_whoever_still_has_streams():
    """Without the collector's help: sessions of the engine and its arrays."""
    gc.collect()
    gc.disable()
    try:
        model = load(frozen("0.8/tokens"), "cpu", 1)
        streams = [model.stream(), model.stream(1)]
        drawn = streams[1].generate(TOKENS[:1], 5)
        next(drawn)
        engine = model.backend.engine
        held = [engine, *engine._sessions.values(), *(stream.loop for stream in streams)]
        held += [array.base if array.base is not None else array for stream in streams for array in loop_arrays(stream)]
        there = [weakref.ref(one) for one in held]
        assert len(there) > 8
        del engine, held
        model.close()
        assert [reference() for reference in there if reference() is not None] == []
    finally:
        gc.enable()


def loop_arrays(stream: Stream) -> Iterator[np.ndarray]:
    for placement in stream.loop.placements:
        yield from (value for value in vars(placement).values() if isinstance(value, np.ndarray))
    yield from (array for pair in stream.loop._arrays.values() for group in pair for array in group.values())


def test_a_step_that_runs_while_the_model_is_closed_comes_to_its_end():
    model = load(frozen("0.8/tokens"), "cpu", 1)
    expected = load(frozen("0.8/tokens"), "cpu", 1).stream().step(TOKENS[:, :4])
    stream, real = model.stream(), HostLoop.run

    def closing(self: HostLoop, *given: Any) -> Any:
        model.close()  # as another thread would, once this one is inside
        gc.collect()
        return real(self, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostLoop, "run", closing)
        with pytest.raises(UsageError, match=CLOSED):
            stream.feed(TOKENS)  # its first segment runs, the second is refused
    model = load(frozen("0.8/tokens"), "cpu", 1)
    stream = model.stream()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostLoop, "run", closing)
        assert stream.step(TOKENS[:, :4]).tobytes() == expected.tobytes()


def test_sessions_on_a_model_that_was_closed_say_so():
    model = load(frozen("0.8/tokens"), "cpu", 1)
    with Sessions(model, rows=1) as sessions:
        running = sessions.submit(Request([1, 2], 5), session="a")
        assert sessions.round()
        waiting = sessions.submit(Request([1, 2], 5), session="b")
        model.close()
        while sessions.round():
            pass
        for ticket in (running, waiting):
            assert ticket.done
            assert CLOSED in str(ticket.error)
