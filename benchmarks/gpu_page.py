"""The page and the document of the GPU check: what ran, how fast, and what did not run, with the reason."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gpu_items import PRESENT, Outcome
from gpu_journal import FAILED, NOT_RUN, OK, Found
from tables import Table
from txl_runtime.device.choosing import NO_GPU
from txl_runtime.device.gpu import gpu_name

from txl_deploy.bench.measuring import cpu_name, version_of

__all__ = ["write_page"]

RATES = ("p90", "tokens/s")
CHECKS = ("build", "open", "self-test", "verify")
COLUMNS = ("B", "precision", "engine", *CHECKS, "decode ms p50", *RATES, "draw ms p50", "score ms p50", *RATES)
PACKAGES = ("txl-deploy", "torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "numpy")


def write_page(outcomes: Sequence[Outcome], given: argparse.Namespace, final: bool = False) -> str:
    """Write gpu_check.md and gpu_check.json with what there is so far; the page."""
    gpu = gpu_name()
    ran = [outcome for outcome in outcomes if outcome.item.kind != "export" and outcome.found]
    timed = sum((step := outcome.step("decode")) is not None and step.state == OK for outcome in ran)
    title = (prepared(outcomes) if given.prepare else f"{gpu or 'no GPU'}: {timed} run") + (
        "" if final else ", not finished"
    )
    parts = [f"**{title}**", _table(ran).markdown()] if ran else [f"**{title}**"]
    notes = left_out(outcomes, gpu)
    if notes:
        parts.append("\n".join(["What did not run, or failed:", "", *(f"* {note}" for note in notes)]))
    if recorded := _recorded(ran):
        parts.append("\n".join(["CUDA graphs:", "", *(f"* {line}" for line in recorded)]))
    parts.append(_conditions(given))
    page = "\n\n".join(parts) + "\n"
    document = {
        "conditions": _conditions(given),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()},
        "results": {
            "gpu": gpu,
            "run": timed,
            "finished": final,
            "engines": [_plain(item) for item in ran],
            "left_out": notes,
        },
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu_check.md").write_text(page)
    (given.out / "gpu_check.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    return page


def prepared(outcomes: Sequence[Outcome]) -> str:
    """Which bundles are there now, and how many of them were before."""
    made = [outcome.item.bundle for outcome in outcomes if any(found.state == OK for found in outcome.found)]
    before = [outcome.item.bundle for outcome in outcomes if outcome.reason == PRESENT]
    said = f"prepared: {len(made)} exported, {len(before)} there already"
    return f"{said}, in {(made + before)[0].parent}" if made or before else said


def left_out(outcomes: Sequence[Outcome], gpu: str | None) -> list[str]:
    """Every step that has no good result, and why; equal reasons of an item's steps are one line."""
    if gpu is None and outcomes and all(outcome.reason in (NO_GPU, "interrupted") for outcome in outcomes):
        return [NO_GPU]
    notes: list[str] = []
    for outcome in outcomes:
        if outcome.reason and not (outcome.item.kind == "export" and outcome.reason == PRESENT):
            notes.append(f"{outcome.item.name}: {NOT_RUN}: {outcome.reason}")
        for state in (FAILED, NOT_RUN):
            reasons: dict[str, list[str]] = {}
            for found in outcome.found:
                if found.state == state:
                    reasons.setdefault(found.reason, []).append(found.name)
            notes += [f"{outcome.item.name}: {', '.join(names)} {state}: {why}" for why, names in reasons.items()]
    return notes


def _table(ran: Sequence[Outcome]) -> Table:
    table = Table(COLUMNS)
    for outcome in ran:
        item = outcome.item
        checks = [_state(outcome.step(name)) for name in CHECKS]
        decode, draw, score = (_times(outcome.step(name)) for name in ("decode", "draw", "score"))
        table.add(item.batch, item.precision, item.engine, *checks, *decode, draw[0], *score)
    return table


def _state(found: Found | None) -> str | None:
    return None if found is None else found.state


def _times(found: Found | None) -> list[object]:
    return [None if found is None else found.figures.get(name) for name in ("p50", "p90", "tokens/s")]


def _recorded(ran: Sequence[Outcome]) -> list[str]:
    """What became of recording, per item: equal outcomes of its programs are one line."""
    lines = []
    for outcome in ran:
        found = outcome.step("score")
        programs: dict[str, list[str]] = {}
        for program, said in (found.figures.get("recorded") or {}).items() if found is not None else ():
            programs.setdefault(said, []).append(program)
        lines += [f"{outcome.item.name}: {'; '.join(names)}: {said}" for said, names in programs.items()]
    return lines


def _plain(outcome: Outcome) -> dict[str, object]:
    item = outcome.item
    return {
        "name": item.name,
        "engine": item.engine,
        "precision": item.precision,
        "batch_size": item.batch,
        "steps": [asdict(found) for found in outcome.found],
    }


def _conditions(given: argparse.Namespace) -> str:
    found = {name: version_of(name) for name in PACKAGES}
    versions = ", ".join(f"{name} {said}" for name, said in found.items() if not said.startswith("not installed"))
    said = f"{cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}."
    return f"(--quick: tiny shapes, the figures mean nothing) {said}" if given.quick else said
