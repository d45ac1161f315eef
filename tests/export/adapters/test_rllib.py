"""The adapter of RLlib, compared with the package's model under its own sampler, `AgentCollector`, one per sequence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from own_loops import LIMIT, Stepped, apart, randomised
from support import package
from torch import nn
from txl_export.adapters.registry import adapt, load_adapted
from txl_export.adapters.rllib import build, split, step_spec
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.plan import make_plan
from txl_runtime.errors import CheckpointError, UsageError
from txl_runtime.listener import Silent

NET: dict[str, Any] = {
    "observation": 7,
    "num_outputs": 3,
    "attention_dim": 8,
    "num_heads": 2,
    "head_dim": 4,
    "memory_inference": 5,
    "memory_training": 5,
    "position_wise_mlp_dim": 6,
}
WRAPPED: dict[str, Any] = {
    "observation": 7,
    "num_outputs": 3,
    "use_attention": True,
    "fcnet_hiddens": [8],
    "attention_dim": 8,
    "attention_head_dim": 4,
    "attention_memory_inference": 5,
    "attention_position_wise_mlp_dim": 6,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": NET,
    "three units": NET | {"num_transformer_units": 3, "init_gru_gate_bias": 0.5},
    "other memory in training": NET | {"memory_inference": 3, "memory_training": 9, "max_seq_len": 4},
    "no heads": NET | {"num_outputs": None},
    "use_attention": WRAPPED | {"attention_num_transformer_units": 2, "attention_num_heads": 2},
    "use_attention over images": WRAPPED | {"observation": [42, 42, 1], "conv_filters": [[4, 8, 4], [8, 11, 1]]},
}
BATCH = 3


class Own:
    """The package's model, one sequence at a time, given what its sampler gives it."""

    def __init__(self, module: Any) -> None:
        self._module, self._core = module, getattr(module, "gtrxl", module)
        self._collectors: list[Any] = [None] * BATCH
        self._rows: list[Any] = [None] * BATCH

    def reset(self, rows: Any) -> None:
        for row in rows:
            self._collectors[row] = None

    def run(self, inputs: Any) -> Any:
        found, states = [], []
        for row in range(BATCH):
            outputs, held = self._one(row, inputs["obs"][row, 0])
            found.append(outputs)
            states.append(held)
        units = range(self._core.num_transformer_units)
        outputs = {name: np.stack([one[name] for one in found])[:, None] for name in found[0]}
        return outputs, {f"units.{unit:02d}.memory": np.stack([one[unit] for one in states]) for unit in units}, {}

    def _one(self, row: int, obs: Any) -> Any:
        units = range(self._core.num_transformer_units)
        collector = self._collectors[row]
        if collector is None:
            collector = self._collectors[row] = package(
                "ray.rllib.evaluation.collectors.agent_collector"
            ).AgentCollector(
                self._core.view_requirements,
                intial_states=[np.zeros(self._core.attention_dim, np.float32) for _ in units],
                is_policy_recurrent=True,
                is_training=False,
            )
            collector.add_init_obs(episode_id=row, agent_index=0, env_id=0, init_obs=obs)
        else:
            told = {"actions": 0, "rewards": 0.0, "terminateds": False, "truncateds": False, "infos": {}}
            rows = {f"state_out_{unit}": self._rows[row][unit][0].numpy() for unit in units}
            collector.add_action_reward_next_obs({"new_obs": obs, **told, **rows})
        batch = collector.build_for_inference()
        held = [batch[f"state_in_{unit}"] for unit in units]
        with torch.no_grad():
            given = [torch.from_numpy(array) for array in held]
            out, self._rows[row] = self._module({"obs": torch.from_numpy(batch["obs"])}, given, torch.ones(1))
            if self._core is self._module and self._module.logits is None:
                return {"features": out[0].numpy()}, [array[0] for array in held]
            value = self._module.value_function()
        return {"logits": out[0].numpy(), "value": value[0].numpy()}, [array[0] for array in held]


def model(config: dict[str, Any]) -> Any:
    package("ray.rllib.models.torch.attention_net")
    torch.manual_seed(0)
    return randomised(build(config))


def drawn(module: Any) -> Any:
    return lambda random: {"obs": random.standard_normal((BATCH, 1, *module.obs_space.shape), np.float32)}


@pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_the_packages_call_under_its_own_sampler(config: dict[str, Any]) -> None:
    module = model(config)
    assert apart(Stepped(step_spec(module), BATCH), Own(module), drawn(module), BATCH, 25) <= 1e-6


