"""Modules with state, exported as others export them: right ones, and ones with the mistakes that are made on the way.

A module has one mistake at most, named by `wrong`; the specification is always of the right one, with the same weights.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper, version_converter
from torch import Tensor, nn
from torch.nn import functional
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

D, H, W = 4, 6, 5


class Wrong(nn.Module):
    """A module that may have a mistake."""

    wrong = ""

    def right(self, *mistakes: str) -> bool:
        """Return whether it has none of these mistakes."""
        return self.wrong not in mistakes


class Lstm(Wrong):
    """An LSTM of two layers behind a normalised input, batch first; h and c [2, B, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(D, H, 2, batch_first=True), nn.Linear(H, D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        x = self.norm(x) if self.right("normaliser lost") else x
        if not self.right("hidden state wiped"):
            h = torch.zeros_like(h)
        if not self.right("layers upside down"):
            h, c = h.flip(0), c.flip(0)
        if not self.right("half precision inside"):
            x, h, c = (one.half().float() for one in (x, h, c))
        if not self.right("first state that is not the module's"):
            h = h + 0.1 * (h.abs().amax((0, 2), keepdim=True) == 0)
        y, (after, cell) = self.rnn(x, (h, c))
        if not self.right("sequences mixed"):
            after = after.roll(1, 1)
        if not self.right("state before the update"):
            after = h
        if not self.right("state of the position before"):
            _, (after, cell) = self.rnn(x[:, :-1], (h, c))
        if not self.right("state of the first layer"):
            after = after[:1].repeat(2, 1, 1)
        if not self.right("states swapped"):
            after, cell = cell, after
        return self.head(y), after, cell


class Gru(Wrong):
    """A GRU over token ids, with a learned first state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(11, D), nn.GRU(D, H, batch_first=True), nn.Linear(H, 11)
        self.start = nn.Parameter(torch.randn(1, 1, H))

    def forward(self, ids: Tensor, h: Tensor) -> Any:
        y, h = self.rnn(self.words(ids if self.right("ids cut off") else ids.clamp(max=9)), h)
        return self.head(y), h


class Reset(Wrong):
    """A GRU cell that a flag sets back to a learned first state; the flag comes with the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.start = nn.GRUCell(D, H), nn.Linear(H, 2), nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor, gain: Tensor, done: Tensor, state: Tensor) -> Any:
        start = self.start if self.right("reset to zeros") else torch.zeros(H)
        if self.right("flag ignored"):
            state = torch.where(done[:, None], start, state)
        gain = gain if self.right("an input folded") else torch.full_like(gain, 0.5)
        state = self.cell(x * gain, state)
        return self.head(state), state


class Convolutions(Wrong):
    """Two causal convolutions, of which the second is dilated, with the positions before the segment as caches."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Conv1d(D, H, 3), nn.Conv1d(H, D, 2, dilation=2), nn.BatchNorm1d(H)
        self.norm.running_mean.copy_(torch.randn(H))
        self.norm.running_var.copy_(torch.rand(H) + 0.5)

    def forward(self, x: Tensor, cache_a: Tensor, cache_b: Tensor) -> Any:
        before = torch.cat([cache_a, x], -1) if self.right("zeros before") else functional.pad(x, (2, 0))
        y = self.one(before)
        if self.right("batch norm in training mode"):
            y = self.norm(y)
        else:
            y = (y - y.mean((0, 2), keepdim=True)) / (y.var((0, 2), keepdim=True, unbiased=False) + 1e-5).sqrt()
        y = torch.relu(y)
        after = torch.cat([cache_b, y], -1)
        return self.two(after), before[..., -2:], after[..., -2:]


class Window(Wrong):
    """Attention over the last W positions, of which `seen` exist, with keys, values and a count of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.places = nn.Embedding(7, D)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Any:
        length = x.shape[1] if self.right("length folded") else int(x.shape[1])
        steps = torch.arange(length)
        x = x + self.places((seen[:, None] + steps) % 7)
        keys, values = torch.cat([keys, self.key(x)], 1), torch.cat([values, self.value(x)], 1)
        rows = torch.arange(W + length)
        distance = W + steps[:, None] - rows
        wide = W if self.right("mask off by one") else W - 1
        open_to = (distance >= 0) & (distance <= wide)
        if self.right("mask of empty rows lost"):
            open_to = open_to & (rows >= (W - seen)[:, None, None])
        scores = (self.query(x) @ keys.transpose(1, 2) / 2).masked_fill(~open_to, -1e9)
        y = torch.softmax(scores, -1) @ values
        count = seen + (0 if not self.right("counter stuck") else 1 if not self.right("counter by one") else length)
        return y, keys[:, -W:], values[:, -W:], count


class Growing(Wrong):
    """Attention over keys and values that become more, until there are W of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, past_key: Tensor, past_value: Tensor) -> Any:
        keys, values = torch.cat([past_key, self.key(x)], 1), torch.cat([past_value, self.value(x)], 1)
        length = x.shape[1]
        late = torch.ones(length, length).triu(1).bool()
        mask = torch.cat([torch.zeros(length, past_key.shape[1]).bool(), late], 1)
        y = torch.softmax((self.query(x) @ keys.transpose(1, 2)).masked_fill(mask, -1e9), -1) @ values
        if not self.right("window that grows"):
            return y, keys, values
        kept = slice(-W, None) if self.right("cut at the wrong end") else slice(0, W)
        return y, keys[:, kept], values[:, kept]


class Memories(Wrong):
    """Two Transformer-XL layers over hidden memories of W rows each, with distances in a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.ModuleList(nn.Linear(D, D) for _ in range(3)) for _ in range(2))
        self.norms, self.bias = nn.ModuleList(nn.LayerNorm(D) for _ in range(2)), nn.Embedding(64 + W, 1)

    def forward(self, x: Tensor, *mems: Tensor) -> Any:
        length, new = x.shape[1], []
        if not self.right("memories of the other layer"):
            mems = mems[::-1]
        for (query, key, value), norm, mem in zip(self.maps, self.norms, mems, strict=True):
            rows = torch.cat([mem, x], 1)
            new.append(rows[:, -W:] if self.right("memory of the segment before") else mem)
            distance = W + torch.arange(length)[:, None] - torch.arange(W + length)
            scores = query(x) @ key(rows).transpose(1, 2) + self.bias(distance.clamp(min=0))[..., 0]
            y = torch.softmax(scores.masked_fill(distance < 0, -1e9), -1) @ value(rows)
            x = norm(x + y)
        return x, *new


