"""A policy at its own rate: `python control.py policy.txl [SECONDS]`. Sensors and motors are yours (`observe`, `act`).

The rate is what the training's folder said, else 50 Hz. Time is kept by the clock and not by sleeping a while, so that
no step shifts those after it; a period that ends before its step does is counted as late, be it that the system woke
the loop late or that the step was long: both are said.
"""

import sys
import time

import numpy as np
import txl_runtime


def observe(size: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """Return the readings of the robot's sensors, [1, size], scaled as the policy was trained on them."""
    return np.zeros((1, size), np.float32)


def act(actions: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> None:
    """Give the motors their targets."""


def main(bundle: str, seconds: float = 5.0) -> None:
    """Run for so long; says at the end how much of a period a step took, and how many periods were late."""
    model = txl_runtime.load(bundle, threads=1)
    stream, (seen, *others), (given, *_) = model.stream(1), model.manifest.given, model.manifest.outputs
    rest = {entry.name: np.zeros(entry.sizes(1, 1), entry.dtype) for entry in others}
    period = 1 / (model.manifest.family.get("rate") or 50)
    due, took, late, woken = time.perf_counter(), [0.0], 0, 0.0
    for _ in range(round(seconds / period)):
        began = time.perf_counter()
        woken = max(woken, began - due)
        act(stream.run({seen.name: observe(int(seen.shape[-1])), **rest})[given.name])
        ended, due = time.perf_counter(), due + period
        took.append(ended - began)
        late += ended > due
        time.sleep(max(0.0, due - ended))
    print(
        f"{len(took) - 1} steps at {1 / period:g} Hz, the longest {max(took) * 1e3:.2f} of {period * 1e3:g} ms, "
        f"woken up to {woken * 1e3:.2f} ms late, {late} periods late"
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:3]))