def test_a_segment_is_the_packages_call_on_a_training_sequence() -> None:
    module = model(NET | {"num_transformer_units": 2})
    stepped, random = Stepped(step_spec(module), BATCH), np.random.default_rng(0)
    for _ in range(4):
        obs = random.standard_normal((BATCH, 3, 7), np.float32)
        held = [torch.from_numpy(array) for array in stepped.state().values()]
        with torch.no_grad():
            out, rows = module({"obs": torch.from_numpy(obs).flatten(0, 1)}, held, torch.full((BATCH,), 3))
        ours = stepped.run({"obs": obs})
        assert np.abs(ours["logits"].reshape(out.shape) - out.numpy()).max() <= 1e-6
        for row, (before, after) in zip(rows, zip(held, stepped.state().values(), strict=True), strict=True):
            assert np.abs(after - torch.cat((before, row.unflatten(0, (BATCH, 3))), 1)[:, -5:].numpy()).max() <= 1e-6


def test_a_call_leaves_the_module_as_it_was() -> None:
    module = model(WRAPPED)
    before = dict(vars(module)), dict(vars(module.gtrxl))
    Stepped(step_spec(module), BATCH).run(drawn(module)(np.random.default_rng(0)))
    for now, was in zip((vars(module), vars(module.gtrxl)), before, strict=True):
        assert all(now[name] is value for name, value in was.items())


def test_without_rows_to_keep_there_is_no_state() -> None:
    module = model(NET | {"memory_inference": 0})
    spec = step_spec(module)
    plan = make_plan(spec, BATCH, [3], Silent())
    obs = torch.randn(BATCH, 3, 7)
    with torch.no_grad():
        expected, _ = module({"obs": obs.flatten(0, 1)}, [obs.new_zeros(BATCH, 0, 8)], torch.full((BATCH,), 3))
    assert (spec.states, plan.streams) == ([], "independent")
    assert torch.equal(Eager(spec)({"obs": obs}, {})[0]["logits"].flatten(0, 1), expected)


def test_a_policys_checkpoint_has_its_weights_under_weights() -> None:
    trained = model(NET)
    stored = {"weights": trained.state_dict(), "global_timestep": 3, "policy_spec": None}
    loaded = load_adapted("rllib", NET, stored).module
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in trained.state_dict().items())


def stored_policy(**model: Any) -> dict[str, Any]:
    """Return the content of a policy's file, of weights as PPO has them."""
    weights = {
        "_value_branch_separate.0._model.0.weight": torch.ones(8, 7),
        "_logits_branch._model.0.weight": torch.ones(3, 8),
    }
    space = {"space": {"space": "box", "shape": (7,)}}
    return {"weights": weights, "policy_spec": {"observation_space": space, "config": {"model": model}}}


def test_a_policys_checkpoint_has_the_whole_config_where_it_uses_attention() -> None:
    stored = stored_policy(use_attention=True, vf_share_layers=True, attention_dim=8)
    told = {"use_attention": True, "attention_dim": 8}
    weights, found = split(stored, None)
    assert weights is stored["weights"]
    assert found == {**told, "vf_share_layers": False, "observation": (7,), "num_outputs": 3}
    stored["policy_spec"]["config"] = Stub("ray.rllib.algorithms.ppo.ppo.PPOConfig", {"model": told})
    assert split(stored, None)[1] == found
    assert split(stored_policy(), told)[1] == {"vf_share_layers": False, "observation": (7,), "num_outputs": 3}
    assert split(stored_policy(), NET)[1] is None


def test_weights_say_whether_the_value_has_layers_of_its_own() -> None:
    for shared in (True, False):
        trained = model(WRAPPED | {"vf_share_layers": shared})
        loaded = load_adapted("rllib", WRAPPED, trained.state_dict()).module
        assert loaded.state_dict().keys() == trained.state_dict().keys()
    with pytest.raises(CheckpointError, match=r"missing: .*_value_branch_separate"):
        load_adapted("rllib", WRAPPED | {"vf_share_layers": False}, model(WRAPPED).state_dict())


def test_earlier_actions_and_rewards_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="attention_use_n_prev_actions is 2, expected 0"):
        step_spec(model(WRAPPED | {"attention_use_n_prev_actions": 2}))
    around = SimpleNamespace(attention_layers=[], memory_inference=5, attention_dim=8)
    with pytest.raises(UsageError, match="attention_use_n_prev_rewards is 1, expected 0"):
        step_spec(SimpleNamespace(gtrxl=around, use_n_prev_actions=0, use_n_prev_rewards=1))


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"this Linear has no attention_layers.*expected RLlib's GTrXLNet"):
        step_spec(nn.Linear(2, 2))


@pytest.mark.slow
def test_a_bundle_stays_with_the_package_over_200_steps_with_resets(tmp_path: Path) -> None:
    module = model(WRAPPED | {"attention_num_transformer_units": 2, "attention_num_heads": 2})
    spec, path = adapt("rllib", module), tmp_path / "attention.txl"
    txl_export.export(spec, path, batch_size=BATCH, segment_length=1, verify=False)
    stream = txl_runtime.load(path, "cpu").stream()
    assert apart(stream, Own(module), drawn(module), BATCH) <= LIMIT
