"""Checkpoints as the packages' own trainers write them, read without running anything in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import randomised
from support import PACKAGES, package
from torch import nn
from txl_export.adapters.registry import load_adapted
from txl_export.checkpoints.plain_weights import read_stored, read_weights

ATTENTION = {
    "use_attention": True,
    "fcnet_hiddens": [8],
    "attention_num_transformer_units": 1,
    "attention_dim": 8,
    "attention_num_heads": 2,
    "attention_head_dim": 4,
    "attention_memory_inference": 5,
    "attention_memory_training": 5,
    "attention_position_wise_mlp_dim": 6,
}
RLLIB = f"""
import sys, ray, torch
from ray.rllib.algorithms.ppo import PPOConfig
ray.init(include_dashboard=False, num_cpus=1, object_store_memory=80_000_000, log_to_driver=False)
config = PPOConfig().api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
config = config.environment("CartPole-v1").framework("torch").env_runners(num_env_runners=0)
algorithm = config.training(model={ATTENTION!r}).build_algo()
algorithm.save(sys.argv[1])
torch.save(algorithm.get_policy().model.state_dict(), sys.argv[1] + "/expected.pt")
"""


@pytest.mark.slow
def test_what_an_algorithm_of_rllib_saves_holds_weights_and_config(tmp_path: Path) -> None:
    """PPO sets `vf_share_layers` itself, and its file has objects of many classes beside the weights."""
    package("ray.rllib.algorithms.ppo")
    path = os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])  # Ray's processes import it
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RLLIB, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "timed out during startup" in done.stderr:
        pytest.skip("Ray's processes do not start on this machine")
    assert done.returncode == 0, done.stderr[-2000:]
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    stored = tmp_path / "policies" / "default_policy" / "policy_state.pkl"
    for config in (None, {"observation": 4, "num_outputs": 2, **ATTENTION}):
        module: Any = load_adapted("rllib", config, stored).module
        assert module.state_dict().keys() == expected.keys()
        assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_what_lightning_saves_has_a_config_of_omegaconf_as_plain_data(tmp_path: Path) -> None:
    lightning, omegaconf = package("pytorch_lightning"), package("omegaconf")
    wrapper = package("x_transformers")
    sizes = {"num_tokens": 9, "max_seq_len": 8, "max_mem_len": 4, "attn_layers": {"dim": 8, "depth": 1, "heads": 2}}

    class Trained(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, cfg: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            given = omegaconf.OmegaConf.to_container(cfg)
            layers = wrapper.Decoder(**given.pop("attn_layers"))
            self.model = randomised(wrapper.TransformerWrapper(attn_layers=layers, **given))

    module = Trained(omegaconf.OmegaConf.create(sizes))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    found = read_weights(tmp_path / "last.ckpt")
    assert found["hyper_parameters"] == {"cfg": sizes}
    spec = load_adapted("x-transformers", found["hyper_parameters"]["cfg"], tmp_path / "last.ckpt")
    _same(spec.module, module.model)


@pytest.mark.slow
def test_what_a_runner_of_rsl_rl_saves_is_its_actor(tmp_path: Path) -> None:
    runners, tensordict = package("rsl_rl.runners"), package("tensordict")
    rnn = {"class_name": "RNNModel", "rnn_type": "lstm", "rnn_hidden_dim": 8, "rnn_num_layers": 1, "hidden_dims": [8]}
    groups = {"actor": ["policy"], "critic": ["policy"]}
    normal = {"obs_normalization": True, "distribution_cfg": {"class_name": "GaussianDistribution"}}
    config: dict[str, Any] = {"obs_groups": groups, "actor": {**rnn, **normal}, "critic": rnn}

    class Env:
        """Observations at random, and an episode that never ends."""

        num_envs, num_actions, max_episode_length, device, cfg = 4, 3, 100, "cpu", {}
        episode_length_buf = torch.zeros(4, dtype=torch.long)

        def get_observations(self) -> Any:
            return tensordict.TensorDict({"policy": torch.randn(4, 6)}, batch_size=[4])

        def step(self, actions: Any) -> Any:
            return self.get_observations(), actions.square().mean(-1), torch.zeros(4, dtype=torch.long), {}

    algorithm = {"class_name": "PPO", "num_learning_epochs": 1, "num_mini_batches": 2}
    trained = {**config, "algorithm": algorithm, "num_steps_per_env": 4, "save_interval": 50}
    runner = runners.OnPolicyRunner(Env(), trained, log_dir=None, device="cpu")
    runner.learn(1)
    runner.save(str(tmp_path / "model_1.pt"))
    assert set(read_stored(tmp_path / "model_1.pt")) >= {"actor_state_dict", "critic_state_dict", "iter", "infos"}
    told = {"obs": {"policy": 6}, "num_actions": 3, **config}
    spec: Any = load_adapted("recurrent-policy", {**told, "critic": False}, tmp_path / "model_1.pt")
    _same(spec.module["actor"], runner.alg.actor)
    _same(load_adapted("recurrent-policy", told, tmp_path / "model_1.pt").module["critic"], runner.alg.critic)  # type: ignore[index]


def _same(found: nn.Module, expected: nn.Module) -> None:
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
