"""CUDA graphs of ONNX Runtime, on the stand-ins for it and for the driver: right, and left out by name where unfit."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins.driver import FakeDriver
from stand_ins.onnxruntime import StandInOrt, load_with, opened
from txl_runtime import BackendError, UsageError, load
from txl_runtime.device import choosing, onnxruntime_graphs
from txl_runtime.device.onnxruntime_graphs import Runs

B, V = 3, 60
LOGGER = "txl_runtime.device.onnxruntime_graphs"
both = pytest.mark.parametrize("update", ["ring", "rolled"])


def recorded(path: Any, update: str, **options: Any) -> Any:
    """A backend whose programs ONNX Runtime records."""
    return opened(path, update, cuda_graphs=True, **options)


@both
@pytest.mark.parametrize("seed", [None, 1])
def test_programs_that_are_replayed_compute_what_the_cpu_does(built, monkeypatch, update, seed):
    driver = FakeDriver(seed)
    model = load_with(built(update), recorded(built(update), update, driver=driver), monkeypatch)
    assert "CUDA graphs" not in model.backend.description
    ours = [model.stream(), model.stream(2)]  # each of them ties the same sessions to memory of its own
    theirs = [load(built(update), backend="cpu", update=update).stream(size) for size in (B, 2)]
    draws = np.random.default_rng(0)
    for _ in range(10):
        for mine, truth, size in zip(ours, theirs, (B, 2), strict=True):
            tokens = draws.integers(0, V, (size, int(draws.integers(2, 10))))
            np.testing.assert_allclose(mine.feed(tokens), truth.feed(tokens), rtol=0, atol=1e-5)
            np.testing.assert_allclose(mine.score(tokens), truth.score(tokens), rtol=0, atol=1e-5)
            held = truth.memory()
            for name, rows in mine.memory().items():
                np.testing.assert_allclose(rows, held[name], rtol=0, atol=1e-5)


@both
def test_a_step_is_one_replay_and_is_waited_for_once(built, monkeypatch, update):
    driver = FakeDriver()
    stream = load_with(built(update), recorded(built(update), update, driver=driver), monkeypatch).stream()
    for _ in range(4):
        stream.step(np.zeros((B, 1), int))
    captured, before = driver.captured, driver.calls.copy()
    for _ in range(4):
        stream.step(np.zeros((B, 1), int))
    seen = driver.calls - before
    assert driver.captured == captured == (1 if update == "ring" else 2), "one for each side of the memory"
    assert seen["cuGraphLaunch"] == 4
    assert {name: n for name, n in seen.items() if name.endswith("Synchronize")} == {"cuEventSynchronize": 4}


def test_nothing_is_recorded_unless_it_is_asked_for(built, monkeypatch):
    driver = FakeDriver()
    stream = load_with(built("ring"), opened(built("ring"), driver=driver), monkeypatch).stream()
    for _ in range(4):
        stream.step(np.zeros((B, 1), int))
    assert not driver.captured
    assert not driver.calls["cuGraphLaunch"]


def test_it_is_asked_for_where_a_bundle_is_loaded(built, monkeypatch):
    asked: list[bool] = []

    def open_cuda(_: object, update: object, cuda_graphs: bool) -> Any:
        asked.append(cuda_graphs)
        raise BackendError("none here")

    monkeypatch.setattr(choosing, "missing", lambda *_, **__: "")
    monkeypatch.setattr("txl_runtime.device.onnxruntime_cuda.open_onnxruntime_cuda", open_cuda)
    monkeypatch.setattr(choosing, "DEVICES", ("cuda",))
    for given in (False, True):
        with pytest.raises(BackendError, match="none here"):
            load(built("ring"), backend="cuda", cuda_graphs=given)
        assert "none here" in load(built("ring"), cuda_graphs=given).backend_notes["cuda"]
    assert asked == [False, False, True, True]
    with pytest.raises(UsageError, match="cuda_graphs is 'yes'"):
        load(built("ring"), backend="cpu", cuda_graphs="yes")  # type: ignore[arg-type]


def test_another_threads_wait_is_neither_refused_nor_spoils_what_is_recorded(built, monkeypatch):
    driver, made = FakeDriver(), list[StandInOrt]()
    model = load_with(built("ring"), recorded(built("ring"), "ring", driver=driver, change=made.append), monkeypatch)
    other = model.stream()
    pending = other.loop.run({"tokens": np.ones((B, 1), np.int32)}, np.array([1] * B, np.int32))
    rows: list[Any] = []
    with ThreadPoolExecutor(1) as threads:

        def wait_elsewhere() -> None:
            made[0].while_recording = int
            rows.append(threads.submit(pending.rows).result())

        made[0].while_recording = wait_elsewhere
        first = model.stream().step(np.ones((B, 1), int))
    assert driver.captured == 2
    np.testing.assert_array_equal(rows[0], first)


def test_another_thread_runs_without_a_graph_and_is_told_so_once(built, monkeypatch, caplog):
    driver = FakeDriver()
    model = load_with(built("ring"), recorded(built("ring"), "ring", driver=driver), monkeypatch)
    stream, truth = model.stream(), load(built("ring"), backend="cpu", update="ring").stream()
    tokens = np.random.default_rng(0).integers(0, V, (9, B, 1))
    with ThreadPoolExecutor(1) as other, caplog.at_level(logging.WARNING, LOGGER):
        for place, each in enumerate(tokens):
            found = other.submit(stream.step, each).result() if place % 3 == 2 else stream.step(each)
            np.testing.assert_allclose(found, truth.step(each), rtol=0, atol=1e-5)
    assert driver.captured == 1
    assert driver.calls["cuGraphLaunch"] == 6
    assert [record.getMessage() for record in caplog.records] == [
        "logprobs-ring-1 runs without a CUDA graph: ONNX Runtime records in one thread, and another had the first run"
    ]


def test_a_record_that_is_spoilt_is_told_by_name_and_the_program_runs_without(built, monkeypatch, caplog):
    driver, made = FakeDriver(), []
    backend = recorded(built("ring"), "ring", driver=driver, change=made.append)
    stream = load_with(built("ring"), backend, monkeypatch).stream()

    def spoil() -> None:
        with ThreadPoolExecutor(1) as other:  # as another library does, which makes memory
            assert other.submit(driver.makes_memory).result() is False

    made[0].while_recording = spoil
    truth = load(built("ring"), backend="cpu", update="ring").stream()
    with caplog.at_level(logging.WARNING, LOGGER):
        for seed in range(5):
            tokens = np.random.default_rng(seed).integers(0, V, (B, 1))
            np.testing.assert_allclose(stream.step(tokens), truth.step(tokens), rtol=0, atol=1e-5)
    assert not driver.captured
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("logprobs-ring-1 runs without a CUDA graph: CUDA failure 901")


def test_a_session_that_onnx_runtime_cannot_record_is_told_by_name(built, monkeypatch):
    def refuse(ort: StandInOrt) -> None:
        real = ort.InferenceSession

        def session(graph: bytes, options: Any, providers: Any, **more: Any) -> Any:
            if dict(providers[:1])["CUDAExecutionProvider"].get("enable_cuda_graph") and b"last" in graph:
                assert options.log_severity_level == 4, "what it cannot record is told, and not printed"
                raise RuntimeError("[Fail] This session cannot use the graph capture feature as requested by the user")
            return real(graph, options, providers, **more)

        ort.InferenceSession = session

    backend = recorded(built("ring"), "ring", change=refuse)
    said = "without CUDA graphs: last-ring-4 ([Fail] This session cannot use the graph capture feature as requested"
    assert said in backend.description
    assert backend.description.count("without CUDA graphs") == 1
    stream = load_with(built("ring"), backend, monkeypatch).stream()
    truth = load(built("ring"), backend="cpu", update="ring").stream()
    tokens = np.random.default_rng(0).integers(0, V, (B, 7))
    drawn = [list(each.generate(tokens, 3, temperature=0)) for each in (stream, truth)]
    assert np.array_equal(*drawn)


def test_what_else_is_wrong_with_a_session_is_told_as_without_graphs(built):
    def fail(ort: StandInOrt) -> None:
        def session(*_: Any, **__: Any) -> Any:
            raise RuntimeError("CUDA failure 35: driver version is insufficient")

        ort.InferenceSession = session

    with pytest.raises(BackendError, match="could not start CUDAExecutionProvider: CUDA failure 35"):
        recorded(built("ring"), "ring", change=fail)


@pytest.mark.parametrize(
    ("version", "wanted"), [("1.31.0", False), ("1.31.1", True), ("1.4.0", False), ("2.0.0", True)]
)
def test_onnx_runtimes_that_replay_copies_of_what_is_gone_record_nothing(built, version, wanted):
    def change(ort: StandInOrt) -> None:
        ort.__version__, ort.replays_what_is_there = version, wanted

    backend = recorded(built("rolled"), "rolled", change=change)
    said = f"; without CUDA graphs: all (onnxruntime is {version}, expected 1.31.1 or newer)"
    assert backend.description.endswith(said) != wanted


class Counting:
    """A package and a session of ONNX Runtime; knows the ids of its runs."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def RunOptions(self) -> Any:
        entries: dict[str, str] = {}
        return SimpleNamespace(entries=entries, add_run_config_entry=entries.__setitem__)

    def run_with_iobinding(self, _: object, options: Any) -> None:
        self.ids.append(options.entries["gpu_graph_id"])


def test_streams_that_come_to_the_same_memory_share_a_graph_and_there_is_an_end_to_their_number(monkeypatch, caplog):
    monkeypatch.setattr(onnxruntime_graphs, "MOST_GRAPHS", 2)
    ort = Counting()
    runs = Runs(ort, ort, "logprobs-1", True)
    with caplog.at_level(logging.WARNING, LOGGER):
        for address in (0, 256, 0, 768, 256):
            runs.tie(None, (address, 512))()
    assert ort.ids == ["1", "2", "1", "-1", "2"]
    assert [record.getMessage() for record in caplog.records] == [
        "logprobs-1 runs without a CUDA graph: this session has 2 already, and keeps them until the model is closed"
    ]


def test_the_call_that_records_runs_three_times(built, monkeypatch):
    """As the real one's does. It computes the same each time, which the other tests show of results and states."""
    driver = FakeDriver()
    stream = load_with(built("ring"), recorded(built("ring"), "ring", driver=driver), monkeypatch).stream()
    stream.step(np.zeros((B, 1), int))
    driver.drain()
    assert [name for name in driver.log if name.startswith("run")] == ["run", "run", "run (recorded)"]
