"""The backend `cuda`: ONNX Runtime's CUDA provider runs graphs that `txl-deploy build --target cuda` put into a bundle.

The programs read and write device memory by address, so a stream's states never leave the device. Every input must be
read on the device: if an input's first reader runs on the CPU, ONNX Runtime copies the input to the CPU once, when it
is bound, and later steps would read old values. Such a program is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_runtime.bundle.bindings import Binding, check_bindings
from txl_runtime.bundle.engines.files import find_engines
from txl_runtime.bundle.engines.sidecar import COMPOSED
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program, TensorSpec
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.cuda import Device, Queue, open_cuda
from txl_runtime.device.dtypes import stored_type
from txl_runtime.device.engines.fitting import checked_engines
from txl_runtime.device.gpu import gpu_name, platform_name
from txl_runtime.device.interface import Executable, Launch
from txl_runtime.errors import BackendError, BundleError, one_line
from txl_runtime.guard.graph_check import check_graph, imported_opset
from txl_runtime.installing import pip_line
from txl_runtime.system import CUDNN, LIBRARIES
from txl_runtime.update_rules import usable_updates, wanted_version

PROVIDER = "CUDAExecutionProvider"
"""ONNX Runtime's name of its execution provider for NVIDIA GPUs."""
BFLOAT16 = 16
"""ONNX's number of the type bfloat16, for which NumPy has no type."""
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
WITHOUT_WAITING = "disable_synchronize_execution_providers"
"""ONNX Runtime's run option that returns from a run before the device has finished."""
ERROR = 3
"""Lowest severity of messages that ONNX Runtime prints: errors."""
ADVICE = "build it again with `txl-deploy build --target cuda`"
"""Advice in messages about a graph that cannot be used."""
KERNELS = {
    ("1.31.1", "linux-x86_64"): "75, 80, 86, 89, 90, 120",
    ("1.31.1", "linux-aarch64"): "89, 90, 120, 121",
}
"""Compute capabilities, times 10, for which pip's onnxruntime-gpu has code, by version and platform; the driver cannot
compile for others. Used only in an error message: builds from source may have other code.
"""
NO_KERNEL = "no kernel image"
"""Part of ONNX Runtime's error message if it has no code for this GPU."""
UNFIT_FUSION = "SkipLayerNorm"
"""An operator into which ONNX Runtime before 1.24 fuses layer norms, also in bf16, for which it has no kernel."""


class OrtExecutable(Executable):
    """A program in a session of ONNX Runtime. See `device.interface.Executable`."""

    # ONNX Runtime may allocate and wait during a run, so the loop cannot record it.
    recordable = False

    def __init__(self, ort: Any, session: Any, program: Program, rings: Mapping[str, str], place: str) -> None:
        self._version = str(ort.__version__)
        self._session, self.program, self._place, self._options = session, program, place, ort.RunOptions()
        # A run need not wait for the device: the queue orders all work, and readers of results wait for an event.
        self._options.add_run_config_entry(WITHOUT_WAITING, "1")
        # TensorScatter works in place only if its output is its input, so a ring must be one buffer.
        self.in_place = rings

    def prepare(self, addresses: Mapping[str, int], queue: Queue) -> Launch:
        binding, program = self._session.io_binding(), self.program
        for spec in program.inputs:
            binding.bind_input(spec.name, self._place, 0, _element(spec), spec.fixed, addresses[spec.name])
        for spec in program.outputs:
            binding.bind_output(spec.name, self._place, 0, _element(spec), spec.fixed, addresses[spec.name])
        run, options, version = self._session.run_with_iobinding, self._options, self._version

        def launch() -> None:
            try:
                run(binding, options)
            except Exception as error:  # ONNX Runtime has a class of errors for each status code
                reason = one_line(error)
                if NO_KERNEL in reason:
                    raise BackendError(without_kernels(version)) from None
                raise BackendError(f"program {program.name} failed in ONNX Runtime: {reason}") from None

        return launch


