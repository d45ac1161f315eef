"""Compare two servers behind nginx with one server, on the same cores.

    python benchmarks/serve/servers_behind_nginx.py BUNDLE [--sessions 32] [--rounds 5]

Every session has 4 turns, as in sessions_cost.py: a prompt, and an answer of 32 tokens. A thread of this process sends
each turn of a session as soon as the turn before has been answered. Four ways to serve run in turns, and the one that
begins changes with every round: one server, one server with two threads of the engine, one server behind nginx, and two
servers behind nginx with the configuration of docs/serving.md. The table has medians over the rounds, and the median of
each round's ratio to one server. The bundle's vocabulary needs at least 256 tokens, as the demo's has.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from nginx_process import free_ports, lines_of_nginx, nginx
from server_process import Server
from sessions_cost import ANSWER, TURNS, prompts_of


class Way(NamedTuple):
    """A way to serve: its name, the number of servers, the threads of each engine, and True for nginx in front."""

    name: str
    servers: int
    threads: int
    proxied: bool


WAYS = (
    Way("one server", 1, 1, False),
    Way("one server, two threads", 1, 2, False),
    Way("one server behind nginx", 1, 1, True),
    Way("two servers behind nginx", 2, 1, True),
)


class Measured(NamedTuple):
    """The figures of a run: tokens per second of wall time, and processor seconds of the servers together."""

    rate: float
    processor: float


def measured(bundle: Path, way: Way, sessions: int) -> Measured:
    """Serve all turns of all sessions in one way, and return the figures."""
    prompts = prompts_of(sessions)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, options = Path(name), ("--threads", way.threads)
        servers = [Server(bundle, folder / f"log-{number}", *options) for number in range(way.servers)]
        for server in servers:
            stack.callback(server.stop)
        port = servers[0].port
        if way.proxied:
            (port,) = free_ports(1)
            ports = [server.port for server in servers]
            lines = lines_of_nginx(port, [ports[0], ports[-1]])
            if way.servers == 1:  # the page's configuration names two servers, of which one is removed
                lines = lines.replace(f"    server 127.0.0.1:{ports[0]} max_fails=0;", "", 1)
            stack.enter_context(nginx(folder / "nginx", lines, port))
        failed = list[str]()

        def talk(who: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            head = {"content-type": "application/json", "x-session": f"s {who}"}
            for turn in range(TURNS):
                body = {"prompt": prompts[who][turn].tolist(), "max_tokens": ANSWER, "seed": turn}
                connection.request("POST", "/v1/completions", json.dumps(body), head)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200 or json.loads(text)["usage"]["completion_tokens"] != ANSWER:
                    failed.append(f"{answer.status} {text[:100]!r}")
            connection.close()

        threads = [threading.Thread(target=talk, args=(who,)) for who in range(sessions)]
        before, began = sum(server.processor_seconds() for server in servers), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        cost = sum(server.processor_seconds() for server in servers) - before
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with {failed[0]}")
    return Measured(sessions * TURNS * ANSWER / took, cost)


def main() -> None:
    """Read the command line, run all ways in turns, and print a row of the table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    results: dict[Way, list[Measured]] = {way: [] for way in WAYS}
    for number in range(asked.rounds):
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            results[way].append(measured(asked.bundle, way, asked.sessions))
    print(f"{asked.sessions} sessions, {asked.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| way | threads | tokens/s, least to most | against one server | processor ms a token |")
    print("|---|---|---|---|---|")
    for way, runs in results.items():
        rates = [run.rate for run in runs]
        ratio = statistics.median(run.rate / one.rate for run, one in zip(runs, results[WAYS[0]], strict=True))
        cost = statistics.median(run.processor for run in runs) / (asked.sessions * TURNS * ANSWER) * 1e3
        span = f"{statistics.median(rates):,.0f}, {min(rates):,.0f} to {max(rates):,.0f}"
        print(f"| {way.name} | {way.threads} each | {span} | {ratio:.2f} | {cost:.3f} |")


if __name__ == "__main__":
    main()
