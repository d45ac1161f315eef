"""libcuda by ctypes: signatures against C, statuses as errors, processes that were forked."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import driver_statuses
from support import CUDA, until
from txl_runtime.device import cuda, gpu
from txl_runtime.device import driver as module
from txl_runtime.device.driver import ADVICE, REPORT, SIGNATURES, Driver, Memcpy2D, open_driver
from txl_runtime.errors import BackendError

TYPES = """
#include <stddef.h>
#include <stdio.h>
#include <time.h>
typedef int CUresult, CUdevice;
typedef unsigned long long CUdeviceptr, cuuint64_t;
typedef enum { MEMORYTYPE_HOST = 1, MEMORYTYPE_DEVICE = 2 } CUmemorytype;
typedef enum { ATTRIBUTE = 75 } CUdevice_attribute;
typedef enum { NONE = 0 } CUstreamCaptureStatus;
typedef enum { RELAXED = 2 } CUstreamCaptureMode;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUarray_st *CUarray;
typedef struct {
    size_t srcXInBytes, srcY;
    CUmemorytype srcMemoryType; const void *srcHost; CUdeviceptr srcDevice; CUarray srcArray; size_t srcPitch;
    size_t dstXInBytes, dstY;
    CUmemorytype dstMemoryType; void *dstHost; CUdeviceptr dstDevice; CUarray dstArray; size_t dstPitch;
    size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;
static char seen[4096];
static int status;
static volatile int held, inside;
const char *what_was_seen(void) { return seen; }
void fail_with(int code) { status = code; }
void hold(int whether) { held = whether; }
int is_inside(void) { return inside; }
static void nap(void) {
    struct timespec t = {0, 1000000L};
    inside = 1;
    for (int i = 0; held && i < 30000; i++) nanosleep(&t, NULL);
    inside = 0;
}
"""
PROTOTYPES = """
cuInit(unsigned int a)
cuDriverGetVersion(int *a)
cuDeviceGetCount(int *a)
cuDeviceGet(CUdevice *a, int b)
cuDeviceGetName(char *a, int b, CUdevice c)
cuDeviceGetAttribute(int *a, CUdevice_attribute b, CUdevice c)
cuDevicePrimaryCtxRetain(CUcontext *a, CUdevice b)
cuDevicePrimaryCtxRelease_v2(CUdevice a)
cuCtxGetCurrent(CUcontext *a)
cuCtxPushCurrent_v2(CUcontext a)
cuCtxPopCurrent_v2(CUcontext *a)
cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *a)
cuMemAlloc_v2(CUdeviceptr *a, size_t b)
cuMemFree_v2(CUdeviceptr a)
cuMemHostAlloc(void **a, size_t b, unsigned int c)
cuMemFreeHost(void *a)
cuMemGetInfo_v2(size_t *a, size_t *b)
cuMemcpyHtoDAsync_v2(CUdeviceptr a, const void *b, size_t c, CUstream d)
cuMemcpyDtoHAsync_v2(void *a, CUdeviceptr b, size_t c, CUstream d)
cuMemcpyDtoDAsync_v2(CUdeviceptr a, CUdeviceptr b, size_t c, CUstream d)
cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *a, CUstream b)
cuMemsetD8Async(CUdeviceptr a, unsigned char b, size_t c, CUstream d)
cuMemsetD2D8Async(CUdeviceptr a, size_t b, unsigned char c, size_t d, size_t e, CUstream f)
cuStreamCreate(CUstream *a, unsigned int b)
cuStreamDestroy_v2(CUstream a)
cuStreamSynchronize(CUstream a)
cuStreamBeginCapture_v2(CUstream a, CUstreamCaptureMode b)
cuStreamEndCapture(CUstream a, CUgraph *b)
cuStreamIsCapturing(CUstream a, CUstreamCaptureStatus *b)
cuGraphInstantiateWithFlags(CUgraphExec *a, CUgraph b, unsigned long long c)
cuGraphDestroy(CUgraph a)
cuGraphExecDestroy(CUgraphExec a)
cuGraphLaunch(CUgraphExec a, CUstream b)
cuEventCreate(CUevent *a, unsigned int b)
cuEventDestroy_v2(CUevent a)
cuEventRecord(CUevent a, CUstream b)
cuEventSynchronize(CUevent a)
"""
"""As cuda.h declares them under these names; each returns a CUresult. The two that name statuses follow by hand."""
STATUSES = "cuGetErrorName(CUresult a, const char **b)", "cuGetErrorString(CUresult a, const char **b)"
NAMING = """
CUresult cuGetErrorName(CUresult a, const char **b) { *b = a == 999 ? NULL : "CUDA_ERROR_OF_A_TEST"; return a == 999; }
CUresult cuGetErrorString(CUresult a, const char **b) { *b = "in words"; return a == 999; }
"""
FIELDS = [name for name, *_ in Memcpy2D._fields_]
BIG = 0x7EDC_BA98_7654_3210
SMALLER = dict.fromkeys(("char", "unsigned char"), 0x41) | dict.fromkeys(
    ("int", "unsigned int", "CUdevice", "CUdevice_attribute", "CUstreamCaptureMode", "CUstreamCaptureStatus"),
    0x1234_5678,
)


def filling(kind: str) -> int:
    """A number that fits into a C type, and into none that is smaller."""
    return SMALLER.get(kind, BIG)


def parameters(prototype: str) -> list[tuple[str, bool]]:
    """The type of each parameter, and whether it is where a function writes to."""
    types = [given.rsplit(" ", 1) for given in re.findall(r"[(,]\s*([^,)]+)", prototype)]
    return [
        (kind + "*" * (name.count("*") - 1), True)
        if ("*" in name and kind not in ("void", "const void", "const CUDA_MEMCPY2D")) or "**" in name
        else (kind + "*" * name.count("*"), False)
        for kind, name in types
    ]


def body(prototype: str) -> str:
    """C that writes down what it was given, and gives back something that fits no smaller type."""
    lines = [f'int n = sprintf(seen, "{prototype.partition("(")[0]}");']
    for (kind, out), letter in zip(parameters(prototype), "abcdef", strict=False):
        if out:
            lines.append(f"*{letter} = ({kind}){filling(kind)}LL;")
        elif "MEMCPY2D" in kind:
            lines += [f'n += sprintf(seen + n, " %llx", (unsigned long long){letter}->{field});' for field in FIELDS]
        else:
            lines.append(f'n += sprintf(seen + n, " %llx", (unsigned long long){letter});')
    return f"CUresult {prototype} {{ {' '.join(lines)} nap(); (void)n; return status; }}"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("libcuda")
    source = [TYPES, *(body(line) for line in PROTOTYPES.split("\n") if line), NAMING]
    (folder / "cuda.c").write_text("\n".join(source))
    library = folder / "libcuda_of_a_test.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", str(folder / "cuda.c"), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return library


class Compiled:
    """A driver over the compiled library, and what the library was given last."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.what_was_seen.restype = ctypes.c_char_p
        self.library.fail_with(0)
        self.library.hold(0)
        self.driver = Driver(self.library)

    @property
    def seen(self) -> str:
        return self.library.what_was_seen().decode()


