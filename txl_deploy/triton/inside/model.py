"""Triton's Python backend loads this file as `model.py`: it prepares the process and then opens the bundle's model.

The backend's process ignores PYTHONPATH, and imports NumPy after loading this module and before calling it. So this
module puts the packages beside itself first on the path as soon as it is loaded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = "TXL_DEPLOY_PACKAGES"
"""Environment variable that names a folder of further packages, such as `pip install --target` makes."""
OLDEST = (3, 10)
"""The oldest Python version that the runtime supports."""
ENGINES = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
"""Package that a backend needs in place of onnxruntime, by the backend's name."""


def find_packages(folder: Path, further: str | None) -> list[str]:
    """Return the folders to put first on Python's path: the folder `packages` beside this file, then the user's folder.

    Args:
        folder: this file's folder; if there is no `packages` in it, the result is empty.
        further: the user's folder; None if there is none.
    """
    own = folder / "packages"
    return [str(own), *([further] if further else [])] if own.is_dir() else []


sys.path[:0] = find_packages(Path(__file__).resolve().parent, os.environ.get(PACKAGES))


class TritonPythonModel:
    """The class that Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle beside this file.

        Args:
            args: the backend's description of the model, whose parameters say how the bundle is served.

        Raises:
            Exception: the server's own class of errors, with a line for its log: a package is missing, or the bundle
                cannot be loaded.
        """
        folder = Path(__file__).resolve().parent
        settings = json.loads(args["model_config"]).get("parameters", {})
        parameters = {name: value["string_value"] for name, value in settings.items()}
        problem = missing(parameters.get("backend", "cpu"))
        if problem:  # if NumPy is missing, the server's own class of errors cannot be imported
            raise RuntimeError(problem)
        server = importlib.import_module("triton_python_backend_utils")
        problem = misread(server)
        if problem:
            raise server.TritonModelException(problem)
        from txl_runtime.errors import TxlError

        inside = importlib.import_module(f"txl_deploy.triton.inside.{parameters['serves']}")
        try:
            self._model = inside.open_model(folder / "bundle", parameters, server)
        except TxlError as error:
            raise server.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer requests; return None if the answers are sent later, one by one."""
        answers: list[Any] | None = self._model.execute(requests)
        return answers

    def finalize(self) -> None:
        """End the requests that are still running."""
        self._model.close()


def missing(backend: str) -> str:
    """Return a line for the server's log that names the packages this process lacks; "" if it lacks none."""
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]} ({sys.prefix})"
    if sys.version_info < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"{python} runs this model, expected {oldest} or newer; use a server whose stub is of such a Python"
    needed = ("numpy", "msgspec", "safetensors", ENGINES.get(backend, "onnxruntime"))
    lacking = [name for name in needed if find_spec(name) is None]
    if not lacking:
        return ""
    return (
        f"{', '.join(lacking)} not found by {python}, expected {', '.join(needed)}; install them for this Python, or "
        f"into a folder with pip install --target, and start the server with {PACKAGES}=FOLDER"
    )


def misread(server: Any) -> str:
    """Return a line for the server's log if the server and NumPy misread each other's arrays; "" if they do not.

    A Python backend that was compiled for NumPy 1 reads and writes wrong values with NumPy 2, without an error. So this
    function converts an array to the server's form and back.
    """
    import numpy as np

    sent = np.arange(97, 102, dtype=np.int32)
    back = server.Tensor.from_dlpack("probe", server.Tensor("probe", sent).to_dlpack()).as_numpy()
    if np.array_equal(sent, back):
        return ""
    return (
        f"NumPy {np.__version__} and this server misread each other's arrays ({sent.tolist()} became "
        f"{np.ravel(back)[:5].tolist()}), expected a NumPy that the server's Python backend was made for; "
        "pip install 'numpy<2' for this model"
    )
