"""Fuzzes every target and prints one table: `python -m fuzz.run --seconds 30 [TARGET…]`; `make fuzz` calls it.

Each target runs in a process of its own (`one`). Inputs that add coverage, and inputs that fail, are left under --out.
With --keep they also go into the kept corpus: failures as they are, the rest as few small files as reach the same.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fuzz.targets import TARGETS

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
ROOT = HERE.parents[1]
HANG = 300
"""Seconds beyond its time after which a target's process is ended."""
SHOWN = 4
"""Failing inputs of a target that are printed."""
COLUMNS = ("target", "seconds", "cases", "per second", "refused", "edges", "features", "new", "failures")


def main() -> None:
    """Read the command line, fuzz, print the table; exit code 1 where an input failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a temporary folder without it")
    parser.add_argument("--keep", action="store_true", help="put what was found into the kept corpus")
    parser.add_argument("--plain", action="store_true", help="without Atheris, as where it is not installed")
    asked = parser.parse_args()
    out = asked.out or Path(tempfile.mkdtemp(prefix="fuzz-"))
    print(" | ".join(COLUMNS), flush=True)
    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = list(pool.map(lambda name: _row(name, out, asked), asked.targets))
    failed = {row["target"]: row["names"] for row in rows if row["names"]}
    for target, names in failed.items():
        print(f"{target}: {'; '.join(names)} (inputs in {out / target / 'crashes'}, log beside it)")
        for file in sorted((out / target / "crashes").iterdir())[:SHOWN]:  # where nobody can look into that folder
            print(f"  {file.name}: {base64.b64encode(file.read_bytes()[:1024]).decode()}")
    if asked.keep:
        for name in asked.targets:
            keep(name, out)
    elif not failed and asked.out is None:
        shutil.rmtree(out)
    sys.exit(1 if failed else 0)


def _row(name: str, out: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Fuzz one target for its time, anew where its process dies, and print its row."""
    place, started = out / name, time.monotonic()
    shutil.rmtree(place, ignore_errors=True)
    (place / "crashes").mkdir(parents=True)
    row: dict[str, Any] = dict.fromkeys(COLUMNS, 0) | {"target": name, "names": []}
    seed = asked.seed
    while (left := asked.seconds - (time.monotonic() - started)) > 1 and seed < asked.seed + 5:
        options = ["--seconds", str(left), "--crashes", str(place / "crashes"), "--seed", str(seed)]
        options += ["--plain"] if asked.plain else []
        died, found = _process([name, str(place / "new"), str(CORPUS / name), *options], place / f"log-{seed}", left)
        row["cases"] += found["cases"]
        row["refused"] += found["refused"]
        row["edges"], row["features"] = max(row["edges"], found["edges"]), max(row["features"], found["features"])
        row["names"] += [failure for failure in [*found["failures"], *died] if failure not in row["names"]]
        seed += 1
        if not died:
            break
    row["seconds"] = time.monotonic() - started
    row["per second"], row["failures"] = row["cases"] / row["seconds"], len(row["names"])
    row["new"] = len(list((place / "new").iterdir())) if (place / "new").is_dir() else 0
    print(" | ".join(f"{row[key]:.0f}" if key != "target" else name for key in COLUMNS), flush=True)
    return row


def _process(arguments: list[str], log: Path, seconds: float) -> tuple[list[str], dict[str, Any]]:
    """Run `one`: how its process died, if it did, and its figures."""
    figures = log.parent / "figures.json"
    figures.unlink(missing_ok=True)
    paths = [str(HERE.parent), *(str(ROOT / name) for name in ("export", "runtime", ""))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with log.open("wb") as stream:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "fuzz.one", *arguments],
                env=environment,
                stdout=stream,
                stderr=stream,
                timeout=seconds + HANG,
                check=False,
            )
            died = [] if done.returncode == 0 else [_death(log, done.returncode)]
        except subprocess.TimeoutExpired:
            died = ["the process hung"]
    found = {"cases": 0, "refused": 0, "failures": [], "edges": 0, "features": 0}
    if figures.is_file():
        found |= json.loads(figures.read_text("utf-8"))
    text = log.read_text("utf-8", errors="replace")
    for key, pattern in (("edges", r"cov: (\d+)"), ("features", r"ft: (\d+)"), ("cases", r"executed_units: +(\d+)")):
        if numbers := re.findall(pattern, text):
            found[key] = int(numbers[-1])
    return died, found


def _death(log: Path, code: int) -> str:
    """Return the end of a process that should not have ended, by the last lines of its log."""
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or line.startswith(("Traceback", "SUMMARY"))]
    return f"exit {code}: {(errors or lines or ['nothing said'])[-1][:200]}"


def keep(name: str, out: Path) -> None:
    """Merge what was found into the kept corpus, as few files as reach the same; failures stay for good."""
    kept, place = CORPUS / name, out / name
    kept.mkdir(parents=True, exist_ok=True)
    merged = place / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    crashes = place / "merge-crashes"
    _process(
        [name, str(merged), str(kept), str(place / "new"), "--merge", "--crashes", str(crashes)], place / "merge", 600
    )
    found = {file.name: file.read_bytes() for file in merged.iterdir()}
    if found:
        for file in kept.iterdir():
            if not file.name.startswith("crash-"):
                file.unlink()
        for file_name, data in found.items():
            (kept / file_name).write_bytes(data)
    for file in (place / "crashes").iterdir():
        shutil.copy(file, kept / file.name.replace("timeout-", "crash-").replace("oom-", "crash-"))


if __name__ == "__main__":
    main()
