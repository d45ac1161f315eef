"""Time `txl-deploy score` on many documents with one job, with two, and with a command of your own, in turns.

    python benchmarks/cpu/score_corpus.py BUNDLE TEXT [--beside "COMMAND score … --json"]

TEXT is cut into documents of random length. BUNDLE and the file of documents are inserted after the word `score` of
COMMAND. Each run prints its seconds, its processor seconds, and the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec


def documents(text: bytes, path: Path, mean: int) -> None:
    """Cut a text into documents of random length, `mean` bytes on average, and write them as lines of JSON."""
    draws, place = random.Random(0), 0
    with path.open("wb") as stream:
        while place < len(text):
            length = 1 + int(draws.expovariate(1 / mean))
            row = {"text": text[place : place + length].decode(errors="replace")}
            stream.write(msgspec.json.encode(row) + b"\n")
            place += length


def main() -> None:
    """Read the command line, run all commands in turns, and print each run and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--bytes", type=int, default=1 << 17, help="of the text")
    parser.add_argument("--mean", type=int, default=2000, help="bytes of a document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", help="a command with the word `score` in it")
    options = parser.parse_args()
    own = [sys.executable, "-m", "txl_deploy", "score"]
    commands = {f"--jobs {jobs}": [*own, "--threads", "1", "--jobs", str(jobs), "--json"] for jobs in (1, 2)}
    if options.beside:
        commands[options.beside] = shlex.split(options.beside)
    walls, used = ({name: list[float]() for name in commands} for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        documents(options.text.read_bytes()[: options.bytes], corpus, options.mean)
        for turn in range(options.rounds):
            for name in sorted(commands, reverse=bool(turn % 2)):
                at = commands[name].index("score") + 1
                command = [*commands[name][:at], str(options.bundle), str(corpus), *commands[name][at:]]
                before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
                done = subprocess.run(command, check=True, capture_output=True)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                walls[name].append(time.monotonic() - began)
                used[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
                scored = json.loads(done.stdout)["scored_tokens"]
                text = f"{walls[name][-1]:6.1f} s, {used[name][-1]:6.1f} s of processors, {scored} tokens"
                print(f"{text}, load {os.getloadavg()[0]:.1f}: {name}", flush=True)
    for name in commands:
        wall, processors = statistics.median(walls[name]), statistics.median(used[name])
        print(f"median {wall:.1f} s (best {min(walls[name]):.1f}), {processors:.1f} s of processors: {name}")


if __name__ == "__main__":
    main()
