"""Put load on `txl-deploy serve`: many clients, some of them killed, slow or wrong; overload; streams at the same time.

    python benchmarks/serve/serve_load.py BUNDLE [--clients 64 --requests 200] [--streams BUNDLE …] [--out FILE]

1. Load: the clients are processes (serve_client.py). One client is killed every half second, and a new process sends
   its remaining requests. An answer that is neither right nor a documented error is a problem, with which the exit code
   is 1. Every 2 seconds the script reads the server's memory, and the part that belongs to resting sessions.
2. Overload: all clients send to a server of 4 rows, where only 2 requests may wait.
3. Streams: one server generates 1, 4 and 16 texts at the same time. For each bundle of --streams, `bench` times the
   competitor torch-kv with the bundle's batch.

Other work on the machine makes wall times longer, so the results also have the server's processor time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from server_process import Server, percentile, text_of

CLIENT = Path(__file__).with_name("serve_client.py")
TIMED = ("plain", "session", "stream")
MIB = 1 << 20
LOOK = 2.0
"""The seconds between two measurements of the server's memory."""


def main() -> None:
    """Read the command line, put all loads on servers, and print the results; exit with 1 after problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200, help="of each client")
    parser.add_argument("--overload", type=int, default=10, help="requests of each client of the overload")
    parser.add_argument("--kill-every", type=float, default=0.5, help="seconds between two killed clients")
    parser.add_argument("--prompt", type=int, default=64, help="characters of the clients' longest prompt")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer to a client")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--streams", type=Path, nargs="*", default=[], help="bundles for bench, beside the streams")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = (asked.prompt, asked.answer)
        results["load"] = load(
            asked.bundle, folder / "load", asked.clients, asked.requests, asked.kill_every, (), sizes
        )
        _note(asked.out, results)
        tight = ("--rows", 4, "--max-waiting", 2)
        results["overload"] = load(asked.bundle, folder / "over", asked.clients, asked.overload, 0, tight, sizes)
        _note(asked.out, results)
        results["streams"] = streams(asked.bundle, folder, asked.tokens)
    results["torch-kv"] = [competitor(bundle) for bundle in asked.streams]
    print(json.dumps(results, indent=1))
    _note(asked.out, results)
    sys.exit(1 if results["load"]["problems"] or results["overload"]["problems"] else 0)


def _note(out: Path | None, results: dict[str, Any]) -> None:
    """Write the figures so far to the file of --out, if it is given."""
    if out:
        out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def load(
    bundle: Path,
    folder: Path,
    clients: int,
    requests: int,
    kill_every: float,
    options: tuple[object, ...],
    sizes: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Start a server, and let many clients send requests to it.

    Args:
        bundle: the bundle to serve.
        folder: the folder for logs.
        clients: the number of clients at the same time.
        requests: the number of requests of each client.
        kill_every: the seconds after which a client is killed, again and again; 0 kills none.
        options: further options of the server.
        sizes: the characters of the longest prompt, and the tokens of an answer; () for the client's defaults.

    Returns:
        The numbers of answers by kind and status, times, memory, and problems in words.
    """
    folder.mkdir()
    server = Server(bundle, folder / "server.log", *options)
    began, cpu = time.monotonic(), server.processor_seconds()
    running = {number: _client(server, number, requests, folder, sizes) for number in range(clients)}
    draws, killed, memory, problems = random.Random(1), 0, list[dict[str, float]](), list[str]()
    most_open, next_kill, next_look = 0, began + kill_every, began
    while running:
        time.sleep(0.05)
        if kill_every and time.monotonic() > next_kill:
            number = draws.choice(list(running))
            running[number].kill()
            running[number].wait()
            killed += 1
            running[number] = _client(server, number, requests, folder, sizes)
            next_kill = time.monotonic() + kill_every
        if time.monotonic() > next_look:
            memory.append(_memory(server, time.monotonic() - began))
            next_look = time.monotonic() + LOOK
        most_open = max(most_open, server.descriptors())
        for number, process in list(running.items()):
            if process.poll() is not None:
                if process.returncode:
                    problems.append(f"client {number} ended with exit code {process.returncode}")
                del running[number]
    seconds, cpu = time.monotonic() - began, server.processor_seconds() - cpu
    time.sleep(1)  # until the server has closed the last connections
    memory.append(_memory(server, time.monotonic() - began))
    status, health = server.ask("GET", "/health")
    left = server.descriptors()
    code = server.stop()
    lines = [json.loads(line) for path in folder.glob("client-*.jsonl") for line in path.read_text().splitlines()]
    problems += [f"{line['kind']}: {line['problem']}" for line in lines if "problem" in line]
    if (status, code) != (200, 0) or health["status"] != "ok":
        problems.append(f"at the end health was {status} {health}, and the exit code {code}")
    answers = [json.loads(line) for line in (folder / "server.log").read_text().splitlines()]
    problems += [
        f"the server said {line}" for line in answers if line["event"] not in ("request", "draining", "stopped")
    ]
    if len(lines) != clients * requests:
        problems.append(f"{len(lines)} requests were made, expected {clients * requests}")
    right = {
        kind: [line["seconds"] for line in lines if line["kind"] == kind and line["status"] == 200] for kind in TIMED
    }
    firsts = [line["first"] for line in lines if "first" in line]
    return {
        "clients": clients,
        "requests": len(lines),
        "killed": killed,
        "seconds": round(seconds, 1),
        "server_processor_seconds": round(cpu, 1),
        "answers": dict(sorted(Counter(f"{line['kind']} {line['status']}" for line in lines).items())),
        "told_to_wait": sum(line["busy"] for line in lines),
        "milliseconds": {
            kind: {"p50": _ms(values, 0.5), "p99": _ms(values, 0.99)}
            for kind, values in {**right, "first token": firsts}.items()
        },
        "memory": memory[:: max(1, len(memory) // 20)] + memory[-1:],
        "descriptors": {"most": most_open, "end": left},
        "load_average": os.getloadavg()[0],
        "problems": problems[:50],
    }


def _client(
    server: Server, number: int, requests: int, folder: Path, sizes: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    log = folder / f"client-{number}.jsonl"
    command = [sys.executable, "-S", CLIENT, server.port, number, requests, log, *sizes]
    return subprocess.Popen([str(part) for part in command])


def _memory(server: Server, seconds: float) -> dict[str, float]:
    """Return the server's resident memory in MiB, the MiB of its resting sessions' states, and their number."""
    resting = [entry["nbytes"] for entry in server.ask("GET", "/v1/sessions")[1]["data"] if entry["place"] == "host"]
    results = {"seconds": seconds, "resident": server.resident() / MIB, "at rest": sum(resting) / MIB}
    return {name: round(value, 1) for name, value in results.items()} | {"sessions at rest": len(resting)}


def _ms(values: list[float], share: float) -> float:
    return round(percentile(values, share) * 1e3, 1)


def streams(bundle: Path, folder: Path, tokens: int) -> list[dict[str, Any]]:
    """Generate 1, 4 and 16 texts at the same time; return tokens per second of all, and processor time per token."""
    server = Server(bundle, folder / "streams.log")
    results = []
    for count in (1, 4, 16):
        _together(server, count, 20)
        cpu, began = server.processor_seconds(), time.monotonic()
        _together(server, count, tokens)
        seconds, cpu = time.monotonic() - began, server.processor_seconds() - cpu
        drawn = count * tokens
        results.append(
            {
                "streams": count,
                "tokens_per_second": round(drawn / seconds),
                "processor_ms_per_token": round(cpu / drawn * 1e3, 3),
                "tokens_per_processor_second": round(drawn / cpu),
            }
        )
    server.stop()
    return results


def _together(server: Server, count: int, tokens: int) -> None:
    def one(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        body = {"prompt": text_of(number, 16), "max_tokens": tokens, "seed": number, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def competitor(bundle: Path) -> dict[str, Any]:
    """Run `bench` of a bundle against torch-kv on one thread; return its results, or the problem in words."""
    options = ["--against", "torch-kv", "--threads", "1", "--seconds", "2", "--json"]
    command = [sys.executable, "-m", "txl_deploy", "bench", str(bundle), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {"bundle": bundle.name, "problem": done.stderr[-300:]}
    return {"bundle": bundle.name, "bench": json.loads(done.stdout)}


if __name__ == "__main__":
    main()
