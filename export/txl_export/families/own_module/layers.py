"""Recognises layers of torch.nn by the names and shapes of their tensors, and by their class if the file has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = "CELU Dropout ELU Flatten GELU Hardsigmoid Hardswish Identity LeakyReLU Mish ReLU ReLU6 SELU SiLU Sigmoid "
_PLAIN += "Softplus Tanh"
WITHOUT_TENSORS = dict.fromkeys(_PLAIN.split(), ()) | dict.fromkeys(("LogSoftmax", "Softmax"), (-1,))
"""Layers without tensors, each with the arguments that the written file gives them."""
NOT_STORED = {
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), "stride, padding, dilation and groups"),
    **dict.fromkeys(("CELU", "ELU", "LeakyReLU", "Softplus"), "the number that it is made with"),
    **dict.fromkeys(("LogSoftmax", "Softmax"), "its axis"),
}
"""Phrases for the arguments that a file of weights does not contain, by layer class."""
Size = int | str


@dataclass(frozen=True)
class Layer:
    """A layer of torch.nn, such as nn.Linear(4, 8), with the features of its input and output.

    Attributes:
        kind: the class.
        sizes, options: its positional and its named arguments.
        axes: the axis of features in its input. "rows": the last axis. "channels": the second of three axes. "tokens":
            no axis, because token ids go in. "": any axis. Inputs with more axes have a longer word, e.g. "channels of
            2 axes".
    """

    kind: str
    sizes: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: str = ""

    @property
    def takes(self) -> int | None:
        """The number of input features, or of an embedding's tokens; None if the layer takes any number of features."""
        return self.sizes[0] if self.axes else None

    @property
    def gives(self) -> int | None:
        """The number of output features; None if there are as many as input features."""
        return self.sizes[:2][-1] if self.axes else None

    @property
    def states(self) -> tuple[tuple[Size, ...], ...]:
        """Shapes of the states that a recurrent layer carries, e.g. ("B", 64) for a cell."""
        if not self.kind.startswith(("LSTM", "GRU")):
            return ()
        layers = () if self.kind.endswith("Cell") else (self.options.get("num_layers", 1),)
        return ((*layers, "B", self.sizes[1]),) * (2 if self.kind.startswith("LSTM") else 1)

    @property
    def text(self) -> str:
        """The Python call that makes the layer, e.g. "nn.Linear(4, 8)"."""
        named = [f"{name}={value!r}".replace("'", '"') for name, value in self.options.items()]
        return f"nn.{self.kind}({', '.join([*map(repr, self.sizes), *named])})"


@dataclass
class Part:
    """A part of a module, as dotted names describe it.

    Attributes:
        kind: its class; "" if the file does not say.
        tensors: its own tensors by name.
        parts: its parts by name.
    """

    kind: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)


def parts_of(tensors: Mapping[str, Tensor], classes: Mapping[str, str]) -> Part:
    """Return the module as a tree of parts, from tensors and classes by dotted names.

    For example, tensors {"rnn.weight_ih": [96, 8]} and classes {"rnn": "GRUCell"} give a part "rnn" of kind "GRUCell".
    """
    top = Part()

    def at(path: list[str]) -> Part:
        part = top
        for name in path:
            part = part.parts.setdefault(name, Part())
        return part

    for name, kind in classes.items():
        at(name.split(".") if name else []).kind = kind
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        at(path).tensors[last] = tensor
    return top


def layer_of(part: Part, name: str) -> Layer | None:
    """Return a part as a layer of torch.nn; None if the part is no known layer.

    `name` is the last word of the part's dotted name: if the class is unknown, "emb" in `name` tells an embedding from
    a Linear.
    """
    kind = part.kind.rpartition(".")[2] if part.kind.startswith("torch.nn.modules.") else ""
    shapes = {key: tuple(tensor.shape) for key, tensor in part.tensors.items()}
    if part.parts:
        return None
    if not shapes:
        return Layer(kind, WITHOUT_TENSORS[kind]) if kind in WITHOUT_TENSORS else None
    layer = _recurrent(shapes, "_l0") or _recurrent(shapes, "") or _other(kind, shapes, name)
    if layer is None or kind not in ("", layer.kind) or any(0 in shape for shape in shapes.values()):
        return None
    try:
        with torch.device("meta"):  # the meta device allocates nothing
            module = getattr(nn, layer.kind)(*layer.sizes, **layer.options)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError):
        return None
    return layer if {key: tuple(value.shape) for key, value in module.state_dict().items()} == shapes else None


def _recurrent(shapes: Mapping[str, tuple[int, ...]], end: str) -> Layer | None:
    """Return an LSTM or a GRU, recognised by its number of gates; a single cell if `end` is ""."""
    match shapes.get(f"weight_ih{end}"), shapes.get(f"weight_hh{end}"):
        case (int(rows), int(takes)), (_, int(hidden)) if hidden and rows // hidden in (3, 4):
            layers = sum(key.startswith("weight_ih_l") for key in shapes)
            options: dict[str, Any] = {"num_layers": layers} if layers > 1 else {}
            options |= {} if f"bias_ih{end}" in shapes else {"bias": False}
            kind = ("GRU" if rows // hidden == 3 else "LSTM") + ("" if end else "Cell")
            return Layer(kind, (takes, hidden), options, "rows")
    return None


def _other(kind: str, shapes: Mapping[str, tuple[int, ...]], name: str) -> Layer | None:
    bias = {} if "bias" in shapes else {"bias": False}
    match shapes.get("weight"):
        case (int(size),):
            return Layer("LayerNorm", (size,), bias, "rows")
        case (int(first), int(second)):
            if kind == "Embedding" or (not kind and bias and "emb" in name.lower()):
                return Layer("Embedding", (first, second), {}, "tokens")
            return Layer("Linear", (second, first), bias, "rows")
        case (int(gives), int(takes), *kernel) if len(kernel) <= 3:
            sizes = (takes, gives, kernel[0] if len(set(kernel)) == 1 else tuple(kernel))
            axes = "channels" if len(kernel) == 1 else f"channels of {len(kernel)} axes"
            return Layer(f"Conv{len(kernel)}d", sizes, bias if max(kernel) == 1 else {"padding": "same"} | bias, axes)
    return None