@pytest.fixture
def native(compiled) -> Any:
    return Compiled(compiled)


def test_every_function_that_is_called_is_declared_as_in_c():
    declared = {line.partition("(")[0] for line in PROTOTYPES.split("\n") if line}
    assert declared | {"cuGetErrorName", "cuGetErrorString"} == set(SIGNATURES)


HEADERS = {"CUDA 12": CUDA / "nvidia" / "cuda_runtime" / "include", "CUDA 13": CUDA / "nvidia" / "cu13" / "include"}
NUMBERS = {
    "CU_MEMORYTYPE_HOST": module.HOST,
    "CU_MEMORYTYPE_DEVICE": module.DEVICE,
    "CU_EVENT_DISABLE_TIMING": module.EVENTS[0],
    "(CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC)": module.EVENTS[1],
    "CU_STREAM_NON_BLOCKING": module.NON_BLOCKING,
    "CU_STREAM_CAPTURE_MODE_RELAXED": module.RELAXED,
    "CU_STREAM_CAPTURE_MODE_GLOBAL": driver_statuses.GLOBAL,
    "CU_STREAM_CAPTURE_STATUS_NONE": 0,
    "CU_STREAM_CAPTURE_STATUS_ACTIVE": driver_statuses.ACTIVE,
    "CU_STREAM_CAPTURE_STATUS_INVALIDATED": driver_statuses.INVALIDATED,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": gpu.MULTIPROCESSORS,
    "CU_DEVICE_ATTRIBUTE_INTEGRATED": gpu.INTEGRATED,
    "CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE": cuda.MEMORY_KHZ,
    "CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH": cuda.MEMORY_BITS,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": gpu.MAJOR,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": gpu.MINOR,
    **{name: status for status, (name, _) in driver_statuses.NAMES.items()},
}


