"""A policy at 50 Hz: `python control.py policy.txl [SECONDS]`. Sensors and motors are yours: `observe` and `act`.

Its time is kept by the clock and not by sleeping a while, so that no step shifts those after it.
"""

import sys
import time

import numpy as np
import txl_runtime

PERIOD = 1 / 50


def observe(size: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """What the robot's sensors say, as the policy was trained on it."""
    return np.zeros((1, size), np.float32)


def act(actions: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> None:
    """Give the motors their targets."""


def main(bundle: str, seconds: float = 5.0) -> None:
    """Run for so long; says at the end how much of a period a step took."""
    model = txl_runtime.load(bundle, threads=1)
    stream, (seen,), (given, *_) = model.stream(1), model.manifest.given, model.manifest.outputs
    due, took = time.perf_counter(), [0.0]
    for _ in range(round(seconds / PERIOD)):
        began = time.perf_counter()
        act(stream.run({seen.name: observe(int(seen.shape[1]))})[given.name])
        took.append(time.perf_counter() - began)
        due += PERIOD
        time.sleep(max(0.0, due - time.perf_counter()))
    print(f"{len(took) - 1} steps, the longest {max(took) * 1e3:.2f} of {PERIOD * 1e3:.0f} ms")


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:3]))
