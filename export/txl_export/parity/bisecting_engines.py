"""An engine against ONNX Runtime, layer by layer, by Polygraphy: it builds the graph with its layers' results marked.

Marked results are kept, so the engine that is looked into is not quite the one that was built: attention may fuse in
another way. What a wrong kernel does shows all the same.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import BackendError
from txl_runtime.ladder import BISECT

from txl_export.parity.bisecting import Bisection, Place, first_feeds, mark, segment_of

__all__ = ["bisect_engine", "compare"]

RTX = "POLYGRAPHY_USE_TENSORRT_RTX"


def bisect_engine(bundle: Bundle, target: str) -> Bisection:
    """Build, run both on the same segment, and compare.

    Raises:
        BackendError: Polygraphy or the library is not installed, or it cannot build or run.
    """
    module = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}[target]
    for name, extra in (("polygraphy", "debug"), (module, target)):
        if find_spec(name) is None:
            raise BackendError(f"{name} is not installed, verify --bisect needs it; pip install 'txl-deploy[{extra}]'")
    if target == "rtx":
        os.environ[RTX] = "1"  # read when it is imported
    program = segment_of(bundle)
    data, names = mark(bundle, program)
    draws = np.random.default_rng(0)
    shape = program.inputs[0].fixed
    tokens = draws.integers(0, bundle.manifest.config.vocab_size, shape).astype(np.int32)
    feeds = {**first_feeds(bundle, program), "tokens": tokens}
    try:
        theirs, ours = _run_both(bundle, data, feeds, target)
    except Exception as error:  # Polygraphy raises its own kind, TensorRT none
        said = " ".join(str(error).split())[-300:]
        raise BackendError(f"{program.name}: Polygraphy with {module} failed: {said}; see docs/engines.md") from None
    limit = BISECT[bundle.manifest.precision]
    return Bisection(f"{module}, {program.name}", "ONNX Runtime on the CPU", limit, compare(names, ours, theirs))


def compare(names: dict[str, str], ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Place, ...]:
    """Every point, first layer first."""
    places = []
    for place, name in names.items():
        found, expected = (np.asarray(side[name], np.float64) for side in (ours, theirs))
        scale = max(1.0, float(np.abs(expected).max()))
        difference = float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max()) / scale
        places.append(Place(place, difference, scale))
    return tuple(places)


def _run_both(
    bundle: Bundle, data: bytes, feeds: dict[str, NDArray[Any]], target: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ONNX Runtime and the engine make of it. The file lies in the bundle while it is read, beside its weights."""
    import tempfile
    from pathlib import Path

    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.backend.trt import CreateConfig, EngineFromNetwork, NetworkFromOnnxPath, TrtRunner

    with tempfile.TemporaryDirectory(prefix="txl-bisect-") as folder:
        path = Path(folder) / "marked.onnx"
        path.write_bytes(data)
        for name in {bundle.manifest.weights}:
            (Path(folder) / name).symlink_to(bundle.file(name).resolve())
        network = NetworkFromOnnxPath(str(path), strongly_typed=True)
        config: Any = CreateConfig(tf32=False)
        if target == "rtx":
            from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

            config = CreateConfigRTX()
        results = []
        session = SessionFromOnnx(str(path), providers=["CPUExecutionProvider"])
        for runner in (OnnxrtRunner(session), TrtRunner(EngineFromNetwork(network, config))):
            with runner:
                outputs = runner.infer(feed_dict=feeds)
                results.append({name: np.array(array) for name, array in outputs.items()})
    return results[0], results[1]
