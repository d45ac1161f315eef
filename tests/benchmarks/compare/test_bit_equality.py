"""The proof that a refactoring changes no bit: it repeats itself, and it notices a change."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bit_equality
import numpy as np
import pytest
import scenes
import step_models
import txl_runtime
from txl_runtime.streaming.stream import Stream


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return step_models.counting((3, 1)).write(tmp_path_factory.mktemp("bundles") / "counting.txl")


def items(bundle: Path, snapshot: Path, others: Path | None = None) -> dict[str, str]:
    model = txl_runtime.load(bundle, backend="cpu", threads=1)
    return {name: bit_equality._hash(array) for name, array in scenes.Scenes(model, snapshot, others).items()}


def test_scenes_give_the_same_again_and_continue_from_the_others_snapshot(bundle: Path, tmp_path: Path) -> None:
    first = items(bundle, tmp_path / "first")
    assert first == items(bundle, tmp_path / "second", tmp_path / "first")
    found = {name.partition(":")[0] for name in first}
    assert found >= {"run", "smaller", "uncommitted", "finite", "poisoned", "moved", "states", "feed", "generate"}


@pytest.mark.parametrize(
    ("fault", "scene"),
    [({"commit": True}, "uncommitted"), ({"require_finite": False}, "finite"), ({"lengths": None}, "run")],
)
def test_scenes_notice_a_runtime_that_forgets_an_argument(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], scene: str
) -> None:
    right, run = items(bundle, tmp_path / "right"), Stream.run

    def wrong(self: Stream, inputs: Any, lengths: Any = None, commit: bool = True, require_finite: bool = False) -> Any:
        return run(self, inputs, **{"lengths": lengths, "commit": commit, "require_finite": require_finite} | fault)

    if "require_finite" in fault:  # tokens are finite: a model of features refuses
        bundle = step_models.recurrent().write(tmp_path / "recurrent.txl")
        right = items(bundle, tmp_path / "right")
    monkeypatch.setattr(Stream, "run", wrong)
    other = items(bundle, tmp_path / "wrong")
    assert any(
        right.get(name) != other.get(name) for name in right.keys() | other.keys() if name.startswith(f"{scene}:")
    )


def test_a_comparison_fails_where_an_item_differs_and_says_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"a": np.array([1.0, np.nan]), "b": np.array("refused"), "c": np.array([1, 2])}
    sides = {"old": kinds, "new": kinds | {"a": np.array([1.5, np.nan]), "b": np.array("refused otherwise")}}
    for side, arrays in sides.items():
        (tmp_path / side / "results").mkdir(parents=True)
        np.savez(tmp_path / side / "results" / "case.npz", **arrays)
        hashes = {name: bit_equality._hash(array) for name, array in arrays.items()}
        document = {"conditions": {}, "cases": {"case": {"documents": {}, "hashes": hashes}}}
        (tmp_path / side / "record.json").write_text(json.dumps(document))
    old, new = tmp_path / "old", tmp_path / "new"
    assert bit_equality.compare(argparse.Namespace(old=old, new=old, all=False)) == 0
    assert bit_equality.compare(argparse.Namespace(old=old, new=new, all=False)) == 1
    told = capsys.readouterr().out
    assert "1 of 2 values, by at most 0.5" in told
    assert "'refused' became 'refused otherwise'" in told
    assert "3 items: 1 equal, 0 explained, 2 differ" in told