class Average(Wrong):
    """A running mean with a count; whole numbers in, and no position axis."""

    def forward(self, level: Tensor, mean: Tensor, count: Tensor) -> Any:
        if not self.right("wrong from the second step on"):
            mean = mean * (count < 1)[:, None]
        after = count + 1
        mean = mean + (level.float() - mean) / after[:, None]
        if not self.right("noise"):
            mean = mean + 1e-2 * torch.randn_like(mean)
        return mean * 2, mean, after


class Ahead(Wrong):
    """A convolution that sees two positions behind the segment, and one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, H, 4)

    def forward(self, x: Tensor, cache: Tensor) -> Any:
        rows = torch.cat([cache, x], 1)
        last = rows[:, -3:-2] if self.right("look-ahead kept") else rows[:, -1:]
        return self.conv(rows.transpose(1, 2)).transpose(1, 2), last


class Counted(Wrong):
    """A GRU cell, position by position, as many of them as count."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, H)

    def forward(self, x: Tensor, h: Tensor, valid: Tensor) -> Any:
        found = []
        for at in range(x.shape[1]):
            after = self.cell(x[:, at], h)
            h = torch.where((at < valid)[:, None], after, h) if self.right("padding counted") else after + 0 * valid[0]
            found.append(h)
        return torch.stack(found, 1), h


def _feature(name: str, *shape: Any, **more: Any) -> InputSpec:
    return InputSpec(name, shape, **more)


