"""Write a `.nam` file with random weights, which needs no training: `python random_nam.py standard amp.nam`.

The WaveNets have the sizes of Neural Amp Modeler's trainer; `lstm` writes an LSTM. Neither sounds like an amplifier.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

LONG = [2**n for n in range(10)]
SHORT, REST = LONG[:7], [128, 256, 512, *LONG]
WAVENETS: dict[str, Any] = {
    "standard": ((16, 8), (LONG, LONG)),
    "lite": ((12, 6), (SHORT, REST)),
    "feather": ((8, 4), (SHORT, REST)),
    "nano": ((4, 2), (SHORT, REST)),
}


def wavenet(channels: tuple[int, ...], dilations: tuple[list[int], ...], seed: int = 0) -> dict[str, Any]:
    """Return the content of a file with a WaveNet whose kernels have 3 rows.

    Each array of layers has one entry of `channels`, its width, and one of `dilations`, a dilation for each layer.
    """
    draws, layers, weights, before = np.random.default_rng(seed), [], [np.zeros(0)], 1

    def draw(*sizes: int) -> None:
        weights.append(draws.standard_normal(sizes).ravel() / np.prod(sizes[1:]) ** 0.5)

    for number, (width, steps) in enumerate(zip(channels, dilations, strict=True)):
        last = number == len(channels) - 1
        head = 1 if last else channels[number + 1]
        layers.append(
            {"input_size": before, "condition_size": 1, "head_size": head, "channels": width, "kernel_size": 3}
            | {"dilations": steps, "activation": "Tanh", "gated": False, "head_bias": last}
        )
        draw(width, before)
        for _ in steps:
            draw(width, width, 3)
            weights.append(draws.standard_normal(width) / 10)
            draw(width, 1)
            # scaled as if there were 4 × width inputs, so that each layer adds little to its rows
            draw(width, 4 * width)
            weights[-1] = weights[-1][: width * width]
            weights.append(draws.standard_normal(width) / 20)
        draw(head, width)
        before = width
    weights += [np.array([0.05, 0.02])]  # the bias of the last head, and the scale of the output
    return _file("WaveNet", {"layers": layers, "head": None, "head_scale": 0.02}, weights)


def lstm(layers: int, width: int, seed: int = 0) -> dict[str, Any]:
    """Return the content of a file with an LSTM, whose first states are not zeros."""
    draws, weights = np.random.default_rng(seed), []
    for input_width in (1, *[width] * (layers - 1)):
        weights.append(draws.standard_normal((4 * width, input_width + width)).ravel() / width**0.5)
        weights.append(draws.standard_normal(6 * width) / 4)  # biases, h and c
    weights += [draws.standard_normal(width) / width, np.array([0.05])]
    return _file("LSTM", {"input_size": 1, "hidden_size": width, "num_layers": layers}, weights)


def _file(architecture: str, config: dict[str, Any], weights: list[Any]) -> dict[str, Any]:
    flat = np.concatenate(weights).astype(np.float32).tolist()
    return {"version": "0.5.4", "architecture": architecture, "config": config, "weights": flat, "sample_rate": 48000}


if __name__ == "__main__":
    size, path = sys.argv[1:]
    made = lstm(2, 8) if size == "lstm" else wavenet(*WAVENETS[size])
    Path(path).write_text(json.dumps(made))
