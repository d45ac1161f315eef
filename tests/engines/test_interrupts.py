"""A build that is cancelled or killed leaves the bundle as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from resealing import contents
from support import until
from txl_engines import building, publishing
from txl_engines.bundles import build_bundle
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import TxlError
from txl_runtime.listener import Silent

pytestmark = pytest.mark.device

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")

# A build that goes on until it is stopped, or until nobody waits for it; its process number is told.
ENDLESS = """
import os, pathlib, time
from txl_engines import compiler
from txl_engines import worker

def build(self, parsed, gpus, on_step):
    pathlib.Path(os.environ["TXL_TEST_PID"]).write_text(str(os.getpid()))
    while True:
        time.sleep(0.06)
        on_step()

compiler.Compiler.build = build
worker.main()
"""

DRIVER = """
import sys
from txl_engines import building
from txl_engines import bundles
building.COMMAND = ("-c", sys.argv[2])
bundles.build_bundle(sys.argv[1], "rtx", force=True)
"""

COMMAND_LINE = """
import sys
from txl_engines import building
building.COMMAND = ("-c", sys.argv[2])
sys.argv[:] = ["txl-deploy", "build", sys.argv[1], "--target", "rtx"]
from txl_deploy.main import main
main()
"""
WORKER = building.COMMAND


@pytest.fixture
def endless(tmp_path, monkeypatch) -> Path:
    """The build process never ends by itself; the file that will hold its number."""
    note = tmp_path / "pid"
    monkeypatch.setenv("TXL_TEST_PID", str(note))
    monkeypatch.setattr(building, "COMMAND", ("-c", ENDLESS))
    return note


def gone(process: int) -> bool:
    """Return whether a process has ended."""
    try:
        os.kill(process, 0)
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return True


def started(note: Path, process: subprocess.Popen | None = None) -> int:
    """The number of the build process, once it is told; whoever starts that one has to run."""

    def told() -> str:
        assert process is None or process.poll() is None
        return note.read_text() if note.exists() else ""

    return int(until(told))


class Stops(Silent):
    """Raises when the builder's progress first arrives."""

    def advance(self, steps: int = 1) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_ends_the_build_and_leaves_nothing(bundle: Path, endless: Path):
    before = contents(bundle)
    with pytest.raises(KeyboardInterrupt):
        build_bundle(bundle, "rtx", listener=Stops())
    assert contents(bundle) == before
    until(lambda: gone(int(endless.read_text())))


def test_an_interrupt_after_the_first_engine_leaves_none(bundle: Path, monkeypatch):
    before = contents(bundle)

    class Second(Silent):
        stages = 0

        def stage(self, title: str, total: int | None = None) -> None:
            self.stages += 1
            if self.stages == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_bundle(bundle, "rtx", listener=Second())
    assert contents(bundle) == before


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_killed_build_leaves_a_bundle_that_loads_and_no_process(bundle: Path, endless: Path, monkeypatch):
    monkeypatch.setattr(building, "COMMAND", WORKER)
    build_bundle(bundle, "rtx")
    before = contents(bundle)
    command = [sys.executable, "-c", DRIVER, str(bundle), ENDLESS]
    process = subprocess.Popen(command)
    started(endless, process)
    process.kill()
    process.wait()
    assert before.items() <= contents(bundle).items(), "as it was, but for a hidden folder"
    open_bundle(bundle)
    until(lambda: gone(int(endless.read_text())))  # nobody waits for it any more
    build_bundle(bundle, "rtx")
    assert contents(bundle) == before, "the next build cleans up"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_stops_when_told_to(bundle: Path, endless: Path, number: int, code: int):
    before = contents(bundle)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND_LINE, str(bundle), ENDLESS], stderr=subprocess.PIPE, text=True
    )
    started(endless, process)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert told.splitlines()[-1] in ("error: interrupted", "error: terminated")
    assert contents(bundle) == before
    until(lambda: gone(int(endless.read_text())))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interrupt_while_engines_get_their_names_waits(bundle: Path, monkeypatch):
    build_bundle(bundle, "rtx")
    replace, renames = Path.replace, 0

    def interrupted(self: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        os.kill(os.getpid(), signal.SIGINT)
        return replace(self, target)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Path, "replace", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_bundle(bundle, "rtx", force=True)
    finally:
        monkeypatch.setattr(Path, "replace", replace)
        assert signal.signal(signal.SIGINT, handler) is signal.default_int_handler, "as it was before"
    assert renames > 2
    again = build_bundle(bundle, "rtx")
    assert all(engine.reused for engine in again.engines), "the new engines are there and listed"


def test_a_bundle_that_changed_meanwhile_is_left_alone(bundle: Path):
    with publishing.staging(bundle) as stage:
        stage.place("engines/rtx/a.engine", b"engine")
        manifest = bundle / "manifest.json"
        manifest.write_bytes(manifest.read_bytes() + b"\n")
        before = contents(bundle)
        with pytest.raises(TxlError, match="changed while engines were built for it, expected it to stay; build again"):
            stage.publish()
    assert {name: data for name, data in before.items() if ".building" not in name} == contents(bundle)
