"""txl_runtime: run a model with state as a stream, from a bundle, without PyTorch.

    model = txl_runtime.load("model.txl")
    stream = model.stream()
    logprobs = stream.feed(tokens)              # int [b, T] -> float32 [b, T, V], memory carried along
    for token in stream.generate(prompt, 100):  # int32 [b]
        ...
    outputs = stream.run({"obs": obs})          # any model: arrays by name, one segment

The package imports only numpy, msgspec, safetensors and the chosen engine.
"""

from __future__ import annotations

import logging
import os

from txl_runtime.errors import BackendError, BundleError, CheckError, CheckpointError, TxlError, UsageError
from txl_runtime.model import Model, load
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.streaming.stream import Stream

__all__ = [
    "BackendError",
    "BundleError",
    "CheckError",
    "CheckpointError",
    "Model",
    "Stream",
    "StreamState",
    "TxlError",
    "UsageError",
    "load",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())  # no messages, unless the application configures logging
# Newer builds of ONNX Runtime report every opened model to Microsoft, and keep a database of the reports in the home
# folder. ONNX Runtime reads this variable once, when it is imported. To allow the reports, set it to 0 before importing
# this package.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
