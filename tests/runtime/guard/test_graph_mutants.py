"""Mutants of real graphs: each is refused in one sentence, or loads; soon, and in little memory, whatever was changed.

TXL_MUTANTS says how many there are; 5,200 were tried, of graphs of both kinds.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import step_models
import txl_runtime
from frozen import frozen
from graph_mutants import mutant
from resealing import copied
from txl_runtime.errors import TxlError

MUTANTS, CHILDREN = int(os.environ.get("TXL_MUTANTS", "300")), 3
SECONDS, BYTES = 5, 1_500_000_000
"""Of the processor for one load; of memory beyond what importing takes."""


def try_mutants(count: int, seed: int) -> None:
    """Load mutants in this process, whose memory is bounded."""
    import resource

    draw, slowest, said = random.Random(seed), 0.0, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        bundles = [make().write(Path(folder) / name) for name, make in step_models.MODELS.items()]
        for name in ("ring", "clusters", "hidden", "half"):
            bundles.append(copied(frozen(name), Path(folder) / name))
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
