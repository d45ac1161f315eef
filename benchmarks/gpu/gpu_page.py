"""Write the page and the JSON document of the GPU check: the figures of each item, or the reason why it was not run.

The module also writes a description of the machine, and packs all results into one archive.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from io import BytesIO
from pathlib import Path

from gpu_items import PRESENT, Outcome
from gpu_journal import ENDED, FAILED, NOT_RUN, OK, Found, figures_of
from txl_runtime.device.choosing import NO_GPU
from txl_runtime.device.gpu import gpu_name

from benchmarks.shared.tables import Table
from txl_deploy.bench.measuring import cpu_name
from txl_deploy.extras import version_of

__all__ = ["pack", "write_machine", "write_page"]

RATES = ("p90", "tokens/s")
CHECKS = ("build", "open", "self-test", "verify")
COLUMNS = ("B", "precision", "engine", *CHECKS, "decode ms p50", *RATES, "draw ms p50", "score ms p50", *RATES)
PACKAGES = ("txl-deploy", "torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "numpy")
FACTS = (("nvidia-smi",), ("nvidia-smi", "-q", "-d", "CLOCK,ECC,POWER,PERFORMANCE"))
"""Commands that print the driver's description of the GPUs, without serial numbers."""
LARGEST = 2**20
"""The largest number of bytes of a file in the archive; of a longer file, the archive has the last bytes."""


def write_machine(folder: Path) -> None:
    """Write machine.txt: the system, the processor, the driver's description of the GPUs, and all packages."""
    parts = [f"{platform.platform()}; {cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}"]
    for command in FACTS:
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
            parts.append(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
        except (OSError, subprocess.TimeoutExpired) as error:
            parts.append(f"$ {' '.join(command)}\n{error}")
    parts.append("\n".join(sorted({f"{item.name}=={item.version}" for item in distributions()})))
    (folder / "machine.txt").write_text("\n\n".join(parts) + "\n")


def pack(folder: Path) -> Path:
    """Pack the results of a folder into FOLDER.tar.gz, without bundles and engines, and return the archive's path.

    Of files over `LARGEST` bytes the archive has only the end.
    """
    archive = folder.with_name(f"{folder.name}.tar.gz")
    part = folder / "archive"
    with tarfile.open(part, "w:gz") as tar:
        for file in sorted([*folder.glob("*.*"), *(folder / "steps").rglob("*")]):
            if file.is_file():
                content = file.read_bytes()[-LARGEST:]
                member = tarfile.TarInfo(f"{folder.name}/{file.relative_to(folder).as_posix()}")
                member.size, member.mtime = len(content), int(file.stat().st_mtime)
                tar.addfile(member, BytesIO(content))
    return part.replace(archive)


def write_page(outcomes: Sequence[Outcome], given: argparse.Namespace, final: bool = False) -> str:
    """Write gpu_check.md and gpu_check.json with the results so far; return the text of the page."""
    gpu = gpu_name()
    begun = [outcome for outcome in outcomes if outcome.found]
    programs = [outcome for outcome in begun if outcome.item.kind == "program"]
    ran = [outcome for outcome in begun if outcome.item.kind not in ("export", "program")]
    timed = sum((step := outcome.step("decode")) is not None and step.state == OK for outcome in ran)
    title = prepared(outcomes) if given.prepare else f"{gpu or 'no GPU'}: {_counted(outcomes, timed)}"
    parts = [f"**{title}{'' if final else ', not finished'}**"]
    parts += [_steps(programs).markdown()] if programs else []
    parts += [_table(ran).markdown()] if ran else []
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
            "programs": [{"name": item.item.name, "steps": [asdict(step) for step in item.found]} for item in programs],
            "finished": final,
            "engines": [_plain(item) for item in ran],
            "left_out": notes,
        },
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu_check.md").write_text(page)
    (given.out / "gpu_check.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    return page


def _counted(outcomes: Sequence[Outcome], timed: int) -> str:
    """Return the number of timed engines and the number of steps in each state: "3 run, 40 ok, 1 FAILED"."""
    states = [step.state for outcome in outcomes for step in outcome.found]
    counts = {state: states.count(state) for state in (OK, FAILED, ENDED, NOT_RUN)}
    return ", ".join([f"{timed} run", *(f"{count} {state}" for state, count in counts.items() if count)])


def _steps(programs: Sequence[Outcome]) -> Table:
    """Return the table of the programs' steps; a step that is not ok says "below" in place of its figures."""
    table = Table(("program", "step", "", "seconds", "figures"))
    for outcome in programs:
        for step in outcome.found:
            text = figures_of(step) if step.state == OK else "below"
            table.add(outcome.item.name, step.name, step.state, f"{step.seconds:.1f}", text.replace("|", "/"))
    return table


def prepared(outcomes: Sequence[Outcome]) -> str:
    """Return a line with the number of bundles that this run exported, and the number that existed before."""
    result = [outcome.item.bundle for outcome in outcomes if any(step.state == OK for step in outcome.found)]
    before = [outcome.item.bundle for outcome in outcomes if outcome.reason == PRESENT]
    text = f"prepared: {len(result)} exported, {len(before)} there already"
    return f"{text}, in {(result + before)[0].parent}" if result or before else text


def left_out(outcomes: Sequence[Outcome], gpu: str | None) -> list[str]:
    """Return a line, with the reason, for every step that is not ok; an item's steps of one reason share a line."""
    if gpu is None and outcomes and all(outcome.reason in (NO_GPU, "interrupted") for outcome in outcomes):
        return [NO_GPU]
    notes: list[str] = []
    for outcome in outcomes:
        if outcome.reason and not (outcome.item.kind == "export" and outcome.reason == PRESENT):
            notes.append(f"{outcome.item.name}: {NOT_RUN}: {outcome.reason}")
        for state in (FAILED, ENDED, NOT_RUN):
            reasons: dict[str, list[str]] = {}
            for step in outcome.found:
                if step.state == state:
                    reasons.setdefault(step.reason, []).append(step.name)
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


def _state(result: Found | None) -> str | None:
    return None if result is None else result.state


def _times(result: Found | None) -> list[object]:
    return [None if result is None else result.figures.get(name) for name in ("p50", "p90", "tokens/s")]


def _recorded(ran: Sequence[Outcome]) -> list[str]:
    """Return for each item its programs and how they are run: recorded into a graph, or the reason why not.

    Programs with the same text share a line.
    """
    lines = []
    for outcome in ran:
        result = outcome.step("score")
        programs: dict[str, list[str]] = {}
        for program, text in (result.figures.get("recorded") or {}).items() if result is not None else ():
            programs.setdefault(text, []).append(program)
        lines += [f"{outcome.item.name}: {'; '.join(names)}: {text}" for text, names in programs.items()]
    return lines


def _plain(outcome: Outcome) -> dict[str, object]:
    item = outcome.item
    return {
        "name": item.name,
        "engine": item.engine,
        "precision": item.precision,
        "batch_size": item.batch,
        "steps": [asdict(step) for step in outcome.found],
    }


def _conditions(options: argparse.Namespace) -> str:
    results = {name: version_of(name) for name in PACKAGES}
    versions = ", ".join(f"{name} {text}" for name, text in results.items() if not text.startswith("not installed"))
    text = f"{cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}."
    return f"(--quick: tiny shapes, the figures mean nothing) {text}" if options.quick else text
