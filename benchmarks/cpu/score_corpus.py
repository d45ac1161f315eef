"""Figures of scoring many documents: processes against one, runs that are killed at random, one text in parts.

    python benchmarks/cpu/score_corpus.py workers BUNDLE TEXT      processor time and wall time, in turns
    python benchmarks/cpu/score_corpus.py kills BUNDLE TEXT        every document once, however often a run is killed
    python benchmarks/cpu/score_corpus.py parts BUNDLE TEXT        how far parts are from the whole, what they cost

TEXT is cut into documents of random length. The load of the machine is printed beside what depends on it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import txl_runtime

from txl_deploy.corpora.parts import cut, warm_up

MEAN_BYTES = 2000


def documents(text: bytes, path: Path) -> int:
    """Write documents of random length as JSON lines; how many."""
    draws, place, count = random.Random(0), 0, 0
    with path.open("wb") as stream:
        while place < len(text):
            length = 1 + int(draws.expovariate(1 / MEAN_BYTES))
            row = {"text": text[place : place + length].decode(errors="replace"), "id": f"d{count}"}
            stream.write(msgspec.json.encode(row) + b"\n")
            place, count = place + length, count + 1
    return count


def command(*arguments: object) -> list[str]:
    """`txl-deploy score`."""
    return [sys.executable, "-m", "txl_deploy", "score", *map(str, arguments)]


def workers(bundle: Path, corpus: Path, rounds: int) -> None:
    """One process and two, in turns: seconds of the wall and of the processors, start and end included."""
    rows: dict[int, list[tuple[float, float, float]]] = {1: [], 2: []}
    for _ in range(rounds):
        for many in rows:
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            run = command(bundle, corpus, "--workers", many, "--threads", 1, "--json")
            done = subprocess.run(run, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall, used = time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            scored = json.loads(done.stdout)["scored_tokens"]
            rows[many].append((wall, used, scored))
            told = f"{many} process(es): {wall:6.1f} s, {used:6.1f} s of processors, {scored / wall:7.0f} tokens/s"
            print(f"{told}, load {os.getloadavg()[0]:.1f}", flush=True)
    wall_of, used_of = ({many: min(row[at] for row in found) for many, found in rows.items()} for at in (0, 1))
    ratio, cost = wall_of[1] / wall_of[2], used_of[2] / used_of[1]
    print(f"best against best: {ratio:.2f} times as fast, with {cost:.2f} times the processor time")


def size(path: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def kills(bundle: Path, corpus: Path, count: int, rounds: int, many: int) -> None:
    """Kill runs at random moments until one ends, and look whether every document is there once."""
    draws, killed, ended = random.Random(1), 0, 0
    for round_ in range(rounds):
        out = corpus.with_name(f"out-{round_}.jsonl")
        while True:
            process = subprocess.Popen(
                command(bundle, corpus, "-o", out, "--resume", "--workers", many, "--threads", 1),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            before, last = size(out), time.monotonic() + draws.random()
            while process.poll() is None and (size(out) <= before or time.monotonic() < last):
                if size(out) <= before:
                    last = time.monotonic() + draws.random()
                time.sleep(0.002)
            if process.poll() is None:
                process.kill()
                killed += 1
            _, said = process.communicate()
            if process.returncode == 0:
                ended += 1
                break
            assert process.returncode == -9, said.decode()
        _, *lines = out.read_text().splitlines()
        found = [json.loads(line)["id"] for line in lines]
        assert sorted(found) == sorted(f"d{index}" for index in range(count)), "documents are lost or there twice"
    print(f"{many} process(es): {ended} corpora of {count} documents, {killed} runs killed: every document once in all")


def parts(bundle: Path, text: bytes) -> None:
    """Errors and extra tokens of parts, for several numbers of them and several warm-ups."""
    model = txl_runtime.load(bundle, threads=1)
    assert model.vocabulary is not None
    ids = model.vocabulary.encode(text)
    stream, longest = model.stream(1), model.segment_lengths[0]
    whole = stream.score(ids[None])[0]
    print(f"{len(ids)} tokens, L {longest}, M {model.memory_length}, warm-up {warm_up(model.manifest)}")
    print("parts | warm-up | extra tokens | largest error of a token | error of the mean")
    for count in (4, 16, 64):
        for warm in sorted({0, model.memory_length or 0, 2 * (model.memory_length or 0), warm_up(model.manifest)}):
            plan, found = cut(len(ids) - 1, count, longest, warm), []
            for unit in plan.units(ids):
                stream.reset()
                found.append(stream.score(unit.ids[None])[0, unit.skipped :])
            error = np.concatenate(found) - whole
            share = plan.extra / plan.total
            print(f"{count:5} | {warm:7} | {share:12.1%} | {np.abs(error).max():.1e} | {error.mean():+.1e}", flush=True)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("workers", "kills", "parts"))
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--bytes", type=int, default=1 << 17, help="of the text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="of the runs that are killed")
    given = parser.parse_args()
    text = given.text.read_bytes()[: given.bytes]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        if given.what == "parts":
            parts(given.bundle, text)
            return
        count = documents(text, corpus)
        if given.what == "workers":
            workers(given.bundle, corpus, given.rounds)
        else:
            kills(given.bundle, corpus, count, given.rounds, given.workers)


if __name__ == "__main__":
    main()
