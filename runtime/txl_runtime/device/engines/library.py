"""Import of NVIDIA's inference libraries, TensorRT (10.x, 11.x) and TensorRT-RTX, and a journal of their messages.

`library_features` lists the features of each version; the library itself is never asked. Only this module, `running`
and `txl_engines.compiler` use the libraries' objects. These modules name variables after the class (`runtime`,
`engine`, `context`, …), so that a test can check every used member against the member lists of six versions.

Two habits of the libraries shape these modules: a failure is a return value, and a process has one logger, the first
that was passed.
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
from txl_runtime.bundle.engines.sidecar import FLAVOURS
from txl_runtime.device.engines.library_features import Compiled, LibraryFeatures, find_facts, how_to_install
from txl_runtime.errors import BackendError, TxlError, one_line

DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "FP8": "float8e4m3fn",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
"""The manifest's names of types by the libraries' names."""
ERROR = 1
"""TensorRT's severity of errors; 0, an internal error, is worse."""
LONGEST, MOST_ERRORS = 400, 20
"""Maximum number of characters of complaints in a message, and of errors that are kept."""


@dataclass
class Journal:
    """The messages of a library's logger that are used: errors, and the last list of layers.

    `errors` holds the latest errors since the last call of `forget`; each operation begins with that call.
    """

    errors: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_ERRORS))
    layers: str = ""

    def add(self, severity: int, text: str) -> None:
        """Add a message; severities are TensorRT's, 0 is the worst."""
        if severity <= ERROR:
            self.errors.append(text)
        elif "LayerType:" in text and "Name:" in text:
            self.layers = text

    def forget(self) -> None:
        """Drop the errors, because a new operation begins."""
        self.errors.clear()

    def complaints(self) -> str:
        """Return all errors as one line, "" for none; of a long line only the end, where the cause stands."""
        text = " ".join(self.errors)
        return " ".join(text.split())[-LONGEST:]


class Library:
    """An imported library of NVIDIA's, which `load_library` returns.

    Attributes:
        target, module, version: its target, Python module and version.
        facts: the features of this version.
        journal: messages of the library.
        logger: the library's logger, which writes to the journal.
    """

    def __init__(self, target: Compiled, module: Any) -> None:
        trt = module
        self.target, self.module, self.version = target, module, str(trt.__version__)
        self.facts: LibraryFeatures = find_facts(target, self.version)
        self.journal = Journal()
        self.logger = _logger(trt, self.journal)

    @property
    def title(self) -> str:
        """The module's name and version."""
        return f"{self.module.__name__} {self.version}"

    @contextmanager
    def speaking(self, what: str) -> Iterator[None]:
        """Return a context for calls of the library, in which any exception becomes a `BackendError` about `what`.

        Raises:
            BackendError: the library's bindings raised an exception that is no TxlError.
        """
        self.journal.forget()
        try:
            yield
        except TxlError:
            raise
        except Exception as error:
            text = " ".join(part for part in (one_line(error), self.journal.complaints()) if part)
            raise BackendError(
                f"{what}: {self.title} failed ({text}), expected it to work; see whether it fits this GPU's driver"
            ) from error

    def header_problems(self, runtime: Any, engine_bytes: Any) -> list[str] | None:
        """Return the reasons in an engine's header why it cannot run here, by the library's names.

        Returns:
            None if the engine may run or the library has no such check. [] if the library refuses without a reason, as
            it does without a usable CUDA driver.
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
        """Return the inputs and outputs of a loaded engine."""
        bindings: list[tuple[str, Binding]] = []
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            mode, dtype = engine.get_tensor_mode(name), engine.get_tensor_dtype(name)
            shape = tuple(int(size) for size in engine.get_tensor_shape(name))
            bindings.append((mode.name, Binding(str(name), DTYPES.get(dtype.name, dtype.name), shape)))
        inputs, outputs = ([binding for side, binding in bindings if side == wanted] for wanted in ("INPUT", "OUTPUT"))
        return inputs, outputs


def _logger(trt: Any, journal: Journal) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
        """A logger that passes every message to the journal. The library ignores exceptions that the logger raises."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            journal.add(int(severity), str(message))

    return Log()


@cache
def load_library(target: Compiled) -> Library:
    """Import the library behind a target, once per process.

    Raises:
        BackendError: the library is not installed, cannot be loaded, or is too old.
    """
    name = FLAVOURS[target]
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
