"""Writes FILE.py with a `build` function for a model of which only the tensors' names and shapes are known.

The tensors show the layers, so the weights load. Tensors do not show how layers follow one another:
`forward` calls them in the file's order as long as sizes fit, and its comments say so.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path

from torch import Tensor
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import shown
from txl_export.families.own_module.layers import NOT_STORED, Layer, Part, Size, layer_of, parts_of

_BETWEEN = {("rows", "channels"): "x = x.unsqueeze(-1)", ("channels", "rows"): "x = x[:, :, -1]"}
"""The line to write between two layers, by the axes that the first returns and the second takes."""
_FILE = """\
# The model of {file}, as far as the names and shapes of its tensors tell.
# The order of the calls in `forward`, and whatever lies between them, has to come from the code that made it.{code}
# "Verified" will mean that the bundle equals this file: compare some of its outputs with the original's too. Then:
#
#     txl-deploy export {module}:build --weights {file}

import torch
from torch import nn
from txl_export import InputSpec, StateSpec, StepSpec, read_weights


class Model(nn.{base}):
    def __init__(self):
        super().__init__({parts})
        {layers}

    def forward(self, {arguments}):
        {calls}


def build(weights):
    model = Model()
    model.load_state_dict(read_weights(weights))
    inputs = [{input}]
    states = [
        {states}
    ]
    return StepSpec(model.eval(), inputs, states, outputs=["output"])
"""
_SEARCHED = 256
"""Number of remaining layers among which the next call is searched; it limits the time for files with many layers."""
_TAKEN = ("self", "features", "frames", "tokens", "output", "valid")
_READ = "\n# The code in an archive is text that can be read: unzip -p {} '*.py'"


def skeleton(tensors: Mapping[str, Tensor], classes: Mapping[str, str], file: str) -> str:
    """Return the text of a Python file whose `build` returns a `StepSpec` for these weights.

    For example, `classes` {"rnn": "GRUCell"} and tensors {"rnn.weight_ih": [96, 8]} give `self.rnn = nn.GRUCell(8,
    32)`.

    Args:
        tensors: tensors by dotted name.
        classes: classes of parts, as `Loaded.classes` has them; {} if the file does not contain them.
        file: the name of the file of weights.

    Raises:
        CheckpointError: a part's name is no valid name in Python.
    """
    top, name = parts_of(tensors, classes), shlex.quote(shown(file))
    layers = _Layers(top)
    forward = _Forward(layers)
    length = _length(top)
    return _FILE.format(
        file=name,
        code=_READ.format(name) if classes else "",
        module=shlex.quote(f"{shown(Path(file).stem)}.py"),
        base="Module" if length is None else "ModuleList",
        parts="" if length is None else f"nn.Module() for _ in range({length})",
        layers="\n        ".join(layers.lines),
        arguments=", ".join(forward.arguments),
        calls="\n        ".join(forward.lines),
        input=_input(forward.first),
        states="\n        ".join(f"{state}," for state in forward.states),
    )


def recognised(tensors: Mapping[str, Tensor], classes: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the layers of a model with tensors as pairs (dotted name, Python call), e.g. ("head", "nn.Linear(4, 8)").

    Raises:
        CheckpointError: a part's name is no valid name in Python.
    """
    calls = _Layers(parts_of(tensors, classes)).calls
    return [(call.place.removeprefix("self").lstrip("."), call.text) for call in calls if call.sized]


@dataclass(frozen=True)
class _Call:
    """A layer, or a Sequential of layers, that `forward` calls once."""

    place: str
    layers: tuple[Layer, ...]
    text: str

    @property
    def sized(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.takes is not None]


