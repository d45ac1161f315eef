"""Reads rl_games' policies: models around an `a2c_network`, with normalisers of observations and values."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from txl_runtime.errors import UsageError

from txl_export.adapters.policies.shape import Recurrence, Shape, count
from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec

KEYS = ("model", "network", "actions_num", "input_shape")
_REST = {"num_seqs": 1, "value_size": 1, "normalize_value": False, "normalize_input": False}
CLIP = 5.0
"""Limit of normalised numbers, -5 … 5, as in the package's normaliser."""


def unfolded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the entries of a training's `params` at the top level.

    Of the training's own `config`, the keys in `_REST` are at the top level, too.
    """
    params = config.get("params")
    params = params if isinstance(params, Mapping) else {}
    trained = {**config, **params}.get("config")
    settings = {key: trained[key] for key in _REST if key in trained} if isinstance(trained, Mapping) else {}
    return {**settings, **params, **config}


def build(config: Mapping[str, Any]) -> nn.Module:
    """Return the model that rl_games builds of a training's `model` and `network`, and values such as `actions_num`."""
    params = {key: config[key] for key in ("model", "network")}
    sizes = config["input_shape"] if isinstance(config["input_shape"], list | tuple) else [config["input_shape"]]
    arguments = {"actions_num": config["actions_num"], "input_shape": tuple(count("input_shape", n) for n in sizes)}
    rest = {key: config.get(key, value) for key, value in _REST.items()}
    builder = import_module("rl_games.algos_torch.model_builder").ModelBuilder()
    model: nn.Module = builder.load(params).build(arguments | rest)
    return model


def shape(module: Any, config: Mapping[str, Any]) -> Shape | None:
    """Return the `Shape` of a model that has an `a2c_network`; None for any other module."""
    network = getattr(module, "a2c_network", None)
    if network is None:
        return None
    if not network.is_rnn() or network.rnn_name not in ("lstm", "gru"):
        rnn = network.rnn_name if network.is_rnn() else "no rnn"
        raise UsageError(f"the network has {rnn}, expected lstm or gru; one without memory needs no stream")
    if getattr(network, "central_value", False) or isinstance(module.obs_shape, dict):
        rnn = "a central value" if getattr(network, "central_value", False) else "a dictionary of observations"
        raise UsageError(f"the model is one with {rnn}, which is not supported; write a StepSpec for it")
    rnns = {"actor": "a2c_network.a_rnn.rnn", "critic": "a2c_network.c_rnn.rnn"}
    return Shape(
        rnns=rnns if network.separate else {"rnn": "a2c_network.rnn.rnn"},
        inputs=[InputSpec("obs", ("B", *module.obs_shape))],
        outputs=[OutputSpec("action"), OutputSpec("value")],
        play=_play,
    )


def _play(policy: Any, inputs: Named, recur: Recurrence) -> tuple[Tensor, Tensor]:
    """Run one position; compute the normalisers here, because a capture cannot read the package's TorchScript."""
    obs = inputs["obs"]
    if policy.normalize_input:
        mean, deviation = _moments(policy.running_mean_std)
        obs = torch.clamp((obs - mean) / deviation, -CLIP, CLIP)
    arguments = {"obs": obs, "rnn_states": tuple(recur.states.values()), "seq_length": 1}
    scores, *_, value, after = policy.a2c_network(arguments)
    recur.states = dict(zip(recur.states, after, strict=True))
    if policy.normalize_value:
        mean, deviation = _moments(policy.value_mean_std)
        value = torch.clamp(value, -CLIP, CLIP) * deviation + mean
    action = torch.cat(scores, -1) if isinstance(scores, list) else scores
    return action, value[:, 0] if value.shape[-1] == 1 else value


def _moments(normaliser: Any) -> tuple[Tensor, Tensor]:
    return normaliser.running_mean.float(), torch.sqrt(normaliser.running_var.float() + normaliser.epsilon)
