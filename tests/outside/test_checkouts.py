"""Files of other people's repositories, checked out in the folder OUTSIDE: `OUTSIDE=FOLDER make outside`.

Nothing of them is kept here. GTCRN (https://github.com/Xiaobin-Rong/gtcrn) and unitree_rl_gym
(https://github.com/unitreerobotics/unitree_rl_gym) are looked for under their own names.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import txl_export
import txl_runtime
from txl_export.describing import describe_checkpoint
from txl_runtime.selftest import relative_difference

FOLDER = Path(os.environ.get("OUTSIDE") or "outside")


def found(pattern: str) -> list[Path]:
    """Files of a checkout; the test is skipped where there is none."""
    files = sorted(FOLDER.glob(pattern))
    if not files:
        pytest.skip(f"OUTSIDE={FOLDER} has no {pattern}")
    return files


@pytest.mark.parametrize("name", ["gtcrn", "gtcrn_simple"])
def test_gtcrn_becomes_a_bundle_that_is_the_file_over_600_frames(name, tmp_path):
    (path,) = found(f"gtcrn/stream/onnx_models/{name}.onnx")
    manifest = txl_export.export(path, tmp_path / "b").manifest
    assert sorted(manifest.family["states"]) == ["conv_cache", "inter_cache", "tra_cache"]
    session, stream = onnxruntime.InferenceSession(path), txl_runtime.load(tmp_path / "b", "cpu").stream()
    held = {state.name: np.zeros(state.shape, np.float32) for state in manifest.states}
    draws = np.random.default_rng(0)
    for _ in range(600):
        frame = draws.normal(0, 0.3, (1, 257, 1, 2)).astype(np.float32)
        wanted, *after = session.run(["enh", *(f"{state}_out" for state in held)], {"mix": frame, **held})
        held = dict(zip(held, after, strict=True))
        np.testing.assert_allclose(stream.run({"mix": frame})["enh"], wanted, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("robot", ["g1", "h1", "h1_2"])
def test_a_walking_robots_policy_is_its_archive_over_a_thousand_steps(robot, tmp_path):
    (path,) = found(f"unitree_rl_gym/deploy/pre_train/{robot}/motion.pt")
    module = tmp_path / "policy.py"
    module.write_text(describe_checkpoint(path)["skeleton"])
    manifest = txl_export.export(f"{module}:build", tmp_path / "b", weights=path).manifest
    (seen,), (given,) = manifest.given, manifest.outputs
    archive, stream = torch.jit.load(path), txl_runtime.load(tmp_path / "b", "cpu").stream()
    draws, worst = np.random.default_rng(0), 0.0
    for _ in range(1000):
        x = draws.normal(size=(1, int(seen.shape[1]))).astype(np.float32)
        wanted = archive(torch.from_numpy(x)).detach().numpy()
        worst = max(worst, relative_difference(stream.run({seen.name: x})[given.name], wanted))
    assert worst <= 1e-5
