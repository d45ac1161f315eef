"""Backend `cuda`: ONNX Runtime's CUDA provider runs the graphs that `txl-deploy build --target cuda` put into a bundle.

The programs read and write device memory by address, so a stream's memory never leaves the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from txl_runtime.bundle.bindings import Binding, check_bindings
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program, TensorSpec
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.dtypes import stored_type
from txl_runtime.device.engines.files import checked_engines, find_engines
from txl_runtime.device.engines.sidecar import COMPOSED
from txl_runtime.device.interface import Device, Executable, Launch, Queue
from txl_runtime.errors import BackendError, BundleError, one_line
from txl_runtime.update_rules import usable_updates

PROVIDER = "CUDAExecutionProvider"
BFLOAT16 = 16
"""ONNX's number of the type, which NumPy has no name for."""
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
ADVICE = "build it again with `txl-deploy build --target cuda`"


class OrtExecutable(Executable):
    """A segment program in a session. See `device.interface.Executable`."""

    # ONNX Runtime waits for the device after each run, which cannot be recorded from outside.
    recordable = False

    def __init__(self, session: Any, program: Program, states: Mapping[str, str], place: str) -> None:
        self._session, self.program, self._place = session, program, place
        # TensorScatter works in place wherever its output is its input, so a ring's memory has to be one buffer.
        self.in_place: Mapping[str, str] = dict(states) if program.update == "ring" else {}

    def prepare(self, addresses: Mapping[str, int], queue: Queue) -> Launch:
        binding, name = self._session.io_binding(), self.program.name
        for spec in self.program.inputs:
            binding.bind_input(spec.name, self._place, 0, _element(spec), spec.fixed, addresses[spec.name])
        for spec in self.program.outputs:
            binding.bind_output(spec.name, self._place, 0, _element(spec), spec.fixed, addresses[spec.name])

        def launch() -> None:
            try:
                self._session.run_with_iobinding(binding)
            except Exception as error:  # ONNX Runtime raises its own kinds, one per status code
                raise BackendError(f"program {name} failed in ONNX Runtime: {one_line(error)}") from None

        return launch


class OrtSessions:
    """One session per program.

    Args:
        ort: the module onnxruntime.
        bundle: whose programs they are, and in whose folder their weights lie.
        providers: of ONNX Runtime; the first is the one that is wanted.
        place: where the addresses are that programs will be bound to, "cuda"; tests say "cpu".
    """

    def __init__(self, ort: Any, bundle: Bundle, providers: Sequence[Any], place: str) -> None:
        self._ort, self._bundle, self._providers, self._place = ort, bundle, list(providers), place
        self._sessions: dict[str, Any] = {}
        self.version = str(ort.__version__)

    def executable(self, program: Program, graph: bytes) -> OrtExecutable:
        """A program, ready to be bound to addresses; `graph` is its ONNX file's bytes.

        Raises:
            BackendError: ONNX Runtime opened the graph without the provider that is wanted.
            BundleError: the graph cannot be loaded, or it is not the program's.
        """
        session = self._open(program.name, graph)
        inputs, outputs = (
            [Binding(str(item.name), _dtype(item.type), tuple(item.shape)) for item in side]
            for side in (session.get_inputs(), session.get_outputs())
        )
        check_bindings(f"{self._bundle.path}: {program.name}", inputs, outputs, program, ADVICE)
        self._sessions[program.name] = session
        states = self._bundle.manifest.states_of(program.update)
        return OrtExecutable(session, program, {state.output: state.input for state in states}, self._place)

    def elsewhere(self, provider: str) -> dict[str, list[str]]:
        """Nodes of each program that a provider does not run, where this ONNX Runtime can tell."""
        found: dict[str, list[str]] = {}
        for name, session in self._sessions.items():
            tell = getattr(session, "get_provider_graph_assignment_info", tuple)
            for node in (node for part in tell() if part.ep_name != provider for node in part.get_nodes()):
                found.setdefault(name, []).append(f"{node.name or '(unnamed)'} ({node.op_type})")
        return found

    def _open(self, name: str, graph: bytes) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.add_session_config_entry(WEIGHTS_FOLDER, str(self._bundle.path))
        try:
            session = self._ort.InferenceSession(graph, options, providers=self._providers)
        except Exception as error:  # ONNX Runtime raises its own kinds, one per status code
            raise BundleError(
                f"{self._bundle.path}: {name}: {one_line(error)}; expected a graph ONNX Runtime can load; {ADVICE}"
            ) from None
        first = self._providers[0]
        wanted = first if isinstance(first, str) else first[0]
        if wanted not in session.get_providers():
            raise BackendError(
                f"ONNX Runtime could not start {wanted} and took the CPU instead, expected CUDA and cuDNN of the "
                "versions it was built for; pip install 'onnxruntime-gpu[cuda,cudnn]'"
            )
        return session


def open_onnxruntime_cuda(bundle: Bundle, update: str | None = None) -> DeviceBackend:
    """Open a bundle's graphs for ONNX Runtime on the GPU of this machine.

    Raises:
        BackendError: there are none, ONNX Runtime has no CUDA provider, or it does not start.
        BundleError: a graph is damaged or cannot be loaded.
    """
    find_engines(bundle, "cuda", update)  # before any library is loaded
    ort = import_onnxruntime()
    from txl_runtime.device.cuda import open_cuda

    device = open_cuda()
    queue = device.queue()
    options = {"device_id": "0", "use_tf32": "0", "user_compute_stream": str(queue.handle)}
    sessions = OrtSessions(ort, bundle, [(PROVIDER, options), "CPUExecutionProvider"], "cuda")
    return load_onnxruntime(sessions, bundle, device, queue, update, PROVIDER)


def load_onnxruntime(
    sessions: OrtSessions, bundle: Bundle, device: Device, queue: Queue, update: str | None, provider: str
) -> DeviceBackend:
    """As `open_onnxruntime_cuda`, with sessions and a device that are open."""
    found = checked_engines(bundle, "cuda", COMPOSED, update, usable_updates(bundle.manifest.updates))
    executables = [sessions.executable(engine.program, bundle.file(engine.name).read_bytes()) for engine in found]
    said = ""
    if elsewhere := sessions.elsewhere(provider):
        names = [node for nodes in elsewhere.values() for node in nodes]
        said = f"; {len(names)} nodes run on the CPU: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    description = f"ONNX Runtime {sessions.version} on {device.title}{said}"
    return DeviceBackend("cuda", description, device, queue, executables)


def import_onnxruntime() -> Any:
    """ONNX Runtime, if it was built with CUDA.

    Raises:
        BackendError: it is not installed or was built without CUDA.
    """
    try:
        import onnxruntime
    except ImportError:
        raise BackendError(
            "onnxruntime is not installed, backend cuda needs it; pip install 'txl-deploy[cuda]'"
        ) from None
    if PROVIDER not in onnxruntime.get_available_providers():
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__} was built without CUDA, expected onnxruntime-gpu; "
            "pip uninstall onnxruntime, then pip install 'txl-deploy[cuda]' (the two replace each other's files)"
        )
    return onnxruntime


def _element(spec: TensorSpec) -> Any:
    return BFLOAT16 if spec.dtype == "bfloat16" else stored_type(spec.dtype).type


def _dtype(kind: str) -> str:
    """ONNX Runtime's "tensor(float)" as the manifest writes it."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return "float32" if name == "float" else name
