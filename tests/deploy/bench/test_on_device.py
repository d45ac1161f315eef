"""`bench` on a device: Python without programs, the device's own memory, the backend asked for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from stand_ins.driver_statuses import INTEGRATED, MEMORY_BITS, MEMORY_KHZ
from stand_ins.engine import open_stand_in, refuse
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.loop import DeviceLoop
from txl_runtime.model import Model

from txl_deploy.bench import on_device, processes
from txl_deploy.bench.competitor import BundleCompetitor
from txl_deploy.bench.floor import HostBandwidth, floor_of
from txl_deploy.bench.measuring import bench, time_tasks
from txl_deploy.bench.on_device import DeviceBandwidth, bandwidth_of, device_floors, import_library, without_programs
from txl_deploy.bench.overhead import PYTHON, WITH_DRIVER, overhead
from txl_deploy.bench.works import Works
from txl_deploy.bench_tables import panels, show, verdict

pytestmark = pytest.mark.device

SLOW = 0.02
"""Seconds that a program of these tests takes: far more than Python does."""


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "COPIED_BYTES", 2**16)
    monkeypatch.setattr(on_device, "PASSES_SECONDS", 0.01)


@pytest.fixture
def model() -> Model:
    """A bundle that many tests share, on the stand-in of a device."""
    opened = txl_runtime.load(frozen("ring"), backend="cpu", threads=1)
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
    found = overhead(Works(model), steps=6)
    assert ran, "a whole step runs the programs"
    assert model.backend is backend, "the model is not changed"
    assert found.step > 1e6 * SLOW
    assert 0 < found.without_engine == found.in_step < 0.5e6 * SLOW, "microseconds, without the program's own"
    assert found.share == pytest.approx(found.in_step / found.step)
    assert (found.what, found.put is not None) == (WITH_DRIVER, True)


def test_the_share_of_launches_is_what_the_host_does_before_it_waits(model: Model) -> None:
    shown = overhead(Works(model), steps=6)
    assert shown.put is not None
    assert shown.put < 0.3e6 * SLOW, "programs are put in at once"
    slow(model.backend)
    late = overhead(Works(model), steps=6)
    assert 0.9e6 * SLOW < late.put < late.step


def test_waiting_for_a_step_is_no_launch(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceLoop.finish

    def late(loop: DeviceLoop) -> None:
        if loop._tail._marked:
            time.sleep(SLOW)
        real(loop)

    monkeypatch.setattr(DeviceLoop, "finish", late)
    found = overhead(Works(model), steps=6)
    assert found.put is not None
    assert found.put < 0.3e6 * SLOW < 0.9e6 * SLOW < found.step


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


def test_on_the_cpu_it_is_python_s_alone() -> None:
    assert overhead(Works(txl_runtime.load(frozen("ring"), backend="cpu", threads=1)), steps=5).what == PYTHON


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
    report = bench(Works(model), threads=1, seconds=0.01, rounds=1, processes=False)
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


def listing(
    kernels: dict[str, int | None], target: str = "rtx", saved: int = 0
) -> Callable[[Any], list[tuple[str, Any]]]:
    """A bundle's engines: a file and a sidecar for each program named."""

    def sidecar(name: str, count: int | None) -> SimpleNamespace:
        return SimpleNamespace(identity=SimpleNamespace(program=name), kernels=count, saved_bytes=saved)

    return lambda _: [(f"engines/{target}/{name}.engine", sidecar(name, count)) for name, count in kernels.items()]


def test_the_floor_of_a_step_on_a_device_is_its_bytes_at_the_memory_s_speed(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = sum(floor_of(model.bundle, 1).values())
    monkeypatch.setattr(on_device, "bundle_engines", listing({"logprobs-ring-1": 5, "logprobs-ring-5": 99}, saved=40))
    report = bench(Works(model), threads=1, seconds=0.01, rounds=1, processes=False)
    measured, stated = report.device_floors
    assert measured.bytes == stated.bytes == sum(report.floor["decode"].values()) == plain - 40
    assert BundleCompetitor("bundle", model).step_bytes(1) == plain - 40
    assert measured.gb_per_second == report.machine.read_gb_per_second
    assert stated.gb_per_second == pytest.approx(360, abs=0.1), "an RTX 3060's"
    for floor in report.device_floors:
        assert floor.us == pytest.approx(floor.bytes / floor.gb_per_second / 1e3)
        assert floor.goal_us == pytest.approx(floor.us / 0.6)
        assert floor.us_per_kernel == pytest.approx(floor.goal_us / 5), "of the shortest program, not of another"
    show(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "floor by stated speed, computed" in shown
    assert re.search(r"launches per decode step \d+\.\d µs to put it in, \d+\.\d% of it", shown)
    assert "at 360 GB/s (by the driver's figures)" in shown
    assert "for each of 5 kernels" in shown


@pytest.mark.parametrize(
    "told", [{MEMORY_KHZ: 0}, {MEMORY_BITS: 0}, {MEMORY_KHZ: 1_275_000, MEMORY_BITS: 128, INTEGRATED: 1}]
)
def test_a_speed_that_the_driver_does_not_know_is_not_made_up(
    model: Model, told: dict[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last is an Orin's driver, which gives the GPU's clock for the memory's."""
    model.backend.driver.attributes |= told
    monkeypatch.setattr(on_device, "bundle_engines", listing({"logprobs-ring-1": 5}, target="tensorrt"))
    bandwidth = bandwidth_of(model.backend, threads=1)
    bandwidth.measured.append(100.0)
    measured, stated = device_floors(model, 10**8, bandwidth)
    assert (measured.us, measured.kernels, measured.us_per_kernel) == (1000, None, None), "no engine of this backend"
    assert stated.by.startswith("not known")
    assert (stated.gb_per_second, stated.us, stated.goal_us, stated.us_per_kernel) == (None, None, None, None)
    report = bench(Works(model), threads=1, seconds=0.01, rounds=1, processes=False)
    capsys.readouterr()
    show(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "not known: the driver does not say how fast the memory is" in shown
    assert "kernels not listed" in shown


def test_on_the_cpu_no_floor_of_a_device_is_shown() -> None:
    opened = txl_runtime.load(frozen("ring"), backend="cpu", threads=1)
    assert device_floors(opened, 10**8, HostBandwidth.__new__(HostBandwidth)) == ()


def test_c8_rows_of_competitors_on_the_cpu_have_no_share_of_it(model: Model) -> None:
    works, here = Works(model), BundleCompetitor("torch", model)
    rows = time_tasks(works, [works.ours, here], works.tasks[:1], bandwidth_of(model.backend, 1), 0.01, 1)
    assert [(row.competitor, row.of_bandwidth is None) for row in rows] == [("bundle", False), ("torch", True)]


def test_c8_processes_open_the_backend_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    measured = processes._child

    def child(what: str, bundle: Path, **options: Any) -> dict[str, Any]:
        asked.append({"what": what} | options)
        return measured(what, bundle, **options | {"backend": "cpu"})

    monkeypatch.setattr(processes, "_child", child)
    model = txl_runtime.load(frozen("ring"), backend="cpu", threads=1)
    model.backend.name = "rtx"
    report = bench(Works(model), threads=1, seconds=0.01, rounds=1)
    assert report.load is not None
    assert {row["what"] for row in asked} == {"load", "memory"}
    assert {row["backend"] for row in asked} == {"rtx"}


def test_c8_a_process_says_why_it_cannot_open_it() -> None:
    with pytest.raises(txl_runtime.TxlError, match="backend rtx cannot run here"):
        processes.measure_load(frozen("ring"), 1, runs=1, backend="rtx")


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
