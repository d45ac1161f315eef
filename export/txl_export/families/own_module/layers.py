"""Layers of torch.nn, recognised by the names and shapes of their tensors, and by their class where a file tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = "CELU Dropout ELU Flatten GELU Hardsigmoid Hardswish Identity LeakyReLU LogSoftmax Mish ReLU ReLU6 SELU SiLU "
_NAMES += "Sigmoid Softmax Softplus Tanh"
WITHOUT_TENSORS: dict[str, tuple[int, ...]] = dict.fromkeys(_NAMES.split(), ()) | {
    "LogSoftmax": (-1,),
    "Softmax": (-1,),
}
"""Layers without tensors, and the arguments that they are written with."""
NOT_STORED = {
    **{f"Conv{n}d": "stride, padding, dilation and groups" for n in (1, 2, 3)},
    **dict.fromkeys(("CELU", "ELU", "LeakyReLU", "Softplus"), "the number that it is made with"),
    **dict.fromkeys(("LogSoftmax", "Softmax"), "its axis"),
}
"""What a file does not tell of a layer."""
_GATES = {4: "LSTM", 3: "GRU"}
Size = int | str


@dataclass(frozen=True)
class Layer:
    """A layer of torch.nn, and what it makes of its input.

    Attributes:
        kind: the class.
        sizes, options: its arguments, without and with a name.
        takes, gives: features of what goes in and of what comes out; of an embedding how many tokens there are. None
            for any number, the same.
        axes: where features are: "rows" as the last axis, "channels" as the second of three, "tokens" nowhere yet, ""
            anywhere; another word for more axes than that.
        states: shapes of what a recurrent layer carries, with "B" for the batch.
    """

    kind: str
    sizes: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    takes: int | None = None
    gives: int | None = None
    axes: str = ""
    states: tuple[tuple[Size, ...], ...] = ()

    @property
    def text(self) -> str:
        """The call that makes it."""
        named = [f"{name}={value!r}".replace("'", '"') for name, value in self.options.items()]
        return f"nn.{self.kind}({', '.join([*map(repr, self.sizes), *named])})"


@dataclass
class Part:
    """A part of a module, as names tell: its class, "" where it is not known, its own tensors, and its parts."""

    kind: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)


def parts_of(tensors: Mapping[str, Tensor], classes: Mapping[str, str]) -> Part:
    """The module as a tree of its parts, from tensors and classes by dotted names."""
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
    """The layer that a part is; None where it is something else.

    `name` is the part's own: where the class is not known, it tells an embedding from a matrix.
    """
    kind = part.kind.rpartition(".")[2] if part.kind.startswith("torch.nn.modules.") else ""
    shapes = {key: tuple(tensor.shape) for key, tensor in part.tensors.items()}
    if part.parts:
        return None
    if not shapes:
        return Layer(kind, WITHOUT_TENSORS[kind]) if kind in WITHOUT_TENSORS else None
    found = _recurrent(shapes, "_l0") or _recurrent(shapes, "") or _other(kind, shapes, name)
    return found if found is not None and _fits(found, kind, shapes) else None


def _recurrent(shapes: Mapping[str, tuple[int, ...]], end: str) -> Layer | None:
    """An LSTM or a GRU, by the number of its gates; a cell of one where `end` is empty."""
    match shapes.get(f"weight_ih{end}"), shapes.get(f"weight_hh{end}"):
        case (int(rows), int(takes)), (_, int(hidden)) if hidden and rows // hidden in _GATES:
            kind = _GATES[rows // hidden]
        case _:
            return None
    layers = sum(key.startswith("weight_ih_l") for key in shapes)
    options: dict[str, Any] = {"num_layers": layers} if layers > 1 else {}
    options |= {} if f"bias_ih{end}" in shapes else {"bias": False}
    shape = (*((layers,) if end else ()), "B", hidden)
    states = (shape, shape) if kind == "LSTM" else (shape,)
    return Layer(kind if end else f"{kind}Cell", (takes, hidden), options, takes, hidden, "rows", states)


def _other(kind: str, shapes: Mapping[str, tuple[int, ...]], name: str) -> Layer | None:
    bias = {} if "bias" in shapes else {"bias": False}
    match shapes.get("weight"):
        case (int(size),):
            return Layer("LayerNorm", (size,), bias, size, size, "rows")
        case (int(first), int(second)):
            if kind == "Embedding" or (not kind and bias and "emb" in name.lower()):
                return Layer("Embedding", (first, second), {}, first, second, "tokens")
            return Layer("Linear", (second, first), bias, second, first, "rows")
        case (int(gives), int(takes), *kernel) if len(kernel) <= 3:
            sizes = (takes, gives, kernel[0] if len(set(kernel)) == 1 else tuple(kernel))
            axes = "channels" if len(kernel) == 1 else f"channels of {len(kernel)} axes"
            options = bias if max(kernel) == 1 else {"padding": "same"} | bias
            return Layer(f"Conv{len(kernel)}d", sizes, options, takes, gives, axes)
    return None


def _fits(layer: Layer, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether it is of the class that is known, if one is, and has these tensors and no others."""
    if kind not in ("", layer.kind) or any(0 in shape for shape in shapes.values()):
        return False
    try:
        with torch.device("meta"):  # which takes no memory
            made = getattr(nn, layer.kind)(*layer.sizes, **layer.options)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError):
        return False
    return {key: tuple(value.shape) for key, value in made.state_dict().items()} == shapes
