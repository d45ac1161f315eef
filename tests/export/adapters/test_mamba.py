"""The adapter of mambapy, compared with the package's own `step` and with its `forward` over whole sequences."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from own_loops import LIMIT, randomised
from support import package
from txl_export.adapters import mamba
from txl_export.adapters.registry import adapt, load_adapted
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states
from txl_runtime.errors import UsageError

BASE: dict[str, Any] = {"d_model": 12, "n_layers": 2, "d_state": 4, "expand_factor": 2, "d_conv": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "as the oracle has it": {"vocab_size": 24},
    "norms inside": {"vocab_size": 24, "inner_layernorms": True, "bias": True, "dt_rank": 3, "dt_init": "constant"},
    "short window, scanned one by one": {"vocab_size": 24, "d_conv": 2, "conv_bias": False, "pscan": False},
    "padded vocabulary, muP": {"vocab_size": 21, "pad_vocab_size_multiple": 8, "mup": True, "mup_base_width": 4},
    "features": {"expand_factor": 3, "n_layers": 3, "inner_layernorms": True, "bias": True},
}


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package's `LM`, whose file asks for Mamba-2's kernels, and these for CUDA; Mamba itself does not."""
    package("mambapy.mamba")
    kernels = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    vars(kernels).update(mamba_chunk_scan_combined=None, mamba_split_conv1d_scan_combined=None)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    yield package("mambapy.lm").LM
    for name in ("mambapy.lm", "mambapy.mamba2"):
        sys.modules.pop(name, None)


def packages_own(config: dict[str, Any], lm: Any) -> Any:
    """The package's own module with weights that make everything matter."""
    own, given = package("mambapy.mamba"), dict(config)
    ends = {name: given.pop(name) for name in ("vocab_size", "pad_vocab_size_multiple") if name in given}
    core = own.MambaConfig(**given)
    return randomised(lm(core, **ends) if ends else own.Mamba(core))


class Own:
    """Every sequence streamed by the package alone, by its own `step` and in its own caches."""

    def __init__(self, module: Any, batch_size: int) -> None:
        self.module, self.config = module, module.config
        self.held: list[Any] = [None] * batch_size
        self.reset(range(batch_size))

    def reset(self, rows: Any) -> None:
        for row in rows:
            window = torch.zeros(1, self.config.d_inner, self.config.d_conv - 1)
            self.held[row] = [(None, window) for _ in range(self.config.n_layers)]

    def __call__(self, given: Any, rows: Any) -> Any:
        found = []
        for row in rows:
            with torch.no_grad():
                output, self.held[row] = self.module.step(given[row : row + 1], self.held[row])
            found.append(output)
        return torch.cat(found)

    def state(self, name: str, row: int) -> Any:
        _, layer, part = name.split(".")
        return self.held[row][int(layer)][part == "conv"][0]


def inputs_of(spec: Any, batch_size: int, random: np.random.Generator) -> dict[str, torch.Tensor]:
    (entry,) = spec.inputs
    if entry.tokens:
        return {entry.name: torch.from_numpy(random.integers(0, entry.tokens, batch_size))}
    return {entry.name: torch.from_numpy(random.standard_normal((batch_size, entry.shape[1])).astype(np.float32))}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_are_the_package_s_forward_over_the_whole_sequence(options: dict[str, Any], lm: Any) -> None:
    module = packages_own(BASE | options, lm)
    spec, random = adapt("mamba", module), np.random.default_rng(0)
    step, states, given, found = Eager(spec), dict(fresh_states(spec, 2)), [], []
    for _ in range(9):
        inputs = inputs_of(spec, 2, random)
        outputs, after = step(inputs, states)
        states = dict(after)
        given.append(*inputs.values())
        found.append(*outputs.values())
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(found, 1), module(torch.stack(given, 1)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_built_from_a_config_computes_what_the_package_s_module_does(options: dict[str, Any], lm: Any) -> None:
    own = packages_own(BASE | options, lm)
    spec, random = load_adapted("mamba", BASE | options, own.state_dict()), np.random.default_rng(1)
    theirs = adapt("mamba", own)
    assert (spec.inputs, spec.states, spec.outputs) == (theirs.inputs, theirs.states, theirs.outputs)
    states = fresh_states(spec, 2)
    for _ in range(3):
        inputs = inputs_of(spec, 2, random)
        (outputs, after), (wanted, beyond) = Eager(spec)(inputs, states), Eager(theirs)(inputs, states)
        assert all(torch.equal(outputs[name], wanted[name]) for name in outputs)
        assert all(torch.equal(after[name], beyond[name]) for name in after)
        states = dict(after)


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Linear(3, 3),
        SimpleNamespace(jamba=SimpleNamespace(layers=[SimpleNamespace(mamba=0)])),
        SimpleNamespace(layers=[SimpleNamespace(mixer=SimpleNamespace(A_log=0, dt_bias=0))]),
        SimpleNamespace(layers=[SimpleNamespace(mixer=SimpleNamespace(A_log=0, A_log_b=0, ssm_step=0))]),
    ],
)
def test_what_is_no_mamba_is_refused(module: Any) -> None:
    with pytest.raises(
        UsageError, match=r"not made of layers with mixer\.ssm_step and A_log alone, expected mambapy\.lm\.LM"
    ):
        adapt("mamba", module)


def test_a_window_of_one_is_refused_because_the_package_s_step_reads_the_token_before() -> None:
    module = mamba.build(BASE | {"d_conv": 1}) if package("mambapy.mamba") else None
    with torch.no_grad():
        x, cache = torch.randn(1, 3, 12), [(None, torch.zeros(1, 24, 0))] * 2
        steps = [module.step(x[:, t], cache)[0] for t in range(3)]
        whole = module(x)
    torch.testing.assert_close(steps[0], whole[:, 0])
    assert not torch.allclose(steps[2], whole[:, 2])
    with pytest.raises(UsageError, match="d_conv is 1, expected at least 2"):
        adapt("mamba", module)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded vocabulary, muP", "features"])
def test_two_hundred_tokens_with_resets_of_single_sequences(name: str, lm: Any, tmp_path: Path) -> None:
    module, random = packages_own(BASE | OPTIONS[name], lm), np.random.default_rng(6)
    spec = adapt("mamba", module)
    txl_export.export(spec, tmp_path / "bundle.txl", batch_size=3, verify=False)
    stream, own, resets = txl_runtime.load(tmp_path / "bundle.txl", "cpu").stream(), Own(module, 3), 0
    for number in range(200):
        if begun := [row for row in range(3) if random.random() < 0.05]:
            resets += len(begun)
            stream.reset(begun)
            own.reset(begun)
        runs = np.flatnonzero(random.random(3) < 0.8) if number else np.arange(3)
        inputs = inputs_of(spec, 3, random)
        (found,) = stream.run(
            {key: value.numpy() for key, value in inputs.items()}, np.isin(np.arange(3), runs) * 1
        ).values()
        if len(runs):
            expected = own(*inputs.values(), runs)
            expected = (expected if name == "features" else expected.log_softmax(-1)).numpy()
            np.testing.assert_allclose(found[runs], expected, atol=LIMIT * max(1, abs(expected).max()))
        for state, values in stream.state().items():
            for row in runs:
                np.testing.assert_allclose(values[row], own.state(state, row).numpy(), atol=LIMIT, rtol=LIMIT)
    assert resets > 20
