"""What `bench` measures on a device: Python without programs, the device's own memory, the backend asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import txl_runtime
from stand_ins.engine import open_stand_in, refuse
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.model import Model

from txl_deploy.bench import on_device, processes
from txl_deploy.bench.competitor import BundleCompetitor
from txl_deploy.bench.measuring import bench, tasks_of, time_tasks
from txl_deploy.bench.on_device import DeviceBandwidth, bandwidth_of, import_library, without_programs
from txl_deploy.bench.overhead import PYTHON, WITH_DRIVER, overhead
from txl_deploy.bench_tables import panels, show, verdict

SLOW = 0.02
"""Seconds that a program of these tests takes: far more than Python does."""


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "COPIED_BYTES", 2**16)
    monkeypatch.setattr(on_device, "PASSES_SECONDS", 0.01)


@pytest.fixture
def model(make_bundle: Callable[..., Path]) -> Model:
    """A bundle that many tests share, on the stand-in of a device."""
    opened = txl_runtime.load(make_bundle(batch_size=3), backend="cpu", threads=1)
    opened.backend = open_stand_in(opened.bundle)
    return opened


def slow(backend: DeviceBackend) -> list[str]:
    """Make every program take `SLOW`; what is returned names the runs."""
    ran: list[str] = []

    def late(executable: Any) -> None:
        prepare = executable.prepare

        def prepared(addresses: Any, queue: Any) -> Callable[[], None]:
            launch = prepare(addresses, queue)

            def launched() -> None:
                ran.append(executable.program.name)
                time.sleep(SLOW)
                launch()

            return launched

        executable.prepare = prepared
        executable.recordable = False  # a record would sleep once

    for executable in backend.executables.values():
        late(executable)
    return ran


def test_c8_the_cost_of_python_is_that_of_steps_without_programs(model: Model) -> None:
    backend = model.backend
    ran = slow(backend)
    found = overhead(model, steps=6)
    assert ran, "a whole step runs the programs"
    assert model.backend is backend, "the model is not changed"
    assert found.step > 1e6 * SLOW
    assert 0 < found.without_engine == found.in_step < 0.5e6 * SLOW, "microseconds, without the program's own"
    assert found.share == pytest.approx(found.in_step / found.step)
    assert found.what == WITH_DRIVER


def test_c8_programs_that_do_nothing_are_tied_like_the_real_ones(model: Model) -> None:
    quiet = without_programs(model.backend)
    assert (quiet.name, quiet.device, quiet.queue) == (model.backend.name, model.backend.device, model.backend.queue)
    assert quiet.executables.keys() == model.backend.executables.keys()
    for name, real in model.backend.executables.items():
        assert quiet.executables[name].program == real.program
        assert quiet.executables[name].in_place == real.in_place
        assert quiet.executables[name].recordable == real.recordable
    other = txl_runtime.load(model.bundle.path, backend="cpu", threads=1)
    other.backend = quiet
    assert not other.stream().step(np.ones((3, 1), np.int32)).any(), "nobody has written a result"


def test_on_the_cpu_it_is_python_s_alone(make_bundle: Callable[..., Path]) -> None:
    assert overhead(txl_runtime.load(make_bundle(), backend="cpu", threads=1), steps=5).what == PYTHON


def test_c8_the_bandwidth_is_the_device_s_own(model: Model) -> None:
    found = bandwidth_of(model.backend, threads=1)
    assert isinstance(found, DeviceBandwidth)
    found.measure()
    assert 0 < found.gb_per_second < 1e5
    assert "on the device" in found.method
    assert found.serves("bundle", "bundle") == found.gb_per_second
    assert found.serves("torch", "bundle") is None, "that one reads the CPU's memory"


def test_c8_copies_are_of_memory_on_the_device(model: Model) -> None:
    copied: list[tuple[int, int, int]] = []
    backend, device = model.backend, model.backend.device
    blocks: list[Any] = []

    def allocate(size: int) -> Any:
        blocks.append(device.allocate(size))
        return blocks[-1]

    queue = SimpleNamespace(copy=lambda *given: copied.append(given), wait=backend.queue.wait)
    spied = SimpleNamespace(
        device=SimpleNamespace(allocate=allocate, current=backend.device.current), queue=queue, lock=backend.lock
    )
    DeviceBandwidth(spied).measure()
    assert set(copied) == {(blocks[1].address, blocks[0].address, on_device.COPIED_BYTES)}


def test_c8_where_the_device_has_no_room_nothing_is_shown(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(model, threads=1, seconds=0.01, rounds=1, processes=False)
    assert report.machine.read_gb_per_second > 0
    assert all(row.of_bandwidth is not None for row in report.rows)
    model.backend.device.allocate = refuse("out of memory")
    bandwidth = bandwidth_of(model.backend, threads=1)
    bandwidth.measure()
    assert bandwidth.gb_per_second is None
    machine = msgspec.structs.replace(report.machine, read_gb_per_second=None, read_method=bandwidth.method)
    rows = tuple(msgspec.structs.replace(row, of_bandwidth=None) for row in report.rows)
    without = msgspec.structs.replace(report, machine=machine, rows=rows)
    capsys.readouterr()
    show(without)
    shown = capsys.readouterr().out
    assert "not measured on the device: out of memory" in shown
    assert "Python and the driver per decode step" in shown
    assert "of what memory delivers" in verdict(report)
    assert "of what memory delivers" not in verdict(without)
    assert len(panels(without)) == len(panels(report))


def test_c8_rows_of_competitors_on_the_cpu_have_no_share_of_it(model: Model) -> None:
    there, here = BundleCompetitor("bundle", model), BundleCompetitor("torch", model)
    rows = time_tasks(model, [there, here], tasks_of(model)[:1], bandwidth_of(model.backend, 1), 0.01, 1)
    assert [(row.competitor, row.of_bandwidth is None) for row in rows] == [("bundle", False), ("torch", True)]


def test_c8_processes_open_the_backend_that_was_asked_for(
    make_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    measured = processes._child

    def child(what: str, bundle: Path, **options: Any) -> dict[str, Any]:
        asked.append({"what": what} | options)
        return measured(what, bundle, **options | {"backend": "cpu"})

    monkeypatch.setattr(processes, "_child", child)
    model = txl_runtime.load(make_bundle(), backend="cpu", threads=1)
    model.backend.name = "rtx"
    report = bench(model, threads=1, seconds=0.01, rounds=1)
    assert report.load is not None
    assert {row["what"] for row in asked} == {"load", "memory"}
    assert {row["backend"] for row in asked} == {"rtx"}


def test_c8_a_process_says_why_it_cannot_open_it(make_bundle: Callable[..., Path]) -> None:
    with pytest.raises(txl_runtime.TxlError, match="backend rtx cannot run here"):
        processes.measure_load(make_bundle(), 1, runs=1, backend="rtx")


@pytest.mark.parametrize(
    ("backend", "package"), [("cpu", "onnxruntime"), ("auto", "onnxruntime"), ("rtx", "tensorrt_rtx")]
)
def test_memory_before_loading_is_that_of_the_backend_s_own_library(
    backend: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(on_device, "import_module", imported.append)
    import_library(backend)
    assert imported == [package]