class _Layers:
    """The layers of a model and the lines of its `__init__`, in the file's order.

    Attributes:
        lines: the lines of `__init__`.
        calls: the layers that `forward` can call.
        buffers: tensors that belong to no known layer, by place, e.g. "self.memory".
    """

    def __init__(self, top: Part) -> None:
        self.lines: list[str] = []
        self.calls: list[_Call] = []
        self.buffers: dict[str, Tensor] = {}
        self._commented: set[str] = set()
        self._write(top, "self", "")

    def _write(self, part: Part, place: str, name: str) -> None:
        length = _length(part)
        if place != "self":
            if layers := _called(part, name):
                text = ", ".join(layer.text for layer in layers)
                text = text if layers[0] == layer_of(part, name) else f"nn.Sequential({text})"
                new = dict.fromkeys(layer.kind for layer in layers if layer.kind in NOT_STORED.keys() - self._commented)
                self._commented |= new.keys()
                self.lines += [f"# Not in the file, of every {kind}: {NOT_STORED[kind]}." for kind in new]
                self.lines.append(f"{place} = {text}")
                self.calls.append(_Call(place, layers, text))
                return
            listed = f"nn.ModuleList(nn.Module() for _ in range({length}))"
            self.lines.append(f"{place} = {'nn.Module()' if length is None else listed}")
        for key, tensor in part.tensors.items():
            dtype = "" if tensor.is_floating_point() else f", dtype={tensor.dtype}"
            self.lines.append(f"{place}.register_buffer({_quoted(key)}, torch.zeros({list(tensor.shape)}{dtype}))")
            self.buffers[f"{place}.{key}"] = tensor
        for key, child in _items(part):
            if length is None and not _is_name(key):
                raise CheckpointError(f"a part is named {shown(key)!r}, which is no name in Python; write it by hand")
            self._write(child, f"{place}.{key}" if length is None else f"{place}[{key}]", key)


def _called(part: Part, name: str) -> tuple[Layer, ...]:
    """Return the layer that a part is, or the layers of a Sequential without recurrent layers; () for other parts."""
    if layer := layer_of(part, name):
        return (layer,)
    layers = tuple(layer for key, child in _items(part) if (layer := layer_of(child, key)) and not layer.states)
    plain = part.kind == "torch.nn.modules.container.Sequential" and not part.tensors
    return layers if plain and len(layers) == len(part.parts) == _length(part) else ()


def _length(part: Part) -> int | None:
    """Return the length of a list of layers: 3 for parts "0" and "2"; None if a name is no number below 10,000."""
    numbered = part.parts and all(re.fullmatch(r"0|[1-9][0-9]{0,3}", name) for name in part.parts)
    return max(map(int, part.parts)) + 1 if numbered else None


def _items(part: Part) -> list[tuple[str, Part]]:
    """Return the parts of a part: those of a list by number, all others in the file's order."""
    items = list(part.parts.items())
    return items if _length(part) is None else sorted(items, key=lambda item: int(item[0]))


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) is not None and not iskeyword(text)


def _quoted(value: Size) -> str:
    return f'"{value}"' if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_]*", value) else ascii(value)


