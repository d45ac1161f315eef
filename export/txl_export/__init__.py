"""txl_export: makes a verified bundle from a trained Transformer-XL, or from any step with state. Needs torch and onnx.

result = txl_export.export("model.pt", "model.txl", memory_length=640, same_length=True)
"""

from __future__ import annotations

import importlib
import typing

from txl_runtime.listener import Listener

from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_export.options import ExportOptions

if typing.TYPE_CHECKING:
    from txl_export.adapters.registry import adapt
    from txl_export.checkpoints.plain_weights import read_weights
    from txl_export.exporting import ExportResult, export
    from txl_export.families.own_module.resting import at_rest
    from txl_export.verifying import verify

__all__ = [
    "ExportOptions",
    "ExportResult",
    "InputSpec",
    "Listener",
    "OutputSpec",
    "StateSpec",
    "StepSpec",
    "adapt",
    "at_rest",
    "export",
    "read_weights",
    "verify",
]

_HOMES = {
    "ExportResult": "exporting",
    "export": "exporting",
    "verify": "verifying",
    "read_weights": "checkpoints.plain_weights",
    "adapt": "adapters.registry",
    "at_rest": "families.own_module.resting",
}
"""The module that defines each public name whose import needs torch."""


def __getattr__(name: str) -> object:
    """Import the module that defines `name` on first use, so that the command line reads the options without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'txl_export' has no attribute {name!r}")
    return getattr(importlib.import_module(f"txl_export.{_HOMES[name]}"), name)
