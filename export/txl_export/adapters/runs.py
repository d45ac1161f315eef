"""Finds the policy in a trainer's folder or file: its checkpoint, its settings, and the facts about the environment.

rsl_rl, skrl and rl_games, as Isaac Lab and mjlab call them, leave a folder with `params/agent.yaml` and
`params/env.yaml`. sb3-contrib leaves a zip, from which plain fields and `policy.pth` are read. A setting that is
missing or unknown is refused by its name; a line says which files were used.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from txl_runtime.errors import CheckpointError, one_line, some

from txl_export.checkpoints.files.loading import load_file
from txl_export.checkpoints.files.yaml_files import MOST_BYTES, read_yaml
from txl_export.checkpoints.plain_weights import read_stored
from txl_export.families.own_module.adapted import Adapted
from txl_export.families.own_module.own_code import own_code
from txl_export.regular import read_regular

AGENT, ENVIRONMENT = Path("params", "agent.yaml"), Path("params", "env.yaml")
MOST_ZIPPED, MOST_DATA = 1 << 28, 1 << 24
"""Most bytes of a zip's weights, unpacked, and of its JSON, which holds the last observations of all environments.

For example, 4096 environments of 235 observations take 10 MB of JSON: two arrays of 4 bytes per number, in base64.
"""
TERM = ("scale", "clip", "history_length")
ACTION = ("joint_names", "actuator_names", "preserve_order", "scale", "offset", "use_default_offset", "clip")
"""Settings of an observation's term, and of an action, that become facts if the environment's file has them."""
Found = tuple[str, Any, dict[str, Any], dict[str, Any], list[Path]]
"""The trainer, the checkpoint (its path or its tensors), the adapter's config, facts, and the files that were read."""


def is_run(path: Path) -> bool:
    """Return whether a path is a folder or zip that `read_run` reads."""
    # a Hugging Face folder may come from a stranger, so its files are not listed
    if (path / "config.json").exists():
        return False
    return (path / AGENT).is_file() or bool(_zips(path))


def read_run(path: Path) -> Adapted:
    """Return the policy of a run for the adapter "recurrent-policy".

    Raises:
        CheckpointError: a file is missing, damaged or of a kind that is not known here.
        BackendError: PyYAML is not installed.
    """
    with own_code(f"{path}: its settings are not laid out as this trainer's are"):
        if not (path / AGENT).is_file():
            return _adapted(path, _sb3(_only(path, _zips(path))))
        agent = _yaml(path / AGENT)
        environment = _yaml(path / ENVIRONMENT) if (path / ENVIRONMENT).is_file() else None
        readers = {"params": _rl_games, "models": _skrl, "actor": _rsl_rl}
        reader = next((readers[key] for key in readers if isinstance(agent.get(key), Mapping)), None)
        if reader is None:
            raise CheckpointError(
                f"{path / AGENT}: has {some([*map(str, agent)], 6)}, expected rsl_rl's actor (since 5.0), skrl's "
                "models or rl_games' params; give --adapter recurrent-policy, --config and --weights"
            )
        run = reader(path, agent)
        groups = run[3].pop("groups", None)
        known = {} if environment is None else _environment(environment, groups)
    trainer, weights, config, facts, files = run
    read = [*files, path / AGENT, *([] if environment is None else [path / ENVIRONMENT])]
    return _adapted(path, (trainer, weights, config, {**facts, **known}, read))


def _adapted(path: Path, run: Found) -> Adapted:
    """Return the model with its adapter and facts, and with a line that names the files that were read."""
    trainer, weights, config, facts, read = run
    facts = {"trainer": trainer, **{key: value for key, value in facts.items() if value is not None and value != []}}
    names = [str(file.relative_to(path if path.is_dir() else path.parent)) for file in read]
    lacks = [key for key in ("rate", "observations", "actions") if key not in facts]
    message = f"{path}: a run of {trainer}; taken are {', '.join(names)}"
    message += f"; not said there: {', '.join(lacks)}" if lacks else ""
    return Adapted("recurrent-policy", weights, config, facts, message)