class _Forward:
    """Writes the lines of `forward`: layers are called one after another as long as sizes fit.

    The next call is the next layer in the file that fits; after the file's last layer the search begins again at the
    first.

    Attributes:
        first: the layer that takes the input; None if no layer has a size.
        arguments, lines: the arguments and lines of `forward`.
        states: the lines of the `StateSpec`s.
    """

    def __init__(self, layers: _Layers) -> None:
        self.lines = ["# TODO: is this the order of the calls, and does nothing lie between them?"]
        self.arguments, self.states = ["x"], list[str]()
        self._free = dict(layers.buffers)
        groups: list[list[_Call]] = [[]]
        for call in layers.calls:  # a layer without sizes is called before the next layer with sizes
            groups[-1].append(call)
            groups += [[]] if call.sized else []
        *groups, end = groups
        self.first = _beginning([group[-1].sized for group in groups])
        self._axes, self._width = ("", None) if self.first is None else (self.first.axes, self.first.takes)
        while group := next((group for group in groups[:_SEARCHED] if self._fits(group[-1].sized[0])), None):
            at = groups.index(group)
            groups = groups[at + 1 :] + groups[:at]
            for call in group:
                self._call(call)
        for call in () if groups else end:
            self._call(call)
        left = [call.place for group in [*groups, end] if groups for call in group]
        if left := [*left, *map(shown, self._free)]:
            self.lines += ["# TODO: not used yet:", *(f"#   {place}" for place in left)]
        self.lines.append(f"return {', '.join(self.arguments)}")

    def _fits(self, layer: Layer) -> bool:
        """Return whether a layer takes the current x, by its width and axes."""
        return layer.takes == self._width and (self._axes, layer.axes) in {(self._axes, self._axes), *_BETWEEN}

    def _call(self, call: _Call) -> None:
        layer = call.layers[0]
        if call.sized:
            if call.sized[0].axes != self._axes:
                self.lines.append(_BETWEEN[self._axes, call.sized[0].axes])
            last = call.sized[-1]
            self._axes, self._width = "rows" if last.axes == "tokens" else last.axes, last.gives
        names = [self._state(call, shape, role) for shape, role in zip(layer.states, ("hidden", "cell"), strict=False)]
        carried = f"({', '.join(names)})" if len(names) > 1 else "".join(names)
        if not names:
            self.lines.append(f"x = {call.place}(x)")
        elif layer.kind.endswith("Cell"):
            self.lines += [f"{', '.join(names)} = {call.place}(x, {carried})", f"x = {names[0]}"]
        else:
            self.lines += [f"x, {carried} = {call.place}(x.unsqueeze(0), {carried})", "x = x.squeeze(0)"]

    def _state(self, call: _Call, shape: tuple[Size, ...], role: str) -> str:
        """Choose the name of a state and add its `StateSpec`.

        If an unused buffer has the shape of the state for one sequence, the state gets the buffer's name, and the
        buffer's values as initial values.
        """
        name, initial, alone = role, "", tuple(1 if size == "B" else size for size in shape)
        fitting = {place.rpartition(".")[2]: place for place, one in self._free.items() if tuple(one.shape) == alone}
        if named := sorted(filter(_is_name, fitting), key=lambda name: ("cell" in name) != (role == "cell")):
            name = named[0]
            self._free.pop(fitting[name])
            first = ", ".join([*[":"] * shape.index("B"), "0"])
            initial = f", initial=model{fitting[name].removeprefix('self')}[{first}]"
        if name in (*self.arguments, *_TAKEN):
            name = re.sub(r"[\W_]+", "_", f"{call.place.removeprefix('self.')}_{role}")
        self.arguments.append(name)
        self.states.append(f'StateSpec("{name}", ({", ".join(map(_quoted, shape))}){initial})')
        return name


def _beginning(chains: list[list[Layer]]) -> Layer | None:
    """Return the layer to call first: an embedding, else a layer whose input no layer returns, else the first layer."""
    counts = Counter(chain[-1].gives for chain in chains)
    free = [chain[0] for chain in chains if counts[chain[0].takes] == (chain[0].takes == chain[-1].gives)]
    firsts = [chain[0] for chain in chains]
    return next(iter([*(first for first in firsts if first.axes == "tokens"), *free, *firsts]), None)


def _input(first: Layer | None) -> str:
    """Return the text of the `InputSpec` for the first layer's input."""
    if first is None:
        return 'InputSpec("features", ("B", 1))'
    if first.axes == "tokens":
        return f'InputSpec("tokens", ("B",), tokens={first.takes})'
    if first.axes == "rows":
        return f'InputSpec("features", ("B", {first.takes}))'
    kernel = first.sizes[2] if isinstance(first.sizes[2], tuple) else (first.sizes[2],) * int(first.kind[4])
    return f'InputSpec("frames", ("B", {", ".join(map(str, (first.takes, *kernel)))}))'
