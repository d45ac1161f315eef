"""Every oracle case as a user meets it: its own file where there is one, exported, run by ONNX Runtime.

Log-probabilities of four chained segments within 1e-4 of the original code's float64 values, with K/V and with hidden
memory; hidden memory equal to the original's entries, K/V memory to the reference's projections of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from support import ORACLE
from txl_export.checkpoints import read_checkpoint
from txl_export.reference import Reference
from txl_export.weights import check_state

LIMIT = 1e-4
CASES = sorted(path.relative_to(ORACLE).with_suffix("").as_posix() for path in ORACLE.glob("*/*.json"))
LANGUAGE_MODELS = [case for case in CASES if "gtrxl" not in case]


def source_of(case: str, facts: dict[str, Any], values: Any) -> tuple[Any, dict[str, Any]]:
    """The case's own file, else its weights with its config; and the options that the export needs."""
    options = {name: value for name, value in facts.get("opts", {}).items() if value is not None}
    asked = {
        "memory_length": options.get("mem_len"),
        "clamp_length": options.get("clamp_len"),
        "same_length": options.get("same_length"),
    }
    stem = ORACLE / case
    own = [stem.with_name(stem.name + ending) for ending in (".model.zip213.pt", ".checkpoint_best.pt", "")]
    found = next((path for path in own if path.exists()), None)
    if found is not None:
        return found, {name: value for name, value in asked.items() if value is not None}
    state = {name[3:]: torch.from_numpy(values[name]) for name in values.files if name.startswith("sd/")}
    config = facts.get("ctor") or facts.get("config") or facts.get("model_config")
    return state, {"config": config} | {name: value for name, value in asked.items() if value is not None}


def test_the_cases_are_there() -> None:
    assert len(CASES) == 25, "the oracle's files belong into tests/fixtures/oracle"


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["kv", "hidden"])
@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_the_bundle_computes_what_the_original_computed(case: str, memory: str, tmp_path: Path) -> None:
    facts = json.loads((ORACLE / f"{case}.json").read_text())
    values, truth = np.load(ORACLE / f"{case}.npz"), np.load(ORACLE / f"{case}.f64.npz")
    checkpoint, options = source_of(case, facts, values)
    attn_type = (facts.get("ctor") or facts.get("config") or {}).get("attn_type", 0)
    if attn_type in (2, 3) and memory == "kv" and facts["ctor"]["mem_len"]:
        with pytest.raises(txl_runtime.TxlError, match="--memory hidden"):
            txl_export.export(checkpoint, tmp_path / "model.txl", memory=memory, verify=False, **options)
        return
    batch_first = truth["logprob/0"].shape[0] == facts["bsz"] and values["tokens/0"].shape[0] == facts["bsz"]
    options |= {"segment_length": max(facts["segs"]), "batch_size": facts["bsz"], "memory": memory, "verify": False}
    manifest = txl_export.export(checkpoint, tmp_path / "model.txl", **options).manifest
    model = txl_runtime.load(tmp_path / "model.txl")
    stream = model.stream()
    imported, _ = read_checkpoint(checkpoint, config=options.get("config"))
    state = check_state(imported.config, imported.state, case)
    reference = Reference(manifest.config, manifest.dialect, manifest.memory_length, state, torch.float64)
    hidden = reference.initial_memory(facts["bsz"])
    for segment in range(4):
        tokens, expected = values[f"tokens/{segment}"], truth[f"logprob/{segment}"]
        if not batch_first:
            tokens, expected = tokens.T, expected.swapaxes(0, 1)
        assert np.abs(stream.step(tokens) - expected).max() <= LIMIT
        _, hidden = reference(torch.from_numpy(np.ascontiguousarray(tokens)), hidden)
        kept = stream.memory()
        if memory == "kv":
            for i, (key, value) in enumerate(reference.keys_and_values(hidden) if kept else ()):
                assert np.abs(kept[f"layers.{i:02d}.key"] - key.numpy()).max() <= LIMIT
                assert np.abs(kept[f"layers.{i:02d}.value"] - value.numpy()).max() <= LIMIT
            continue
        for i, rows in enumerate(kept.values()):
            whole = f"mems/{segment}"
            original = truth[f"{whole}/{i}"] if f"{whole}/{i}" in truth.files else truth[whole][i]
            if original.shape[0] != rows.shape[0] or original.shape[1] != rows.shape[1]:
                original = original.swapaxes(0, 1)
            assert np.abs(rows - original).max() <= LIMIT
