"""Random models, dialects and operations: bundles look where the formulas of the paper say (see `random_looks`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import txl_runtime
from random_looks import LIMIT, Beside, drawn, export

SEEDS = {2: "learned positions, pre-norm, biases", 12: "learned distances, one head", 18: "three layers of one head"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS, ids=SEEDS.values())
def test_random_models_look_where_the_formulas_say(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = export(seed, tmp_path / "random.txl", monkeypatch)
    for update in txl_runtime.load(tmp_path / "random.txl").manifest.updates:
        model = txl_runtime.load(tmp_path / "random.txl", threads=1, update=update)
        for chain in range(3):
            beside = Beside(model, state, seed + chain)
            beside.run(8)
            assert beside.looks == 16
            assert beside.operations
            assert beside.worst <= LIMIT


def test_seeds_draw_every_kind_of_model() -> None:
    """So that a sweep over some hundred of them has tried all that importers know."""
    configs, options, dialects = zip(*map(drawn, range(300)), strict=True)
    assert {config["attn_type"] for config in configs} == {0, 1, 2, 3}
    assert {config["memory_start"] for config in configs} == {"empty", "zeros"}
    assert {0, 1, 16} <= {config["memory_length"] for config in configs}
    assert {form["memory"] for form in options} == {"kv", "hidden"}
    assert any(config.get("div_val") for config in configs)
    windows = [
        (dialect["window"] or 0) - config["memory_length"]
        for config, dialect in zip(configs, dialects, strict=True)
        if dialect["window"]
    ]
    assert set(windows) == {0, 1}
    assert any(dialect["segment_window"] for dialect in dialects)
