"""Reads rsl_rl's policies: since version 5 two RNNModels, actor and critic; before it one ActorCriticRecurrent."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from txl_runtime.errors import UsageError

from txl_export.adapters.policies.shape import Recurrence, Shape, count
from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec

KEYS = ("obs", "num_actions", "obs_groups", "actor")
_EXPECTED = {
    "obs": 'the width of each group of observations, such as {"policy": 48}',
    "actor": "the model's arguments, as in the runner's config",
    "critic": "the model's arguments, as in the runner's config, or false",
}


class _Place(NamedTuple):
    """Paths to the LSTM or GRU, the normaliser before it, the layers after it, and the distribution of actions."""

    rnn: str
    normalizer: str
    mlp: str
    distribution: str = ""


PLACES = {
    "actor": (
        _Place("actor.rnn.rnn", "actor.obs_normalizer", "actor.mlp", "actor.distribution"),
        _Place("rnn.rnn", "obs_normalizer", "mlp", "distribution"),
        _Place("memory_a.rnn", "actor_obs_normalizer", "actor"),
        _Place("memory_s.rnn", "student_obs_normalizer", "student"),
    ),
    "critic": (
        _Place("critic.rnn.rnn", "critic.obs_normalizer", "critic.mlp"),
        _Place("memory_c.rnn", "critic_obs_normalizer", "critic"),
    ),
}
"""Paths in each version and class of the package, for the actor and for the critic."""
_EXPORTED = {"obs_normalizer": "obs_normalizer", "normalizer": "obs_normalizer", "mlp": "mlp", "actor": "mlp"}
_EXPORTED |= {"rnn": "rnn.rnn", "memory": "rnn.rnn"}
"""Path in our module by the name in TorchScript archives for robots (policy.pt), which keep their state in buffers."""


def build(config: Mapping[str, Any]) -> nn.Module:
    """Return actor and critic for a runner's config and the environment's sizes.

    `obs` gives the width of each group of observations, `num_actions` the number of actions; `obs_groups`, `actor` and
    `critic` come from the runner's config. Without `critic` only the actor is built.
    """
    package, tensordict = import_module("rsl_rl.models"), import_module("tensordict")
    for key in ("obs", *(role for role in ("actor", "critic") if _has(config, role))):
        if not isinstance(config[key], Mapping):
            raise UsageError(f"{key} is {config[key]!r} in the config, expected {_EXPECTED[key]}")
    widths = {name: count(f"obs.{name}", width) for name, width in config["obs"].items()}
    seen = tensordict.TensorDict({name: torch.zeros(1, n) for name, n in widths.items()}, batch_size=[1])
    models = nn.ModuleDict()
    for role, width in (("actor", count("num_actions", config["num_actions"])), ("critic", 1)):
        if _has(config, role):
            arguments = dict(config[role])
            model_class = getattr(package, name := arguments.pop("class_name", "RNNModel"), None)
            if model_class is None:
                raise UsageError(f"class_name of {role} is {name!r}, which rsl_rl.models lacks; expected RNNModel")
            models[role] = model_class(seen, config["obs_groups"], role, width, **arguments)
    return models


def state_dict(stored: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge the state dicts of a checkpoint's models into one; a student is treated as the actor.

    An archive for robots contains only the actor, under different names (`_EXPORTED`).
    """
    stores = {"actor_state_dict": "actor", "student_state_dict": "actor", "critic_state_dict": "critic"}
    parts = [(role, stored.get(key)) for key, role in stores.items()]
    named = [(role, part) for role, part in parts if isinstance(part, Mapping)]
    state = {f"{role}.{key}": tensor for role, part in named for key, tensor in part.items()} or stored
    if "hidden_state" in state:
        split = [(*key.partition("."), tensor) for key, tensor in state.items()]
        state = {f"actor.{_EXPORTED[part]}.{rest}": tensor for part, _, rest, tensor in split if part in _EXPORTED}
    alone = _has(config, "actor") and not _has(config, "critic")
    return {key: tensor for key, tensor in state.items() if not (alone and str(key).startswith("critic."))}


def _has(config: Mapping[str, Any], role: str) -> bool:
    return config.get(role) not in (None, False)


def shape(module: Any, config: Mapping[str, Any]) -> Shape | None:
    """Return the `Shape` of a policy of the package; None for any other module.

    `"critic": false` in the config leaves out the critic and its input.
    """
    places = {role: place for role, many in PLACES.items() for place in many if _at(module, place.rnn) is not None}
    # models without memory exist since version 5
    plain = {role for role in PLACES if _at(module, f"{role}.is_recurrent") is False}
    places |= {role: PLACES[role][0] for role in plain}
    if "actor" not in places:
        return None
    if config.get("critic", True) is False:
        places.pop("critic", None)
    for role, place in places.items():
        if not isinstance(mlp := _at(module, place.mlp), nn.Module):
            raise UsageError(f"{place.mlp} of the {role} is a {type(mlp).__name__}, expected its layers")
    observed = {"actor": "obs", "critic": "critic_obs"}
    named = {"actor": "action", "critic": "value"}

    def play(policy: Any, inputs: Named, recur: Recurrence) -> list[Tensor]:
        results = []
        for role, place in places.items():
            normal = _at(policy, place.normalizer)
            rows = inputs[observed[role]] if normal is None else normal(inputs[observed[role]])
            rows = _at(policy, place.mlp)(rows if role in plain else recur(role, rows))
            if place.distribution and (noise := _at(policy, place.distribution)) is not None:
                rows = noise.deterministic_output(rows)
            elif getattr(policy, "state_dependent_std", False) and role == "actor":
                rows = rows[..., 0, :]
            results.append(rows[:, 0] if role == "critic" else rows)
        return results

    return Shape(
        rnns={role: place.rnn for role, place in places.items() if role not in plain},
        inputs=[
            InputSpec(
                observed[role], ("B", module[role].obs_dim if role in plain else _at(module, place.rnn).input_size)
            )
            for role, place in places.items()
        ],
        outputs=[OutputSpec(named[role]) for role in places],
        play=play,
    )


def _at(module: Any, path: str) -> Any:
    """Return the object at a path such as "actor.rnn.rnn"; None if nothing is there."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
