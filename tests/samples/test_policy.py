"""The policies of `samples/policy`: what the mazes ask for, and that bundles play as PyTorch does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime

pytestmark = pytest.mark.slow(keep=9)

FOLDER = Path(__file__).parents[2] / "samples" / "policy"
FILES = ("maze", "policy", "lstm", "gtrxl", "train", "play")
SMALL = {"lstm": {"WIDTH": 8}, "gtrxl": {"LAYERS": 1, "WIDTH": 8, "HEADS": 2, "MEMORY": 5}}
EPISODES, CLOSE = 200, 1e-4


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """All files of the sample, imported as its scripts import each other."""
    monkeypatch.syspath_prepend(FOLDER)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in FILES})
    for name in FILES:
        del sys.modules[name]


def mean(episodes: list[Any]) -> float:
    return float(np.mean([episode.returned for episode in episodes]))


def bundle_player(sample: Any, spec: Any, path: Path, rows: int, precision: str = "fp32") -> Any:
    made = txl_export.export(
        spec, path, batch_size=rows, segment_length=1, precision=precision, verify=False, force=True
    )
    return sample.play.BundlePlayer(txl_runtime.load(made.path, "cpu"))


def disturbed(player: Any, size: float) -> Any:
    """The player, with noise of this size on its scores."""
    random = np.random.default_rng(0)
    return lambda observation: player.scores(observation) + size * random.normal(size=(len(observation), 3))


def test_with_a_memory_all_doors_are_right_and_without_one_few(sample: Any) -> None:
    mazes, random = sample.maze.Mazes(50, seed=3), np.random.default_rng(0)
    returned, ended, forgetful = np.zeros(50), 0, sample.maze.Mazes(50, seed=3)
    guessed, left_by = 0, 0
    for _ in range(100):
        rewards, left = mazes.act(mazes.right_action())
        returned += rewards
        assert (returned[left] == sample.maze.DOORS).all()
        returned[left], ended = 0, ended + int(left.sum())
        guess = np.where(forgetful.at_door().any(1), random.integers(1, 3, 50), sample.maze.AHEAD)
        rewards, left = forgetful.act(guess)
        guessed, left_by = guessed + int(rewards.sum()), left_by + int(left.sum())
    assert ended > 100
    assert guessed / left_by == pytest.approx(sample.maze.FORGETFUL, abs=0.15)


def test_an_episode_is_the_same_whatever_other_rows_do(sample: Any) -> None:
    def walk(rows: int) -> list[Any]:
        mazes: list[Any] = []

        def random_but_the_same(observation: np.ndarray) -> np.ndarray:
            return np.eye(3)[(np.abs(observation[:, -1]) * 7).astype(int) % 2]

        mazes = sample.maze.play(random_but_the_same, lambda left: None, rows, 40)
        return [(episode.actions, episode.returned) for episode in mazes]

    assert walk(1) == walk(16)


def test_no_sign_is_seen_at_a_door_nor_a_door_behind_the_last_step(sample: Any) -> None:
    mazes = sample.maze.Mazes(500, seed=0)
    assert (mazes.doors[:, 0] > sample.maze.DOORS - 1).all()
    assert (np.diff(mazes.doors, axis=1) > 0).all()
    assert mazes.doors.max() < sample.maze.LONGEST <= SMALL["gtrxl"]["MEMORY"] * 5
    observations, actions, doors, weights = sample.maze.lessons(20, seed=0)
    assert observations.shape == (20, sample.maze.LONGEST, sample.maze.SEEN)
    assert (actions[weights == 1] != sample.maze.AHEAD).all()
    assert (weights == 1).sum() == 20 * sample.maze.DOORS
    assert doors.max() == sample.maze.DOORS


def test_the_running_mean_is_that_of_all_that_was_seen(sample: Any) -> None:
    policy, parts = sample.policy.Policy(4), [torch.randn(7, 5, 9) * 3 + 2, torch.randn(20, 9), torch.randn(1, 9)]
    for part in parts:
        policy.see(part)
    rows = torch.cat([part.reshape(-1, 9) for part in parts])
    torch.testing.assert_close(policy.mean, rows.mean(0))
    torch.testing.assert_close(policy.variance, rows.var(0, correction=0))
    assert policy.normal(torch.full((9,), 1e9)).tolist() == [sample.policy.LIMIT] * 9


@pytest.mark.parametrize("name", ["gtrxl", pytest.param("lstm", marks=pytest.mark.slow)])
def test_a_bundle_plays_as_pytorch_does_and_a_forgotten_reset_shows(
    name: str, sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = getattr(sample, name)
    for constant, value in SMALL[name].items():
        monkeypatch.setattr(model, constant, value)
    spec = sample.train.train(model, updates=2)
    with torch.no_grad():
        spec.module.action.bias[sample.maze.AHEAD] += 5  # so that it comes to the first door, at least
    theirs = sample.train.TorchPlayer(spec, 4)
    expected = sample.maze.play(theirs.scores, theirs.reset, 4, 20)
    ours = bundle_player(sample, spec, tmp_path / "policy.txl", 4)
    found = sample.maze.play(ours.scores, ours.reset, 4, 20)
    counts = sample.play.compare(found, expected)
    assert counts.decisions > 80
    assert counts.excess("fp32", "cpu") == []
    assert counts.returns_differ == 0
    for one, other in zip(found, expected, strict=True):
        if one.actions == other.actions:
            np.testing.assert_allclose(one.scores, other.scores, atol=CLOSE)
    ours.reset(np.ones(4, bool))
    forgotten = sample.maze.play(ours.scores, lambda left: None, 4, 20)
    assert any(
        np.abs(one.scores[0] - other.scores[0]).max() > CLOSE for one, other in zip(forgotten, expected, strict=True)
    )


def test_a_difference_is_counted_off_near_ties_alone(sample: Any) -> None:
    def episode(actions: list[int], returned: int, *scores: float) -> Any:
        return sample.maze.Episode([np.array([0.0, s, -9.0]) for s in scores], actions, returned)

    told = sample.play.compare([episode([1, 1], 2, 5, 5)], [episode([1, 0], 1, 5, -5)])
    assert (told.decisions, told.differ, told.near_ties, told.returns_differ) == (2, 1, 0, 1)
    told = sample.play.compare([episode([1, 1], 2, 5, 5)], [episode([1, 0], 1, 5, -0.01)])
    assert (told.differ, told.differ_at_near_tie, told.without_tie, told.returns_differ) == (0, 1, 0, 0)
    assert told.margin == pytest.approx(0.01)


def test_scores_are_judged_by_the_ladder_where_every_action_is_equal(sample: Any) -> None:
    def episode(*scores: float) -> Any:
        return sample.maze.Episode([np.array([20.0, s, -9.0]) for s in scores], [0] * len(scores), 1)

    exact = episode(3, 4)
    assert sample.play.compare([exact], [exact]).excess("fp32", "cpu") == []
    told = sample.play.compare([episode(3, 4.001)], [exact])
    assert told.largest == pytest.approx(0.001 / 20)
    assert told.excess("fp32", "cpu") == []
    told = sample.play.compare([episode(3, 4.01)], [exact])
    assert told.excess("fp32", "cpu") == ["difference of scores 5.0e-04, expected at most 1.0e-04"]
    assert told.excess("fp16", "cpu") == []
    told = sample.play.compare([episode(3, 5)], [exact])
    (excess,) = told.excess("fp16", "cpu")
    assert excess.startswith("deviation of scores ")
    told = sample.play.compare([episode(3, np.nan)], [exact])
    assert told.excess("fp32", "cpu")


def test_playing_ends_with_what_was_found(
    sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sample.lstm, "WIDTH", 8)
    monkeypatch.chdir(tmp_path)
    spec = sample.lstm.build(None)
    bundle_player(sample, spec, tmp_path / "lstm.txl", 2)
    torch.save(spec.module.state_dict(), "lstm.pt")
    with torch.no_grad():
        spec.module.action.bias[1] += 2e-3
    torch.save(spec.module.state_dict(), "other.pt")

    def played(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["play.py", *arguments, "--episodes", "10"])
        code = sample.play.main()
        return (code, *capsys.readouterr())

    code, told, _ = played("lstm.txl", "--against", "lstm", "lstm.pt")
    assert code == 0
    assert "scores: largest difference " in told
    code, told, _ = played("lstm.txl", "--against", "lstm", "other.pt")
    assert code == 1
    assert told.splitlines()[-1].startswith("NOT as PyTorch: difference of scores 2.0e-03, expected at most 1.0e-04")
    for wrong, message in {
        (
            "lstm.txl",
            "--against",
            "gtrxl",
            "lstm.pt",
        ): "error: lstm.pt: not the weights of this GtrxlPolicy: Missing key",
        ("lstm.txl", "--against", "lstm", "none.pt"): "error: none.pt: ",
        ("none.txl",): "error: none.txl: ",
    }.items():
        code, _, told = played(*wrong)
        assert code == 2
        assert told.startswith(message)
        assert len(told.splitlines()) == 1
    with pytest.raises(SystemExit):
        played("lstm.txl", "--against", "maze", "lstm.pt")


@pytest.mark.slow(keep=1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALL)
def test_a_half_trained_policy_meets_near_ties_and_plays_as_pytorch_does(
    name: str, sample: Any, tmp_path: Path
) -> None:
    """One environment in fp16, 64 in fp32: of the latter a small disturbance is found."""
    spec = sample.train.train(getattr(sample, name), updates=60)
    for rows, precision, episodes in ((1, "fp16", EPISODES // 4), (64, "fp32", EPISODES)):
        theirs = sample.train.TorchPlayer(spec, rows)
        expected = sample.maze.play(theirs.scores, theirs.reset, rows, episodes)
        ours = bundle_player(sample, spec, tmp_path / "policy.txl", rows, precision)
        counts = sample.play.compare(sample.maze.play(ours.scores, ours.reset, rows, episodes), expected)
        assert counts.excess(precision, "cpu") == [], (rows, precision, counts)
        assert counts.returns_differ == 0
        assert counts.decisions > 5 * episodes
    assert counts.near_ties > 5
    assert counts.differ_at_near_tie <= 1
    for size, differing in ((1e-3, 0), (0.1, 20)):
        ours.reset(np.ones(64, bool))
        counts = sample.play.compare(sample.maze.play(disturbed(ours, size), ours.reset, 64, EPISODES), expected)
        assert counts.excess("fp32", "cpu"), counts
        assert counts.differ + counts.differ_at_near_tie >= differing, counts


@pytest.mark.slow(keep=1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "updates"), [("lstm", 150), ("gtrxl", 100)])
def test_a_trained_policy_needs_its_memory(name: str, updates: int, sample: Any) -> None:
    spec = sample.train.train(getattr(sample, name), updates)
    player = sample.train.TorchPlayer(spec, 64)
    assert mean(sample.maze.play(player.scores, player.reset, 64, EPISODES)) > 2.5
    player.reset(np.ones(64, bool))
    forgetful = sample.maze.play(player.scores, lambda left: player.reset(np.ones_like(left)), 64, EPISODES)
    assert mean(forgetful) < 1.3


def test_the_readmes_commands_name_files_that_are_there() -> None:
    text = (FOLDER / "README.md").read_text()
    named = {word for word in text.replace(":build", "").split() if word.startswith("samples/policy/")}
    assert {Path(word).stem for word in named} >= {"train", "play", "lstm"}
    assert all((FOLDER.parents[1] / word).is_file() for word in named)