def _rsl_rl(path: Path, agent: Mapping[str, Any]) -> Found:
    checkpoint = _newest(path, "model_*.pt")
    actor, state = dict(agent["actor"]), _part(checkpoint, read_stored(checkpoint), "actor_state_dict")
    name = actor.get("class_name", "MLPModel")
    if name not in ("MLPModel", "RNNModel"):
        raise CheckpointError(f"{path / AGENT}: class_name of actor is {name}, expected MLPModel or RNNModel")
    plain = name == "MLPModel"
    settings = {
        key: value for key, value in actor.items() if value is not None and not (plain and key.startswith("rnn_"))
    }
    width = _tensor(checkpoint, state, "mlp.0.weight" if plain else "rnn.rnn.weight_ih_l0").shape[1]
    deviations = [tensor for key, tensor in state.items() if re.fullmatch(r"distribution\.(log_)?std_param", key)]
    last = max((key for key in state if key.startswith("mlp.")), key=lambda key: int(key.split(".")[1]))
    count = deviations[0].shape[0] if deviations else state[last].shape[0]
    # if the file has no parameters for the deviations, they also come out of the last layer
    if not deviations and settings.get("distribution_cfg"):
        count //= 2
    groups = list((agent.get("obs_groups") or {}).get("actor", ["policy"]))
    config = {"obs": {"policy": width}, "num_actions": count, "obs_groups": {"actor": ["policy"]}, "actor": settings}
    normal = "in the graph" if settings.get("obs_normalization") else None
    return (
        "rsl_rl",
        checkpoint,
        config,
        {"groups": groups, "normaliser": normal, "clip_actions": agent.get("clip_actions")},
        [checkpoint],
    )


def _rl_games(path: Path, agent: Mapping[str, Any]) -> Found:
    params = agent["params"]
    name = str(params["config"]["name"])
    if Path(name).name != name:
        raise CheckpointError(f"{path / AGENT}: name is {name}, expected one without a path; check the run")
    best = path / "nn" / f"{name}.pth"
    checkpoint = best if best.is_file() else _newest(path / "nn", "*.pth")
    state = _part(checkpoint, read_stored(checkpoint), "model")
    output = next((key for key in ("a2c_network.mu.weight", "a2c_network.logits.weight") if key in state), "")
    means = "running_mean_std.running_mean"
    layers = "actor_mlp.0.weight" if not params["network"].get("rnn", {}).get("before_mlp") else "rnn.rnn.weight_ih_l0"
    first = means if means in state else f"a2c_network.{layers}"
    sizes: dict[str, Any] = {"actions_num": _tensor(checkpoint, state, output or "a2c_network.mu.weight").shape[0]}
    sizes |= {"input_shape": [_tensor(checkpoint, state, first).shape[-1]]}
    around, normal = params.get("env") or {}, "in the graph" if means in state else None
    limits = {key: around.get(key) for key in ("clip_observations", "clip_actions")}
    # a player of rl_games clips actions to 1, then rescales them to the limits of the space
    if params["config"].get("clip_actions", True):
        limits |= {"clip_actions": 1.0, "rescale_actions": limits["clip_actions"]}
    return "rl_games", checkpoint, {"params": params, **sizes}, {"normaliser": normal, **limits}, [checkpoint]


def _skrl(path: Path, agent: Mapping[str, Any]) -> Found:
    folder = path / "checkpoints"
    checkpoint = folder / "best_agent.pt" if (folder / "best_agent.pt").is_file() else _newest(folder, "agent_*.pt")
    stored, settings = read_stored(checkpoint), agent["models"]["policy"]
    state = _part(checkpoint, stored, "policy")
    normal, scaler = _scaler(path, checkpoint, stored, agent.get("agent") or {})
    (network,), output = settings["network"], str(settings["output"])
    if network["input"] not in ("OBSERVATIONS", "STATES") or output not in ("ACTIONS", "tanh(ACTIONS)"):
        raise CheckpointError(
            f"{path / AGENT}: the policy reads {network['input']} and returns {output}, expected OBSERVATIONS and "
            "ACTIONS or tanh(ACTIONS); write a build for it"
        )
    own = re.compile(rf"(?:{re.escape(network['name'])}_container\.\d+|policy_layer)\.(?:weight|bias)")
    others = [key for key in state if not own.fullmatch(key) and not re.match(r"log_std|value_layer\.", key)]
    if others or not all(isinstance(size, int) for size in network["layers"]):
        layers = others or list(map(str, network["layers"]))
        raise CheckpointError(f"{checkpoint}: its policy has {some(layers, 4)}, expected linear layers; write a build")
    matrices = [tensor for key, tensor in state.items() if own.fullmatch(key)]
    weights = {f"layers.{place // 2}.{('weight', 'bias')[place % 2]}": one for place, one in enumerate(matrices)}
    weights |= {key: normal[key].float() for key in ("running_mean", "running_variance") if normal}
    activations = network.get("activations") or ""
    listed = [activations] * len(network["layers"]) if isinstance(activations, str) else list(activations)
    sizes = [matrices[0].shape[1], *(tensor.shape[0] for tensor in matrices[::2])]
    config = {
        "widths": sizes,
        "activations": [*listed, "tanh" if output != "ACTIONS" else ""],
        "normalised": bool(normal),
        "scaler": scaler,
    }
    facts = {"normaliser": "in the graph" if normal else None, "clip_actions": settings.get("clip_actions")}
    return "skrl", weights, config, facts, [checkpoint]


