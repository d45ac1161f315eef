"""Runs a policy at the rate of its training: `python control.py policy.txl [SECONDS]`.

Connect your sensors and motors in `observe` and `act`. The rate is in the bundle if the training's folder named it;
else it is 50 Hz. Each period ends at a fixed time of the clock, so a slow step does not delay later periods. A period
is late if its step ends after it, because the system woke the loop late or because the step was long.
"""

import sys
import time

import numpy as np
import txl_runtime


def observe(size: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """Return the readings of the robot's sensors, [1, size], scaled as the policy was trained on them."""
    return np.zeros((1, size), np.float32)


def act(actions: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> None:
    """Send targets to the motors, e.g. [1, 12] for 12 motors."""


def main(bundle: str, seconds: float = 5.0) -> None:
    """Run the policy for `seconds`; print the longest step, the latest waking, and the number of late periods."""
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
