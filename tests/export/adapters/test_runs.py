"""Folders that trainers leave behind, as their packages write them: folder → step, beside the package's own policy."""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
from own_loops import Stepped
from plain_c import build, need
from support import package
from torch import nn
from txl_export.adapters.policies.skrl import LayeredPolicy
from txl_export.adapters.runs import is_run, read_run
from txl_export.checkpoints.files.yaml_files import read_yaml
from txl_export.families.own_module.adapted import Adapted
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.probing import Tries, idle_states
from txl_export.families.own_module.sources import found_source, read_source
from txl_runtime.errors import TxlError

from txl_deploy.plain_c.package import package_c

B, STEPS = 3, 1000
SCALER = {"clip_threshold": 1.5, "epsilon": 0.01}
ENVIRONMENT = """
decimation: 4
sim: {dt: 0.005, device: cuda:0}
observations:
  policy:
    concatenate_terms: true
    history_length: null
    base_ang_vel: {func: 'isaaclab.envs.mdp.observations:base_ang_vel', scale: 0.25, clip: !!python/tuple [-5.0, 5.0]}
    joint_pos: {func: 'isaaclab.envs.mdp.observations:joint_pos_rel', scale: null, clip: null, history_length: 0}
    gone: null
events:
  push: {params: {body_ids: !!python/object/apply:builtins.slice [null, null, null]}}
actions:
  joint_pos: {joint_names: ['.*'], scale: 0.5, offset: 0.0, use_default_offset: true, clip: null}
"""
FACTS = {
    "rate": 50.0,
    "observations": [
        {
            "group": "policy",
            "terms": [{"name": "base_ang_vel", "scale": 0.25, "clip": [-5.0, 5.0]}, {"name": "joint_pos"}],
        }
    ],
    "actions": [{"name": "joint_pos", "joint_names": [".*"], "scale": 0.5, "use_default_offset": True}],
}
Own = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(observations [B, n], which sequences begin anew [B]) → actions [B, m], by the package's own policy."""


def settings(path: Path, agent: Any, environment: str = ENVIRONMENT) -> None:
    """The two files of settings as Isaac Lab writes them."""
    (path / "params").mkdir(parents=True)
    (path / "params" / "agent.yaml").write_text(json.dumps(agent))  # JSON is YAML
    (path / "params" / "env.yaml").write_text(environment)


def shaken(module: nn.Module) -> nn.Module:
    """Weights at which every term matters, normalisers among them."""
    draws = torch.Generator().manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.dim():
            values = torch.randn(tensor.shape, generator=draws) * 0.3
            tensor.copy_(values.abs() + 0.5 if re.search("var|_std", name) else values)
    return module.eval()


