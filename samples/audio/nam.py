"""Reads an amplifier or effect from a `.nam` file of Neural Amp Modeler: a WaveNet or an LSTM of one channel.

    txl-deploy export samples/audio/nam.py:build --weights amp.nam -o amp.txl

The file is JSON: `architecture`, `config`, `weights` (one list of numbers) and `sample_rate`. If it holds several
sizes of one model (SlimmableContainer), the largest is exported. States begin as they are after a long silence.
Sources: "The current specification" of neural-amp-modeler's documentation and the page "WaveNet Computation
Walkthrough" of NeuralAmpModelerCore, files of version 0.5 to 0.7.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, at_rest
from txl_runtime.errors import UsageError

SAMPLE_RATE = 48000.0
"""Samples per second if the file does not name a rate."""
LENGTHS = (64, 8, 1)
"""Segment lengths in samples. A block of any size can be cut into segments of these lengths."""
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "Tanh": torch.tanh,
    "Hardtanh": functional.hardtanh,
    "ReLU": torch.relu,
    "LeakyReLU": functional.leaky_relu,
    "Sigmoid": torch.sigmoid,
    "SiLU": functional.silu,
    "Hardswish": functional.hardswish,
    "Softsign": functional.softsign,
}
REFUSED = (
    *("head1x1", "conv_pre_film", "conv_post_film", "input_mixin_pre_film", "input_mixin_post_film"),
    *("activation_pre_film", "activation_post_film", "layer1x1_post_film", "head1x1_post_film"),
)
"""Optional parts of a layer that this module does not compute: a file that switches one of them on is refused."""
MOST_PAST = 1 << 18
"""Maximum number of samples that a layer may look back, 5 s at 48 kHz, so that no file makes a state of any size."""

MOST_LAYERS = 64
"""Maximum number of an LSTM's layers: they are made before the number of weights in the file is checked."""


class Conv(nn.Module):
    """A convolution over rows, [B, T, n] → [B, T, m]. Its state holds the earlier rows that the first new row needs.

    Attributes:
        past: number of the state's rows, (kernel - 1) · dilation.
        name: the state's name, which is the path of this module.
    """

    def __init__(self, taken: int, given: int, kernel: int = 1, dilation: int = 1, bias: bool = True) -> None:
        super().__init__()
        if (kernel - 1) * dilation > MOST_PAST:
            raise UsageError(f"kernel_size {kernel} and dilation {dilation} look back further than {MOST_PAST} samples")
        self.shape, self.dilation, self.past, self.name = (given, taken, kernel), dilation, (kernel - 1) * dilation, ""
        self.weight = nn.Parameter(torch.zeros(kernel * taken, given))
        self.bias = nn.Parameter(torch.zeros(given)) if bias else None

    def forward(self, x: Tensor, states: dict[str, Tensor]) -> Tensor:
        """Convolve new rows [B, L, channels], and replace the state in `states` by the newest rows.

        For example, the state is [1, 2, 4] for 4 channels and a kernel of 3.
        """
        length = x.shape[1]
        if self.past:
            rows = torch.cat([states[self.name], x], 1)
            states[self.name] = rows[:, length:]
            places = range(0, self.past + 1, self.dilation)
            x = torch.cat([rows[:, place : place + length] for place in places], -1)
        result = x @ self.weight
        return result if self.bias is None else result + self.bias

    def read(self, values: Tensor) -> dict[str, Tensor]:
        """Return the parameters as a state dict. A file stores the weights in the order [m][n][kernel], then the bias.

        For example, 4 channels in and out with a kernel of 3 have 48 weights and 4 numbers of bias.
        """
        size = self.weight.numel()
        parameters = {"weight": values[:size].reshape(self.shape).permute(2, 1, 0).reshape(self.weight.shape)}
        return parameters if self.bias is None else parameters | {"bias": values[size:]}


