"""txl-deploy on one screen: runs a model that carries its memory from step to step, with NumPy and ONNX Runtime only.

    python samples/minimal.py samples/tiny.txl "def main("

A bundle is a folder. `manifest.json` lists the programs, which are ONNX files, and the states that each reads and
returns. A step runs one program and keeps the states that it returned for the next step; so a Transformer-XL carries
its memory over a text of any length. `txl_runtime` does this for every kind of state, checks what it reads, and runs
several sequences at once; docs/bundle-format.md has the rules. The tokens drawn here equal those of `generate` with
the same seed, if `txl_runtime.load(BUNDLE, update="rolled")` opens the bundle: its programs return the memory in new
arrays. The programs of the default, the ring, are faster.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray


class Minimal:
    """One sequence of a bundle, read token by token.

    Attributes:
        memory: keys and values of each layer, {"memory.layers.00.key": float32 [1, heads, M, head size], …}.
        rows, fill: number of memory rows, M, and number of filled rows; these stand last.
    """

    def __init__(self, folder: Path) -> None:
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        except OSError:
            manifest = {"batch_size": 0}
        wanted = {"kind": "logprobs", "segment_length": 1, "update": "rolled"}  # reads one token, returns the memory
        programs = [entry for entry in manifest.get("programs", ()) if wanted.items() <= entry.items()]
        if manifest["batch_size"] != 1 or not programs:
            raise SystemExit(f"{folder}: expected a bundle of one sequence that returns log-probabilities of bytes")
        self.program = programs[0]
        self.session = onnxruntime.InferenceSession(str(folder / self.program["file"]))
        self.states = [state for state in manifest["states"] if state["update"] == "rolled"]
        self.memory: dict[str, NDArray[np.float32]] = {
            state["input"]: np.zeros(state["shape"], state["dtype"]) for state in self.states
        }
        self.rows, self.fill = self.states[0]["shape"][self.states[0]["row_axis"]], 0

    def step(self, token: int) -> NDArray[np.float32]:
        """Read one token and return the log-probabilities of the next token, float32 [V].

        For example, after `step(ord("d"))` entry `ord("e")` is log p("e" | all that was read, "d").
        """
        inputs = {
            "tokens": np.array([[token]], np.int32),  # one sequence of one token, [B, L]
            "valid": np.array([1], np.int32),  # number of tokens of each sequence, at most L
            "fill": np.array([self.fill], np.int32),  # number of memory rows that the attention may see
        }
        names: list[str] = [output["name"] for output in self.program["outputs"]]
        outputs = dict(zip(names, self.session.run(names, inputs | self.memory), strict=True))
        self.memory = {state["input"]: outputs[state["output"]] for state in self.states}
        self.fill = min(self.fill + 1, self.rows)
        logprobs: NDArray[np.float32] = outputs["logprobs"][0, 0]
        return logprobs


def draw(model: Minimal, prompt: bytes, count: int, temperature: float, seed: int) -> Iterator[int]:
    """Read a prompt, then yield `count` tokens, each drawn from the distribution after the previous token."""
    random: Any = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(0,))))
    for token in prompt:
        logprobs = model.step(token)
    for number in range(count):
        x = logprobs.astype(np.float64)
        sums = np.exp((x - x.max()) / temperature).cumsum()
        token = min(int(np.searchsorted(sums, random.random() * sums[-1], side="right")), len(sums) - 1)
        yield token
        if number < count - 1:
            logprobs = model.step(token)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2]:
        sys.exit(f'usage: python {sys.argv[0]} BUNDLE "TEXT TO CONTINUE"')
    for byte in draw(Minimal(Path(sys.argv[1])), os.fsencode(sys.argv[2]), 200, 0.8, seed=1):
        sys.stdout.buffer.write(bytes([byte]))
        sys.stdout.buffer.flush()
    print()