def rsl_rl(path: Path, kind: str) -> Own:
    package("rsl_rl.models")
    tensordict, runners = package("tensordict"), package("rsl_rl.runners")
    noise = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    mlp = {"class_name": "MLPModel", "hidden_dims": [8, 7], "activation": "elu", "obs_normalization": True}
    mlp |= {"distribution_cfg": noise, "cnn_cfg": None}
    unused = {"rnn_type": None, "rnn_hidden_dim": 256, "rnn_num_layers": 1}
    rnn = {"class_name": "RNNModel", "rnn_type": "lstm", "rnn_hidden_dim": 8, "rnn_num_layers": 2, "hidden_dims": [8]}
    rnn |= {"obs_normalization": True, "distribution_cfg": noise}
    actor = rnn if kind == "lstm" else {**mlp, **unused}
    asked = {key: value for key, value in actor.items() if value is not None and (kind == "lstm" or "rnn" not in key)}

    class Env:
        num_envs, num_actions, max_episode_length, device, cfg = 4, 3, 100, "cpu", {}
        episode_length_buf = torch.zeros(4, dtype=torch.long)

        def get_observations(self) -> Any:
            return tensordict.TensorDict({"policy": torch.randn(4, 6)}, batch_size=[4])

        def step(self, actions: Any) -> Any:
            return self.get_observations(), actions.square().mean(-1), torch.zeros(4, dtype=torch.long), {}

    algorithm = {"class_name": "PPO", "num_learning_epochs": 1, "num_mini_batches": 2}
    agent = {"obs_groups": {"actor": ["policy"], "critic": ["policy"]}, "actor": actor, "critic": actor}
    agent |= {"algorithm": algorithm, "num_steps_per_env": 4, "save_interval": 50, "clip_actions": 1.0}
    settings(path, agent)
    built = {**agent, "actor": asked, "critic": {key: asked[key] for key in asked if key != "distribution_cfg"}}
    runner = runners.OnPolicyRunner(Env(), json.loads(json.dumps(built)), log_dir=None, device="cpu")
    runner.learn(1)
    policy = runner.get_inference_policy()
    runner.save(str(path / "model_50.pt"))
    shaken(policy)
    runner.save(str(path / "model_1500.pt"))
    policy.reset()  # what the training's environments left

    def own(obs: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        policy.reset(begins)
        return policy(tensordict.TensorDict({"policy": obs}, batch_size=[len(obs)]))

    return own


def rl_games(path: Path, kind: str) -> Own:
    builder = package("rl_games.algos_torch.model_builder")
    filled = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"}, "fixed_sigma": True}
    filled |= {"sigma_init": {"name": "const_initializer", "val": 0}}
    network = {"name": "actor_critic", "separate": False, "space": {"continuous": filled}}
    network |= {"mlp": {"units": [16, 8], "activation": "elu", "initializer": {"name": "default"}}}
    network |= {"rnn": {"name": "lstm", "units": 8, "layers": 1, "before_mlp": kind == "before"}}
    config = {"name": "robot", "normalize_input": kind == "behind", "normalize_value": True}
    params = {"algo": {"name": "a2c_continuous"}, "model": {"name": "continuous_a2c_logstd"}, "network": network}
    settings(path, {"params": {**params, "config": config, "env": {"clip_observations": 5.0, "clip_actions": 1.0}}})
    sizes = {"actions_num": 3, "input_shape": (6,), "num_seqs": 1, "value_size": 1}
    model = shaken(
        builder.ModelBuilder().load(params).build({**sizes, **{key: config[key] for key in config if key != "name"}})
    )
    (path / "nn").mkdir()
    torch.save({"model": model.state_dict(), "epoch": 3, "last_mean_rewards": 1.0}, path / "nn" / "robot.pth")
    (path / "nn" / "last_robot_ep_9.pth").write_bytes(b"the newest one, and not the best")
    states = tuple(torch.zeros(one.shape[0], B, one.shape[2]) for one in model.a2c_network.get_default_rnn_state())

    def own(obs: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        nonlocal states
        for part in states:
            part[:, begins] = 0
        found = model({"is_train": False, "prev_actions": None, "obs": obs, "rnn_states": states})
        states = tuple(part.clone() for part in found["rnn_states"])
        return found["mus"]

    return own


def skrl(path: Path, kind: str) -> Own:
    made, spaces = package("skrl.utils.model_instantiators.torch"), package("gymnasium.spaces")
    scaler = package("skrl.resources.preprocessors.torch").RunningStandardScaler
    boxes = {"observation_space": spaces.Box(-1, 1, (6,)), "action_space": spaces.Box(-1, 1, (3,))}
    network = [{"name": "net", "input": "OBSERVATIONS", "layers": [9, 8], "activations": "elu"}]
    policy = {"class": "GaussianMixin", "clip_actions": False, "network": network, "output": "ACTIONS"}
    value = {"class": "DeterministicMixin", "clip_actions": False, "network": network, "output": "ONE"}
    normalises = {"observation_preprocessor": "RunningStandardScaler", "observation_preprocessor_kwargs": SCALER}
    settings(path, {"models": {"separate": kind == "separate", "policy": policy, "value": value}, "agent": normalises})
    given = {role: {key: part[key] for key in part if key != "class"} for role, part in (("p", policy), ("v", value))}
    if kind == "separate":
        model = made.gaussian_model(**boxes, device="cpu", **{**given["p"], "output": "tanh(ACTIONS)"})
        policy["output"] = "tanh(ACTIONS)"
        (path / "params" / "agent.yaml").write_text(json.dumps({"models": {"policy": policy}, "agent": normalises}))
    else:
        structure, roles = ["GaussianMixin", "DeterministicMixin"], ["policy", "value"]
        parts = [given["p"], given["v"]]
        model = made.shared_model(**boxes, device="cpu", structure=structure, roles=roles, parameters=parts)
    for role in ("policy", "value"):  # lazy layers learn their sizes
        model.compute({"observations": torch.zeros(1, 6)}, role)
    normal = scaler(6, device="cpu", **SCALER)
    for module in (model, normal):
        shaken(module)
    (path / "checkpoints").mkdir()
    stored = {
        "policy": model.state_dict(),
        "value": model.state_dict(),
        "observation_preprocessor": normal.state_dict(),
    }
    torch.save(stored, path / "checkpoints" / "agent_900.pt")

    def own(obs: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        return model.compute({"observations": normal(obs)}, "policy")[0]

    return own


def sb3(path: Path, kind: str) -> Own:
    gym, contrib, vectors = package("gymnasium"), package("sb3_contrib"), package("stable_baselines3.common.vec_env")

    class Env(gym.Env):  # type: ignore[misc, name-defined]
        observation_space = gym.spaces.Box(-1, 1, (6,), np.float32)
        action_space = gym.spaces.Box(np.array([-0.2, -1, -1], np.float32), 0.1, dtype=np.float32)

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            return self.observation_space.sample(), 0.0, False, False, {}

    env = vectors.DummyVecEnv([Env])
    if kind == "normalised":
        env = vectors.VecNormalize(env, clip_obs=2.0)
    sizes = {
        "lstm_hidden_size": 8,
        "net_arch": [8],
        "activation_fn": nn.ELU,
        "enable_critic_lstm": kind == "normalised",
    }
    model = contrib.RecurrentPPO("MlpLstmPolicy", env, n_steps=8, policy_kwargs=sizes, device="cpu")
    model.learn(16)
    shaken(model.policy)
    path.mkdir()
    model.save(path / "model.zip")
    if kind == "normalised":
        env.save(str(path / "model_vecnormalize.pkl"))
        env.training = False
    state: Any = None

    def own(obs: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        nonlocal state
        rows = env.normalize_obs(obs.numpy()) if kind == "normalised" else obs.numpy()
        found, state = model.predict(rows, state, begins.numpy(), deterministic=True)
        return torch.from_numpy(found)

    return own


RUNS = {
    "rsl_rl, lstm": (rsl_rl, "lstm"),
    "rsl_rl, without memory": (rsl_rl, "mlp"),
    "rl_games, normalised": (rl_games, "behind"),
    "rl_games, LSTM first": (rl_games, "before"),
    "skrl, separate": (skrl, "separate"),
    "skrl, shared": (skrl, "shared"),
    "sb3-contrib, normalised": (sb3, "normalised"),
    "sb3-contrib": (sb3, "plain"),
}


@pytest.mark.slow(keep=2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", RUNS)
def test_actions_are_the_packages_own_over_a_thousand_steps_with_resets(name: str, tmp_path: Path) -> None:
    make, kind = RUNS[name]
    own = make(tmp_path / "run", kind)
    found = found_source(tmp_path / "run")
    assert isinstance(found, Adapted)
    assert found.told.startswith(f"{tmp_path / 'run'}: a run of {name.partition(',')[0]}; taken are ")
    spec, _ = read_source(found, None)
    assert spec.facts is not None
    if make is not sb3:
        assert {key: spec.facts[key] for key in FACTS} == FACTS
    stepped, draws, worst = Stepped(spec, B), np.random.default_rng(1), 0.0
    with torch.no_grad():
        for step in range(STEPS):
            begins = draws.random(B) < 0.02 if step else np.ones(B, bool)
            if begins.any() and spec.states:
                stepped.reset(np.flatnonzero(begins))
            obs = draws.standard_normal((B, 6)).astype(np.float32)
            given = {"obs": obs, "episode_start": begins.astype(np.float32)}
            action = stepped.run({entry.name: given[entry.name] for entry in spec.inputs})["action"]
            wanted = own(torch.from_numpy(obs), torch.from_numpy(begins)).numpy()
            worst = max(worst, float(np.abs(action - wanted).max()))
    assert worst < 1e-5
    assert np.abs(wanted).max() > 0.01


C_LOOP = """
#include "policy.h"
#include <stdio.h>
static policy_state state;
static float obs[POLICY_OBS_VALUES], action[POLICY_ACTION_VALUES], other[64];
int main(void)
{
    (void)other;
    policy_init(&state);
    for (float begins; fread(&begins, sizeof begins, 1, stdin) == 1;) {
        if (fread(obs, sizeof obs, 1, stdin) != 1) return 1;
        if (begins) policy_reset(&state, NULL);
        policy_step(&state, %s);
        fwrite(action, sizeof action, 1, stdout);
    }
    return 0;
}
"""


@pytest.mark.slow(keep=1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["rsl_rl, lstm", "rl_games, normalised", "skrl, shared", "sb3-contrib, normalised"])
def test_a_folder_becomes_a_header_and_c_acts_as_the_package_does(name: str, tmp_path: Path) -> None:
    need("cc")
    make, kind = RUNS[name]
    own = make(tmp_path / "run", kind)
    txl_export.export(tmp_path / "run", tmp_path / "policy.txl", verify=False)
    made = package_c(tmp_path / "policy.txl", tmp_path / "policy", name="policy").folder
    header = (made / "policy.h").read_text()
    if make is not sb3:
        assert "#define POLICY_RATE 50.0" in header
        assert '"base_ang_vel"' in header
    starts = "episode_start" in header
    names = ["obs", *(["other"] if starts else []), "NULL", "action", *(["other + 32"] if "*value" in header else [])]
    (tmp_path / "main.c").write_text(C_LOOP % ", ".join(names))
    program = build(made, tmp_path / "main", tmp_path / "main.c", made / "policy.c", flags="-O2 -Wall -Wextra -Werror")
    draws = np.random.default_rng(2)
    begins, obs = draws.random(STEPS) < 0.02, draws.standard_normal((STEPS, 6)).astype(np.float32)
    begins[0] = True
    rows = np.concatenate([begins[:, None], obs], 1).astype(np.float32)
    (tmp_path / "in").write_bytes(rows.tobytes())
    with (tmp_path / "in").open("rb") as given, (tmp_path / "out").open("wb") as written:
        subprocess.run([program], stdin=given, stdout=written, check=True)
    found = np.frombuffer((tmp_path / "out").read_bytes(), np.float32).reshape(STEPS, -1)
    with torch.no_grad():
        for row, action, start in zip(obs, found, begins, strict=True):
            wanted = own(torch.from_numpy(row[None].repeat(B, 0)), torch.full((B,), bool(start)))[0]
            np.testing.assert_allclose(action, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow(keep=0)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_inputs_that_try_sb3s_leave_it_its_memory(tmp_path: Path) -> None:
    sb3(tmp_path / "run", "normalised")
    found = found_source(tmp_path / "run")
    assert "taken are model.zip, model_vecnormalize.pkl;" in found.told
    tries = Tries(Eager(read_source(found, None)[0]), B)
    assert idle_states(tries, 1, 2) == []
    assert sum(float(tries.inputs(1)["episode_start"].sum()) for _ in range(200)) > 0
    (tmp_path / "run" / "model_vecnormalize.pkl").unlink()
    with pytest.raises(TxlError, match=r"normalised, and no \*vecnormalize\*\.pkl lies beside it; put"):
        found_source(tmp_path / "run")


# Settings that cannot be placed


def a_run(path: Path, **changes: Any) -> Path:
    """A folder of skrl's, which needs no package, with changes of its settings."""
    network = {"name": "net", "input": "STATES", "layers": [4], "activations": "elu", **changes.pop("network", {})}
    policy = {"network": [network], "output": "ACTIONS", "clip_actions": True}
    settings(path, changes.pop("agent", {"models": {"policy": policy | changes}, "agent": {}}))
    module = LayeredPolicy([6, 4, 3], ["elu", ""], False)
    names = ["net_container.0.weight", "net_container.0.bias", "policy_layer.weight", "policy_layer.bias"]
    state = dict(zip(names, module.state_dict().values(), strict=True)) | {"log_std_parameter": torch.zeros(3)}
    (path / "checkpoints").mkdir()
    torch.save({"policy": state}, path / "checkpoints" / "agent_10.pt")
    return path


def test_a_run_without_settings_of_the_environment_says_what_is_not_known(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    (path / "params" / "env.yaml").unlink()
    found = read_run(path)
    assert found.told.endswith(
        "taken are checkpoints/agent_10.pt, params/agent.yaml; not said there: rate, observations, actions"
    )
    assert read_source(found, None)[0].facts == {"trainer": "skrl", "clip_actions": True}


def scaled(path: Path, stored: str, **settings: Any) -> Path:
    """A folder of skrl's whose checkpoint has a scaler under a name, with settings of the agent."""
    a_run(path)
    agent = json.loads((path / "params" / "agent.yaml").read_text())
    (path / "params" / "agent.yaml").write_text(json.dumps(agent | {"agent": settings}))
    checkpoint = path / "checkpoints" / "agent_10.pt"
    normal = {"running_mean": torch.full((6,), 0.5), "running_variance": torch.full((6,), 4.0)}
    torch.save(torch.load(checkpoint) | {stored: normal}, checkpoint)
    return path


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("observation_preprocessor", "observation_preprocessor"),
        ("observation_preprocessor", "state_preprocessor"),  # skrl 2 takes it for the observations'
        ("state_preprocessor", "state_preprocessor"),  # before skrl 2
    ],
)
def test_skrls_scaler_is_the_one_of_the_settings_with_its_numbers(stored: str, named: str, tmp_path: Path) -> None:
    told = {named: "RunningStandardScaler", f"{named}_kwargs": SCALER}
    policy = read_source(read_run(scaled(tmp_path / "run", stored, **told)), None)[0].module
    assert (policy.normalised, policy.clip, policy.epsilon) == (True, 1.5, 0.01)


def test_a_scaler_of_skrls_states_is_not_the_observations(tmp_path: Path) -> None:
    told = {"observation_preprocessor": None, "state_preprocessor": "RunningStandardScaler"}
    found = read_run(scaled(tmp_path / "run", "state_preprocessor", **told))
    assert "normaliser" not in found.facts


class Kept:
    """An object of a package as a pickle holds it: a class and its attributes."""

    def __init__(self, **kept: Any) -> None:
        self.__dict__.update(kept)


def a_zip(path: Path, extent: int = 0, **changes: Any) -> Path:
    """A folder of sb3-contrib's, which needs no package, whose VecNormalize has changes, with more bytes of JSON."""
    path.mkdir()
    box = {":type:": "<class 'gymnasium.spaces.box.Box'>", "dtype": "float32"}
    acts = box | {"_shape": [2], "low": "[-1. -1.]", "high": "[1. 1.]"}
    data = {"observation_space": box | {"_shape": [2]}, "action_space": acts, "_last_original_obs": "x" * extent}
    torch.save({}, path / "policy.pth")
    with zipfile.ZipFile(path / "model.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", json.dumps(data))
        archive.write(path / "policy.pth", "policy.pth")
    moments = {"mean": np.array([1.0, 2.0]), "var": np.array([0.0, 4.0]), **changes.pop("moments", {})}
    state = {"norm_obs": True, "epsilon": 1e-8, "clip_obs": 10.0, "obs_rms": Kept(**moments), **changes}
    torch.save(Kept(**state), path / "vecnormalize.pkl")
    return path


def test_the_file_of_a_normaliser_beside_a_zip_is_named(tmp_path: Path) -> None:
    found = read_run(a_zip(tmp_path / "run"))
    assert "; taken are model.zip, vecnormalize.pkl; not said" in found.told
    assert isinstance(found.config, dict)
    assert found.config["vec_normalize"].obs_rms.mean.tolist() == [1.0, 2.0]
    assert found.facts["normaliser"] == "in the graph"


def test_a_normaliser_that_leaves_observations_is_none(tmp_path: Path) -> None:
    assert "normaliser" not in read_run(a_zip(tmp_path / "run", norm_obs=False, obs_rms=None)).facts


def a_player(path: Path, config: Any, around: Any) -> Path:
    """A folder of rl_games', which needs no package until its policy is built."""
    settings(path, {"params": {"config": {"name": "robot", **config}, "network": {}, "env": around}})
    (path / "nn").mkdir()
    state = {"a2c_network.mu.weight": torch.zeros(2, 4), "a2c_network.actor_mlp.0.weight": torch.zeros(4, 6)}
    torch.save({"model": state}, path / "nn" / "robot.pth")
    return path


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({}, {"clip_actions": 1.0, "rescale_actions": 100.0}),
        ({"clip_actions": True}, {"clip_actions": 1.0, "rescale_actions": 100.0}),
        ({"clip_actions": False}, {"clip_actions": 100.0}),
    ],
)
def test_a_player_of_rl_games_clips_to_one_unless_it_is_told_otherwise(
    config: Any, facts: dict[str, float], tmp_path: Path
) -> None:
    found = read_run(a_player(tmp_path / "run", config, {"clip_actions": 100.0}))
    assert "taken are nn/robot.pth, params" in found.told
    assert {key: found.facts[key] for key in found.facts if "actions" in key and key != "actions"} == facts


@pytest.mark.parametrize("fault", ["name", "version"])
def test_a_zip_that_cannot_be_opened_is_no_run(fault: str, tmp_path: Path) -> None:
    path = a_zip(tmp_path / "run") / "model.zip"
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    if fault == "name":  # no UTF-8, though its flag says so
        content[entry + 9] |= 8
        content[entry + 46 : entry + 48] = b"\xff\xfe"
    else:
        content[entry + 6] = 255
    path.write_bytes(content)
    assert not is_run(path)


def test_a_rate_without_end_is_left_out(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    (path / "params" / "env.yaml").write_text("decimation: 4\nsim: {dt: 1.0e-320}\n")
    assert "rate" not in read_run(path).facts


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1" + ":1" * 32, "a number of 65 signs, expected up to 64"),
        ("1" + ":1" * 200 + ".5", "a number of 403 signs"),
        ("!!float 1" + ":1" * 200, "a number of 401 signs"),
        ("!!bool foo", "not of its tag's kind: KeyError: 'foo'"),
        ("!!int ''", "not of its tag's kind: IndexError"),
        ("!!timestamp foo", "not of its tag's kind: AttributeError"),
    ],
)
def test_a_number_of_yaml_is_short_and_one(value: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        read_yaml(tmp_path, f"a: {value}", typed=True)
    assert read_yaml(tmp_path, "[1:30, 1:30.5, 1.0e-08]", typed=True) == [90, 90.5, 1e-8]


def test_mjlabs_settings_are_read_by_their_names(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    (path / "params" / "env.yaml").write_text(
        "decimation: 4\nsim: {mujoco: {timestep: 0.005}}\n"
        "observations: {actor: {history_length: 5, terms: {gyro: {func: f, scale: 2.0}}}}\n"
        "actions: {joint_pos: {actuator_names: !!python/tuple ['.*'], scale: {hip: 0.3}}}\n"
    )
    facts = read_run(path).facts
    assert facts["rate"] == 50
    assert facts["observations"] == [{"group": "actor", "history_length": 5, "terms": [{"name": "gyro", "scale": 2.0}]}]
    assert facts["actions"] == [{"name": "joint_pos", "actuator_names": [".*"], "scale": {"hip": 0.3}}]


def unsafe(path: Path) -> None:
    code = "!!python/object/apply:os.system ['touch " + str(path / "ran") + "']"
    (path / "params" / "env.yaml").write_text(f"sim: {{dt: 0.01}}\ndecimation: {code}\n")


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "settings of nobody": (lambda path: a_run(path, agent={"seed": 1}), "has seed, expected rsl_rl's actor"),
    "settings that are a list": (lambda path: a_run(path, agent=[1]), "holds a list, expected a table"),
    "no checkpoint": (
        lambda path: (a_run(path) / "checkpoints" / "agent_10.pt").unlink(),
        r"has no agent_\*\.pt, expected the training's checkpoint",
    ),
    "a checkpoint of another": (
        lambda path: torch.save({"model": {}}, a_run(path) / "checkpoints" / "agent_10.pt"),
        "has no tensors under policy",
    ),
    "an input by another name": (lambda path: a_run(path, network={"input": "ACTIONS"}), "the policy reads ACTIONS"),
    "layers of another kind": (
        lambda path: a_run(path, network={"layers": ["conv2d"]}),
        "its policy has conv2d, expected linear layers",
    ),
    "an activation by another name": (lambda path: a_run(path, network={"activations": "gelu"}), "activations are"),
    "a scaler that was not stored": (
        lambda path: scaled(path, "value_preprocessor", observation_preprocessor="RunningStandardScaler"),
        "has no observation_preprocessor, and observation_preprocessor of params/agent.yaml is RunningStandardScaler",
    ),
    "a scaler without its settings": (
        lambda path: scaled(path, "observation_preprocessor"),
        "has observation_preprocessor, and state_preprocessor of params/agent.yaml is None",
    ),
    "a scaler by another name": (
        lambda path: scaled(path, "state_preprocessor", state_preprocessor="Mine"),
        "state_preprocessor is Mine, expected RunningStandardScaler",
    ),
    "an argument of another scaler": (
        lambda path: scaled(
            path,
            "state_preprocessor",
            state_preprocessor="RunningStandardScaler",
            state_preprocessor_kwargs={"clip": 1},
        ),
        "the scaler's arguments are .* expected numbers for epsilon and clip_threshold",
    ),
    "a name that is a path": (
        lambda path: a_player(path, {"name": "../../../secret"}, {}),
        "name is ../../../secret, expected one without a path",
    ),
    "a normaliser of other observations": (
        lambda path: a_zip(path, moments={"mean": np.zeros(3)}),
        r"has mean \[3\] and variance \[2\], expected finite ones of \[2\], variances ≥ 0",
    ),
    "a normaliser with NaN": (lambda path: a_zip(path, moments={"mean": np.array([0, np.nan])}), "expected finite"),
    "a variance below 0": (lambda path: a_zip(path, moments={"var": np.array([-1.0, 1.0])}), "variances ≥ 0"),
    "a normaliser without a limit": (lambda path: a_zip(path, clip_obs=0.0), "clip_obs is 0.0 and epsilon 1e-08"),
    "a limit that is no number": (lambda path: a_zip(path, clip_obs=[]), "TypeError: .* expected a VecNormalize"),
    "a normaliser that is none": (
        lambda path: torch.save({"norm_obs": True}, a_zip(path) / "vecnormalize.pkl"),
        "AttributeError: .* expected a VecNormalize",
    ),
    "JSON that is too large": (lambda path: a_zip(path, 1 << 24), "data has more than 16777216 bytes"),
    "settings without an output": (
        lambda path: a_run(path, agent={"models": {"policy": {"network": [{}]}}}),
        "not laid out as this trainer's are: KeyError",
    ),
    "an environment that is no YAML": (
        lambda path: (a_run(path) / "params" / "env.yaml").write_text("a: [1"),
        "expected the YAML that the training wrote",
    ),
    "an alias that explodes": (
        lambda path: (a_run(path) / "params" / "env.yaml").write_text(
            "a: &a [1, 1]\n"
            + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True))
        ),
        "more than 65536 parts",
    ),
    "a tag that would run": (
        lambda path: unsafe(a_run(path)),
        "settings are not laid out as this trainer's are: TypeError",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_cannot_be_placed_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    damage, said = DAMAGED[name]
    damage(tmp_path / "run")
    assert is_run(tmp_path / "run")
    with pytest.raises(TxlError, match=said) as refused:
        read_source(read_run(tmp_path / "run"), None)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "ran").exists()


def test_what_is_no_run_is_left_to_others(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data.pkl", b"a checkpoint of torch's")
    assert found_source(tmp_path) is tmp_path
    assert found_source("model.py:build") == "model.py:build"
