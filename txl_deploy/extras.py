"""Which optional parts are installed."""

from __future__ import annotations

from importlib.util import find_spec

from txl_runtime.errors import BackendError

__all__ = ["require_export"]


def require_export(verb: str) -> None:
    """Refuse a verb that needs PyTorch where it is not installed.

    Raises:
        BackendError: torch, onnx or onnxscript is missing.
    """
    missing = [name for name in ("torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise BackendError(f"{verb} needs {', '.join(missing)}, not installed here; pip install 'txl-deploy[export]'")
