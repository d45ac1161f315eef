"""A disk that fails, kills or keeps a diary: a library preloaded into the processes of a test, and the plan it follows.

Every call that touches one folder is counted, in Python and in native code alike: opening, reading a folder, writing,
fsync, rename, mkdir, unlink, rmdir, mmap, ftruncate, chmod, link, stat, close. At the n-th the library fails with any
error, writes half of what it was given, or sends a signal before or after the call. Native code that makes its system
calls without the C library passes by it (safetensors renames so); `replay` finds such a rename where the file is opened
next.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
NOTHING, FAIL, SHORT, SIGNAL, SIGNAL_AFTER = range(5)
KINDS = "open write sync rename mkdir unlink rmdir mmap truncate chmod link stat read-open list close".split()  # noqa: SIM905
EVERY = (1 << len(KINDS)) - 1


class _Plan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ["count", "at", "action", "error", "kinds", "pid", "log", "hit"]] + [
        ("root", ctypes.c_char * 1024),
        ("call", ctypes.c_char * 64),
    ]


class Disk:
    """The plan, shared with all processes that `environment` is given to.

    Attributes:
        root: the folder whose calls are counted, below the folder of the plan.
        diary: what calls have changed, where the plan says so; `stand_ins.power_loss` reads it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.root, self.diary = self.folder / "root", self.folder / "diary"
        self._file, self._library = self.folder / "plan", self.folder / "disk.so"
        if not self._file.exists():
            self.root.mkdir()
            self._file.write_bytes(bytes(ctypes.sizeof(_Plan)))
        with self._file.open("r+b") as stream:
            self.plan = _Plan.from_buffer(mmap.mmap(stream.fileno(), 0))
        self.plan.root = os.fsencode(self.root)

    @property
    def environment(self) -> dict[str, str]:
        """For a process whose calls are to be counted."""
        if not self._library.exists():
            command = [str(compiler()), "-O1", "-fPIC", "-shared", "-o", str(self._library), str(SOURCE), "-ldl"]
            subprocess.run(command, check=True)
        found = {"LD_PRELOAD": self._library, "TXL_DISK_PLAN": self._file, "TXL_DISK_LOG": self.diary}
        return {name: str(path) for name, path in found.items()}

    def arm(self, at: int = 0, action: int = NOTHING, error: int = 0, kinds: int = EVERY, log: bool = False) -> None:
        """Count from here; do `action` at the call with that number, of a call of these kinds.

        `error` is the error's or the signal's number.
        """
        plan = self.plan
        plan.at, plan.action, plan.error, plan.kinds, plan.log = at, action, error, kinds, log
        plan.pid = plan.hit = plan.count = 0
        plan.call = b""

    def rest(self) -> None:
        """Do nothing more, and count nothing."""
        self.plan.kinds = self.plan.at = self.plan.log = 0

    @property
    def hit(self) -> str:
        """The call that the plan met, or nothing."""
        return bytes(self.plan.call).decode(errors="replace") if self.plan.hit else ""


def compiler() -> str | None:
    """A C compiler, where this is Linux and has one."""
    return (shutil.which("gcc") or shutil.which("cc")) if sys.platform == "linux" else None


def run_cases(folder: Path, scenario: str, *arguments: object, timeout: float = 600) -> dict[str, Any]:
    """Run `stand_ins.faulty_writing` in an empty folder; what it found."""
    disk = Disk(folder)
    command = [sys.executable, "-m", "stand_ins.faulty_writing", scenario, str(folder), *map(str, arguments)]
    path = os.pathsep.join([str(SOURCE.parents[1]), *sys.path])
    environment = os.environ | disk.environment | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"{scenario}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
