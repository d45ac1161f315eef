"""Hops that end by position: a graph runs all of them and masks, and counts what a loop counts that stops early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from oracle_stateful import Case
from stand_ins.stateful import universal

LIMIT = 1e-4
SEGMENTS = 200


def stopping(model: Any, story: torch.Tensor, query: torch.Tensor) -> tuple[Any, Any, int]:
    """Logits and updates [B, positions] by a loop over positions, which ends when all have halted; and its hops."""
    words = model.tensor("emb.weight")[torch.cat((story, query[:, None]), 1)]
    x = model.linear((words * model.tensor("mask")[: words.shape[2]]).sum(2), "transformer_enc.embedding_proj")
    places = model._signal(torch.arange(x.shape[1]), x.shape[2])
    times = model._signal(torch.arange(model.hops), x.shape[2])
    spots = [(row, place) for row in range(x.shape[0]) for place in range(x.shape[1])]
    total, updates, result = dict.fromkeys(spots, 0.0), np.zeros(x.shape[:2]), torch.zeros_like(x)
    running, hop = list(spots), 0
    while running and hop < model.hops:
        x = x + places + times[hop]
        chances = torch.sigmoid(model.linear(x, "transformer_enc.act_fn.p")).squeeze(-1)
        x, left = model._hop(x), list(running)
        for spot in running:
            chance = float(chances[spot])
            if total[spot] + chance > universal.THRESHOLD:
                chance = 1.0 - total[spot]
                left.remove(spot)
            total[spot] += chance
            updates[spot] += 1
            result[spot] = x[spot] * chance + result[spot] * (1 - chance)
        running, hop = left, hop + 1
    return model.linear(result.mean(1), "W"), updates, hop


@pytest.mark.slow
@pytest.mark.parametrize(("hops", "bias", "threshold"), [(7, -2.0, 0.9), (4, -3.0, 0.9), (9, -1.5, 0.6)])
def test_segments_that_need_more_hops_than_others_are_counted_as_a_loop_counts_them(
    hops: int, bias: float, threshold: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(universal, "THRESHOLD", threshold)
    case = Case("ut01_act")
    weights = case.weights() | {"transformer_enc.act_fn.p.bias": torch.tensor([bias])}
    spec = universal.build(weights, case.facts["config"] | {"num_layers": hops})
    made = txl_export.export(spec, tmp_path / "hops.txl", batch_size=2, verify=False)
    stream, draws = txl_runtime.load(made.path, backend="cpu").stream(), np.random.default_rng(0)
    model, seen, worst = spec.module.double(), set(), 0.0
    for _ in range(SEGMENTS):
        story, query = draws.integers(0, 19, (2, 4, 4), np.int32), draws.integers(0, 19, (2, 4), np.int32)
        found = stream.run({"story": story, "query": query})
        with torch.no_grad():
            logits, updates, needed = stopping(model, torch.from_numpy(story).long(), torch.from_numpy(query).long())
        assert np.array_equal(found["n_updates"], updates)
        worst = max(worst, float(np.abs(found["logits"] - logits.numpy()).max() / max(1.0, logits.abs().max())))
        seen.add(needed)
    assert len(seen) > 1 or seen == {hops}
    assert worst <= LIMIT
