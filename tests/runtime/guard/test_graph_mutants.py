"""Mutants of real graphs: each is refused in one sentence, or loads; soon, and in little memory, whatever was changed.

TXL_MUTANTS says how many there are; 5,200 were tried, of graphs of both kinds.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import step_models
import txl_runtime
from support import FIXTURES
from txl_runtime.errors import TxlError

MUTANTS, CHILDREN = int(os.environ.get("TXL_MUTANTS", "300")), 3
SECONDS, BYTES = 5, 1_500_000_000
"""Of the processor for one load; of memory beyond what importing takes."""


def mutant(data: bytes, draw: random.Random) -> bytes:
    """A graph with bits or fields changed."""
    if draw.random() < 0.5:
        changed = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 4])):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed[: draw.choice([len(changed)] * 9 + [draw.randrange(len(changed))])])
    model = onnx.load_model_from_string(data)
    graph = model.graph
    step, constant = draw.choice(graph.node), draw.choice(graph.initializer)
    names = [name for node in graph.node for name in node.output] + [tensor.name for tensor in graph.initializer]
    change = draw.randrange(8)
    if change == 0 and constant.data_type == onnx.TensorProto.INT64 and constant.raw_data:
        numbers = np.frombuffer(constant.raw_data, np.int64).copy()
        numbers[draw.randrange(len(numbers))] = draw.choice([0, -1, 1, 2**31, -(10**9)])
        constant.raw_data = numbers.tobytes()
    elif change == 1 and constant.dims:
        constant.dims[draw.randrange(len(constant.dims))] = draw.choice([0, -1, 2**40])
    elif change == 2 and constant.external_data:
        draw.choice(constant.external_data).value = draw.choice(["-1", "99999999999", "/etc/passwd", "../x"])
    elif change == 3:
        step.op_type = draw.choice(
            ["Loop", "Tile", "Expand", "Range", "ConstantOfShape", draw.choice(graph.node).op_type]
        )
    elif change == 4 and step.attribute:
        draw.choice(step.attribute).i = draw.choice([0, -1, 2**62, -(2**62)])
    elif change == 5:
        del graph.node[draw.randrange(len(graph.node))]
    elif change == 6:
        step.output[0] = draw.choice(names)
    else:
        step.input[draw.randrange(len(step.input))] = draw.choice(names)
    return model.SerializeToString()


def try_mutants(count: int, seed: int) -> None:
    """Load mutants in this process, whose memory is bounded."""
    import resource

    draw, slowest, said = random.Random(seed), 0.0, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        bundles = [make().write(Path(folder) / name) for name, make in step_models.MODELS.items()]
        for name in ("kv", "adaptive", "hidden", "half"):
            bundles.append(Path(shutil.copytree(FIXTURES / "format1" / name, Path(folder) / name)))
        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, held + BYTES))
        for _ in range(count):
            bundle = draw.choice(bundles)
            whole = (bundle / "manifest.json").read_bytes()
            manifest = json.loads(whole)
            graph = bundle / draw.choice(sorted({entry["file"] for entry in manifest["programs"]}))
            data = graph.read_bytes()
            changed = mutant(data, draw)
            manifest["files"][graph.name] = {"size": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
            graph.write_bytes(changed)
            (bundle / "manifest.json").write_text(json.dumps(manifest))
            begun = time.process_time()  # of this process: other work on the machine does not count
            try:
                txl_runtime.load(bundle, backend="cpu", threads=1)
            except TxlError as error:
                said.append(str(error))
            slowest = max(slowest, time.process_time() - begun)
            graph.write_bytes(data)
            (bundle / "manifest.json").write_bytes(whole)
    assert slowest < SECONDS
    assert not [text for text in said if "alloc" in text]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is told by Linux alone")
def test_mutants_are_refused_or_load():
    tests = Path(__file__).parents[2]
    for seed in range(CHILDREN):
        code = f"from test_graph_mutants import try_mutants; try_mutants({MUTANTS // CHILDREN}, {seed})"
        paths = [str(Path(__file__).parent), str(tests), *sys.path]
        child = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=60 + MUTANTS,
            check=False,
        )
        assert child.returncode == 0, child.stderr[-2000:]