SPECS: dict[str, Callable[[], StepSpec]] = {
    "lstm": lambda: StepSpec(
        Lstm(),
        [_feature("x", "B", "L", D)],
        [StateSpec("h", (2, "B", H)), StateSpec("c", (2, "B", H))],
        ["y"],
        segment_lengths=(4, 2),
    ),
    "gru": lambda: StepSpec(
        Gru(),
        [_feature("ids", "B", "L", tokens=11)],
        [StateSpec("h", (1, "B", H), initial="start")],
        [OutputSpec("logits", role="logits")],
        segment_lengths=(4, 1),
    ),
    "reset": lambda: StepSpec(
        Reset(),
        [_feature("x", "B", D), _feature("gain", "B", 1), _feature("done", "B", dtype="bool")],
        [StateSpec("state", ("B", H), initial="start")],
        ["action"],
    ),
    "convolutions": lambda: StepSpec(
        Convolutions(),
        [_feature("x", "B", D, "L")],
        [StateSpec("cache_a", ("B", D, 2)), StateSpec("cache_b", ("B", H, 2))],
        [OutputSpec("y", ("B", D, "L"))],
        segment_lengths=(4, 1),
    ),
    "window": lambda: StepSpec(
        Window(),
        [_feature("x", "B", "L", D)],
        [StateSpec("keys", ("B", W, D)), StateSpec("values", ("B", W, D)), StateSpec("seen", ("B",), "int64")],
        ["y"],
        segment_lengths=(3, 1),
    ),
    "growing": lambda: StepSpec(
        Growing(),
        [_feature("x", "B", "L", D)],
        [StateSpec(f"past_{name}", ("B", W, D), grows=1) for name in ("key", "value")],
        ["y"],
        segment_lengths=(2, 1),
    ),
    "memories": lambda: StepSpec(
        Memories(),
        [_feature("x", "B", "L", D)],
        [StateSpec(f"mems.{number}", ("B", W, D)) for number in range(2)],
        ["y"],
        segment_lengths=(3, 1),
    ),
    "average": lambda: StepSpec(
        Average(),
        [_feature("level", "B", 3, dtype="int32")],
        [StateSpec("mean", ("B", 3)), StateSpec("count", ("B",), "int32")],
        ["out"],
    ),
    "ahead": lambda: StepSpec(
        Ahead(),
        [_feature("x", "B", "L", D, lookahead=2)],
        [StateSpec("cache", ("B", 1, D))],
        ["y"],
        segment_lengths=(3, 1),
    ),
    "counted": lambda: StepSpec(
        Counted(), [_feature("x", "B", "L", D)], [StateSpec("h", ("B", H))], ["y"], lengths=True, segment_lengths=(3,)
    ),
}


@dataclass(frozen=True)
class Outside:
    """The way in which a module is exported.

    Attributes:
        model: of `SPECS`.
        batch, length: that it is traced with; open where they stand in `free`.
        free: letters of sizes that are left open.
        opset: of the file; from 18 on it is converted.
        names: of inputs, states, next states and outputs by those of the specification; none of which says anything
            where it is None.
        wrong: its mistake.
        edit: what is done to the graph afterwards.
    """

    model: str
    batch: int = 1
    length: int = 3
    free: str = ""
    opset: int = 17
    names: Mapping[str, str] | None = field(default_factory=dict)
    wrong: str = ""
    edit: Callable[[onnx.ModelProto], None] | None = None


def spec_of(model: str) -> StepSpec:
    """The specification, always with the same weights."""
    torch.manual_seed(3)
    with torch.no_grad():
        return SPECS[model]()


def exported(case: Outside, path: Path) -> Path:
    """The file."""
    spec = spec_of(case.model)
    module = copy.deepcopy(spec.module).eval()
    module.wrong = case.wrong
    entries, free = [*spec.inputs, *spec.states], {}
    entries += [InputSpec("valid", ("B",), "int32")] * spec.lengths
    given, takes, gives = [], [], []
    outputs = [one if isinstance(one, str) else one.name for one in spec.outputs]
    for number, entry in enumerate(entries):
        state = isinstance(entry, StateSpec)
        name = _name(case, entry.name, "_in" if state else "", f"onnx::Cast_{number}")
        takes.append(name)
        shape = list(entry.axes.sizes(case.batch, case.length))
        open_axes = {axis: size for axis, size in enumerate(entry.shape) if size in (*case.free,)}
        if state and entry.grows is not None:
            open_axes[entry.grows], shape[entry.grows] = f"past_{entry.name}", 2
        free[name] = open_axes
        dtype = entry.dtype if state else entry.module_dtype
        values = torch.rand(shape) if dtype == "float32" else torch.ones(shape)
        given.append(values.to(getattr(torch, dtype)))
        if state:
            gives.append(_name(case, entry.name, "_out", f"v.{500 + 7 * number}"))
            free[gives[-1]] = {at: size if size in ("B", "L") else f"next_{size}" for at, size in open_axes.items()}
    results = [_name(case, name, "", f"v.{90 + at}") for at, name in enumerate(outputs)]
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(given),
            buffer,
            input_names=takes,
            output_names=[*results, *gives],
            dynamic_axes={name: axes for name, axes in free.items() if axes},
            opset_version=min(case.opset, 17),
            dynamo=False,
            do_constant_folding=True,
        )
    graph = onnx.load_model_from_string(buffer.getvalue())
    if case.edit is not None:
        case.edit(graph)
    if case.opset > 17:
        graph = version_converter.convert_version(graph, case.opset)
    path.write_bytes(graph.SerializeToString())
    return path


