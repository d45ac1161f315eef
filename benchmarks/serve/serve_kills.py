"""Kill `txl-deploy serve` with SIGKILL at random moments, and check its sessions after each restart.

    python benchmarks/serve/serve_kills.py BUNDLE [--kills 50] [--sessions 6] [--out FILE.json]

Each session reads a text of its own in requests of PART tokens, which only score the text (`echo` with `max_tokens` 0).
The server writes a checkpoint every 0.1 s, and is killed at a random moment. After the restart, the server says how
many tokens each session has seen, and the session's client continues from there. Every log-probability has to be the
one that a server without kills gave for that token. The exit code is 1 if there is one of these problems:

* a session that does not continue at the end of a segment of one of its requests, or that is ahead of its client by
  more than one request;
* a log-probability that differs by more than 1e-4;
* a file in the folder, after a restart, that the checkpoint does not name, or a named file that is missing;
* a request that the server refuses, e.g. because the session has not seen the tokens that its client says
  (`session_seen`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from server_process import Server, text_of

PART, EVERY = 150, 0.1
LIMIT = 1e-4
INDEX = "sessions.json"
CALM = ("request", "draining", "checkpoint", "stopped")
"""The events that the server may log; a line of any other event is a problem."""


class Reader:
    """The client of one session, which sends its text part by part and compares the log-probabilities.

    Attributes:
        seen: the number of tokens that the session has seen.
        problems: errors in words.
        compared: the number of compared log-probabilities.
        largest: their largest difference.
        truth: the log-probabilities of the first reading, without kills, by place in the text.
        stop: True after an error, when the client ends.
    """

    def __init__(self, number: int, tokens: int) -> None:
        self.name, self.ids = f"reader {number}", [*text_of(number, tokens).encode()]
        self.seen, self.compared, self.largest = 0, 0, 0.0
        self.truth: list[float | None] = []
        self.problems: list[str] = []
        self.stop = False

    def read(self, server: Server) -> bool:
        """Send the next part of the text; return False at the text's end and after an error."""
        end = min(len(self.ids), (self.seen // PART + 1) * PART)
        if self.seen >= len(self.ids):
            return False
        body: dict[str, Any] = {"prompt": self.ids[self.seen : end], "max_tokens": 0, "echo": True, "logprobs": 0}
        body |= {"session": self.name, "session_seen": self.seen}
        status, answer = server.ask("POST", "/v1/completions", body)
        if status != 200:
            self.problems.append(f"{self.name} at {self.seen}: {status} {str(answer)[:160]}")
            self.stop = True
            return False
        result = answer["choices"][0]["logprobs"]["token_logprobs"]
        if len(result) != end - self.seen:
            self.problems.append(f"{self.name} at {self.seen}: {len(result)} scores, expected {end - self.seen}")
        self._compare(result)
        self.seen = end
        return True

    def _compare(self, results: list[float | None]) -> None:
        for place, value in enumerate(results, self.seen):
            if place == len(self.truth):
                self.truth.append(value)
            elif value is not None and (expected := self.truth[place]) is not None:
                self.compared += 1
                self.largest = max(self.largest, abs(value - expected))

    def until_killed(self, server: Server) -> None:
        """Send parts until the server is killed, the text ends, or an error occurs."""
        try:
            while not self.stop and self.read(server):
                pass
        except (OSError, http.client.HTTPException):
            pass  # the server was killed during a request


def main() -> None:
    """Read the command line, kill and restart the server, and print the results; exit with 1 after problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=6000, help="of each session's text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = kills(asked.bundle, Path(name), asked.kills, asked.sessions, asked.tokens, asked.seed)
    text = json.dumps(result, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", "utf-8")
    sys.exit(1 if result["problems"] else 0)


def kills(bundle: Path, folder: Path, count: int, sessions: int, tokens: int, seed: int) -> dict[str, Any]:
    """Kill and restart a server repeatedly, while clients send their texts.

    Args:
        bundle: the bundle to serve, whose tokens are bytes.
        folder: the folder for checkpoints and logs.
        count: the number of kills.
        sessions: the number of sessions at the same time.
        tokens: the number of tokens of each text; a session that has read all is deleted, and begins anew.
        seed: the seed of the random moments.

    Returns:
        The figures by name, and the problems in words.
    """
    readers, draws = [Reader(number, tokens) for number in range(sessions)], random.Random(seed)
    server = Server(bundle, folder / "truth.log")
    segment = max(server.ask("GET", "/v1/models")[1]["data"][0]["segment_lengths"])
    _together(readers, server, None)
    server.kill()
    kept, log = folder / "kept", folder / "server.log"
    problems, back, resumed, downtime = [*_problems(readers)], 0, 0, list[float]()
    for reader in readers:
        reader.seen = 0
    for _ in range(count):
        started = time.monotonic()
        server = Server(bundle, log, "--checkpoint-dir", kept, "--checkpoint-every", EVERY)
        downtime.append(time.monotonic() - started)
        problems += _leftovers(kept)  # no session has changed yet, so the server writes no file now
        named = {entry["name"]: entry["seen"] for entry in server.ask("GET", "/v1/sessions")[1]["data"]}
        for reader in readers:
            seen = named.get(reader.name, 0)
            if seen > reader.seen + PART or seen % PART % segment:
                problems.append(f"{reader.name} begins at {seen}, and had been told {reader.seen}")
            back, resumed = back + max(0, reader.seen - seen), resumed + (seen > 0)
            reader.seen = seen
            if seen >= tokens:
                server.ask("DELETE", f"/v1/sessions/{reader.name.replace(' ', '%20')}")
                reader.seen = 0
        _together(readers, server, draws.uniform(0.05, 1.5))
        server.kill()
    server = Server(bundle, log, "--checkpoint-dir", kept)
    server.ask("POST", "/v1/completions", {"prompt": "the end", "max_tokens": 0, "echo": True, "session": "last"})
    server.stop()
    problems += _leftovers(kept)
    answers = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    problems += [f"the server said {line}" for line in answers if line["event"] not in CALM]
    problems += _problems(readers)
    compared, largest = sum(reader.compared for reader in readers), max(reader.largest for reader in readers)
    if largest > LIMIT or not compared or not resumed:
        problems.append(f"{compared} log-probabilities differ by up to {largest}; {resumed} sessions were resumed")
    return {
        "kills": count,
        "sessions": sessions,
        "resumed": resumed,
        "read again after a kill, tokens of a session": round(back / max(1, resumed), 1),
        "compared": compared,
        "largest difference": largest,
        "seconds to listen again": {"median": sorted(downtime)[len(downtime) // 2], "most": max(downtime)},
        "problems": problems[:50],
    }


def _together(readers: list[Reader], server: Server, seconds: float | None) -> None:
    """Let all clients send at the same time, to the end, or until the server is killed after `seconds`."""
    threads = [threading.Thread(target=reader.until_killed, args=(server,)) for reader in readers]
    for thread in threads:
        thread.start()
    if seconds is not None:
        time.sleep(seconds)
        server.process.kill()
    for thread in threads:
        thread.join()


def _problems(readers: list[Reader]) -> list[str]:
    return [problem for reader in readers for problem in reader.problems]


def _leftovers(kept: Path) -> list[str]:
    """Return a sentence for each file of the folder that the checkpoint does not name, and each named one missing."""
    index = kept / INDEX
    named = {entry["file"] for entry in json.loads(index.read_bytes())["sessions"]} if index.exists() else set()
    there = {path.name for path in kept.iterdir() if path.suffix != ".lock" and path.name != INDEX}
    return [f"{name} is in the folder, and no checkpoint names it" for name in sorted(there - named)] + [
        f"{name} is named, and not in the folder" for name in sorted(named - there)
    ]


if __name__ == "__main__":
    main()