def _scaler(
    path: Path, checkpoint: Path, stored: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Return the tensors and arguments of the scaler that normalises observations; {} and {} without a scaler.

    As in skrl's runner, `state_preprocessor` is used if the settings have no `observation_preprocessor`. Checkpoints
    from before skrl 2 store the scaler as `state_preprocessor` in either case.
    """
    new, old = "observation_preprocessor", "state_preprocessor"
    name = new if new in settings else old
    kind = settings.get(name)
    if kind not in (None, "RunningStandardScaler"):
        raise CheckpointError(f"{path / AGENT}: {name} is {kind}, expected RunningStandardScaler; write a build")
    key = new if name == new or new in stored else old
    if bool(kind) != (key in stored):
        has = f"has {key}" if key in stored else f"has no {key}"
        raise CheckpointError(f"{checkpoint}: {has}, and {name} of {AGENT} is {kind}; give the settings of this run")
    return (_part(checkpoint, stored, key), settings.get(f"{name}_kwargs") or {}) if kind else ({}, {})


def _sb3(path: Path) -> Found:
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.getinfo(name) for name in ("data", "policy.pth")}
            for name, most in (("data", MOST_DATA), ("policy.pth", MOST_ZIPPED)):
                if parts[name].file_size > most:
                    raise CheckpointError(f"{path}: {name} has more than {most} bytes, expected a policy")
            data, policy = json.loads(archive.read("data")), archive.read("policy.pth")
    except (KeyError, OSError, zipfile.BadZipFile, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {one_line(error)}; expected the zip that model.save of sb3-contrib wrote"
        ) from None
    seen, acts, arguments = data["observation_space"], data["action_space"], dict(data.get("policy_kwargs") or {})
    if not all(str(space.get(":type:")).endswith(".Box'>") and "float" in space["dtype"] for space in (seen, acts)):
        kinds = f"{seen.get(':type:')} and {acts.get(':type:')}"
        raise CheckpointError(
            f"{path}: observations and actions are {kinds}, expected two Boxes of floats; give it in Python"
        )
    limits = [
        np.array(re.findall(r"[-\d.einf]+", acts[key]), np.float32).reshape(acts["_shape"]) for key in ("low", "high")
    ]
    arguments = {key: value for key, value in arguments.items() if not key.startswith((":", "optimizer"))}
    config = {"observation_shape": seen["_shape"], "limits": limits, "policy_kwargs": arguments}
    read, beside = [path], [*path.parent.glob("*vecnormalize*.pkl"), *path.parent.glob("*/vecnormalize.pkl")]
    if data.get("_last_original_obs") is not None:
        if not beside:
            raise CheckpointError(
                f"{path}: its training normalised, and no *vecnormalize*.pkl lies beside it; "
                "put what env.save wrote there"
            )
        read.append(_only(path.parent, beside))
        config["vec_normalize"] = _vec_normalize(read[-1], tuple(seen["_shape"]))
    facts = {"normaliser": "in the graph" if config.get("vec_normalize") else None}
    with tempfile.TemporaryDirectory() as place:  # the weights are read as any checkpoint is
        (Path(place) / "policy.pth").write_bytes(policy)
        return "sb3-contrib", read_stored(Path(place) / "policy.pth"), config, facts, read


def _vec_normalize(path: Path, shape: tuple[int, ...]) -> Any:
    """Return the numbers of a pickled VecNormalize; None if it does not normalise observations.

    No code in the file is run. `shape` is the shape of an observation, and so of mean and variance.
    """
    content = load_file(path).content
    try:
        if not content.state["norm_obs"]:
            return None
        rms = content.state["obs_rms"].state
        mean, var = (np.asarray(rms[key], np.float64) for key in ("mean", "var"))
        epsilon, clip = (float(content.state[key]) for key in ("epsilon", "clip_obs"))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"{path}: {reason}; expected a VecNormalize of one Box, by its save") from None
    if not (mean.shape == var.shape == shape and np.isfinite([mean, var]).all() and (var >= 0).all()):
        has = f"mean {list(mean.shape)} and variance {list(var.shape)}"
        raise CheckpointError(f"{path}: has {has}, expected finite ones of {list(shape)}, variances ≥ 0")
    if not (clip > 0 and 0 <= epsilon < math.inf):
        raise CheckpointError(f"{path}: clip_obs is {clip} and epsilon {epsilon}, expected numbers > 0")
    return SimpleNamespace(obs_rms=SimpleNamespace(mean=mean, var=var), norm_obs=True, epsilon=epsilon, clip_obs=clip)


def _environment(env: Mapping[str, Any], groups: list[str] | None) -> dict[str, Any]:
    """Return rate, observations and actions from the settings of an environment of Isaac Lab or mjlab.

    The groups of mjlab have their terms under `terms`.
    """
    sim = env.get("sim") or {}
    step = sim.get("dt") or (sim.get("mujoco") or {}).get("timestep")
    facts: dict[str, Any] = {}
    if isinstance(step, int | float) and math.isfinite(step) and step > 0 and "decimation" in env:
        rate = round(1 / (step * int(env["decimation"])), 6)
        facts |= {"rate": rate} if math.isfinite(rate) else {}
    seen = env.get("observations")
    seen, facts["observations"] = seen if isinstance(seen, Mapping) else {}, []
    for name in groups or [name for name in ("policy", "actor") if name in seen]:
        group = seen.get(name) or {}
        terms = {
            key: term
            for key, term in (group.get("terms") or group).items()
            if isinstance(term, Mapping) and "func" in term
        }
        listed = [{"name": key, **_settings_of(term, TERM)} for key, term in terms.items()]
        facts["observations"].append({"group": name, **_settings_of(group, TERM[2:]), "terms": listed})
    acts = env.get("actions")
    acts = acts if isinstance(acts, Mapping) else {}
    facts["actions"] = [
        {"name": name, **_settings_of(term, ACTION)} for name, term in acts.items() if isinstance(term, Mapping)
    ]
    return facts


def _settings_of(term: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: term[key] for key in keys if term.get(key) not in (None, 0)}


def _part(path: Path, stored: Any, key: str) -> Mapping[str, Tensor]:
    part = stored.get(key) if isinstance(stored, Mapping) else None
    if not isinstance(part, Mapping) or not all(isinstance(value, Tensor) for value in part.values()):
        raise CheckpointError(
            f"{path}: has no tensors under {key}, expected the trainer's own checkpoint; check the run"
        )
    return part


def _tensor(path: Path, state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise CheckpointError(
            f"{path}: lacks {name} beside {some(list(state), 4)}; expected a policy of these settings"
        )
    return state[name]


def _newest(folder: Path, pattern: str) -> Path:
    """Return the file whose name has the largest number, e.g. model_1500.pt beside model_50.pt."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise CheckpointError(f"{folder}: has no {pattern}, expected the training's checkpoint; check the run")
    return max(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)[-1:]])


def _zips(path: Path) -> list[Path]:
    """Return sb3's policies at a path: the zip itself; in a folder best_model.zip, else model.zip, else all zips."""
    named = [file for file in (path / "best_model.zip", path / "model.zip") if file.is_file()]
    files = [path] if path.suffix == ".zip" else named[:1] or sorted(path.glob("*.zip"))
    return [file for file in files if file.is_file() and _is_policy(file)]


def _is_policy(path: Path) -> bool:
    with suppress(OSError, ValueError, NotImplementedError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return {"data", "policy.pth"} <= set(archive.namelist())
    return False


def _only(path: Path, files: list[Path]) -> Path:
    if len(files) != 1:
        names = some([file.name for file in files], 4) or "none"
        raise CheckpointError(f"{path}: has {names}, expected one file; give it by its path, or put it there")
    return files[0]


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = read_yaml(path, read_regular(path, MOST_BYTES).decode(), typed=True)
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}; expected the YAML that the training wrote") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a table; check the run")
    return content