@pytest.mark.parametrize("version", HEADERS)
def test_cuda_declares_these_functions_and_this_structure_and_these_numbers(version, tmp_path):
    """C refuses to declare a function a second time unless every type is the same."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not (HEADERS[version] / "cuda.h").exists():
        pytest.skip("no C compiler here, or no cuda.h: `make cuda`")
    prototypes = [*(line for line in PROTOTYPES.split("\n") if line), *STATUSES]
    declared = [f"(void *){line.partition('(')[0]}" for line in prototypes]
    lines = ["#include <cuda.h>", "#include <stddef.h>", f"void *declared[] = {{{', '.join(declared)}}};"]
    lines += [f"CUresult {line};" for line in prototypes]
    facts = [f"{name} == {value}" for name, value in NUMBERS.items()]
    for structure in (Memcpy2D, driver_statuses.MemoryCopy):
        facts.append(f"sizeof(CUDA_MEMCPY2D) == {ctypes.sizeof(structure)}")
        for name, (field, _) in zip(FIELDS, structure._fields_, strict=True):
            place = getattr(structure, field)
            facts.append(f"offsetof(CUDA_MEMCPY2D, {name}) == {place.offset}")
            facts.append(f"sizeof ((CUDA_MEMCPY2D *)0)->{name} == {place.size}")
    source = tmp_path / "held.c"
    source.write_text("\n".join([*lines, *(f'_Static_assert({fact}, "not so");' for fact in facts)]))
    command = [compiler, "-fsyntax-only", "-Wall", "-Werror", f"-I{HEADERS[version]}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("prototype", [line for line in PROTOTYPES.split("\n") if line])
def test_arguments_arrive_in_c_as_they_were_given_and_results_come_back(native, prototype):
    name = prototype.partition("(")[0]
    given, expected, written = [], [], []
    for index, ((kind, out), argtype) in enumerate(zip(parameters(prototype), SIGNATURES[name], strict=True)):
        if out:
            where = argtype._type_()
            given.append(ctypes.byref(where))
            written.append((kind, where))
        elif "MEMCPY2D" in kind:
            values = [BIG + n if ctypes.sizeof(field[1]) == 8 else n for n, field in enumerate(Memcpy2D._fields_)]
            given.append(ctypes.byref(Memcpy2D(*values)))
            expected += values
        else:
            given.append(filling(kind) - index)
            expected.append(filling(kind) - index)
    getattr(native.driver, name)(*given)
    assert native.seen == " ".join([name, *(f"{value:x}" for value in expected)])
    for kind, where in written:
        value = ord(where.value) if isinstance(where.value, bytes) else where.value
        assert value == filling(kind), kind


def test_other_threads_run_while_a_function_waits(native):
    """It waits until another thread lets it go; half a minute at most, if it keeps all others from running."""
    native.library.hold(1)
    waiting = threading.Thread(target=native.driver.cuEventSynchronize, args=(5,))
    waiting.start()
    until(lambda: native.seen.startswith("cuEventSynchronize"))
    assert native.library.is_inside()
    native.library.hold(0)
    waiting.join()


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_status_of_every_function_is_an_error_that_names_it(name):
    returned = [0]
    functions: dict[str, Any] = dict.fromkeys(SIGNATURES, lambda *_: 0)
    driver = Driver(SimpleNamespace(**functions | {name: lambda *_: returned[0]}))
    getattr(driver, name)()
    for status in (1, 2, 700, 12345):
        returned[0] = status
        with pytest.raises(BackendError, match=rf"^{name} returned .*\({status}.*expected success; "):
            getattr(driver, name)()


def test_an_error_has_cudas_name_and_words_for_it_and_what_to_do(native):
    for status, advice in {2: ADVICE[2], 700: ADVICE[700], 77: REPORT}.items():
        native.library.fail_with(status)
        with pytest.raises(BackendError) as caught:
            native.driver.cuStreamSynchronize(1)
        assert str(caught.value) == (
            f"cuStreamSynchronize returned CUDA_ERROR_OF_A_TEST ({status}, in words), expected success; {advice}"
        )
    native.library.fail_with(999)  # one that this driver has no name for
    with pytest.raises(BackendError, match=r"returned a status that CUDA has no name for \(999\), expected success"):
        native.driver.cuStreamSynchronize(1)


@pytest.mark.parametrize(
    ("status", "words"),
    [(804, "cuda-compat"), (709, "was reset"), (100, "group video"), (999, "--runtime nvidia"), (34, "stubs")],
)
def test_what_a_status_means_on_real_machines_is_said(native, status, words):
    native.library.fail_with(status)
    with pytest.raises(BackendError, match=rf"\({status}.*expected success; .*{words}"):
        native.driver.cuStreamSynchronize(1)


def test_functions_of_every_step_take_what_ctypes_has_ready_and_return_their_status(native):
    found = ctypes.c_void_p()
    assert native.driver.instant("cuCtxGetCurrent")(ctypes.byref(found)) == 0
    assert found.value == BIG
    native.library.fail_with(201)
    assert native.driver.instant("cuCtxPushCurrent_v2")(ctypes.c_void_p(BIG)) == 201
    assert native.seen == f"cuCtxPushCurrent_v2 {BIG:x}"


def test_functions_of_every_step_are_found_where_windows_loads_libraries(native, monkeypatch):
    """There ctypes looks into a library's name before it looks whether the library is loaded already."""
    names = ("_LOAD_LIBRARY_SEARCH_DEFAULT_DIRS", "_LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR")
    monkeypatch.setitem(sys.modules, "nt", SimpleNamespace(**dict.fromkeys(names, 0), _getfullpathname=str))
    monkeypatch.setattr(ctypes, "_os", SimpleNamespace(**{**vars(os), "name": "nt"}))
    monkeypatch.setattr(module, "CUDA_DRIVER", "nvcuda.dll")
    assert native.driver.instant("cuCtxPushCurrent_v2")(ctypes.c_void_p(BIG)) == 0
    assert native.seen == f"cuCtxPushCurrent_v2 {BIG:x}"


