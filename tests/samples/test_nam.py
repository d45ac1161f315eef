"""`.nam` files: the step in blocks beside the whole signal at once, computed here from the format's page alone."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_runtime
from own_loops import Stepped
from support import call_main
from torch.nn import functional
from txl_export.families.own_module.resting import at_rest
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.errors import TxlError

FOLDER = Path(__file__).parents[2] / "samples" / "audio"
sys.path.insert(0, str(FOLDER))
import nam  # noqa: E402
import random_nam  # noqa: E402

SILENCE = 3000
ACTIVATIONS: dict[str, Any] = {"Tanh": torch.tanh, "LeakyReLU": lambda x: functional.leaky_relu(x, 0.2)}


def plain() -> dict[str, Any]:
    """A file of version 0.5 as the trainer writes it: two arrays of layers."""
    return random_nam.wavenet((4, 2), ([1, 2, 4], [8, 1]))


def newer() -> dict[str, Any]:
    """A file of version 0.7: kernels of their own, a gate, a narrower middle, a head that looks back."""
    of = {
        "input_size": 1,
        "condition_size": 1,
        "channels": 3,
        "bottleneck": 2,
        "kernel_sizes": [2, 5],
        "dilations": [3, 2],
    }
    of |= {"activation": [{"type": "LeakyReLU", "negative_slope": 0.2}, "Tanh"], "gating_mode": ["none", "gated"]}
    of |= {"secondary_activation": [None, "Sigmoid"], "head": {"out_channels": 1, "kernel_size": 4, "bias": True}}
    of |= {"layer1x1": {"active": True, "groups": 1}, "head1x1": {"active": False, "out_channels": 1, "groups": 1}}
    sizes = [3, (3 * 2 * 2 + 2) + 2 + (2 * 3 + 3), (3 * 4 * 5 + 4) + 4 + (2 * 3 + 3), 2 * 4 + 1, 1]
    weights = np.random.default_rng(3).standard_normal(sum(sizes)).astype(np.float32) / 2
    config = {"layers": [of], "head": None, "head_scale": 0.02}
    return {"version": "0.7.0", "architecture": "WaveNet", "config": config, "weights": weights.tolist()}


def whole(file: dict[str, Any], samples: np.ndarray) -> np.ndarray:
    """Return the output for a signal [B, T] after `SILENCE` zeros, by convolutions over all of it at once."""
    weights, place = torch.tensor(file["weights"], dtype=torch.float64), 0

    def take(*sizes: int) -> torch.Tensor:
        nonlocal place
        place += (count := int(np.prod(sizes)))
        return weights[place - count : place].reshape(sizes)

    x = torch.cat([torch.zeros(len(samples), SILENCE), torch.tensor(samples)], 1)[:, None].double()
    if file["architecture"] == "LSTM":
        return _lstm(file["config"], take, x[:, 0])[:, SILENCE:]
    rows, head = x, torch.zeros(())

    def conv(given: torch.Tensor, out: int, kernel: int = 1, dilation: int = 1, bias: bool = True) -> torch.Tensor:
        weight, more = take(out, given.shape[1], kernel), take(out) if bias else None
        return functional.conv1d(functional.pad(given, ((kernel - 1) * dilation, 0)), weight, more, dilation=dilation)

    for of in file["config"]["layers"]:
        rows, channels = conv(rows, of["channels"], bias=False), of["channels"]
        inner = of.get("bottleneck", channels)
        for number, dilation in enumerate(of["dilations"]):
            gated = of.get("gating_mode", ["none"] * 9)[number] == "gated"
            kernel, wide = of.get("kernel_sizes", [of.get("kernel_size")] * 9)[number], inner * (1 + gated)
            found = conv(rows, wide, kernel, dilation) + conv(x, wide, bias=False)
            said = of["activation"][number] if isinstance(of["activation"], list) else of["activation"]
            activation = ACTIVATIONS[said if isinstance(said, str) else said["type"]]
            found = activation(found[:, :inner]) * torch.sigmoid(found[:, inner:]) if gated else activation(found)
            head, rows = head + found, rows + conv(found, channels)
        last = of.get("head") or {"out_channels": of["head_size"], "kernel_size": 1, "bias": of["head_bias"]}
        head = conv(head, last["out_channels"], last["kernel_size"], bias=last["bias"])
    found = take(1) * head[:, 0]
    assert place == len(weights)
    return found[:, SILENCE:].numpy()


def _lstm(config: dict[str, Any], take: Any, x: torch.Tensor) -> np.ndarray:
    width, taken, layers = config["hidden_size"], 1, []
    for _ in range(config["num_layers"]):
        layers.append([take(4 * width, taken + width), take(4 * width), take(width), take(width)])
        taken = width
    weight, bias = take(1, width), take(1)
    out = torch.zeros_like(x)
    state = [[part.expand(len(x), width) for part in layer[2:]] for layer in layers]
    for t in range(x.shape[1]):
        row = x[:, t : t + 1]
        for number, (matrix, more, _, _) in enumerate(layers):
            h, c = state[number]
            i, f, g, o = (torch.cat([row, h], 1) @ matrix.T + more).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            row = torch.sigmoid(o) * torch.tanh(c)
            state[number] = [row, c]
        out[:, t] = (row @ weight.T + bias)[:, 0]
    return out.numpy()


FILES = {"plain": plain, "newer": newer, "lstm": lambda: random_nam.lstm(2, 5)}


@pytest.fixture(params=FILES)
def file(request, tmp_path) -> tuple[Path, dict[str, Any]]:
    content = FILES[request.param]()
    (tmp_path / "amp.nam").write_text(json.dumps(content))
    return tmp_path / "amp.nam", content


def test_blocks_of_any_size_are_the_whole_signal_after_a_long_silence(file):
    """So a stream begins as an amplifier that has been switched on for a while: states are at rest."""
    path, content = file
    stepped, draws = Stepped(nam.build(str(path)), 2), np.random.default_rng(1)
    samples = draws.standard_normal((2, 600)).astype(np.float32)
    cuts = [0, *np.cumsum(draws.integers(1, 60, 12)).tolist(), 600]
    parts = [stepped.run({"input": samples[:, a:b]})["output"] for a, b in pairwise(cuts)]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole(content, samples), rtol=0, atol=2e-6)


def test_the_largest_of_several_sizes_is_taken(tmp_path):
    sizes = [{"max_value": 0.5, "model": random_nam.lstm(1, 3)}, {"max_value": 1.0, "model": plain()}]
    content = {"version": "0.7.0", "architecture": "SlimmableContainer", "config": {"submodels": sizes}, "weights": []}
    (tmp_path / "a.nam").write_text(json.dumps(content))
    assert type(nam.build(str(tmp_path / "a.nam")).module).__name__ == "WaveNet"


def test_a_state_that_never_rests_is_said(tmp_path):
    """A counter goes on for ever: silence ends after 524,288 positions, and the facts say how far it still moves."""

    def step(module, inputs, states):
        return {"y": inputs["x"]}, {"n": states["n"] + 1}

    module = torch.nn.Identity()
    spec = at_rest(StepSpec(module, [InputSpec("x", ("B", "L"))], [StateSpec("n", ("B",))], ["y"], step=step))
    assert spec.facts == {"rest": {"positions": 1 << 19, "moved": 1 / 128}}
    assert float(spec.states[0].initial) == 128


def _changed(**changes: Any) -> dict[str, Any]:
    """A plain file in which one thing of the file, its config or its first array is another."""
    content = plain()
    of = content["config"]["layers"][0]
    for key, value in changes.items():
        next((place for place in (content, content["config"]) if key in place), of)[key] = value
    return content


DAMAGED: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "Expecting property name"),
    "a list": ([1], "list indices must be integers"),
    "a network of another kind": (_changed(architecture="ConvNet"), "architecture is 'ConvNet'"),
    "too few weights": (_changed(weights=[0.5] * 7), "has 7 weights, expected 296"),
    "weights of no numbers": (_changed(weights=["a"]), "too many dimensions 'str'"),
    "infinity": (_changed(weights=[*plain()["weights"][:-1], 1e39]), "expected 296 finite ones"),
    "a post-processing head": (_changed(head={"channels": 3}), "the WaveNet has head"),
    "modulation": (_changed(conv_pre_film={"active": True}), "a layer has conv_pre_film"),
    "groups": (_changed(groups_input=2), "groups_input is 2"),
    "an activation by another name": (_changed(activation="Fasttanh"), "the activation is Fasttanh"),
    "blended": (_changed(gating_mode="blended"), "gating_mode is 'blended'"),
    "a width of nobody's memory": (_changed(channels=10**12), "Storage size calculation overflowed"),
    "a dilation of nobody's memory": (_changed(dilations=[1, 2, 10**9]), "look back further than 262144"),
    "no layers": (_changed(layers=None), "not iterable"),
    "a layer without a width": (_changed(layers=[{}]), "lacks 'head_size'"),
    "an LSTM without end": (
        random_nam.lstm(1, 3) | {"config": {"hidden_size": 3, "num_layers": 10**9}},
        "num_layers is 1000000000, expected at most 64",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_cannot_be_read_is_refused_in_one_line(name, tmp_path):
    content, said = DAMAGED[name]
    (tmp_path / "a.nam").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TxlError, match=said) as refused:
        nam.build(str(tmp_path / "a.nam"))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_file_becomes_a_bundle_that_knows_its_rate(tmp_path, monkeypatch, capfd):
    (tmp_path / "amp.nam").write_text(json.dumps(content := newer() | {"sample_rate": 44100}))
    source = ["--weights", tmp_path / "amp.nam"]
    words = ["export", f"{FOLDER / 'nam.py'}:build", *source, "-o", tmp_path / "amp.txl", "--batch-size", "2"]
    assert call_main(words, monkeypatch, capfd)[0] == 0
    model = txl_runtime.load(tmp_path / "amp.txl", "cpu", threads=1)
    assert model.manifest.family["rate"] == 44100
    assert model.manifest.segment_lengths == (64, 8, 1)
    samples = np.random.default_rng(2).standard_normal((2, 500)).astype(np.float32)
    stream = model.stream()
    found = stream.feed({"input": samples})["output"]
    np.testing.assert_allclose(found, whole(content, samples), rtol=0, atol=1e-5)
    stream.reset([1])
    again = stream.feed({"input": samples})["output"]
    np.testing.assert_allclose(again[1], found[1], rtol=0, atol=1e-6)
