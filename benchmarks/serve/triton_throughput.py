"""Measure steps per second, and tokens per second of generation, of a package in Triton's Python backend.

    .clients/bin/python benchmarks/serve/triton_throughput.py BUNDLE [--seconds 5] [--sequences 1,4,16]

The script needs `make triton` and `make clients`. A step is a request over gRPC that feeds one token and asks for the
most likely next token. Generation runs on the server.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

import tritonclient.grpc  # noqa: E402 - in the environment that has it
from deploy.triton.exercises import Client, ask  # noqa: E402
from deploy.triton.running import Server, running  # noqa: E402

from txl_deploy.triton.repository import package_python  # noqa: E402


def steps(server: Server, model: str, count: int, seconds: float) -> float:
    """Return steps per second of `count` sequences, each with a client that waits for each answer."""
    done = [0] * count
    begin, ends = threading.Barrier(count + 1), [0.0]

    def talk(number: int) -> None:
        client = Client("grpc", server.grpc, model)
        client.feed(number + 1, [1] * 128, "next", sequence_start=True)
        begin.wait()
        while time.monotonic() < ends[0]:
            client.feed(number + 1, [done[number] % 200], "next")
            done[number] += 1
        client.feed(number + 1, [1], "next", sequence_end=True)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    ends[0] = time.monotonic() + seconds + 60
    begin.wait()
    ends[0] = time.monotonic() + seconds
    for thread in threads:
        thread.join()
    return sum(done) / seconds


def tokens(server: Server, model: str, count: int, seconds: float) -> float:
    """Return tokens per second of `count` requests that generate at the same time, after prompts of 128 tokens."""
    found: Queue[Any] = Queue()
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        for number in range(count):
            ask(client, model, [1] * 128, 100_000, request_id=str(number))
        heard = 0
        while heard < 20 * count:
            heard += _heard(found)
        began, heard = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            heard += _heard(found)
        rate = heard / (time.monotonic() - began)
        client.stop_stream(cancel_requests=True)
    return rate


def _heard(found: Queue[Any]) -> int:
    result, error = found.get(timeout=60)
    if error is not None:
        raise error
    return int(result.as_numpy("tokens").size)


def processor_seconds(server: Server) -> float:
    """Return the processor seconds so far of the server and of the processes of its models."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    for process in (server.process.pid, *server.stubs().values()):
        told = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += (int(told[11]) + int(told[12])) / tick
    return total


def main() -> None:
    """Read the command line, and print a line for each kind of work and number of sequences."""
    parser = argparse.ArgumentParser(description="Throughput of a package in Triton.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--sequences", default="1,4,16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = package_python(options.bundle, Path(folder) / "models")
        with running(Path(folder) / "log", result.folder) as server:
            for measure, model, unit in ((steps, result.models[0], "steps"), (tokens, result.models[-1], "tokens")):
                for count in map(int, options.sequences.split(",")):
                    before, own = processor_seconds(server), resource.getrusage(resource.RUSAGE_SELF).ru_utime
                    rate = measure(server, model, count, options.seconds)
                    spent = processor_seconds(server) - before
                    mine = resource.getrusage(resource.RUSAGE_SELF).ru_utime - own
                    print(
                        f"{count:3d} sequences: {rate:7.0f} {unit}/s, server {spent:5.1f} s of the processor, client "
                        f"{mine:5.1f} s, load {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
                    time.sleep(2)


if __name__ == "__main__":
    main()
