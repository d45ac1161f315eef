"""Memories that always have all their rows, with counters: what growing ones compute, and sequences independent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle_stateful import Case, errors, export_case, run_bundle
from stand_ins.stateful import compressive, compressive_counted
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states

LIMIT = 1e-4
ROWS = {"mem": "fill", "compressed_mem": "compressed_fill"}
"""The states whose newest rows a counter counts."""
OPTIONS: dict[str, dict[str, Any]] = {
    "ct01_base": {},
    "ct02_partial_segment": {},
    "a ratio that does not divide the rows": {"cmem_ratio": 3, "mem_len": 6, "cmem_len": 4},
    "rows that leave one at a time first": {"cmem_ratio": 1, "mem_len": 7, "cmem_len": 7},
}


def steps(options: str) -> tuple[Eager, Eager, int]:
    """The growing and the counted module with small weights, and the length of a whole segment."""
    case = Case(options if options in ("ct01_base", "ct02_partial_segment") else "ct01_base")
    config, draws = dict(case.facts["config"]) | OPTIONS[options], torch.Generator().manual_seed(0)
    shapes = {name: list(shape) for name, shape in case.facts["sd_shapes"].items()}
    for name, shape in shapes.items():
        if name.endswith("conv.weight"):
            shape[2] = config["cmem_ratio"]
    shapes["pos_emb"][1] = config["seq_len"] + config["mem_len"] + config["cmem_len"]
    weights = {name: torch.randn(shape, generator=draws) * 0.15 for name, shape in shapes.items()}
    specs = [module.build(weights, config) for module in (compressive, compressive_counted)]
    for spec in specs:
        spec.module.double()
    growing, counted = (Eager(spec, torch.float64) for spec in specs)
    return growing, counted, config["seq_len"]


@pytest.mark.parametrize("options", OPTIONS)
def test_counters_in_place_of_growing_rows_compute_the_same(options: str) -> None:
    growing, counted, whole = steps(options)
    count, draws = 3, np.random.default_rng(1)
    fresh = fresh_states(counted.spec, count, torch.float64)
    ours = dict(fresh)
    theirs = [fresh_states(growing.spec, 1, torch.float64) for _ in range(count)]
    seen = set()
    for _ in range(40):
        for row in np.flatnonzero(draws.random(count) < 0.08):
            theirs[row] = fresh_states(growing.spec, 1, torch.float64)
            for entry in counted.spec.states:
                axis = entry.shape.index("B")
                ours[entry.name] = ours[entry.name].index_copy(  # type: ignore[union-attr]
                    axis,
                    torch.tensor([row]),
                    fresh[entry.name].narrow(axis, row, 1),  # type: ignore[union-attr]
                )
        length = int(draws.choice([whole, whole, whole, 1, whole - 1]))
        tokens = torch.from_numpy(draws.integers(0, 29, (count, length)).astype(np.int32))
        outputs, after = counted({"tokens": tokens}, ours)
        ours = dict(after)
        for row in range(count):
            wanted, next_ = growing({"tokens": tokens[row : row + 1]}, theirs[row])
            theirs[row] = dict(next_)
            assert torch.allclose(outputs["logits"][row], wanted["logits"][0], atol=1e-9)
            for name, counter in ROWS.items():
                filled = int(after[counter][row])
                held = after[name][:, row, after[name].shape[2] - filled :]
                assert held.shape == next_[name][:, 0].shape
                assert torch.allclose(held, next_[name][:, 0], atol=1e-9)
            seen.add((int(after["fill"][row]), int(after["compressed_fill"][row])))
    assert len(seen) >= 3


@pytest.mark.slow
def test_one_graph_of_independent_sequences_gives_the_stored_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "ct01_base"
    monkeypatch.setattr("oracle_stateful.BUILDS", {name: compressive_counted.build})
    case = Case(name)
    made = export_case(case, tmp_path / "counted.txl")
    assert made.manifest.streams == "independent"
    assert len(made.manifest.programs) == len(case.segment_lengths())
    found = []
    for outputs, states in run_bundle(case, made.path):
        rows = {kept: int(states[counter][0]) for kept, counter in ROWS.items()}
        found.append((outputs, {kept: states[kept][:, :, states[kept].shape[2] - n :] for kept, n in rows.items()}))
    assert len(found) == len(case.resets)
    assert max(errors(found, case)) <= LIMIT
