"""An engine against ONNX Runtime, layer by layer, by Polygraphy: it builds the graph with its layers' results marked.

The engine that is looked into is not quite the one that was built: a marked result has to be kept, so attention may be
fused in another way. A wrong kernel shows all the same.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import BackendError, one_line
from txl_runtime.ladder import BISECT

from txl_export.families.transformer_xl.points import mark, segment_of
from txl_export.parity.bisecting import Bisection, compare, first_feeds

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
        raise BackendError(
            f"{program.name}: Polygraphy with {module} failed: {one_line(error)}; see docs/engines.md"
        ) from None
    places = compare(*({point: side[name] for point, name in names.items()} for side in (ours, theirs)))
    return Bisection(f"{module}, {program.name}", "ONNX Runtime on the CPU", BISECT[bundle.manifest.precision], places)


def _run_both(
    bundle: Bundle, data: bytes, feeds: dict[str, NDArray[Any]], target: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every output of the marked graph, by ONNX Runtime and by the engine.

    The graph is read from a folder of its own, beside a link to the bundle's weights.
    """
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.backend.trt import CreateConfig, EngineFromNetwork, NetworkFromOnnxPath, TrtRunner

    with tempfile.TemporaryDirectory(prefix="txl-bisect-") as folder:
        path = Path(folder) / "marked.onnx"
        path.write_bytes(data)
        (Path(folder) / bundle.manifest.weights).symlink_to(bundle.file(bundle.manifest.weights).resolve())
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
