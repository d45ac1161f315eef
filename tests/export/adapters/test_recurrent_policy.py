"""Recurrent policies: packages' own policies beside their bundles, reset one by one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from own_loops import Stepped
from stand_ins.stateful.actor_critic_recurrent import ActorCriticRecurrent
from support import package
from torch import Tensor, nn
from txl_export.adapters.recurrent_policy import build, split, step_spec
from txl_export.adapters.registry import adapt, load_adapted
from txl_export.families.own_module.spec import StepSpec
from txl_runtime.errors import TxlError, UsageError

NAME, BATCH = "recurrent-policy", 3
LIMIT, EXACT = 1e-4, 1e-6
PLAIN = {"obs": 6, "hidden": 8, "layers": 2, "actions": 3, "kind": "LSTM", "episode_start_input": False}
Named: TypeAlias = Mapping[str, Any]
Own: TypeAlias = Callable[[dict[str, Tensor], Tensor], Named]
"""(inputs, rows that begin anew) → outputs and states by name, by the package's own call."""


def random_weights(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights of N(0, 0.3) and normalisers that do something: every term of the policy matters."""
    draws = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            values = torch.randn(tensor.shape, generator=draws) * 0.3
            spread = name.rpartition(".")[2] in ("_var", "_std", "running_var", "std")
            tensor.copy_(values.abs() + 0.7 if spread else values)
    return module.eval()


def exported(spec: StepSpec, path: Path) -> Any:
    """A stream of its bundle."""
    model = txl_runtime.load(
        txl_export.export(spec, path, batch_size=BATCH, segment_length=1, verify=False).path, "cpu"
    )
    assert model.manifest.streams == "independent"
    return model.stream()


def largest_error(spec: StepSpec, stream: Any, own: Own, *, steps: int = 200, forget: bool = False) -> float:
    """Outputs and states against the package's own call; the last reset may be forgotten."""
    draws, worst = np.random.default_rng(0), 0.0
    resets = draws.random((steps, BATCH)) < 0.05
    resets[0] = False
    last = int(np.argwhere(resets.any(1))[-1, 0])
    with torch.no_grad():
        for step in range(steps):
            inputs = {
                entry.name: draws.normal(size=[{"B": BATCH, "L": 1}.get(str(n), n) for n in entry.shape]).astype("f4")
                for entry in spec.inputs
            }
            begins = resets[step] & (not forget or step != last)
            given = {name: torch.from_numpy(array) for name, array in inputs.items() if name != "episode_start"}
            wanted = own(given, torch.from_numpy(resets[step]))
            if "episode_start" in inputs:
                inputs["episode_start"] = begins.astype(np.float32)
            elif begins.any():
                stream.reset(np.flatnonzero(begins))
            found = stream.run(inputs)
            found |= {f"state {name}": array for name, array in stream.state().items()}
            found["log shares"] = torch.from_numpy(found["action"]).log_softmax(-1).numpy()
            for name, expected in wanted.items():
                exact = np.asarray(expected)
                assert found[name].shape == exact.shape, name
                worst = max(worst, float(np.abs(found[name] - exact).max()) / max(1.0, float(np.abs(exact).max())))
    return worst


def held(**states: Any) -> dict[str, Tensor]:
    """States by the bundle's names, from what a package keeps for each of its roles."""
    found = {}
    for role, kept in states.items():
        parts = dict(zip("hc", kept if isinstance(kept, tuple) else (kept,), strict=False))
        found |= {f"state {part}" if role == "only" else f"state {role}.{part}": t for part, t in parts.items()}
    return found


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("starts", [False, True])
def test_a_plain_policy_streams_as_torch_computes_it(kind: str, starts: bool) -> None:
    config = PLAIN | {"kind": kind, "episode_start_input": starts}
    policy: Any = random_weights(build(config))
    spec = step_spec(policy, config)
    state: Any = None

    def own(inputs: dict[str, Tensor], begins: Tensor) -> Named:
        nonlocal state
        for part in () if state is None else state if kind == "LSTM" else (state,):
            part[:, begins] = 0
        rows, state = policy.rnn((inputs["obs"] - policy.mean) / (policy.std + 0.01), state)
        return {"action": policy.actor(rows), "value": policy.critic(rows)[..., 0], **held(only=state)}

    assert largest_error(spec, Stepped(spec, BATCH), own) <= EXACT
    state = None
    assert largest_error(spec, Stepped(spec, BATCH), own, forget=True) > LIMIT


@pytest.mark.parametrize(("kind", "normalized"), [("lstm", True), ("gru", False)])
def test_rsl_rls_older_policy_by_its_names(kind: str, normalized: bool) -> None:
    policy: Any = random_weights(ActorCriticRecurrent(6, 9, 3, kind, normalized))

    def own(inputs: dict[str, Tensor], begins: Tensor) -> Named:
        if policy.memory_a.hidden_state is not None:
            policy.reset(begins)
        action, value = policy.act_inference(inputs["obs"]), policy.evaluate(inputs["critic_obs"])[:, 0]
        states = {"actor": policy.memory_a.hidden_state, "critic": policy.memory_c.hidden_state}
        return {"action": action, "value": value, **held(**states)}

    spec = adapt(NAME, policy)
    assert largest_error(spec, Stepped(spec, BATCH), own) <= EXACT


def test_the_critic_can_be_left_out_with_the_input_that_it_alone_needs() -> None:
    policy = ActorCriticRecurrent(6, 9, 3, "lstm", True)
    spec = adapt(NAME, policy, {"critic": False})
    assert [entry.name for entry in spec.inputs] == ["obs"]
    assert [getattr(entry, "name", entry) for entry in spec.outputs] == ["action"]
    assert [entry.name for entry in spec.states] == ["h", "c"]
    assert len(adapt(NAME, policy).states) == 4


def test_of_a_checkpoint_of_several_models_those_of_the_config_are_read() -> None:
    stored = {"actor_state_dict": {"mlp.0.bias": 1}, "critic_state_dict": {"mlp.0.bias": 2}, "iter": 3}
    assert split(stored, {"actor": {}, "critic": {}}) == ({"actor.mlp.0.bias": 1, "critic.mlp.0.bias": 2}, None)
    for config in ({"actor": {}}, {"actor": {}, "critic": False}, {"actor": {}, "critic": None}):
        assert split(stored, config) == ({"actor.mlp.0.bias": 1}, None)
    taught = {"student_state_dict": {"mlp.0.bias": 3}, "teacher_state_dict": {"mlp.0.bias": 4}, "iter": 3}
    assert split(taught, {"actor": {}}) == ({"actor.mlp.0.bias": 3}, None)
    assert split({"model": {"a": 1}, "epoch": 3}, None) == ({"a": 1}, None)
    assert split({"rnn.bias": 1}, PLAIN) == ({"rnn.bias": 1}, None)


class RNNModel(nn.Module):
    """Built as rsl_rl's, without its normaliser."""

    def __init__(self, obs: Any, groups: Named, role: str, width: int, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.ModuleDict({"rnn": nn.LSTM(sum(obs[name].shape[1] for name in groups[role]), hidden)})
        self.mlp = nn.Linear(hidden, width)


@pytest.fixture
def rsl_rl(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A package that builds such a model, and a config of an actor."""
    monkeypatch.setitem(sys.modules, "rsl_rl.models", SimpleNamespace(RNNModel=RNNModel))
    monkeypatch.setitem(sys.modules, "tensordict", SimpleNamespace(TensorDict=lambda seen, **_: seen))
    groups = {"actor": ["policy"], "critic": ["policy"]}
    return {"obs": {"policy": 6}, "num_actions": 3, "obs_groups": groups, "actor": {"hidden": 8}}


@pytest.mark.parametrize("change", [{}, {"critic": False}])
def test_the_actor_alone_is_built_and_loaded(change: Named, rsl_rl: dict[str, Any], tmp_path: Path) -> None:
    config = rsl_rl
    pair: Any = random_weights(build({**config, "critic": {"hidden": 9}}))
    actor, critic = pair["actor"].state_dict(), pair["critic"].state_dict()
    both = {"actor_state_dict": actor, "critic_state_dict": critic}
    rest = {"optimizer_state_dict": torch.optim.Adam(pair.parameters()).state_dict(), "iter": 3, "infos": None}
    for stored in (both, pair.state_dict(), {"student_state_dict": actor, "teacher_state_dict": critic}):
        torch.save(stored | (rest if "actor_state_dict" in stored else {}), tmp_path / "model_3.pt")
        spec = load_adapted(NAME, {**config, **change}, tmp_path / "model_3.pt")
        assert [entry.name for entry in spec.states] == ["h", "c"]
        found = spec.module.state_dict()
        assert all(torch.equal(found[f"actor.{name}"], tensor) for name, tensor in actor.items())
    assert len(load_adapted(NAME, {**config, "critic": {"hidden": 9}}, both).states) == 4


class ForRobots(nn.Module):
    """An actor as rsl_rl and legged_gym export it: a state in buffers, and names of their own."""

    def __init__(self, actor: Any, rnn: str, mlp: str) -> None:
        super().__init__()
        setattr(self, rnn, actor.rnn["rnn"])
        setattr(self, mlp, actor.mlp)
        self.normalizer = nn.Identity()
        self.register_buffer("hidden_state", torch.ones(1, 1, 8))
        self.register_buffer("cell_state", torch.ones(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("names", [("rnn", "mlp"), ("memory", "actor")], ids=str)
def test_an_archive_exported_for_robots_gives_the_actor_its_weights(
    names: tuple[str, str], rsl_rl: dict[str, Any], tmp_path: Path
) -> None:
    model: Any = random_weights(build(rsl_rl))
    torch.jit.save(torch.jit.script(ForRobots(model["actor"], *names)), tmp_path / "policy.pt")
    found = load_adapted(NAME, rsl_rl, tmp_path / "policy.pt").module.state_dict()
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"obs": 12},
            'obs is 12 in the config, expected the width of each group of observations, such as {"policy": 48}',
        ),
        ({"obs": {"policy": [7]}}, "obs.policy is [7] in the config, expected a whole number from 1"),
        ({"num_actions": "3"}, "num_actions is '3' in the config, expected a whole number from 1"),
        ({"critic": True}, "critic is True in the config, expected the model's arguments"),
        ({"actor": {"class_name": "Bogus"}}, "class_name of actor is 'Bogus', which rsl_rl.models lacks"),
    ],
)
def test_a_config_that_rsl_rl_cannot_take_is_refused_by_name(
    change: Named, message: str, rsl_rl: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        load_adapted(NAME, {**rsl_rl, **change}, {"x": torch.zeros(1)})


def test_rl_games_whole_config_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_model(**given: Any) -> nn.Module:
        asked.append(given)
        return nn.Identity()

    asked: list[dict[str, Any]] = []
    model = SimpleNamespace(load=lambda params: SimpleNamespace(build=lambda given: build_model(**params, **given)))
    builder = SimpleNamespace(ModelBuilder=lambda: model)
    monkeypatch.setitem(sys.modules, "rl_games.algos_torch.model_builder", builder)
    training = {"model": {"name": "m"}, "network": {"name": "n"}, "algo": {"name": "a2c"}}
    training["config"] = {"normalize_input": True, "normalize_value": True, "gamma": 0.9}
    told = {"actions_num": 3, "input_shape": 6}
    build({"params": training, **told})
    build({**training, **told, "input_shape": [6], "normalize_value": False})
    whole, own = asked
    assert (whole["model"], whole["network"], whole["input_shape"]) == ({"name": "m"}, {"name": "n"}, (6,))
    assert (whole["normalize_input"], whole["normalize_value"]) == (True, True)
    assert own == {**whole, "normalize_value": False}
    with pytest.raises(UsageError, match=r"the config has .*, lacks actions_num, input_shape, expected"):
        build({"params": training})
    with pytest.raises(UsageError, match=r"input_shape is 6\.5 in the config, expected a whole number from 1"):
        build({"params": training, **told, "input_shape": 6.5})


@pytest.mark.parametrize("name", ["policy", "actor_critic", "actor", "student"])
def test_an_algorithm_or_a_runner_gives_its_policy(name: str) -> None:
    policy = ActorCriticRecurrent(6, 9, 3, "lstm", True)
    algorithm = SimpleNamespace(**{"device": "cpu", name: policy})
    for given in (algorithm, SimpleNamespace(alg=algorithm)):
        assert adapt(NAME, given).module is policy
    assert adapt(NAME, SimpleNamespace(alg=algorithm, obs_normalizer=nn.Identity())).module is policy
    with pytest.raises(UsageError, match=r"set policy\.actor_obs_normalizer to runner\.obs_normalizer"):
        adapt(NAME, SimpleNamespace(alg=algorithm, obs_normalizer=nn.BatchNorm1d(6)))
    policy.memory_a.rnn.weight_hh_l0.data[0, 0] = torch.nan
    with pytest.raises(TxlError, match=r"memory_a\.rnn\.weight_hh_l0 holds NaN"):
        adapt(NAME, algorithm)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "RNN"}, "kind is 'RNN', expected one of LSTM, GRU"),
        ({"layers": 0}, "layers is 0 in the config, expected a whole number from 1"),
        ({"obs": "6"}, "obs is '6' in the config, expected a whole number from 1"),
    ],
)
def test_a_config_that_builds_nothing_is_refused(change: Named, message: str) -> None:
    with pytest.raises(TxlError, match=re.escape(message)):
        load_adapted(NAME, {**PLAIN, **change}, {"x": torch.zeros(1)})


def test_a_config_of_nothing_known_says_what_to_do() -> None:
    with pytest.raises(TxlError, match="the config has obs, hidden, actions, lacks layers, kind,") as refused:
        load_adapted(NAME, {"obs": 6, "hidden": 8, "actions": 3}, {"x": torch.zeros(1)})
    assert "build the policy as your training did and call txl_export.adapt" in str(refused.value)
    assert 'of sb3-contrib it is RecurrentPPO.load("model.zip").policy' in str(refused.value)


def test_what_is_no_recurrent_policy_is_refused() -> None:
    with pytest.raises(TxlError, match="a Linear is no recurrent policy known here"):
        adapt(NAME, nn.Linear(2, 2))
    policy = ActorCriticRecurrent(6, 9, 3, "lstm", False)
    policy.memory_a.rnn = nn.LSTM(6, 4, 2, bidirectional=True)
    with pytest.raises(TxlError, match=r"memory_a\.rnn has bidirectional"):
        adapt(NAME, policy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_rsl_rls_own_archive_for_robots(kind: str, tmp_path: Path) -> None:
    """The bundle of one sequence, made of the archive's weights, beside the archive itself."""
    package("rsl_rl.models")
    package("tensordict")
    rnn = {"class_name": "RNNModel", "rnn_type": kind, "rnn_hidden_dim": 8, "rnn_num_layers": 2, "hidden_dims": [8]}
    config = {"obs": {"policy": 6}, "num_actions": 4, "obs_groups": {"actor": ["policy"]}}
    noise = {"distribution_cfg": {"class_name": "GaussianDistribution"}}
    actor: Any = random_weights(build({**config, "actor": {**rnn, "obs_normalization": True, **noise}}))["actor"]
    torch.jit.save(torch.jit.script(actor.as_jit()), tmp_path / "policy.pt")
    original = torch.jit.load(tmp_path / "policy.pt")
    spec = load_adapted(NAME, {**config, "actor": {**rnn, "obs_normalization": True}}, tmp_path / "policy.pt")
    stream, draws = exported(spec, tmp_path / "policy.txl"), np.random.default_rng(0)
    with torch.no_grad():
        for _ in range(200):
            row = draws.normal(size=(1, 6)).astype("f4")
            found = stream.run({"obs": np.repeat(row, BATCH, 0)})["action"]
            assert np.abs(found - original(torch.from_numpy(row)).numpy()).max() <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_rsl_rls_own_models(kind: str, tmp_path: Path) -> None:
    package("rsl_rl.models")
    tensordict = package("tensordict")
    rnn = {"class_name": "RNNModel", "rnn_type": kind, "rnn_hidden_dim": 8, "rnn_num_layers": 2, "hidden_dims": [8]}
    noise = {"class_name": "HeteroscedasticGaussianDistribution" if kind == "gru" else "GaussianDistribution"}
    config = {
        "obs": {"policy": 6, "height": 3},
        "num_actions": 4,
        "obs_groups": {"actor": ["policy"], "critic": ["policy", "height"]},
        "actor": {**rnn, "obs_normalization": True, "distribution_cfg": noise},
        "critic": rnn,
    }
    pair: Any = random_weights(build(config))
    stored = {f"{role}_state_dict": getattr(pair, role).state_dict() for role in ("actor", "critic")}
    torch.save(stored | {"iter": 1, "infos": None}, tmp_path / "model.pt")
    spec = load_adapted(NAME, config, tmp_path / "model.pt")

    def own(inputs: dict[str, Tensor], begins: Tensor) -> Named:
        inputs["critic_obs"][:, :6] = inputs["obs"]  # in the array that the bundle is given, too
        seen = {"policy": inputs["obs"], "height": inputs["critic_obs"][:, 6:]}
        obs = tensordict.TensorDict(seen, batch_size=[BATCH])
        pair.actor.reset(begins)
        pair.critic.reset(begins)
        action, value = pair.actor(obs), pair.critic(obs)[:, 0]
        states = {role: getattr(pair, role).get_hidden_state() for role in ("actor", "critic")}
        return {"action": action, "value": value, **held(**states)}

    assert largest_error(spec, exported(spec, tmp_path / "policy.txl"), own) <= LIMIT


CONTINUOUS = {
    "mu_activation": "None",
    "sigma_activation": "None",
    "mu_init": {"name": "default"},
    "sigma_init": {"name": "const_initializer", "val": 0},
    "fixed_sigma": True,
}
RL_GAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "separate LSTMs behind the layers": (
        "continuous_a2c_logstd",
        {
            "separate": True,
            "space": {"continuous": CONTINUOUS},
            "rnn": {"name": "lstm", "units": 8, "layers": 2, "concat_input": True, "layer_norm": True},
        },
    ),
    "a GRU before the layers": (
        "discrete_a2c",
        {
            "separate": False,
            "space": {"discrete": {}},
            "rnn": {"name": "gru", "units": 8, "layers": 1, "before_mlp": True, "concat_output": True},
        },
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", RL_GAMES)
def test_rl_games_own_models(case: str, tmp_path: Path) -> None:
    package("rl_games.algos_torch.model_builder")
    kind, network = RL_GAMES[case]
    mlp = {"units": [16, 8], "activation": "elu", "initializer": {"name": "default"}}
    config = {
        "model": {"name": kind},
        "network": {"name": "actor_critic", "mlp": mlp, **network},
        "actions_num": 3,
        "input_shape": [6],
        "normalize_input": True,
        "normalize_value": True,
    }
    policy: Any = random_weights(build(config))
    spec = load_adapted(NAME, config, policy.state_dict())
    states = tuple(
        torch.zeros(held.shape[0], BATCH, held.shape[2]) for held in policy.a2c_network.get_default_rnn_state()
    )

    def own(inputs: dict[str, Tensor], begins: Tensor) -> Named:
        nonlocal states
        for part in states:
            part[:, begins] = 0
        found = policy({"is_train": False, "prev_actions": None, "obs": inputs["obs"], "rnn_states": states})
        states = tuple(part.clone() for part in found["rnn_states"])
        value = found["values"][:, 0]
        if kind == "discrete_a2c":
            return {"log shares": found["logits"], "value": value, **held(only=states)}
        return {"action": found["mus"], "value": value, **held(actor=states[:2], critic=states[2:])}

    assert largest_error(spec, exported(spec, tmp_path / "policy.txl"), own) <= LIMIT


SB3: dict[str, dict[str, Any]] = {
    "two LSTMs, a Box of actions": {"n_lstm_layers": 2},
    "one LSTM for both": {"shared_lstm": True, "enable_critic_lstm": False},
    "a critic without one": {"enable_critic_lstm": False, "net_arch": {"pi": [8], "vf": [8]}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SB3)
def test_sb3_contribs_own_policy(case: str, tmp_path: Path) -> None:
    policies = package("sb3_contrib.common.recurrent.policies")
    vectors = package("stable_baselines3.common.vec_env.vec_normalize")
    aliases, spaces = package("sb3_contrib.common.recurrent.type_aliases"), package("gymnasium.spaces")
    box = case == next(iter(SB3))
    low, high = np.array([-0.1, -1, -np.inf], np.float32), np.array([0.1, np.inf, 0.05], np.float32)
    policy: Any = random_weights(
        policies.RecurrentActorCriticPolicy(
            spaces.Box(-np.inf, np.inf, (6,)),
            spaces.Box(low, high) if box else spaces.Discrete(3),
            lambda _: 1e-3,
            lstm_hidden_size=8,
            **SB3[case],
        )
    )
    environment = vectors.VecNormalize.__new__(vectors.VecNormalize)
    environment.norm_obs, environment.clip_obs, environment.epsilon = True, 1.5, 1e-8
    environment.obs_rms = vectors.RunningMeanStd(shape=(6,))
    environment.obs_rms.mean, environment.obs_rms.var = np.linspace(-1, 1, 6), np.linspace(0.5, 2, 6)
    spec = adapt(NAME, policy, {"vec_normalize": environment})
    zeros = torch.zeros(SB3[case].get("n_lstm_layers", 1), BATCH, 8)
    states = aliases.RNNStates((zeros, zeros), (zeros, zeros))

    def own(inputs: dict[str, Tensor], begins: Tensor) -> Named:
        nonlocal states
        obs = environment._normalize_obs(inputs["obs"].numpy(), environment.obs_rms)
        before = tuple(part.numpy() for part in states.pi)
        played, after = policy.predict(obs, before, begins.numpy(), deterministic=True)
        given = torch.from_numpy(obs), states, begins.float()
        scores = policy.get_distribution(given[0], states.pi, given[2])[0].distribution
        _, value, _, states = policy.forward(*given, deterministic=True)
        kept = tuple(torch.from_numpy(part) for part in after)
        one = policy.lstm_critic is None
        found = {"value": value[:, 0], **(held(only=kept) if one else held(actor=kept, critic=states.vf))}
        return found | ({"action": torch.from_numpy(played)} if box else {"log shares": scores.logits})

    assert largest_error(spec, exported(spec, tmp_path / "policy.txl"), own) <= LIMIT
