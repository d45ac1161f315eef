"""txl_export: from a trained Transformer-XL to a verified bundle. Needs torch and onnx.

result = txl_export.export("model.pt", "model.txl", memory_length=640, same_length=True)
"""

from __future__ import annotations

import importlib
import typing

from txl_runtime.listener import Listener

from txl_export.options import ExportOptions

if typing.TYPE_CHECKING:
    from txl_export.exporting import ExportResult, export
    from txl_export.verifying import verify

__all__ = ["ExportOptions", "ExportResult", "Listener", "export", "verify"]


def __getattr__(name: str) -> object:
    """Import what needs torch when it is asked for: the command line reads the options where torch is missing."""
    if name not in __all__:
        raise AttributeError(f"module 'txl_export' has no attribute {name!r}")
    module = "txl_export.verifying" if name == "verify" else "txl_export.exporting"
    return getattr(importlib.import_module(module), name)
