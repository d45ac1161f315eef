"""The backend that `auto` takes, and its words on the others."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frozen import frozen
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_stand_in
from txl_runtime import BackendError, BundleError, UsageError, load
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import choosing, gpu, onnxruntime_cuda
from txl_runtime.device.cuda import open_cuda
from txl_runtime.device.driver import open_driver
from txl_runtime.device.engines import opening
from txl_runtime.system import CUDA_DRIVER


def test_auto_takes_the_cpu_where_there_is_nothing_else_and_says_why(monkeypatch):
    monkeypatch.setattr(choosing, "shows_gpu", lambda: False)
    path = frozen("ring")
    model = load(path)
    assert model.backend.name == "cpu"
    assert list(model.backend_notes) == ["rtx", "tensorrt", "cuda", "native"]
    assert "txl-deploy build" in model.backend_notes["rtx"]
    assert "no usable CUDA driver" in choosing.missing("cuda", open_bundle(path), built=True)


def test_auto_takes_the_best_that_opens_and_says_why_not_the_others(monkeypatch):
    bundle = open_bundle(frozen("ring"))
    monkeypatch.setattr(choosing, "DEVICES", ("rtx", "tensorrt", "next"))
    monkeypatch.setattr(choosing, "missing", lambda name, bundle, **_: "not installed" if name == "tensorrt" else "")

    def opener(name: str, bundle: Any, update: str | None) -> Any:
        if name == "rtx":
            raise BundleError("built by version 1.6, the library here is 1.7")
        return open_stand_in(bundle, update, name)

    found, notes = choosing.choose_device(bundle, None, opener)
    assert found is not None
    assert found.name == "next"
    assert notes == {"rtx": "built by version 1.6, the library here is 1.7", "tensorrt": "not installed"}


def test_auto_goes_to_the_cpu_where_the_last_does_not_open_and_says_why(monkeypatch):
    monkeypatch.setattr(choosing, "missing", lambda name, bundle, **_: "" if name == "cuda" else "not installed")
    found, notes = choosing.choose_device(
        open_bundle(frozen("ring")), None, raising(BackendError("reads tokens outside of cuda"))
    )
    assert found is None
    assert list(notes) == ["rtx", "tensorrt", "cuda"]
    assert notes["cuda"] == "reads tokens outside of cuda"


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_auto_takes_a_backend_only_after_its_smallest_program_has_run_there(monkeypatch, update):
    """Sessions of ONNX Runtime open without a kernel, and the first step finds that there is none for this GPU."""
    bundle = open_bundle(frozen("ring"))
    monkeypatch.setattr(choosing, "missing", lambda name, bundle, **_: "")
    drivers: list[FakeDriver] = []
    opened: list[weakref.ref[Any]] = []

    def refused(*_: Any) -> Any:
        def launch() -> None:
            raise BackendError("no kernel image is available")

        return launch

    def opener(name: str, bundle: Any, update: str | None) -> Any:
        assert not [each for each in opened if each() is not None], "the memory of the one before is free again"
        drivers.append(FakeDriver())
        backend = open_stand_in(bundle, update, name, driver=drivers[-1])
        opened.append(weakref.ref(backend))
        for item in backend.executables.values() if name == "rtx" else ():
            monkeypatch.setattr(item, "prepare", refused)
        return backend

    found, notes = choosing.choose_device(bundle, update, opener)
    assert found is not None
    assert (found.name, notes) == ("tensorrt", {"rtx": "no kernel image is available"})
    tied = {item.program.segment_length for item in found.executables.values() if item.prepared}  # type: ignore[attr-defined]
    assert tied == {1}
    assert drivers[1].captured == 1, "it was recorded as well"


# --- CUDA starts only where it can be of use ----------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The names under which the driver's library was looked for: CUDA starts with it, and with nothing else."""
    found: list[str] = []

    class Library(ctypes.CDLL):
        def __init__(self, name: str) -> None:
            found.append(name)
            raise OSError("not here")

    for cached in (open_driver, open_cuda, gpu.gpu_name):
        cached.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", Library)
    return found


def here(bundle: Any, monkeypatch: Any, name: str, facts: dict[str, bool]) -> None:
    """Make a machine and a bundle of which some facts hold."""
    if facts["engines"]:
        bundle.manifest.files[f"engines/{name}/logprobs.engine"] = None
    monkeypatch.setattr(choosing, "find_spec", lambda package: object() if facts["package"] else None)
    monkeypatch.setattr(choosing, "shows_gpu", lambda: facts["gpu"])

    def import_onnxruntime() -> None:
        if not facts["built with CUDA"]:
            raise BackendError("onnxruntime was built without CUDA")

    monkeypatch.setattr(onnxruntime_cuda, "import_onnxruntime", import_onnxruntime)


FACTS = ("engines", "package", "gpu", "built with CUDA")


