"""The smoke checks of a GPU, rehearsed on the stand-in for its driver: they pass there, and find what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_smoke
import pytest
from gpu_journal import ENDED, FAILED, NOT_RUN, OK, Journal, read_found
from gpu_smoke import Smoke, with_torch
from stand_ins.driver import FakeDriver
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.cuda_context import Context
from txl_runtime.device.driver import Driver

pytestmark = pytest.mark.device


BIG, PIECE = 2**16, 2**12


def smoke(folder: Path | None = None, seed: int | None = 0) -> tuple[dict[str, Any], FakeDriver]:
    """Run the checks on a stand-in; what they found, by name."""
    library = FakeDriver(seed=seed, capacity=2**24)
    driver, journal = Driver(library), Journal("gpu_smoke", folder)
    device = Device(driver)
    Smoke(driver, device, BIG, PIECE).run(journal)
    with_torch(device, journal)
    journal.finish()
    return {found.name: found for found in journal.found}, library


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_every_check_passes_on_the_stand_in(seed: int | None, tmp_path: Path) -> None:
    assert gpu_smoke.BIG > 2**31, "the sizes of a real run do not fit 31 bits"
    found, library = smoke(tmp_path, seed)
    assert {name: item.reason for name, item in found.items() if item.state == FAILED} == {}
    assert {name for name, item in found.items() if item.state == NOT_RUN} == {"PyTorch's device"}
    assert len(found) == 17
    library.check()
    assert [item.name for item in read_found(tmp_path / "gpu_smoke.jsonl")] == list(found), "a line for each"
    assert f"{len(found) - 1} ok, 0 FAILED, 0 ended, 1 not run" in (tmp_path / "gpu_smoke.md").read_text()


def test_a_driver_that_spills_into_the_host_s_memory_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVIDIA's does under Windows, and in WSL2: it gives more than it says there is."""

    def info(self: Any, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = max(0, self.capacity // 2 - self.memory.used()), self.capacity // 2

    monkeypatch.setattr(FakeDriver, "cuMemGetInfo_v2", info)
    assert {item.state for item in smoke()[0].values()} == {OK, NOT_RUN}


def dropped(*_: Any, **__: Any) -> None:
    """A call that does nothing."""


def first_row(real: Any) -> Any:
    def copy(self: Any, to: int, source: int, width: int, rows: int = 1, *pitches: int) -> None:
        real(self, to, source, width)

    return copy


def not_far(self: Queue, to: int, width: int, rows: int = 1, pitch: int = 0) -> None:
    """Zero as if sizes had one bit less than BIG."""
    size = width * rows % BIG
    if size:
        self._driver.cuMemsetD8Async(to, 0, size, self.handle)


FETCHED = {"pinned memory", "pageable memory", "rows with pitches", "rows within the device", "events"}
ROWS = {"rows with pitches", "rows within the device", "record and replay"}
ZEROED = {"rows set to zero", "more than 2 GiB set to zero"}
RECORDED = {"record and replay", "a record that fails"}
FAULTS: dict[str, tuple[Any, str, Any, set[str]]] = {
    "fetch does nothing": (Queue, "fetch", dropped, FETCHED),
    "copy moves one row": (Queue, "copy", first_row(Queue.copy), ROWS),
    "zero does nothing": (Queue, "zero", dropped, ZEROED),
    "zero of 31 bits": (Queue, "zero", not_far, {"more than 2 GiB set to zero"}),
    "capture does the work": (Queue, "capture", lambda self, work: (work(), work)[1], RECORDED),
    "contexts stay": (Context, "leave", dropped, {"the application's context"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_the_other_checks_go_on(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong, expected = FAULTS[fault]
    monkeypatch.setattr(place, name, wrong)
    found, library = smoke(seed=None if fault == "fetch does nothing" else 0)
    library.violations.clear()
    failed = {key for key, item in found.items() if item.state == FAILED}
    assert expected <= failed
    assert len(found) == 17, "every check has a line"
    assert found["device"].state == OK


def test_a_check_that_raises_anything_is_noted_and_an_interrupt_stops(tmp_path: Path) -> None:
    journal = Journal("any", tmp_path)
    assert journal.run("odd", lambda: {}["missing"]).state == FAILED
    assert journal.run("good", lambda: {"ms": 1.5}).figures == {"ms": 1.5}

    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.run("stopped", stopped)
    expected = {"odd": FAILED, "good": OK, "stopped": ENDED}
    assert [(item.name, item.state) for item in read_found(tmp_path / "any.jsonl")] == [*expected.items()]
    assert journal.finish() == 1
    with (tmp_path / "any.jsonl").open("a") as file:
        file.write('{"name": "cut o')
    assert len(read_found(tmp_path / "any.jsonl")) == 3, "a line that was cut off is left out"
