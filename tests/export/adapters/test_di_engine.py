"""The adapter of DI-engine, compared with the package's own memory: `TransformerMemoryWrapper`, reset by sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from own_loops import LIMIT, Stepped, apart, randomised
from support import package
from torch import nn
from txl_export.adapters.di_engine import build, step_spec
from txl_export.adapters.registry import adapt, load_adapted
from txl_runtime.errors import UsageError

GTRXL: dict[str, Any] = {"input_dim": 6, "head_dim": 4, "embedding_dim": 8, "layer_num": 2, "memory_len": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "residual sums": {"gru_gating": False, "activation": "GELU"},
    "no embedding": {"use_embedding_layer": False, "input_dim": 8, "gru_bias": 0.5},
    "one layer, three products, dropout": {"layer_num": 1, "mlp_num": 3, "head_num": 3, "dropout_ratio": 0.2},
    "no memory": {"memory_len": 0},
}
DQN: dict[str, Any] = {"obs_shape": 6, "action_shape": 3, "att_layer_num": 2, "hidden_size": 8, "memory_len": 5}
POLICIES: dict[str, dict[str, Any]] = {
    "dueling": {},
    "one head": {"dueling": False, "head_layer_num": 2, "gru_gating": False},
    "two branches": {"action_shape": [3, 4]},
    "images": {"obs_shape": [1, 44, 44], "encoder_hidden_size_list": [4, 4, 8]},
}
BATCH = 3


class Own:
    """The package's model under the wrapper that holds its memory between calls."""

    def __init__(self, module: Any) -> None:
        self._wrapper = package("ding.model.wrapper.model_wrappers").TransformerMemoryWrapper(module, BATCH)
        self._policy = hasattr(module, "core")

    def reset(self, rows: Any) -> None:
        self._wrapper.reset(data_id=rows)

    def run(self, inputs: Any) -> Any:
        with torch.no_grad():
            found = self._wrapper.forward(torch.from_numpy(inputs["obs"]))["logit"]
        if not self._policy:
            outputs = {"features": found}
        else:
            several = isinstance(found, list)
            outputs = {f"logit.{n}": one for n, one in enumerate(found)} if several else {"logit": found}
        memory = self._wrapper.memory.numpy().copy()
        after = {"memory": memory} if memory.shape[1] else {}
        return {name: tensor.numpy() for name, tensor in outputs.items()}, {}, after


def model(config: dict[str, Any]) -> Any:
    package("ding.torch_utils.network.gtrxl")
    torch.manual_seed(0)
    return randomised(build(config))


def drawn(module: Any, length: int) -> Any:
    _, _, *shape = step_spec(module).inputs[0].shape
    return lambda random: {"obs": random.standard_normal((length, BATCH, *shape), np.float32)}


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_the_packages_call_with_its_own_memory(options: dict[str, Any], length: int) -> None:
    module = model(GTRXL | options)
    assert apart(Stepped(step_spec(module), BATCH), Own(module), drawn(module, length), BATCH, 60) <= 1e-6


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_a_policy_of_the_package_is_carried_with_its_heads(options: dict[str, Any]) -> None:
    module = model(DQN | options)
    assert apart(Stepped(step_spec(module), BATCH), Own(module), drawn(module, 1), BATCH, 40) <= 1e-6


def test_the_policy_of_the_package_asks_with_a_window_of_observations_that_its_caller_keeps() -> None:
    """R2D2GTrXLPolicy gives the newest `seq_len` observations at each step, behind the written ones zeros."""
    seq_len, wrappers = 4, package("ding.model.wrapper.model_wrappers")
    module = model(DQN)
    own = wrappers.TransformerMemoryWrapper(wrappers.TransformerInputWrapper(module, seq_len), BATCH)
    stepped, random = Stepped(step_spec(module), BATCH), np.random.default_rng(0)
    window, written = np.zeros((seq_len, BATCH, 6), np.float32), np.zeros(BATCH, int)
    for step in range(40):
        rows = [] if step == 0 else [row for row in range(BATCH) if random.random() < 0.1]
        if rows:
            own.reset(data_id=rows)
            stepped.reset(rows)
            window[:, rows], written[rows] = 0, 0
        obs = random.standard_normal((BATCH, 6), np.float32)
        for row in range(BATCH):
            if written[row] == seq_len:
                window[:-1, row] = window[1:, row].copy()
            written[row] = min(written[row] + 1, seq_len)
            window[written[row] - 1, row] = obs[row]
        ours = stepped.run({"obs": window})["logit"][written - 1, range(BATCH)]
        with torch.no_grad():
            assert np.abs(ours - own.forward(torch.from_numpy(obs))["logit"].numpy()).max() <= 1e-6
        assert np.abs(stepped.state()["memory"] - own.memory.numpy()).max() <= 1e-6


def test_a_call_leaves_the_module_as_it_was() -> None:
    module = model(GTRXL)
    module.reset_memory(BATCH)
    held = module.memory, module.att_mask, dict(module.pos_embedding_dict)
    Stepped(step_spec(module), BATCH).run(drawn(module, 2)(np.random.default_rng(0)))
    assert (module.memory, module.att_mask, module.pos_embedding_dict) == held


def test_a_checkpoint_of_a_policy_is_loaded(tmp_path: Path) -> None:
    trained = model(DQN)
    torch.save({"model": trained.state_dict(), "optimizer": {"state": {}}}, tmp_path / "ckpt_best.pth.tar")
    loaded = load_adapted("di-engine", DQN, tmp_path / "ckpt_best.pth.tar").module
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in trained.state_dict().items())


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"this Linear has no memory.*expected ding's GTrXL or GTrXLDQN"):
        step_spec(nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "length"), [({"action_shape": [3, 4], "dropout": 0.1}, 3)])
def test_a_bundle_stays_with_the_package_over_200_segments_with_resets(
    options: dict[str, Any], length: int, tmp_path: Path
) -> None:
    module = model(DQN | options)
    spec, path = adapt("di-engine", module), tmp_path / "dqn.txl"
    txl_export.export(spec, path, batch_size=BATCH, segment_length=length, verify=False)
    stream = txl_runtime.load(path, "cpu").stream()
    assert apart(stream, Own(module), drawn(module, length), BATCH) <= LIMIT
