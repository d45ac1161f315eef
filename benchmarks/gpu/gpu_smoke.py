"""Check the project's own CUDA code on this machine's GPU: each kind of call that a model's loop makes.

    python benchmarks/gpu/gpu_smoke.py [--bytes N] [--out FOLDER]

Each check prints ok or FAILED with figures, and the next check runs in any case. With --out, each result is in
FOLDER/gpu_smoke.jsonl as soon as it is known. The script needs NumPy and the driver, and for the last check PyTorch.
Without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gpu_journal import OK, Journal, without_cuda, writing
from gpu_smoke_memory import Figures, MemoryChecks, require
from gpu_smoke_work import WorkChecks
from txl_runtime.device.choosing import NO_GPU
from txl_runtime.device.cuda import Device, open_cuda
from txl_runtime.device.driver import Driver, open_driver
from txl_runtime.device.gpu import gpu_name

BIG = 2**31 + 2**20
"""The size of the largest block in bytes, a number that does not fit into 31 bits."""
PIECE = 2**26
"""The number of bytes that are copied to measure the speed of copies."""


class Smoke:
    """All smoke checks of an open device.

    Args:
        driver, device: the driver and the device to check.
        big, piece: numbers of bytes, see `BIG` and `PIECE`.
    """

    def __init__(self, driver: Driver, device: Device, big: int = BIG, piece: int = PIECE) -> None:
        self._device = device
        self._memory = MemoryChecks(driver, device, big, piece)
        self._work = WorkChecks(driver, device, big, piece)

    def run(self, journal: Journal) -> None:
        """Run all checks, one after the other, and note their results in the journal."""
        for name, check in {**self._memory.named(), **self._work.named()}.items():
            journal.run(name, self._inside(check))
        if hasattr(os, "fork"):
            journal.run("a forked child is refused", self._work.forked)
        else:
            journal.skip("a forked child is refused", "this system has no fork")

    def _inside(self, check: Callable[[], Figures]) -> Callable[[], Figures]:
        """Return a check that enters the device's context first, as a loop does, and leaves it afterwards."""

        def run() -> Figures:
            with self._device.current():
                return check()

        return run


def with_torch(device: Device, journal: Journal) -> None:
    """Check that PyTorch in the same process still works on the device that it has chosen, after our work."""
    name = "PyTorch's device"
    try:
        import torch
    except ImportError:
        reason = "PyTorch is not installed"
    else:
        reason = "" if torch.cuda.is_available() else without_cuda(torch)
    if reason:
        journal.skip(name, reason)
        return

    def current() -> Figures:
        last = torch.cuda.device_count() - 1
        torch.cuda.set_device(last)
        before = torch.ones(4, device="cuda")
        device.allocate(16)
        with device.current():
            device.queue().wait()
        require(torch.cuda.current_device() == last, "PyTorch works on another device afterwards")
        require((before + torch.ones(4, device="cuda")).device.index == last, "new tensors are on another device")
        return {"devices": last + 1}

    journal.run(name, current)


def main() -> int:
    """Read the command line and run the checks; return 1 if a check failed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    options.add_argument("--bytes", type=int, default=BIG, help=f"of the largest block (default {BIG})")
    options.add_argument("--out", type=Path, metavar="FOLDER", help="write the results here")
    given = options.parse_args()
    with writing("gpu_smoke"):
        journal = Journal("gpu_smoke", given.out)
    if gpu_name() is None:
        journal.skip("everything", NO_GPU)
        return journal.finish()
    try:
        opened = journal.run("open", lambda: {"is": open_cuda().title})
        if opened.state == OK:
            Smoke(open_driver(), open_cuda(), given.bytes).run(journal)
            with_torch(open_cuda(), journal)
    except KeyboardInterrupt:
        journal.finish()
        return 130
    return journal.finish()


if __name__ == "__main__":
    sys.exit(main())