@pytest.mark.parametrize(
    ("name", "lacking"),
    [(name, lacking) for name in choosing.DEVICES for lacking in (None, *FACTS[:3])] + [("cuda", "built with CUDA")],
)
def test_cuda_starts_only_where_engines_their_library_and_a_gpu_are_there(monkeypatch, opened, name, lacking):
    bundle = open_bundle(frozen("ring"))
    here(bundle, monkeypatch, name, {fact: fact != lacking for fact in FACTS})
    monkeypatch.setattr(opening, "open_engines", lambda *_: open_cuda())
    monkeypatch.setattr(onnxruntime_cuda, "open_onnxruntime_cuda", lambda *_: open_cuda())
    found, notes = choosing.choose_device(bundle, None)
    assert found is None
    assert opened == ([] if lacking else [CUDA_DRIVER])
    said = {
        None: f"{CUDA_DRIVER} cannot be loaded",
        "engines": "has no engines for it",
        "package": "is not installed",
        "gpu": choosing.NO_GPU,
        "built with CUDA": "without CUDA",
    }
    assert said[lacking] in notes[name]


def test_on_a_jetson_tensorrt_is_not_asked_of_pip(monkeypatch):
    bundle = open_bundle(frozen("ring"))
    for name, told in (("tensorrt", True), ("rtx", False)):
        here(bundle, monkeypatch, name, dict.fromkeys(FACTS, True) | {"package": False})
        assert ("not on a Jetson: there apt install python3-libnvinfer" in choosing.missing(name, bundle)) is told


def test_a_plain_load_of_a_plain_bundle_asks_no_driver(opened):
    assert load(frozen("ring")).backend.name == "cpu"
    assert opened == []


def test_who_insists_on_a_backend_is_heard_where_the_gpu_is_of_an_unknown_kind(monkeypatch):
    bundle = open_bundle(frozen("ring"))
    here(bundle, monkeypatch, "rtx", dict.fromkeys(FACTS, True) | {"gpu": False})
    backend = object()
    monkeypatch.setattr(opening, "open_engines", lambda *_: backend)
    monkeypatch.setattr(choosing, "gpu_name", lambda: None)
    with pytest.raises(BackendError, match=r"^backend rtx cannot run here: no usable CUDA driver"):
        choosing.open_device("rtx", bundle, None)
    monkeypatch.setattr(choosing, "gpu_name", lambda: "Strange, SM 99")
    assert choosing.open_device("rtx", bundle, None) is backend


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (["null", "nvidiactl", "nvidia-uvm", "nvidia-modeset"], False),
        (["nvidia0", "nvidiactl"], True),
        (["nvidia3"], True),
        (["nvhost-gpu"], True),
        (["nvhost-ctrl-gpu"], True),
        (["nvgpu"], True),
        (["dxg"], True),
        ([], False),
    ],
)
def test_device_files_show_a_gpu(tmp_path, monkeypatch, opened, files, shown):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in files:
        (tmp_path / name).touch()
    assert gpu.shows_gpu(tmp_path) is shown
    assert opened == []


@pytest.mark.parametrize(("found", "shown"), [(None, False), (r"C:\Windows\System32\nvcuda.dll", True)])
def test_on_windows_the_drivers_library_shows_a_gpu(monkeypatch, found, shown):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: found if name == "nvcuda" else None)
    assert gpu.shows_gpu(Path("/nowhere")) is shown


def test_a_gpu_is_named_by_the_driver_and_by_nothing_else(monkeypatch, opened):
    assert gpu.gpu_name() is None
    assert opened == [CUDA_DRIVER]


# --- what a library raises ----------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[..., Any]:
    def raise_it(*_: Any) -> Any:
        raise error

    return raise_it


ODD = [TypeError("factory function returned nullptr"), RuntimeError("CUDA\n  failed"), MemoryError(), ImportError("x")]


@pytest.mark.parametrize("error", ODD, ids=repr)
def test_whatever_a_library_raises_while_it_is_opened_is_a_note_and_auto_goes_on(monkeypatch, error):
    bundle = open_bundle(frozen("ring"))
    monkeypatch.setattr(choosing, "missing", lambda name, bundle, **_: "")

    def opener(name: str, bundle: Any, update: str | None) -> Any:
        return raising(error)() if name == "rtx" else open_stand_in(bundle, update, name)

    found, notes = choosing.choose_device(bundle, None, opener)
    assert found is not None
    assert found.name == "tensorrt"
    said = ": ".join(part for part in (type(error).__name__, " ".join(str(error).split())) if part)
    assert notes["rtx"].startswith(f"backend rtx could not be opened ({said}), expected its library to load the bundle")


@pytest.mark.parametrize("error", ODD, ids=repr)
@pytest.mark.parametrize("name", choosing.DEVICES)
def test_whatever_a_library_raises_is_an_error_of_the_backend_that_was_asked_for(monkeypatch, name, error):
    bundle = open_bundle(frozen("ring"))
    monkeypatch.setattr(choosing, "missing", lambda name, bundle, **_: "")
    monkeypatch.setattr(opening, "open_engines", raising(error))
    monkeypatch.setattr(onnxruntime_cuda, "open_onnxruntime_cuda", raising(error))
    with pytest.raises(BackendError, match=rf"^backend {name} could not be opened \({type(error).__name__}") as caught:
        choosing.open_device(name, bundle, None)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), UsageError("update is no rule")], ids=repr)
def test_an_interrupt_and_a_users_own_mistake_end_the_choice(monkeypatch, error):
    bundle = open_bundle(frozen("ring"))
    monkeypatch.setattr(choosing, "missing", lambda name, bundle, **_: "")
    with pytest.raises(type(error)) as caught:
        choosing.choose_device(bundle, None, raising(error))
    assert caught.value is error
