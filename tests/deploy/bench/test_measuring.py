"""The parts of a measurement: turns, percentiles, bytes of pages, agreement."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from txl_runtime.errors import BackendError, UsageError

from txl_deploy.bench import processes, timing
from txl_deploy.bench.competitor import BundleCompetitor, fill
from txl_deploy.bench.floor import HostBandwidth
from txl_deploy.bench.measuring import bench
from txl_deploy.bench.overhead import overhead
from txl_deploy.bench.works import Works

SMAPS = """\
00400000-00500000 r-xp 00000000 fd:00 11 /usr/bin/thing
Rss:                1000 kB
Private_Clean:      1000 kB
Private_Dirty:         0 kB
00600000-00700000 r--s 00000000 fd:00 12 /weights
Rss:                 800 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
00800000-00900000 r--s 00000000 fd:00 12 /weights
Rss:                 600 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
00a00000-00b00000 rw-p 00000000 00:00 0
Rss:                 500 kB
Private_Clean:         0 kB
Private_Dirty:       400 kB
VmFlags: rd wr
"""


def test_a_page_of_a_file_counts_once_however_often_it_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SMAPS", tmp_path / "smaps")
    assert processes.resident_bytes() is None, "where the system does not tell"
    (tmp_path / "smaps").write_text(SMAPS)
    assert processes.resident_bytes() == ((1000 + 800 + 500) * 1024, 500 * 1024)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_that_is_taken_is_seen() -> None:
    before = processes.resident_bytes()
    taken = np.ones(4_000_000)
    after = processes.resident_bytes()
    assert before is not None
    assert after is not None
    assert after[0] - before[0] > 0.9 * taken.nbytes


def test_everyone_has_a_turn_in_every_round_and_the_first_changes() -> None:
    turns: list[str] = []

    def work(name: str) -> timing.Work:
        def call(_: int) -> None:
            if not turns or turns[-1] != name:
                turns.append(name)

        return call

    found = timing.interleave({"a": work("a"), "b": work("b")}, rounds=3, slice_seconds=0.001)
    assert turns == ["a", "b", "a", "b"], "a b, b a, a b"
    assert all(len(timed.rounds) == 3 and timed.times.calls >= 9 for timed in found.values())


def test_slow_work_is_called_a_few_times_all_the_same() -> None:
    calls: list[int] = []
    samples = timing.time_slice(lambda index: (calls.append(index), time.sleep(0.01)), 0.001)
    assert len(samples) == timing.LEAST_CALLS
    assert calls == list(range(1 + timing.LEAST_CALLS)), "one call was enough to warm up"


def test_rest_is_looked_up() -> None:
    assert timing.come_to_rest()
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    spinning = threading.Thread(target=spin)
    spinning.start()
    try:
        assert not timing.come_to_rest(patience=0.1)
    finally:
        stop.set()
        spinning.join()


def test_percentiles_are_in_milliseconds() -> None:
    found = timing.percentiles([1_000_000 * value for value in range(1, 101)])
    assert (found.calls, found.best, found.p50) == (100, 1.0, 50.5)
    assert found.p90 == pytest.approx(90.1)


def test_bandwidth_is_a_rate() -> None:
    bandwidth = HostBandwidth(2)
    assert bandwidth.gb_per_second is None
    bandwidth.measure()
    assert 0.01 < (bandwidth.gb_per_second or 0) < 10_000


def test_python_is_timed_without_changing_the_model() -> None:
    model = txl_runtime.load(frozen("ring"), threads=1)
    engine = model.backend
    found = overhead(Works(model), steps=20)
    assert model.backend is engine
    assert 0 < found.in_step < found.step
    assert found.share == pytest.approx(found.in_step / found.step)
    assert 0 < found.without_engine < np.inf


def test_filling_fills_every_stream() -> None:
    model = txl_runtime.load(frozen("ring"), threads=1)
    competitor = BundleCompetitor("bundle", model)
    fill(competitor, model)
    assert competitor.stream.fill.tolist() == [6, 6, 6]


def test_a_bundle_is_measured_without_competitors_and_processes() -> None:
    works = Works(txl_runtime.load(frozen("ring"), threads=1))
    found = bench(works, threads=1, seconds=0.01, rounds=1, processes=False)
    assert [row.task for row in found.rows] == ["decode", "prefill", "score"]
    assert found.load is None
    assert found.memory is None
    with pytest.raises(UsageError, match=r"--seconds is 1e\+06, expected"):
        bench(works, threads=1, seconds=1e6)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"a process to measure memory ended with code 1: .*expected a bundle"):
        processes.measure_footprint(tmp_path / "absent", 1)


def test_measuring_needs_no_torch_and_no_command_line() -> None:
    names = sorted(path.stem for path in Path(timing.__file__).parent.glob("[!_]*.py"))
    assert {"measuring", "works", "overhead", "processes"} <= set(names)
    code = "".join(f"import txl_deploy.bench.{name}\n" for name in names)
    code += "import sys\nassert not {'torch', 'txl_export', 'onnx', 'typer', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
