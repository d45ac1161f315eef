"""txl_export: from a trained Transformer-XL to a verified bundle. Needs torch and onnx.

result = txl_export.export("model.pt", "model.txl", memory_length=640, same_length=True)
"""

from __future__ import annotations

from txl_runtime.listener import Listener

from txl_export.exporting import ExportResult, export
from txl_export.verifying import verify

__all__ = ["ExportResult", "Listener", "export", "verify"]
