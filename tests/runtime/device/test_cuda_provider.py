"""ONNX Runtime's real CUDA provider on the graphs of a build, without a GPU: what runs where, what is copied."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import CUDA
from txl_engines.bundles import build_bundle
from txl_runtime.device.onnxruntime_cuda import pip_folders

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "tests" / "stand_ins" / "cuda_libraries.c"
LINKED = ("libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13", "libcuda.so.1")
RULES = ("ring", "rolled")
KERNELS = {"fp32": 58, "fp16": 65, "bf16": 65}
"""The most that a program of two layers launches beside its products of matrices, of which it has `PRODUCTS`."""
PRODUCTS = 15
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for CUDA's libraries, in a folder of their own, as pip lays them out; libcuda stands beside."""
    if not (CUDA / "onnxruntime").is_dir():
        pytest.skip("onnxruntime-gpu is not here: `make cuda` on Linux, x86-64, Python 3.11 or newer")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("libraries") / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    compiled = folder / "all.o"
    options = ["-c", "-fPIC", "-O1", "-w", "-fno-builtin", f"-I{CUDA / 'nvidia' / 'cu13' / 'include'}"]
    subprocess.run([compiler, *options, str(SOURCE), "-o", str(compiled)], check=True)
    for name in LINKED:
        subprocess.run(
            [compiler, "-shared", str(compiled), f"-Wl,-soname,{name}", "-o", str(folder / name)], check=True
        )
    shutil.move(folder / LINKED[-1], folder.parents[2] / LINKED[-1])
    return folder


def run(libraries: Path, places: list[Path], asked: list[str]) -> subprocess.CompletedProcess[str]:
    """The provider's process; `places` follow where ONNX Runtime is and the tests are."""
    found = os.pathsep.join(map(str, [CUDA, ROOT / "tests", *places]))
    command = [sys.executable, "-m", "stand_ins.cuda_provider", str(libraries.parents[2] / LINKED[-1])]
    return subprocess.run(
        [*command, str(libraries / LINKED[0]), *asked],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": found},
    )


@pytest.fixture(scope="module")
def bundles(make_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles with graphs of both rules, by their precision."""
    made = {}
    for precision in KERNELS:
        options: dict[str, Any] = {} if precision == "fp32" else {"precision": precision}
        made[precision] = tmp_path_factory.mktemp(precision) / "a.txl"
        shutil.copytree(make_bundle(verify=False, **options), made[precision])
        for rule in RULES:
            build_bundle(made[precision], "cuda", update=rule)
    return made


def test_everything_runs_on_the_device_and_a_run_neither_waits_nor_moves_anything_to_it_or_from_it(libraries, bundles):
    asked = {f"{path}:{rule}": (name, rule) for name, path in bundles.items() for rule in RULES}
    done = run(libraries, [libraries.parents[2]], list(asked))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    programs = 0
    for where, (precision, rule) in asked.items():
        for name, seen in found[where].items():
            said = f"{precision} {name}: {seen}"
            assert seen["nodes"] == [], said
            unread = rule == "ring" and not name.startswith("last")
            assert seen["off"] == ({"valid": "Cpu"} if unread else {}), said
            assert moved(seen["bound"]) == ({"cudaMemcpyAsync DtoH": 1} if unread else {}), said
            for calls in (seen["first"], seen["again"]):
                assert not moved(calls), said
                assert not [call for call in calls if re.search("Synchronize|Malloc|HostAlloc|Free", call)], said
                products = sum(count for call, count in calls.items() if re.match("cublas.*(Gemm|gemm|Matmul)", call))
                assert products == PRODUCTS, said
                assert calls["__cudaLaunchKernel"] <= KERNELS[precision], said
                assert rule == "rolled" or calls["cudaMemcpyAsync DtoD bytes"] < seen["memory"], f"copied: {said}"
            programs += 1
    assert programs == 24


def moved(calls: dict[str, int]) -> dict[str, int]:
    """Copies that are not within the device."""
    return {call: n for call, n in calls.items() if re.match(r"cudaMemcpy(?!Async DtoD)", call) and "bytes" not in call}


def test_libraries_that_are_nowhere_are_named_with_where_they_were_looked_for(libraries, bundles, tmp_path):
    if pip_folders():
        pytest.skip("CUDA's libraries are here")
    (tmp_path / "nvidia" / "cublas" / "lib").mkdir(parents=True)
    done = run(libraries, [tmp_path], [f"{bundles['fp32']}:ring"])
    said = done.stderr.strip().splitlines()[-1]
    assert re.search(r"BackendError: ONNX Runtime could not start CUDAExecutionProvider", said), done.stderr
    assert re.search(rf"Failed to load libcublasLt\.so\.13: .* and in: .*{tmp_path}/nvidia/cublas/lib", said), said
