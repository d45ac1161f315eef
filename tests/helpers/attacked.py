"""Runs each attack of `hostile_graphs` in a process that loads it with a trial and runs one segment.

`python tests/helpers/attacked.py` prints the table: by name, what ended it, and seconds of processor time that the
caller itself spent on it, its imports left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import step_models
from hostile_graphs import HOSTILE, hostile
from resealing import copied, reseal

CALLER = """
import json, sys, time
import numpy as np
import onnxruntime, txl_runtime, txl_runtime.host.trial

begun, error = time.process_time(), ""
try:
    with txl_runtime.load(sys.argv[1], trial=True) as model:
        model.stream().run({"tokens": np.zeros((3, 4), np.int32)})
except txl_runtime.TxlError as found:
    error = f"{type(found).__name__}: {found}"
print(json.dumps([error, time.process_time() - begun]))
"""
"""Loads a bundle of `step_models.counting`, and runs a segment."""


class Ended(NamedTuple):
    """The end of an attack: "structure", "trial" or "ran"; the words, and the seconds that the caller spent on it."""

    where: str
    said: str
    seconds: float


def attacked(bundle: Path, place: Path, name: str) -> Ended:
    """One attack, in a bundle that is made at a place.

    Raises:
        AssertionError: the caller died, or raised what is no error of this project's.
    """
    copied(bundle, place)
    (place / "step-4.onnx").write_bytes(hostile(bundle, name))
    reseal(place)
    done = subprocess.run([sys.executable, "-c", CALLER, place], capture_output=True, text=True)
    assert done.returncode == 0, (name, done.returncode, done.stderr)
    error, seconds = json.loads(done.stdout)
    if not error:
        return Ended("ran", "", seconds)
    assert error.isprintable()
    refused = re.fullmatch(r"BundleError: .*step-4\.onnx: (has .*, expected .*); export the model again", error)
    if refused:
        return Ended("structure", refused[1], seconds)
    in_trial = re.fullmatch(r"BundleError: .*: in a trial, (.*), expected (at most|programs that run) .*", error)
    by_engine = re.fullmatch(r"BundleError: .*step-4\.onnx: (.*); expected a graph ONNX Runtime can load", error)
    ended = in_trial or by_engine
    assert ended, error
    return Ended("trial", ended[1], seconds)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = step_models.counting().write(Path(folder) / "step.txl")
        for number, attack in enumerate(HOSTILE):
            found = attacked(made, Path(folder) / f"{number}.txl", attack)
            print(f"| {attack} | {found.where} | {found.said[:150]} | {found.seconds:.2f} |", flush=True)
