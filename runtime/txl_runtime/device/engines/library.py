"""One of NVIDIA's two inference libraries, imported: TensorRT (10.x, 11.x) or TensorRT-RTX.

What a version has is read from `library_features`, never asked of the library. Only this module, `running` and
`txl_engines.compiler` touch the libraries' objects. They hold them under one name per class (`runtime`, `engine`,
`context`, …), which a test uses to check every member that is named there against the member lists of six versions.

Two habits of the libraries shape these modules: a failure is a return value, and a process has one logger, the first
that it was given.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from txl_runtime.bundle.bindings import Binding
from txl_runtime.device.engines.library_features import MODULES, Compiled, LibraryFeatures, find_facts, how_to_install
from txl_runtime.errors import BackendError, TxlError, one_line

DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
"""The libraries' names of types, and the manifest's."""
ERROR = 1
LONGEST, MOST_ERRORS = 400, 20


@dataclass
class Journal:
    """What a library said through its logger, as far as it is used: errors, and the last list of layers it printed.

    Of errors these are the last ones since `forget`: each operation begins with it.
    """

    errors: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_ERRORS))
    layers: str = ""

    def add(self, severity: int, text: str) -> None:
        """Take one message; severities count as TensorRT's do, 0 is the worst."""
        if severity <= ERROR:
            self.errors.append(text)
        elif "LayerType:" in text and "Name:" in text:
            self.layers = text

    def forget(self) -> None:
        """What follows is about something else."""
        self.errors.clear()

    def complaints(self) -> str:
        """All errors in one line; of a long one its end, where the cause stands. Empty when there was none."""
        said = " ".join(self.errors)
        return " ".join(said.split())[-LONGEST:]


class Library:
    """A library that has been imported. Use `load_library`.

    Attributes:
        journal, logger: what the library has said so far, and the logger that it says it to.
    """

    def __init__(self, target: Compiled, module: Any) -> None:
        trt = module
        self.target, self.module, self.version = target, module, str(trt.__version__)
        self.facts: LibraryFeatures = find_facts(target, self.version)
        self.journal = Journal()
        self.logger = _logger(trt, self.journal)

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.module.__name__} {self.version}"

    @contextmanager
    def speaking(self, what: str) -> Iterator[None]:
        """Calls of the library: what its bindings raise is a `BackendError` about `what`.

        Raises:
            BackendError: they raised something that is no error of ours.
        """
        self.journal.forget()
        try:
            yield
        except TxlError:
            raise
        except Exception as error:
            said = " ".join(part for part in (one_line(error), self.journal.complaints()) if part)
            raise BackendError(
                f"{what}: {self.title} failed ({said}), expected it to work; see whether it fits this GPU's driver"
            ) from error

    def header_problems(self, runtime: Any, engine_bytes: Any) -> list[str] | None:
        """Why an engine's header says that the engine cannot run here, by the library's own names.

        Returns:
            None where the header says nothing against it, or where the library has no such check. An empty list where
            the library says no without a reason, as it does without a usable CUDA driver.
        """
        trt = self.module
        if not self.facts.portable:
            return None
        header = bytes(memoryview(engine_bytes)[: runtime.engine_header_size])
        validity, bits = runtime.get_engine_validity(header)
        if validity != trt.EngineValidity.INVALID:
            return None
        reasons = trt.EngineInvalidityDiagnostics.__members__
        return [name for name, value in reasons.items() if int(bits) & int(value)]

    def bindings(self, engine: Any) -> tuple[list[Binding], list[Binding]]:
        """The inputs and outputs of a loaded engine."""
        found: list[tuple[str, Binding]] = []
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            mode, dtype = engine.get_tensor_mode(name), engine.get_tensor_dtype(name)
            shape = tuple(int(size) for size in engine.get_tensor_shape(name))
            found.append((mode.name, Binding(str(name), DTYPES.get(dtype.name, dtype.name), shape)))
        inputs, outputs = ([binding for side, binding in found if side == wanted] for wanted in ("INPUT", "OUTPUT"))
        return inputs, outputs


def _logger(trt: Any, journal: Journal) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
        """Passes every message on. The library swallows what is raised here."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            journal.add(int(severity), str(message))

    return Log()


@cache
def load_library(target: Compiled) -> Library:
    """Import the library behind a target, once per process.

    Raises:
        BackendError: it is not installed, cannot be loaded, or is too old.
    """
    name = MODULES[target]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and missing.name.partition(".")[0] != name:
            raise BackendError(f"{name} needs {missing.name}, not installed here; install {name} again") from None
        raise BackendError(
            f"{name} is not installed, expected it for --target {target}; {how_to_install(target)}"
        ) from None
    except (ImportError, OSError) as reason:
        raise BackendError(
            f"{name} cannot be loaded: {reason}; expected its native libraries; install it again"
        ) from None
    return Library(target, module)