def test_giving_back_quietly_tells_nobody(native):
    native.library.fail_with(4)
    native.driver.quietly("cuMemFree_v2", BIG)
    assert native.seen == f"cuMemFree_v2 {BIG:x}"
    native.driver.quietly("cuMemFree_v2", "not an address")


def test_a_prototype_of_its_own_leaves_the_library_as_others_use_it(native):
    assert native.library.cuMemFree_v2.argtypes is None


def test_a_function_that_is_missing_means_an_old_driver():
    functions = dict.fromkeys(SIGNATURES, lambda *_: 0)
    del functions["cuGraphInstantiateWithFlags"]
    with pytest.raises(BackendError, match=r"has no cuGraphInstantiateWithFlags, expected .*CUDA 11\.4 or newer"):
        Driver(SimpleNamespace(**functions))


def test_a_driver_that_is_missing_is_named_and_looked_for_again(monkeypatch):
    monkeypatch.setattr(module, "CUDA_DRIVER", "libcuda_that_nobody_has.so.1")
    open_driver.cache_clear()
    for _ in range(2):
        with pytest.raises(BackendError, match=r"^libcuda_that_nobody_has\.so\.1 cannot be loaded .*NVIDIA's driver"):
            open_driver()


@pytest.mark.parametrize(("status", "advice"), [(100, "no GPU is visible"), (3, "multiprocessing's spawn")])
def test_a_driver_that_cannot_start_says_why(status, advice):
    functions = dict.fromkeys(SIGNATURES, lambda *_: 0) | {"cuInit": lambda flags: status}
    with pytest.raises(BackendError, match=rf"^cuInit returned .*{status}.*{advice}"):
        Driver(SimpleNamespace(**functions))


FORKING = """
import gc, os, signal, sys, threading
sys.path[:0] = {paths!r}
from stand_ins.driver import FakeDriver
from txl_runtime.device.cuda_context import open_lock
from txl_runtime.device.cuda import Device
from txl_runtime.device.driver import Driver
from txl_runtime.errors import BackendError

fake = FakeDriver(seed=1)
device = Device(Driver(fake))
queue, event = device.queue(), device.event()
block, pinned = device.allocate(64), device.staging(64)
with device.current():
    replay = queue.capture(lambda: queue.zero(block.address, 64))
busy, entered, over = open_lock(), threading.Event(), threading.Event()


def at_work():
    with busy:
        entered.set()
        over.wait()


def in_turn():
    with busy, device.current():
        pass


other = threading.Thread(target=at_work)  # in the child this thread is not there, and what it holds is never let go
other.start()
entered.wait()
child = os.fork()
if child == 0:
    code = 1
    signal.alarm(30)
    try:
        for enter in (
            in_turn, device.current().__enter__, device.queue, device.event,
            lambda: device.allocate(8), lambda: device.staging(8), lambda: Device(Driver(fake)),
        ):
            try:
                enter()
            except BackendError as error:
                assert ("forked" in str(error)) and "spawn" in str(error), str(error)
            else:
                raise SystemExit("not refused")
        called = []
        fake.call = lambda name, *_: called.append(name) or 3
        queue.settle()
        del enter, block, pinned, event, replay, queue, device
        gc.collect()
        assert not called, f"finalizers called {{called}} in a child"
        code = 0
    finally:
        os._exit(code)
over.set()
other.join()
assert os.waitpid(child, 0)[1] == 0, "see above"
with device.current():
    queue.zero(block.address, 64)
    queue.wait()
fake.check()
"""


def test_a_forked_child_is_refused_by_name_and_the_parent_goes_on():
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    root = Path(__file__).parents[3]
    script = FORKING.format(paths=[str(Path(module.__file__).parents[2]), str(root / "export"), str(root / "tests")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
