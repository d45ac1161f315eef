"""ONNX Runtime's CUDA provider: programs read and write device memory by address, and the memory never leaves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import msgspec

from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program, TensorSpec
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.dtypes import stored_type
from txl_runtime.device.interface import Device, Launch, Queue
from txl_runtime.errors import BackendError, BundleError, UsageError
from txl_runtime.types import Arrays, Call
from txl_runtime.update_rules import usable_updates

__all__ = [
    "OrtExecutable",
    "OrtSessions",
    "import_onnxruntime",
    "load_onnxruntime",
    "nodes_elsewhere",
    "open_onnxruntime_cuda",
]

PROVIDER = "CUDAExecutionProvider"
BFLOAT16 = 16
"""ONNX's number of the type, which NumPy has no name for."""


class OrtExecutable:
    """A segment program in a session. See `device.Executable`.

    Attributes:
        place: where the addresses are, "cuda"; tests say "cpu".
    """

    # ONNX Runtime waits for the device after each run, which cannot be recorded from outside.
    recordable = False

    def __init__(self, session: Any, program: Program, states: Mapping[str, str], place: str) -> None:
        self._session, self.program, self._place = session, program, place
        # TensorScatter works in place wherever its output is its input: that the memory is one is what makes it so.
        self.in_place: Mapping[str, str] = dict(states) if program.update == "ring" else {}

    def prepare(self, addresses: Mapping[str, int], queue: Queue) -> Launch:
        """See `device.Executable`."""
        binding, name = self._session.io_binding(), self.program.name
        for spec in self.program.inputs:
            binding.bind_input(spec.name, self._place, 0, _element(spec), spec.fixed, addresses[spec.name])
        for spec in self.program.outputs:
            binding.bind_output(spec.name, self._place, 0, _element(spec), spec.fixed, addresses[spec.name])

        def launch() -> None:
            try:
                self._session.run_with_iobinding(binding)
            except Exception as error:  # ONNX Runtime raises its own kinds, one per status code
                raise BackendError(f"program {name} failed in ONNX Runtime: {_one_line(error)}") from None

        return launch


class OrtSessions:
    """One session per graph; segment programs for the device, softmax programs for arrays of the host."""

    def __init__(self, ort: Any, bundle: Bundle, providers: Sequence[Any], place: str) -> None:
        self._ort, self._bundle, self._providers, self._place = ort, bundle, list(providers), place
        self._sessions: dict[str, Any] = {}
        self.version = str(ort.__version__)

    def executable(self, program: Program, graph: bytes | None = None) -> OrtExecutable:
        """A segment program, for addresses of the device; `graph` where it is not a file of the bundle."""
        states = self._bundle.manifest.states_of(program.update)
        session = self.open(program, graph)
        return OrtExecutable(session, program, {s.output: s.input for s in states}, self._place)

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        """A softmax program on arrays; ONNX Runtime brings them to the device and back."""
        session = self.open(program)
        binding = session.io_binding()
        value = self._ort.OrtValue.ortvalue_from_numpy
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, value(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, value(array))

        def call() -> None:
            try:
                session.run_with_iobinding(binding)
            except Exception as error:  # see above
                raise BackendError(f"program {program.name} failed in ONNX Runtime: {_one_line(error)}") from None

        return call

    def elsewhere(self, provider: str) -> dict[str, list[str]]:
        """Nodes of each graph that a provider does not run; empty lists are left out."""
        found = {file: nodes_elsewhere(session, provider) for file, session in self._sessions.items()}
        return {file: nodes for file, nodes in found.items() if nodes}

    def open(self, program: Program, graph: bytes | None = None) -> Any:
        """The session of a program's graph, opened when it is first asked for.

        Raises:
            BackendError: it was opened without the provider it was to run on.
            BundleError: the graph cannot be loaded.
        """
        session = self._sessions.get(program.file)
        if session is None:
            options = self._ort.SessionOptions()
            options.log_severity_level = 3
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            path = self._bundle.file(program.file)
            if graph is not None:
                folder = str(self._bundle.path)
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
            try:
                source = str(path) if graph is None else graph
                session = self._ort.InferenceSession(source, options, providers=self._providers)
            except Exception as error:  # see above
                raise BundleError(f"{path}: {_one_line(error)}; expected a graph ONNX Runtime can load") from None
            first = self._providers[0]
            wanted = first if isinstance(first, str) else first[0]
            if wanted not in session.get_providers():
                raise BackendError(
                    f"ONNX Runtime could not start {wanted} and took the CPU instead, expected CUDA and cuDNN of the "
                    "versions it was built for; pip install 'onnxruntime-gpu[cuda,cudnn]'"
                )
            self._sessions[program.file] = session
        return session


def nodes_elsewhere(session: Any, provider: str) -> list[str]:
    """Names of a session's nodes that another provider runs, where this ONNX Runtime can tell."""
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    if tell is None:
        return []
    return [
        f"{node.name or '(unnamed)'} ({node.op_type})"
        for part in tell()
        if part.ep_name != provider
        for node in part.get_nodes()
    ]


def open_onnxruntime_cuda(bundle: Bundle, update: str | None = None) -> DeviceBackend:
    """Open a bundle's programs of one update rule.

    Raises:
        BackendError: ONNX Runtime has no CUDA provider, or it does not start.
        BundleError: a graph cannot be loaded.
    """
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
    """As `open_onnxruntime_cuda`, with sessions and a device that are open.

    Where onnx is installed, programs are whole, softmax included, as engines are; else they are the bundle's own, and
    what the softmax takes and gives passes through the host. The memory does not in either case.
    """
    rule = update or usable_updates(bundle.manifest.updates)[0]
    if rule not in bundle.manifest.updates:
        raise UsageError(
            f"update is {rule!r}, this bundle has programs for {', '.join(bundle.manifest.updates)}; use one"
        )
    softmax = None
    if find_spec("onnx") is None:
        held = bundle.manifest.programs
        executables = [sessions.executable(program) for program in held if program.update == rule]
        if any(item.program.kind == "hidden" for item in executables):
            for program in held:
                if program.update == "none":
                    sessions.open(program)
            softmax = sessions.bind
    else:
        from txl_engines.composing import compose, whole_programs

        whole = whole_programs(bundle.manifest, rule)
        executables = [
            # One graph may serve programs of any length; composed ones are of one length each.
            sessions.executable(msgspec.structs.replace(program, file=f"{program.name}.onnx"), compose(bundle, program))
            for program in whole
        ]
    said = ""
    if elsewhere := sessions.elsewhere(provider):
        names = [node for nodes in elsewhere.values() for node in nodes]
        said = f"; {len(names)} nodes run on the CPU: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    description = f"ONNX Runtime {sessions.version} on {device.title}{said}"
    return DeviceBackend("cuda", description, device, queue, executables)


def import_onnxruntime() -> Any:
    """ONNX Runtime, if it was built with CUDA.

    Raises:
        BackendError: it is not installed or was not.
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
    if spec.dtype == "bfloat16":
        return BFLOAT16
    return stored_type(spec.dtype).type


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[-300:]  # what went wrong stands last, after signatures and places
