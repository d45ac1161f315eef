"""Fuzzes one target in this process: `python -m fuzz.one TARGET --seconds N --crashes DIR CORPUS…`.

With Atheris the inputs are guided by coverage of the project's own code, and new ones go into the first folder of the
corpus. Without it they are seeded changes of the corpus.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

with contextlib.suppress(ImportError):
    import atheris

OURS = ["txl_runtime", "txl_export", "txl_engines", "txl_deploy", "pickletools", "zipfile"]
LONGEST = 1 << 16


def main() -> None:
    """Read the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("corpus", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--crashes", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--merge", action="store_true", help="keep of all folders what adds coverage, in the first one")
    parser.add_argument("--plain", action="store_true", help="without Atheris")
    parser.add_argument("--libfuzzer", nargs=argparse.REMAINDER, help="its own arguments, when it starts this again")
    asked = parser.parse_args()
    guided = "atheris" in globals() and not asked.plain
    if guided:
        import msgspec  # noqa: F401 - what is not ours is loaded before anything is watched
        import numpy  # noqa: F401

        atheris.instrument_imports(include=OURS).__enter__()  # for good: modules are imported late, too
    target = importlib.import_module(f"fuzz.targets.{asked.target}")
    from fuzz.guard import Guard, bound_memory

    guard = Guard(target.one_input, asked.crashes)
    for seed in target.seeds():
        guard(seed)
    longest = getattr(target, "LONGEST", LONGEST)
    bound_memory()
    started = due = time.monotonic()
    report = _reporter(guard, asked.crashes, started)
    if not guided:
        _plain(guard, [*target.seeds(), *_kept(asked.corpus)], asked.seconds, asked.seed, longest, report)
        return
    first, *others = (folder for folder in asked.corpus if folder.is_dir() or folder == asked.corpus[0])
    first.mkdir(parents=True, exist_ok=True)
    if not (asked.merge or asked.libfuzzer):
        own = asked.crashes.parent / "seeds"
        own.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(target.seeds()):
            (own / f"seed-{number}").write_bytes(seed)
        others.append(own)

    def one(data: bytes) -> None:
        nonlocal due
        if guard(data) or time.monotonic() > due:
            report()
            due = time.monotonic() + 1

    options = ["-merge=1"] if asked.merge else [f"-max_total_time={int(asked.seconds)}", f"-seed={asked.seed}"]
    options += [f"-max_len={longest}", "-timeout=60", "-rss_limit_mb=3072", "-print_final_stats=1"]
    options += [f"-artifact_prefix={asked.crashes}/", "-reload=0", "-len_control=20"]
    asked.crashes.mkdir(parents=True, exist_ok=True)
    arguments = asked.libfuzzer or [*options, str(first), *map(str, others)]
    atheris.Setup([_starter(asked.target, first, asked.crashes), *arguments], one)
    atheris.Fuzz()


def _starter(target: str, first: Path, crashes: Path) -> str:
    """A script for libFuzzer, which merges in processes that it starts itself."""
    script = crashes.parent / "again"
    words = map(shlex.quote, [sys.executable, "-m", "fuzz.one", target, str(first), "--crashes", str(crashes)])
    script.write_text(f'#!/bin/sh\nexec {" ".join(words)} --libfuzzer "$@"\n', "utf-8")
    script.chmod(0o755)
    return str(script)


def _kept(folders: list[Path]) -> list[bytes]:
    return [file.read_bytes() for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())]


def _plain(
    guard: Any, corpus: list[bytes], seconds: float, seed: int, longest: int, report: Callable[[], None]
) -> None:
    from fuzz.mutations import changed

    draws, until = random.Random(seed), time.monotonic() + seconds
    for data in corpus:
        guard(data)
    while time.monotonic() < until:
        guard(changed(draws, corpus, longest))
    report()


def _reporter(guard: Any, crashes: Path, started: float) -> Callable[[], None]:
    """Writes what was done so far, for whoever waits: libFuzzer ends the process without a word to Python."""
    file = crashes.parent / "figures.json"
    crashes.parent.mkdir(parents=True, exist_ok=True)

    def report() -> None:
        figures = {
            "cases": guard.cases,
            "refused": guard.refused,
            "seconds": time.monotonic() - started,
            "failures": list(guard.failures),
        }
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(figures), "utf-8")
        partial.replace(file)

    return report


if __name__ == "__main__":
    main()