class OrtSessions:
    """Sessions of ONNX Runtime, one per program.

    Args:
        ort: the module onnxruntime.
        bundle: the bundle of the programs, whose folder holds the weights.
        providers: ONNX Runtime's providers; the first provider, with its settings, is required.
        place: kind of memory to which programs will be bound: "cuda"; in tests "cpu".
        missed: a message about CUDA libraries that could not be loaded; "" if all were loaded.
    """

    def __init__(self, ort: Any, bundle: Bundle, providers: Sequence[Any], place: str, missed: str = "") -> None:
        self._ort, self._bundle, self._place = ort, bundle, place
        self._wanted, self._providers, self._missed = providers[0][0], providers, missed
        self._sessions: dict[str, Any] = {}
        self.version = str(ort.__version__)

    def executable(self, program: Program, graph: bytes) -> OrtExecutable:
        """Load a program from its ONNX file's bytes, `graph`.

        Raises:
            BackendError: the required provider does not start, or an input or output is not in the device's memory.
            BundleError: the graph cannot be loaded, or differs from the program's row.
        """
        where = f"{self._bundle.path}: {program.name}"
        walk = check_graph(graph, where, program, self._bundle.manifest, ADVICE)
        session = self._open(program, graph)
        inputs, outputs = (
            [Binding(str(item.name), _dtype(item.type), tuple(item.shape)) for item in side]
            for side in (session.get_inputs(), session.get_outputs())
        )
        check_bindings(where, inputs, outputs, program, ADVICE)
        self._sessions[program.name] = session
        self._check_places(program.name, session, walk.read)
        states = self._bundle.manifest.states_of(program.update)
        rings = {state.output: state.input for state in states if state.slots is not None}
        return OrtExecutable(self._ort, session, program, rings, self._place)

    def elsewhere(self, provider: str) -> dict[str, list[str]]:
        """Return the nodes that the provider does not run, by program; {} if this ONNX Runtime cannot tell."""
        nodes: dict[str, list[str]] = {}
        for name, session in self._sessions.items():
            tell = getattr(session, "get_provider_graph_assignment_info", tuple)
            for node in (node for part in tell() if part.ep_name != provider for node in part.get_nodes()):
                nodes.setdefault(name, []).append(f"{node.name or '(unnamed)'} ({node.op_type})")
        return nodes

    def _check_places(self, name: str, session: Any, read: frozenset[str]) -> None:
        """Refuse inputs and outputs that are not in the device's memory, except inputs that no node reads."""
        if not hasattr(session, "get_input_memory_infos"):
            raise BackendError(
                f"onnxruntime {self.version} does not tell where a program reads its inputs, expected 1.23.2 or newer; "
                "pip install -U 'onnxruntime-gpu[cuda,cudnn]'"
            )
        inputs = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
        outputs = zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
        places = {f"reads {item.name}": info.name for item, info in inputs if item.name in read}
        places |= {f"writes {item.name}": info.name for item, info in outputs}
        wrong = [what for what, place in places.items() if str(place).casefold() != self._place]
        if wrong:
            nodes = self.elsewhere(self._wanted).get(name, [])
            where_they_run = (
                f", where its nodes {', '.join(nodes[:3])}{' …' if len(nodes) > 3 else ''} run" if nodes else ""
            )
            raise BackendError(
                f"{self._bundle.path}: {name}: ONNX Runtime {self.version} {', '.join(wrong)} outside of "
                f"{self._place}{where_they_run}, expected all on the device; {ADVICE}, or use another backend"
            )

    def _open(self, program: Program, graph: bytes) -> Any:
        try:
            session = self._session(graph)
        except Exception as error:  # ONNX Runtime has a class of errors for each status code
            reason = one_line(error).replace(str(self._bundle.path), "")
            if any(word in reason.casefold() for word in ("cuda", "cudnn", "cublas")):
                needed = self._requirements("cudnn" in reason.casefold())
                raise BackendError(f"ONNX Runtime could not start {self._wanted}: {reason}; {needed}") from None
            wanted = wanted_version(imported_opset(graph)["ai.onnx"], self.version, program.update)
            able = wanted or f"a graph ONNX Runtime can load; {ADVICE}"
            raise BundleError(f"{self._bundle.path}: {program.name}: {reason}; expected {able}") from None
        if self._wanted not in session.get_providers():
            raise BackendError(
                f"ONNX Runtime could not start {self._wanted} and took the CPU instead; {self._requirements()}"
            )
        return session

    def _session(self, graph: bytes) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = ERROR
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.add_session_config_entry(WEIGHTS_FOLDER, os.fsencode(self._bundle.folder.place))
        # A fallback would print to the terminal and try again on the CPU.
        arguments = {"providers": [*self._providers], "enable_fallback": False}
        try:
            return self._ort.InferenceSession(graph, options, **arguments)
        except Exception as error:
            if f"{UNFIT_FUSION}alization" not in str(error):
                raise
        return self._ort.InferenceSession(graph, options, **arguments, disabled_optimizers=[f"{UNFIT_FUSION}Fusion"])

    def _requirements(self, cudnn: bool = False) -> str:
        """Return a message for a provider that did not start: the libraries it needs (or only cuDNN), and advice."""
        major = str(getattr(self._ort, "cuda_version", "") or "").partition(".")[0]
        if cudnn:
            return (
                f"expected cuDNN 9, which this model's steps need; {CUDNN} was looked for {_searched()}; "
                f"pip install nvidia-cudnn-cu{major or 13}"
            )
        version = f"CUDA {major}" if major else "the CUDA it was built for"
        missing = f" ({self._missed})" if self._missed else ""
        return (
            f"expected a driver that runs {version}, and its libraries{missing}; "
            "pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )


def open_onnxruntime_cuda(bundle: Bundle, update: str | None = None) -> DeviceBackend:
    """Open a bundle's graphs for ONNX Runtime on the GPU of this machine.

    Raises:
        BackendError: the bundle has no graphs for backend cuda, ONNX Runtime has no CUDA provider, or the provider does
            not start.
        BundleError: a graph is damaged or cannot be loaded.
    """
    find_engines(bundle, "cuda", update)  # raises an error if there are no engines, before a library is loaded
    ort = import_onnxruntime()
    device = open_cuda()
    queue = device.queue()
    options = {"device_id": "0", "use_tf32": "0", "user_compute_stream": str(queue.handle)}
    providers = [(PROVIDER, options), "CPUExecutionProvider"]
    sessions = OrtSessions(ort, bundle, providers, "cuda", preload_libraries(ort))
    return load_onnxruntime(sessions, bundle, device, queue, update, PROVIDER)


def load_onnxruntime(
    sessions: OrtSessions, bundle: Bundle, device: Device, queue: Queue, update: str | None, provider: str
) -> DeviceBackend:
    """Load a bundle's graphs as `open_onnxruntime_cuda` does, for a device and sessions that are already open."""
    engines = checked_engines(bundle, "cuda", COMPOSED, update, usable_updates(bundle.manifest.updates))
    # the provider changes the thread's current device, which `current` restores
    with device.current(), queue.beside_records():
        executables = [sessions.executable(engine.program, bundle.read(engine.name)) for engine in engines]
    reason = ""
    if elsewhere := sessions.elsewhere(provider):
        names = [node for nodes in elsewhere.values() for node in nodes]
        reason = f"; {len(names)} nodes run on the CPU: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    description = f"ONNX Runtime {sessions.version} on {device.title}{reason}"
    return DeviceBackend("cuda", description, device, queue, executables)


def without_kernels(version: str) -> str:
    """Return the error message for an onnxruntime-gpu that has no kernels for this GPU, with advice."""
    held = KERNELS.get((version, platform_name()))
    expected = f"one of SM {held}, which this wheel has code for" if held else "one that it was built for"
    return (
        f"onnxruntime {version} has no kernels for {gpu_name()}, expected {expected}; use --backend tensorrt or rtx "
        "with engines that `txl-deploy build` makes, or an onnxruntime-gpu that is built for this GPU"
    )


def preload_libraries(ort: Any) -> str:
    """Load CUDA's libraries from all of pip's folders; ONNX Runtime itself searches at most the folder beside its own.

    Returns:
        ONNX Runtime's messages about libraries that could not be loaded, and the searched folders; "" if all were
        loaded. A library in the messages may not be needed.
    """
    places = pip_folders()
    lines: list[str] = []
    # ONNX Runtime's own folder comes first, because pip installs the extras beside it. Later calls find a loaded
    # library by its name, so the messages of the last call are about libraries that are in no folder.
    for folders in ([""], *places):
        for folder in folders:
            lines = _preloaded(ort, folder, [line for line in lines if os.sep in line])
        if not lines:
            break
    # Since 1.31 ONNX Runtime does not report a missing cuDNN; few models need it, and it may be in a different folder.
    for folder in (folder for folders in places for folder in folders):
        if any(Path(folder).glob("*cudnn*")) and not _can_load(CUDNN):
            _preloaded(ort, folder, [], cuda=False)
    return f"{'; '.join(lines[:2])}; looked {_searched()}" if lines else ""


def _preloaded(ort: Any, folder: str, messages: list[str], **which: bool) -> list[str]:
    """Let ONNX Runtime load libraries from a folder; return `messages` and the messages of libraries that failed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            ort.preload_dlls(directory=folder or None, **which)
        except Exception as error:  # not fatal: starting the provider shows whether a library is missing
            messages.append(f"Failed: {one_line(error)}")
    return messages + [line.strip() for line in printed.getvalue().splitlines() if line.startswith("Failed")]


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _searched() -> str:
    folders_text = ", ".join(folder for folders in pip_folders() for folder in folders)
    folders_text = folders_text or f"no nvidia/*/{LIBRARIES[0]} is in any folder of sys.path"
    return f"beside onnxruntime, where the system looks, and in: {folders_text}"


def pip_folders() -> list[list[str]]:
    """Return the library folders of NVIDIA's packages for CUDA 12 and 13, one list for each entry of sys.path."""
    places = (
        [folder for name in LIBRARIES for folder in sorted(Path(place).absolute().glob(f"nvidia/*/{name}"))]
        for place in dict.fromkeys(sys.path)
        if Path(place).absolute() != Path.cwd()  # the current folder may be a stranger's bundle
    )
    return [[str(folder) for folder in folders if folder.is_dir()] for folders in places if folders]


def import_onnxruntime() -> Any:
    """Return the module onnxruntime, built with CUDA.

    Raises:
        BackendError: onnxruntime is not installed, or was built without CUDA.
    """
    try:
        import onnxruntime
    except ImportError:
        raise BackendError(f"onnxruntime is not installed, backend cuda needs it; {pip_line('cuda')}") from None
    if PROVIDER not in onnxruntime.get_available_providers():
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__} was built without CUDA, expected onnxruntime-gpu; "
            f"pip uninstall onnxruntime, then {pip_line('cuda')} (the two replace each other's files)"
        )
    return onnxruntime


def _element(spec: TensorSpec) -> Any:
    return BFLOAT16 if spec.dtype == "bfloat16" else stored_type(spec.dtype).type


def _dtype(kind: str) -> str:
    """Return the manifest's name for one of ONNX Runtime's types: "float32" for "tensor(float)"."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return "float32" if name == "float" else name
