"""Compare the cost of `Sessions` with that of a stream driven by hand, on the same turns of the same conversations.

    python benchmarks/serve/sessions_cost.py BUNDLE --sessions 100 16 [--old CHECKOUT] [--rounds 3]

Every session has 4 turns: a prompt, and an answer whose last token begins the next turn. "By hand", a stream takes as
many sessions at once as it has rows, feeds their prompts together, draws their answers together, and stores their
states. "Sessions" sends the same turns to `Sessions`, each as soon as the session's turn before has ended. In "varied"
the answers have different lengths, so that turns begin and end at different times. In "over HTTP", one client for each
session streams its answers from `txl-deploy serve`, whose processor time is counted. The bundle's vocabulary needs at
least 256 tokens, as the demo's has.

Each run is a process of its own with one thread. The ways run in turns, and the one that begins changes with every
round. The table has the median of each round's ratio of processor time to that by hand. `--old` names a second
checkout, whose sessions run too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from server_process import Server

HERE = Path(__file__).resolve().parents[2]
PROMPTS, ANSWER, TURNS = (64, 16), 32, 4
"""The number of tokens of the first and of each later prompt; the mean number of an answer; the turns of a session."""
BYTES = 256
"""The number of token ids from which prompts are drawn."""
WAYS = ("sessions", "varied", "over HTTP")


def prompts_of(sessions: int) -> list[list[np.ndarray]]:
    """Return prompts by session and turn, e.g. arrays [64], [16], [16], [16] for a session of 4 turns."""
    draws = np.random.default_rng(0)
    lengths = [PROMPTS[min(turn, 1)] for turn in range(TURNS)]
    return [[draws.integers(0, BYTES, length) for length in lengths] for _ in range(sessions)]


def answers_of(sessions: int, varied: bool) -> np.ndarray:
    """Return the number of tokens of each answer, [sessions, TURNS], e.g. [[32, 32, 32, 32]].

    `varied` draws different numbers with the same sum for each session.
    """
    if not varied:
        return np.full((sessions, TURNS), ANSWER)
    half = np.random.default_rng(1).integers(-ANSWER * 3 // 4, ANSWER * 3 // 4 + 1, (sessions, TURNS // 2))
    return ANSWER + np.concatenate([half, -half], axis=1)


def by_hand(model: Any, sessions: int) -> dict[str, Any]:
    """Run all turns on a stream, with as many sessions at once as the model has rows; return the figures."""
    prompts, rows = prompts_of(sessions), model.batch_size
    states: dict[int, Any] = {}
    pending: dict[int, list[int]] = {}
    streams = {size: model.stream(size) for size in {min(rows, sessions), sessions % rows or rows}}
    wall, processor = time.perf_counter(), time.process_time()
    for turn in range(TURNS):
        for first in range(0, sessions, rows):
            some = range(first, min(first + rows, sessions))
            stream = streams[len(some)]
            stream.reset()
            for row, who in enumerate(some):
                if who in states:
                    stream.put(row, states[who])
            inputs = [np.concatenate([pending[who], prompts[who][turn]]) if turn else prompts[who][0] for who in some]
            drawn = list(stream.generate(np.stack(inputs), ANSWER, temperature=1.0, seed=turn))
            for row, who in enumerate(some):
                states[who], pending[who] = stream.take(row), [int(drawn[-1][row])]
    tokens = sessions * TURNS * ANSWER
    return _measured(wall, processor, tokens, [], [])


def by_sessions(model: Any, sessions: int, varied: bool) -> dict[str, Any]:
    """Run all turns as requests to `Sessions`, each sent after the answer to the turn before; return the figures."""
    from txl_runtime.sessions import Finished, Limits, Request, Sampling, Sessions, Token

    prompts, answers = prompts_of(sessions), answers_of(sessions, varied)
    firsts, gaps = list[float](), list[float]()
    with Sessions(model, limits=Limits(sessions=sessions)) as served:
        tickets, turns, asked, told = {}, [0] * sessions, [0.0] * sessions, [0.0] * sessions

        def ask(who: int) -> None:
            turn = turns[who]
            request = Request(prompts[who][turn], int(answers[who, turn]), Sampling(1.0, seed=turn))
            tickets[who] = served.submit(request, f"session {who}")
            asked[who], told[who] = time.perf_counter(), 0.0

        wall, processor = time.perf_counter(), time.process_time()
        for who in range(sessions):
            ask(who)
        while served.round():
            now = time.perf_counter()
            for who, ticket in list(tickets.items()):
                for event in ticket.events() if ticket.unread else ():
                    if isinstance(event, Token):
                        if told[who]:
                            gaps.append(now - told[who])
                        else:
                            firsts.append(now - asked[who])
                        told[who] = now
                    elif isinstance(event, Finished):
                        turns[who] += 1
                        del tickets[who]
                        if turns[who] < TURNS:
                            ask(who)
        return _measured(wall, processor, int(answers.sum()), firsts, gaps)


def _measured(wall: float, processor: float, tokens: int, firsts: list[float], gaps: list[float]) -> dict[str, Any]:
    """Return the figures of work that ends now.

    Args:
        wall: the wall clock when the work began.
        processor: the processor clock when the work began.
        tokens: the number of drawn tokens.
        firsts: the seconds to the first token of each answer.
        gaps: the seconds between two tokens of an answer.
    """
    took, cost = time.perf_counter() - wall, time.process_time() - processor
    return {"tokens": tokens, "wall": took, "processor": cost, "firsts": firsts, "gaps": gaps}


def over_http(bundle: Path, sessions: int) -> dict[str, Any]:
    """Send all turns as streamed requests to a server, from one thread for each session; return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(bundle, Path(folder) / "log", "--max-sessions", sessions)
        prompts, firsts, gaps = prompts_of(sessions), list[float](), list[float]()

        def talk(who: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
            for turn in range(TURNS):
                body = {"prompt": prompts[who][turn].tolist(), "max_tokens": ANSWER, "seed": turn, "stream": True}
                last, began = 0.0, time.perf_counter()
                head = {"content-type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps({**body, "session": f"session {who}"}), head)
                for line in connection.getresponse():
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        (gaps if last else firsts).append(now - (last or began))
                        last = now

        threads = [threading.Thread(target=talk, args=(who,)) for who in range(sessions)]
        wall, before = time.perf_counter(), server.processor_seconds()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cost = server.processor_seconds() - before
        drawn = int(float(server.ask("GET", "/metrics")[1].partition("\ntxl_completion_tokens_total ")[2].split()[0]))
        assert drawn == sessions * TURNS * ANSWER, drawn
        result = _measured(wall, time.process_time() - cost, drawn, firsts, gaps)
        server.stop()
        return result


def run_one(options: argparse.Namespace) -> None:
    """Run one way in this process, and print its figures as a line of JSON."""
    import txl_runtime

    way, sessions = options.way, options.sessions[0]
    if way == "over HTTP":
        print(json.dumps(over_http(options.bundle, sessions)))
        return
    model = txl_runtime.load(options.bundle, backend="cpu", threads=1)
    result = by_hand(model, sessions) if way == "by hand" else by_sessions(model, sessions, way == "varied")
    print(json.dumps(result))


def main() -> None:
    """Read the command line, run all ways in turns, and print a row of the table for each; or run one way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sessions", nargs="+", type=int, default=[100, 16])
    parser.add_argument("--old", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        run_one(options)
        return
    ways = [("by hand", HERE), *((way, HERE) for way in WAYS)]
    if options.old is not None:
        ways += [(way, options.old.resolve()) for way in WAYS]
    print("| sessions | way | tokens/s | processor s | ratio | first token p50, p99 | gap p50, p99 | load |")
    print("|---|---|---|---|---|---|---|---|")
    for sessions in options.sessions:
        results: dict[tuple[str, Path], list[dict[str, Any]]] = defaultdict(list)
        for number in range(options.rounds):
            for way, source in ways[number % len(ways) :] + ways[: number % len(ways)]:
                asked = [options.bundle.resolve(), "--way", way, "--sessions", str(sessions)]
                paths = os.pathsep.join(str(source / part) for part in ("runtime", "export", "."))
                environment = {**os.environ, "PYTHONPATH": paths}
                command = [sys.executable, __file__, *asked]
                done = subprocess.run(command, env=environment, cwd=source, check=True, stdout=subprocess.PIPE)
                results[way, source].append(json.loads(done.stdout))
        hand = [run["processor"] for run in results["by hand", HERE]]
        for (way, source), runs in results.items():
            rate = statistics.median(run["tokens"] / run["wall"] for run in runs)
            cost = statistics.median(run["processor"] for run in runs)
            ratio = statistics.median(run["processor"] / one for run, one in zip(runs, hand, strict=True))
            text = way if source == HERE else f"{way}, old"
            firsts, gaps = (_percentiles([x for run in runs for x in run[key]]) for key in ("firsts", "gaps"))
            load = os.getloadavg()[0]
            print(f"| {sessions} | {text} | {rate:,.0f} | {cost:.2f} | {ratio:.2f} | {firsts} | {gaps} | {load:.1f} |")


def _percentiles(seconds: list[float]) -> str:
    if not seconds:
        return "–"
    middle, high = np.percentile(seconds, [50, 99])
    return f"{middle * 1e3:,.0f} ms, {high * 1e3:,.0f} ms"


if __name__ == "__main__":
    main()