def said(case: Outside, path: Path) -> dict[str, dict[str, str]]:
    """The options by which `verify` is told what a file calls the things of its specification that it has."""
    graph = onnx.load(path).graph
    has = {one.name for one in (*graph.input, *graph.output)}
    spec, rename, states = spec_of(case.model), {}, {}
    entries = [*spec.inputs, *spec.states] + [InputSpec("valid", ("B",), "int32")] * spec.lengths
    for number, entry in enumerate(entries):
        state = isinstance(entry, StateSpec)
        rename[_name(case, entry.name, "_in" if state else "", f"onnx::Cast_{number}")] = entry.name
        if state and case.names is None:
            states[f"onnx::Cast_{number}"] = f"v.{500 + 7 * number}"
    for at, one in enumerate(spec.outputs):
        name = one if isinstance(one, str) else one.name
        rename[_name(case, name, "", f"v.{90 + at}")] = name
    rename = {port: name for port, name in rename.items() if port != name and port in has}
    return {"rename": rename, "states": states}


def _name(case: Outside, name: str, end: str, odd: str) -> str:
    if case.names is None:
        return odd
    return case.names.get(f"{name}{end}", f"{name}{end}")


def _node(graph: onnx.GraphProto, operator: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == operator)


def dropout_in_training(model: onnx.ModelProto) -> None:
    """Half of the values that a recurrence returns are zero, others in each call."""
    graph, after = model.graph, _node(model.graph, "MatMul")
    graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "ratio"))
    graph.initializer.append(numpy_helper.from_array(np.array(True), "training"))
    made = helper.make_node("Dropout", [after.input[0], "ratio", "training"], ["dropped"])
    graph.node.insert([*graph.node].index(after), made)
    after.input[0] = "dropped"


def starts_anew(model: onnx.ModelProto) -> None:
    """The recurrence begins with zeros in every call; the state is an input still, and read by nothing."""
    node = _node(model.graph, "GRU")
    del node.input[5:]


def other_gate(model: onnx.ModelProto) -> None:
    """The reset gate comes before the product, as in the first papers and not as in PyTorch."""
    node = _node(model.graph, "GRU")
    next(one for one in node.attribute if one.name == "linear_before_reset").i = 0


def other_weights(model: onnx.ModelProto) -> None:
    """Those of another training: a matrix is a hundredth larger."""
    tensor = max(model.graph.initializer, key=lambda one: np.prod(one.dims))
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.01), tensor.name))


def batch_of_one(model: onnx.ModelProto) -> None:
    """The recurrence begins with a constant, traced with one sequence, where the sizes are declared open."""
    shape = (1, 1, H)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), "fixed"))
    _node(model.graph, "GRU").input[5] = "fixed"


def without_input(name: str) -> Callable[[onnx.ModelProto], None]:
    """An input is a constant of ones."""

    def edit(model: onnx.ModelProto) -> None:
        (port,) = (one for one in model.graph.input if one.name == name)
        sizes = [size.dim_value for size in port.type.tensor_type.shape.dim]
        model.graph.initializer.append(numpy_helper.from_array(np.ones(sizes, np.float32), name))
        model.graph.input.remove(port)

    return edit


def optional(name: str, value: float) -> Callable[[onnx.ModelProto], None]:
    """An input has a value in the file, which is taken where a call gives none."""

    def edit(model: onnx.ModelProto) -> None:
        (port,) = (one for one in model.graph.input if one.name == name)
        sizes = [size.dim_value for size in port.type.tensor_type.shape.dim]
        model.graph.initializer.append(numpy_helper.from_array(np.full(sizes, value, np.float32), name))

    return edit


def not_returned(name: str) -> Callable[[onnx.ModelProto], None]:
    """An output is left out."""

    def edit(model: onnx.ModelProto) -> None:
        model.graph.output.remove(next(one for one in model.graph.output if one.name == name))

    return edit
