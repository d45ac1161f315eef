"""The adapter of episodic-transformer-memory-ppo beside the loop of a player; the repository is a stand-in.

It is no package, so tests have no copy of it: tests/stand_ins/episodic_repository has its interface and tensor names.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from own_loops import LIMIT, Stepped, apart, randomised
from torch import nn
from torch.distributions import Distribution
from txl_export.adapters.episodic import build, step_spec
from txl_export.adapters.registry import adapt, load_adapted
from txl_runtime.errors import TxlError, UsageError

REPOSITORY = Path(__file__).parents[2] / "stand_ins" / "episodic_repository"
BATCH, STEPS, WINDOW = 3, 14, 5
BLOCKS: dict[str, Any] = {
    "num_blocks": 2,
    "embed_dim": 8,
    "num_heads": 2,
    "memory_length": WINDOW,
    "positional_encoding": "relative",
    "layer_norm": "pre",
    "gtrxl": False,
    "gtrxl_bias": 0.5,
}
POLICY: dict[str, Any] = {
    "hidden_layer_size": 8,
    "observation": 6,
    "actions": [3],
    "max_episode_length": STEPS,
    "repository": str(REPOSITORY),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "relative, norms before": {},
    "learned, norms behind, gates": {"positional_encoding": "learned", "layer_norm": "post", "gtrxl": True},
    "no positions, no norms, two branches": {"positional_encoding": "", "layer_norm": "", "actions": [3, 4]},
    "images": {"observation": [1, 40, 44], "positional_encoding": "learned"},
    "a window of the whole episode": {"memory_length": STEPS, "gtrxl": True},
    "a window of one row, which is never seen": {"memory_length": 1},
}


@pytest.fixture(autouse=True)
def _fresh_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test imports `transformer` and `model` anew, and leaves none."""
    for name in ("transformer", "model"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is put back
        monkeypatch.delitem(sys.modules, name)


class Own:
    """The loop of a player: for each sequence a memory, a step counter, and tables of masks and windows."""

    def __init__(self, module: Any) -> None:
        core = module.transformer
        self._module, steps, window = module, core.max_episode_steps, core.config["memory_length"]
        self._mask = torch.ones(window, window).tril(-1)
        first = [list(range(window))] * (window - 1)
        self._windows = torch.tensor(first + [list(range(row, row + window)) for row in range(steps - window + 1)])
        self._zeros = torch.zeros(steps, core.num_blocks, core.embed_dim)
        self._memory, self._t = [self._zeros.clone() for _ in range(BATCH)], [0] * BATCH

    def reset(self, rows: Any) -> None:
        for row in rows:
            self._memory[row], self._t[row] = self._zeros.clone(), 0

    def run(self, inputs: Any) -> Any:
        found = [self._one(row, torch.from_numpy(inputs["obs"][row : row + 1])) for row in range(BATCH)]
        outputs = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        after = {"memory": torch.stack(self._memory).numpy().copy(), "t": np.array(self._t, np.int32)}
        return outputs, {}, after

    def _one(self, row: int, obs: Any) -> dict[str, Any]:
        t, memory = self._t[row], self._memory[row]
        window, mask = self._windows[t : t + 1], self._mask[[min(t, len(self._mask) - 1)]]
        with torch.no_grad():
            policy, value, new = self._module(obs, memory[window[0]][None], mask, window)
        memory[t], self._t[row] = new[0], t + 1
        names = ["logits"] if len(policy) == 1 else [f"logits.{number}" for number in range(len(policy))]
        return {name: one.logits.numpy() for name, one in zip(names, policy, strict=True)} | {"value": value.numpy()}


def model(options: dict[str, Any]) -> Any:
    blocks = BLOCKS | {name: value for name, value in options.items() if name in BLOCKS}
    rest = {name: value for name, value in options.items() if name not in BLOCKS}
    torch.manual_seed(0)
    return randomised(build(POLICY | rest | {"transformer": blocks}))


def drawn(module: Any) -> Any:
    return lambda random: {"obs": random.standard_normal((BATCH, *module.observation_space_shape), np.float32)}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_the_players_loop(options: dict[str, Any]) -> None:
    module = model(options)
    assert apart(Stepped(step_spec(module), BATCH), Own(module), drawn(module), BATCH, 60, longest=STEPS) <= 2e-6


def test_after_the_last_step_of_an_episode_no_row_is_written() -> None:
    module = model({})
    stepped, random = Stepped(step_spec(module), BATCH), np.random.default_rng(0)
    for _ in range(STEPS):
        stepped.run(drawn(module)(random))
    full = stepped.state()
    assert full["t"].tolist() == [STEPS] * BATCH
    assert np.abs(full["memory"]).max(axis=(2, 3)).all()
    stepped.run(drawn(module)(random))
    assert all(np.array_equal(stepped.state()[name], array) for name, array in full.items())


def test_the_repository_is_found_where_the_config_says_in_the_current_folder_or_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = BLOCKS | {"input_dim": 6, "max_episode_steps": STEPS}
    with pytest.raises(UsageError, match=r"episodic.*name its folder as .repository. in the config"):
        load_adapted("episodic", config, {"any": torch.zeros(1)})
    before = list(sys.path)
    assert type(build(config | {"repository": str(REPOSITORY)})).__module__ == "transformer"
    assert sys.path == before
    del sys.modules["transformer"]
    monkeypatch.chdir(REPOSITORY)
    assert type(build(config)).__module__ == "transformer"
    del sys.modules["transformer"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(REPOSITORY)
    assert type(build(config)).__module__ == "transformer"


def test_another_module_of_that_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "transformer.py").write_text("class Other: ...\n")
    with pytest.raises(UsageError, match=r"transformer\.py, expected the one of episodic-transformer-memory-ppo"):
        build(BLOCKS | {"repository": str(tmp_path)})
    with pytest.raises(UsageError, match=r"transformer\.py, expected the one of episodic-transformer-memory-ppo"):
        build(BLOCKS | {"repository": str(REPOSITORY)})  # imported already, from another folder


def test_a_trainers_checkpoint_is_loaded_with_its_own_config(tmp_path: Path) -> None:
    trained = model({})
    config = {"hidden_layer_size": 8, "transformer": BLOCKS, "environment": {"type": "CartPole"}}
    torch.save((trained.state_dict(), config), tmp_path / "run.nn")
    loaded = load_adapted("episodic", POLICY, tmp_path / "run.nn").module
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in trained.state_dict().items())
    with pytest.raises(TxlError, match="the config lacks observation"):
        load_adapted("episodic", {"repository": str(REPOSITORY)}, tmp_path / "run.nn")


def test_a_call_leaves_the_check_of_distributions_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile turns it off for the whole process
    module = model({})
    Stepped(step_spec(module), BATCH).run(drawn(module)(np.random.default_rng(0)))
    assert Distribution._validate_args


def test_a_window_longer_than_an_episode_and_other_models_are_refused() -> None:
    module = model({})
    module.transformer.config["memory_length"] = STEPS + 1
    with pytest.raises(UsageError, match=rf"memory_length is {STEPS + 1}, expected at most the {STEPS} steps"):
        step_spec(module)
    with pytest.raises(UsageError, match="this is a Linear, expected the repository's Transformer"):
        step_spec(nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned, norms behind, gates", "images"])
def test_a_bundle_stays_with_the_player_over_200_steps_with_resets(name: str, tmp_path: Path) -> None:
    module = model(OPTIONS[name])
    path = tmp_path / "policy.txl"
    txl_export.export(adapt("episodic", module), path, batch_size=BATCH, verify=False)
    stream = txl_runtime.load(path, "cpu").stream()
    assert apart(stream, Own(module), drawn(module), BATCH, longest=STEPS) <= LIMIT