class Layer(nn.Module):
    """A layer: a dilated convolution of its rows plus the projected samples, an activation, and a projection.

    The result of the projection is added to the layer's rows.
    """

    def __init__(self, of: Mapping[str, Any], number: int) -> None:
        super().__init__()
        channels, kernel = of["channels"], _each(of, "kernel_sizes" if "kernel_sizes" in of else "kernel_size", number)
        inner, gate = of.get("bottleneck", channels), "gated" if of.get("gated") else "none"
        gate = _each(of, "gating_mode", number, gate)
        if gate not in ("none", "gated"):
            raise UsageError(f"gating_mode is {gate!r}, expected none or gated")
        wide = inner if gate == "none" else 2 * inner
        self.conv = Conv(channels, wide, count("kernel_size", kernel), count("dilations", of["dilations"][number]))
        self.mixin = Conv(1, wide, bias=False)
        self.narrow = Conv(inner, channels) if of.get("layer1x1", {}).get("active", True) else None
        self.activation = _activation(_each(of, "activation", number))
        second = _each(of, "secondary_activation", number) or "Sigmoid"
        self.gate = None if gate == "none" else _activation(second)

    def forward(self, x: Tensor, samples: Tensor, states: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rows for the next layer and the rows for the head, e.g. [1, 64, 4] each."""
        result = self.conv(x, states) + self.mixin(samples, states)
        if self.gate is None:
            result = self.activation(result)
        else:
            first, second = result.chunk(2, -1)
            result = self.activation(first) * self.gate(second)
        return x + (result if self.narrow is None else self.narrow(result, states)), result


class LayerArray(nn.Module):
    """Layers of one width, with a head that projects the sum of the layers' outputs."""

    def __init__(self, of: Mapping[str, Any]) -> None:
        super().__init__()
        for part in REFUSED:
            if (of.get(part) or {}).get("active"):
                raise UsageError(f"a layer has {part}; that is not supported")
        for key in ("groups_input", "groups_input_mixin", "condition_size"):
            if of.get(key, 1) != 1:
                raise UsageError(f"{key} is {of[key]!r}, expected 1")
        head = of.get("head") or {"out_channels": of["head_size"], "kernel_size": 1, "bias": of["head_bias"]}
        sizes = {key: count(key, of[key]) for key in ("input_size", "channels")}
        inner = count("bottleneck", of.get("bottleneck", sizes["channels"]))
        self.widen = Conv(sizes["input_size"], sizes["channels"], bias=False)
        self.layers = nn.ModuleList(Layer(of, number) for number in range(len(of["dilations"])))
        kernel, dilation = count("kernel_size", head["kernel_size"]), count("dilation", head.get("head_dilation", 1))
        self.head = Conv(inner, count("head_size", head["out_channels"]), kernel, dilation, bool(head["bias"]))


class WaveNet(nn.Module):
    """Arrays of layers in sequence; the head of an array also gets the result of the previous array's head."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        for part in ("head", "condition_dsp"):
            if config.get(part) is not None:
                raise UsageError(f"the WaveNet has {part}; that is not supported")
        self.arrays = nn.ModuleList(map(LayerArray, config["layers"]))
        self.scale = nn.Parameter(torch.zeros(1))
        for name, part in self.named_modules():
            if isinstance(part, Conv):
                part.name = name

    def forward(self, samples: Tensor, states: dict[str, Tensor]) -> Tensor:
        """Run new samples, [B, L] → [B, L], and replace each convolution's state in `states` by the next one.

        For example, [1, 64] → [1, 64].
        """
        first = rows = samples[..., None]
        head: Any = 0
        array: Any
        found: Any
        for array in self.arrays:
            rows = array.widen(rows, states)
            for layer in array.layers:
                rows, found = layer(rows, first, states)
                head = head + found
            head = array.head(head, states)
        scaled: Tensor = self.scale * head
        return scaled[..., 0]

    def states(self) -> dict[str, tuple[int, int]]:
        """Return (rows, width) of the state of each convolution that has one, by name."""
        convs = [part for part in self.modules() if isinstance(part, Conv)]
        return {conv.name: (conv.past, conv.shape[1]) for conv in convs if conv.past}

    def read(self, values: Tensor) -> dict[str, Tensor]:
        """Return a file's numbers as a state dict: the numbers of each convolution in turn, and last the scale.

        For example, the numbers of a standard model are a tensor [13802].
        """
        parameters, place = {"scale": values[-1:]}, 0
        for name, part in self.named_modules():
            if isinstance(part, Conv):
                size = sum(parameter.numel() for parameter in part.parameters())
                read = part.read(values[place : place + size])
                parameters |= {f"{name}.{key}": value for key, value in read.items()}
                place += size
        return parameters


def _each(of: Mapping[str, Any], key: str, number: int, default: Any = None) -> Any:
    """Return a layer's value from an array's config, which holds one value for all layers or a list with one each."""
    value = of.get(key, default)
    return value[number] if isinstance(value, list) else value


def _activation(activation: Any) -> Callable[[Tensor], Tensor]:
    name, options = (activation, {}) if isinstance(activation, str) else (activation["type"], dict(activation))
    options.pop("type", None)
    if name not in ACTIVATIONS or options.keys() - ({"negative_slope"} if name == "LeakyReLU" else set()):
        raise UsageError(f"the activation is {activation}, expected one of {', '.join(ACTIVATIONS)}")
    return partial(ACTIVATIONS[name], **options)


class Lstm(nn.Module):
    """An LSTM over samples. The file also holds the first states `h` and `c`, [layers, H] each."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        for key in ("input_size", "in_channels", "out_channels"):
            if config.get(key, 1) != 1:
                raise UsageError(f"{key} is {config[key]!r}, expected 1")
        layers, width = count("num_layers", config["num_layers"]), count("hidden_size", config["hidden_size"])
        if layers > MOST_LAYERS:
            raise UsageError(f"num_layers is {layers}, expected at most {MOST_LAYERS}")
        self.lstm, self.head = nn.LSTM(1, width, layers, batch_first=True), nn.Linear(width, 1)
        self.register_buffer("h", torch.zeros(layers, width))
        self.register_buffer("c", torch.zeros(layers, width))

    def forward(self, samples: Tensor, states: dict[str, Tensor]) -> Tensor:
        """Run new samples, [B, L] → [B, L], and replace h and c [layers, B, H] in `states` by the next ones.

        For example, [1, 64] → [1, 64].
        """
        rows, (states["h"], states["c"]) = self.lstm(samples[..., None], (states["h"], states["c"]))
        sound: Tensor = self.head(rows)[..., 0]
        return sound

    def read(self, values: Tensor) -> dict[str, Tensor]:
        """Return a file's numbers as a state dict.

        A file holds for each layer one matrix (columns of the input, then of h), one bias, h and c; then the head. For
        example, one layer of input 1 and hidden size 3 has 4 · 3 · (1 + 3) numbers in its matrix, and 12 in its bias.
        """
        layers, width = self.lstm.num_layers, self.lstm.hidden_size
        parameters, h, c, place = {}, [], [], 0

        def take(*sizes: int) -> Tensor:
            nonlocal place
            size = torch.Size(sizes).numel()
            place += size
            return values[place - size : place].reshape(sizes)

        for layer in range(layers):
            input_width = width if layer else 1
            matrix = take(4 * width, input_width + width)
            parameters[f"lstm.weight_ih_l{layer}"], parameters[f"lstm.weight_hh_l{layer}"] = (
                matrix[:, :input_width],
                matrix[:, input_width:],
            )
            parameters[f"lstm.bias_ih_l{layer}"] = take(4 * width)
            parameters[f"lstm.bias_hh_l{layer}"] = torch.zeros(4 * width)
            h.append(take(width))
            c.append(take(width))
        return parameters | {
            "head.weight": take(1, width),
            "head.bias": take(1),
            "h": torch.stack(h),
            "c": torch.stack(c),
        }


def build(weights: str | None) -> StepSpec:
    """Return the step of a `.nam` file: samples `input` and `output` [B, L], and states after a long silence."""
    if weights is None:
        raise UsageError("no file is given, expected one of Neural Amp Modeler; give --weights amp.nam")
    try:
        stored = json.loads(Path(weights).read_bytes())
        if stored["architecture"] == "SlimmableContainer":
            stored = max(stored["config"]["submodels"], key=lambda one: float(one["max_value"]))["model"]
        if stored["architecture"] not in ("WaveNet", "LSTM"):
            raise UsageError(f"architecture is {stored['architecture']!r}, expected WaveNet or LSTM")
        make = WaveNet if stored["architecture"] == "WaveNet" else Lstm
        with torch.device("meta"):  # on the meta device, because a file may name sizes that do not fit the memory
            expected = sum(part.numel() for name, part in make(stored["config"]).state_dict().items() if _stored(name))
        values = torch.tensor(stored["weights"], dtype=torch.float32)
        if values.shape != (expected,) or not values.isfinite().all():
            raise UsageError(f"has {values.numel()} weights, expected {expected} finite ones of its config")
    except (OSError, LookupError, AttributeError, TypeError, ValueError, RuntimeError, UsageError) as error:
        lacks = f"lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise UsageError(
            f"{weights}: {' '.join(lacks.split())}; export it again, or change samples/audio/nam.py"
        ) from None
    module = make(stored["config"]).eval()
    module.load_state_dict(module.read(values))
    if isinstance(module, WaveNet):
        states = [StateSpec(name, ("B", *sizes)) for name, sizes in module.states().items()]
    else:
        shape = (module.lstm.num_layers, "B", module.lstm.hidden_size)
        states = [StateSpec(name, shape, initial=getattr(module, name)[:, None]) for name in ("h", "c")]
    inputs, outputs = [InputSpec("input", ("B", "L"))], [OutputSpec("output", ("B", "L"))]
    facts = {"rate": float(stored.get("sample_rate") or SAMPLE_RATE)}
    return at_rest(StepSpec(module, inputs, states, outputs, step=_step, segment_lengths=LENGTHS, facts=facts))


def _step(module: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    after = dict(states)
    return {"output": module(inputs["input"], after)}, after


def _stored(name: str) -> bool:
    """Return True if `.nam` files hold this tensor. They hold no second bias of an LSTM, as the first is the sum."""
    return "bias_hh" not in name


def count(name: str, value: Any) -> int:
    """Return a size from a file's config; refuse a value that is no positive integer."""
    if type(value) is not int or value < 1:
        raise UsageError(f"{name} is {value!r}, expected a whole number from 1")
    return value
