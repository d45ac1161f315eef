"""Oracle cases as a user meets them: their own file where there is one, exported, run by ONNX Runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import txl_export
import txl_runtime
from support import ORACLE
from txl_export.checkpoints import read_checkpoint
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.weights import check_weights

CASES = sorted(path.relative_to(ORACLE).with_suffix("").as_posix() for path in ORACLE.glob("*/*.json"))
LANGUAGE_MODELS = [case for case in CASES if "gtrxl" not in case]
OWN_FILES = (".model.zip213.pt", ".checkpoint_best.pt", "")


def facts_of(case: str) -> dict[str, Any]:
    """Read the case's JSON: constructor or config, options, segment lengths, batch size."""
    facts: dict[str, Any] = json.loads((ORACLE / f"{case}.json").read_text())
    return facts


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The values under the family's own names."""
    values: dict[str, Any] = facts.get("ctor") or facts.get("config") or facts["model_config"]
    return values


def state_and_config(case: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state dict of a case, and its config."""
    values = dict(np.load(ORACLE / f"{case}.npz"))
    state = {name[3:]: torch.from_numpy(values[name]) for name in values if name.startswith("sd/")}
    return state, dict(config_of(facts_of(case)))


def refuses_kv(case: str) -> bool:
    """Return whether the model has absolute positions and a memory, which only hidden memory can follow."""
    config = config_of(facts_of(case))
    return config.get("attn_type", 0) in (2, 3) and config["mem_len"] > 0


def source_of(case: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The checkpoint or state of a case, the config it needs, and the options that its run was set to."""
    facts = facts_of(case)
    names = {"memory_length": "mem_len", "clamp_length": "clamp_len", "same_length": "same_length"}
    options = {ours: facts["opts"][own] for ours, own in names.items() if facts.get("opts", {}).get(own) is not None}
    stem = ORACLE / case
    checkpoint: Any = next((p for p in (stem.with_name(stem.name + end) for end in OWN_FILES) if p.exists()), None)
    if checkpoint is not None:
        return checkpoint, {}, options
    return *state_and_config(case), options


def export_case(case: str, memory: str, folder: Path, **more: Any) -> tuple[Any, dict[str, Any], Any]:
    """Export a case to folder/model.txl: (the checkpoint or state, the config it needed, the result)."""
    facts, (checkpoint, config, options) = facts_of(case), source_of(case)
    shape = {"segment_length": max(facts["segs"]), "batch_size": facts["bsz"], "memory": memory, "verify": False}
    result = txl_export.export(checkpoint, folder / "model.txl", config=config or None, **options, **shape, **more)
    return checkpoint, config, result


def oracle_errors(case: str, memory: str, folder: Path) -> tuple[float, float]:
    """Largest differences of log-probabilities and of memory from the original's float64, over four segments.

    Hidden memory is held against the original's entries, K/V memory against the reference's projections. Each of the
    bundle's update rules is run, and the largest of all is returned.
    """
    exported = export_case(case, memory, folder)
    found = [_errors_of_rule(case, memory, exported, update) for update in exported[2].manifest.updates]
    return max(logprobs for logprobs, _ in found), max(remembered for _, remembered in found)


def _errors_of_rule(case: str, memory: str, exported: tuple[Any, Any, Any], update: str) -> tuple[float, float]:
    facts = facts_of(case)
    values, truth = dict(np.load(ORACLE / f"{case}.npz")), dict(np.load(ORACLE / f"{case}.f64.npz"))
    checkpoint, config, result = exported
    stream, manifest = txl_runtime.load(result.path, update=update).stream(), result.manifest
    imported, _ = read_checkpoint(checkpoint, config=config or None)
    state = check_weights(imported.config, imported.weights, case)
    reference = PaperModel(manifest.config, manifest.dialect, manifest.memory_length, state, torch.float64)
    hidden = reference.initial_memory(facts["bsz"])
    batch_first = values["tokens/0"].shape == (facts["bsz"], facts["segs"][0])
    worst_logprobs = worst_memory = 0.0
    for segment in range(4):
        tokens, expected = values[f"tokens/{segment}"], truth[f"logprob/{segment}"]
        if not batch_first:
            tokens, expected = np.ascontiguousarray(tokens.T), expected.swapaxes(0, 1)
        worst_logprobs = max(worst_logprobs, float(np.abs(stream.step(tokens) - expected).max()))
        _, hidden = reference(torch.from_numpy(tokens), hidden)
        kept = stream.memory()
        if memory == "kv":
            projected = reference.keys_and_values(hidden) if kept else ()
            wanted = [part.numpy() for pair in projected for part in pair]
        else:
            wanted = [_original(truth, segment, i, rows.shape) for i, rows in enumerate(kept.values())]
        for rows, original in zip(kept.values(), wanted, strict=True):
            worst_memory = max(worst_memory, float(np.abs(rows - original).max(initial=0)))
    return worst_logprobs, worst_memory


def _original(truth: Any, segment: int, layer: int, shape: tuple[int, ...]) -> Any:
    """The original's memory entry of a layer, batch first; some store a list, some one stacked array."""
    own = f"mems/{segment}/{layer}"
    original = truth[own] if own in truth else truth[f"mems/{segment}"][layer]
    return original if original.shape == shape else original.swapaxes(0, 1)
