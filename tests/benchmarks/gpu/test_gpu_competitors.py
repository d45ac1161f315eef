"""PyTorch in the GPU check: it computes the bundle's function, and draws as the bundle does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import gpu_worker
import msgspec
import numpy as np
import pytest
import torch
from frozen import frozen
from gpu_competitors import DTYPES, EAGER, MODES, RELEASED, TorchOnGpu, compare
from stand_ins.compiler import Compiler
from txl_runtime import load
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import CheckError

pytestmark = pytest.mark.device

quiet = pytest.mark.filterwarnings("ignore")  # the compiler's own deprecations
B, PATH = 3, frozen("ring")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    found = Compiler()
    monkeypatch.setattr(torch, "compile", found.compile)
    yield found
    torch._dynamo.reset()


def ids(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 41, (B, 5), np.int32)


@quiet
@pytest.mark.parametrize("form", [EAGER, RELEASED, "torch-compiled"])
def test_they_compute_what_the_bundle_does(compiler: Compiler, form: str) -> None:
    model, competitor = load(PATH, backend="cpu"), TorchOnGpu(open_bundle(PATH), form, "cpu")
    stream, tokens = model.stream(), ids(0)
    competitor.fill(tokens)
    for _ in range(-(-model.memory_length // 4)):
        stream.step(tokens[:, :4])
    for seed in range(6):
        tokens = ids(seed)
        np.testing.assert_allclose(competitor.logprobs(tokens[:, :1]), stream.step(tokens[:, :1]), rtol=0, atol=1e-4)
        np.testing.assert_allclose(competitor.score(tokens), stream.score(tokens), rtol=0, atol=1e-4)
    assert compiler.modes == (["reduce-overhead"] * 2 if form in MODES else [])
    assert [graph.moving for graph in compiler.graphs] == [0] * len(compiler.modes), "ids have a place of their own"


@quiet
@pytest.mark.parametrize("form", [EAGER, "torch-compiled"])
def test_draws_have_the_shares_of_the_most_likely_ids(compiler: Compiler, form: str) -> None:
    competitor = TorchOnGpu(open_bundle(PATH), form, "cpu", temperature=0.5, top_k=3)
    competitor.fill(ids(0))
    torch.manual_seed(0)
    given, after = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).log_softmax(-1).repeat(4000, 1), competitor.parts
    after.log_probabilities = lambda hidden: given  # type: ignore[method-assign]
    drawn = competitor.draw(ids(0)[:, :1])
    expected = np.exp([4.0, 2.0, 0.0]) / np.exp([4.0, 2.0, 0.0]).sum()
    assert drawn.dtype == np.int32
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4000, [*expected, 0], atol=0.02)
    assert len(compiler.graphs) == (form in MODES), "drawn within the graph"


def test_another_function_is_not_timed() -> None:
    bundle = open_bundle(PATH)
    right, wrong = TorchOnGpu(bundle, EAGER, "cpu"), TorchOnGpu(bundle, EAGER, "cpu")
    assert compare(right, TorchOnGpu(bundle, RELEASED, "cpu"), ids(0))["max_abs"] < 1e-4
    wrong.parts.state["layers.00.attention.output.weight"] *= 1.5
    with pytest.raises(CheckError, match=r"^torch: differs from the released layout by max_abs .* at most 0.001"):
        compare(wrong, TorchOnGpu(bundle, RELEASED, "cpu"), ids(0))


def test_they_compute_in_the_bundle_s_precision() -> None:
    assert set(DTYPES) == set(gpu_worker.IN_PYTORCH)
    bundle = open_bundle(PATH)
    lower = SimpleNamespace(manifest=msgspec.structs.replace(bundle.manifest, precision="bf16"), file=bundle.file)
    half = TorchOnGpu(lower, EAGER, "cpu")  # type: ignore[arg-type]
    assert {tensor.dtype for tensor in half.parts.state.values()} == {torch.bfloat16}
    assert 0 < compare(half, TorchOnGpu(bundle, RELEASED, "cpu"), ids(0))["kl"] < 1e-2
