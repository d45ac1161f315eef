"""Small ONNX files as others export them: modules with state of many kinds, and modules without any."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx.checker
import onnx.parser
import onnx_ir as ir
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional
from txl_export.families.graph.find.pairing import Paired, pair
from txl_export.families.graph.find.structure import Structure, read_structure
from txl_export.families.graph.find.trying import Inputs
from txl_export.families.graph.take.reading import read_foreign
from txl_export.families.graph.take.running import RunError

B, D, H, T = 2, 6, 8, 4
ODD = [f"{a}{b}" for a in "qwzjb" for b in ("7", "ule", "ax", "_41", "e.3", "::5", "Of", "Ty", *range(30, 60))]
"""Names that say nothing."""


@dataclass(frozen=True)
class Case:
    """A module, how it is called, and which of its inputs and outputs are one state.

    Attributes:
        make: the module.
        given: names of its inputs with what it is traced with.
        returned: names of its outputs.
        pairs: by the names of inputs, those of outputs.
        free: axes that are left open, by name of input or output.
        named: whether the names are needed, because nothing in the graph tells the state from data.
    """

    make: Callable[[], nn.Module]
    given: dict[str, Tensor]
    returned: tuple[str, ...]
    pairs: dict[str, str]
    free: dict[str, dict[int, str]] | None = None
    named: bool = False


class Step(nn.Module):
    """A function of tensors, with the layers that it uses."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self._function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *given: Tensor) -> Any:
        """Return the function's results; its first argument is the module."""
        return self._function(self, *given)


def step(function: Callable[..., Any], **layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Makes such a module with fresh layers, the same ones each time."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Step(function, **{name: layer() for name, layer in layers.items()}).eval()

    return make


def exported(case: Case, odd: int | None = None, dynamo: bool = False) -> tuple[bytes, dict[str, str]]:
    """A case as an ONNX file, and its pairs; `odd` is a seed for other names and another order of outputs."""
    given, returned, pairs, free = list(case.given), list(case.returned), case.pairs, case.free or {}
    order = list(range(len(returned)))
    if odd is not None:
        draws = random.Random(odd)
        names = dict(zip([*given, *returned], draws.sample(ODD, len(given) + len(returned)), strict=True))
        draws.shuffle(order)
        pairs = {names[a]: names[b] for a, b in pairs.items()}
        free = {names[name]: axes for name, axes in free.items()}
        given, returned = [names[name] for name in given], [names[name] for name in returned]
    module = case.make()
    ordered = Step(lambda self, *each: _ordered(self.inner(*each), order), inner=module).eval()
    file = io.BytesIO()
    options: dict[str, Any] = (
        {"dynamo": False, "dynamic_axes": free or None} if not dynamo else {"dynamo": True, "verbose": False}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(
            ordered,
            tuple(case.given.values()),
            None if dynamo else file,
            input_names=given,
            output_names=[returned[at] for at in order],
            **options,
        )
    return made.model_proto.SerializeToString() if dynamo else file.getvalue(), pairs


def _ordered(results: Any, order: Sequence[int]) -> Any:
    results = results if isinstance(results, tuple) else (results,)
    return tuple(results[at] for at in order)


def normal(*shape: int) -> Tensor:
    """Numbers to trace with."""
    return torch.randn(*shape)


BATCH = {0: "batch"}


def _lstm(first: bool, layers: int = 1) -> Callable[[], nn.Module]:
    def run(self: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
        y, (h, c) = self.l(x, (h, c))
        return self.o(y), h, c

    return step(run, l=lambda: nn.LSTM(D, H, layers, batch_first=first), o=lambda: nn.Linear(H, 3))


def _gru(kind: type[nn.Module], layers: int = 1, bare: bool = False) -> Callable[[], nn.Module]:
    def run(self: Any, x: Tensor, h: Tensor) -> Any:
        y, h = self.l(x, h)
        return (y if bare else self.o(y)), h

    return step(run, l=lambda: kind(D, H, layers), o=lambda: nn.Linear(H, 3))


def _cells(self: Any, x: Tensor, *states: Tensor) -> Any:
    found: list[Tensor] = []
    for at, cell in enumerate(self.cells):
        h, c = cell(x, (states[2 * at], states[2 * at + 1]))
        found += [h, c]
        x = h
    return (self.o(x), *found)


def _packed(self: Any, x: Tensor, both: Tensor) -> Any:
    h, c = self.cell(x, (both[0], both[1]))
    return self.o(torch.relu(h)), torch.stack([h, c])


def _gru_cell(self: Any, x: Tensor, h: Tensor) -> Any:
    h = self.cell(x, h)
    return self.o(h), h


def _conv_gru(self: Any, x: Tensor, h: Tensor) -> Any:
    z = torch.sigmoid(self.z(torch.cat([x, h], 1)))
    n = torch.tanh(self.n(torch.cat([x, z * h], 1)))
    h = (1 - z) * h + z * n
    return self.o(h), h


def _convolutions(self: Any, x: Tensor, *caches: Tensor) -> Any:
    found = []
    for layer, cache in zip(self.layers, caches, strict=True):
        window = torch.cat([cache, x], -1)
        found.append(window[..., -cache.shape[-1] :])
        x = torch.relu(layer(window))
    return (x, *found)


def _convolved(layers: int, kernel: int, dilation: int = 1) -> Callable[[], nn.Module]:
    return step(
        _convolutions, layers=lambda: nn.ModuleList(nn.Conv1d(D, D, kernel, dilation=dilation) for _ in range(layers))
    )


def _tail_of_input(self: Any, x: Tensor, cache: Tensor) -> Any:
    return torch.relu(self.layer(torch.cat([cache, x], -1))), x[..., -cache.shape[-1] :]


def _in_place(self: Any, x: Tensor, caches: Tensor) -> Any:
    caches = caches.clone()
    window = torch.cat([caches[0], x], -1)
    caches[0] = window[..., -2:]
    y = torch.relu(self.a(window))
    window = torch.cat([caches[1], y], -1)
    caches[1] = window[..., -2:]
    return self.b(window), caches


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v


def _windowed(self: Any, x: Tensor, *caches: Tensor) -> Any:
    found = []
    for at, layer in enumerate(self.layers):
        q, k, v = layer(x).chunk(3, -1)
        k, v = torch.cat([caches[2 * at], k], 1), torch.cat([caches[2 * at + 1], v], 1)
        found += [k[:, -M:], v[:, -M:]]
        x = x + _attend(q, k, v)
    return (x, *found)


M = 5


def _growing(self: Any, *given: Tensor) -> Any:
    *mask, x = given[: len(given) - 2 * len(self.layers)][::-1]
    caches = given[len(given) - 2 * len(self.layers) :]
    x = self.embed(x) if x.dtype == torch.int64 else x
    found = []
    for at, layer in enumerate(self.layers):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in layer(x).chunk(3, -1))
        k, v = torch.cat([caches[2 * at], k], 2), torch.cat([caches[2 * at + 1], v], 2)
        found += [k, v]
        scores = q @ k.transpose(-1, -2)
        if mask:
            scores = scores + (1 - mask[0][:, None, None, :].to(scores.dtype)) * -10000.0
        x = x + (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)
    return (self.o(x), *found)


def _memories(self: Any, x: Tensor, memories: Tensor) -> Any:
    found = []
    for layer, memory in zip(self.layers, memories, strict=True):
        rows = torch.cat([memory, x], 0)
        found.append(rows[-M:])
        q, k, v = layer(x), layer(rows), rows
        x = x + _attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)
    return x @ self.o.weight.T, torch.stack(found)


def _linear_attention(self: Any, x: Tensor, s: Tensor) -> Any:
    q, k, v = self.l(x).chunk(3, -1)
    s = 0.9 * s + k[:, :, None] * v[:, None, :]
    return (q[:, None, :] @ s)[:, 0], s


def _ring(self: Any, x: Tensor, at: Tensor, rows: Tensor) -> Any:
    rows = rows.index_copy(1, at % M, self.k(x)[:, None])
    return _attend(x[:, None], rows, rows)[:, 0], at + 1, rows


def _history(self: Any, token: Tensor, before: Tensor) -> Any:
    after = torch.cat([before[:, 1:], token], 1)
    return self.o(self.embed(after).flatten(1)), after


def _delay(self: Any, x: Tensor, line: Tensor) -> Any:
    return self.o(torch.cat([x, line[:, 0]], -1)), torch.cat([line[:, 1:], x[:, None]], 1)


def _average(self: Any, x: Tensor, mean: Tensor) -> Any:
    mean = 0.95 * mean + 0.05 * x
    return self.o(x - mean), mean


def _elman(self: Any, x: Tensor, h: Tensor) -> Any:
    h = torch.tanh(self.i(x) + self.h(h))
    return self.o(h), h


def _reset(self: Any, x: Tensor, h: Tensor, c: Tensor, done: Tensor) -> Any:
    kept = (1 - done)[None, :, None]
    y, (h, c) = self.l(x, (h * kept, c * kept))
    return self.o(y), h, c


def _rated(self: Any, x: Tensor, h: Tensor, rate: Tensor) -> Any:
    """The rate is read and changes nothing, so that exporters keep it among the inputs."""
    y, h = self.l(x, h)
    return self.o(y), h + (rate * 0).to(h.dtype)


def _static(self: Any, x: Tensor, position: Tensor, keys: Tensor) -> Any:
    keys = torch.where(torch.arange(M)[None, :, None] == position, self.k(x)[:, None], keys)
    return _attend(x[:, None], keys, keys)[:, 0], keys


def _mixed(self: Any, x: Tensor, cache: Tensor, h: Tensor, c: Tensor) -> Any:
    window = torch.cat([cache, x], -1)
    y, (h, c) = self.l(torch.relu(self.conv(window)).transpose(1, 2), (h, c))
    return self.o(y), c, window[..., -2:], h


def linear(a: int = D, b: int = D) -> Callable[[], nn.Module]:
    """A layer, made later."""
    return lambda: nn.Linear(a, b)


def _heads(layers: int) -> dict[str, Callable[[], nn.Module]]:
    return {
        "layers": lambda: nn.ModuleList(nn.Linear(H, 3 * H) for _ in range(layers)),
        "o": lambda: nn.Linear(H, 11),
        "embed": lambda: nn.Embedding(11, H),
    }


def _caches(layers: int, rows: int) -> dict[str, Tensor]:
    return {f"past_key_values.{at}.{kind}": normal(B, 2, rows, 4) for at in range(layers) for kind in ("key", "value")}


def _grown(layers: int, ids: bool = False, mask: bool = False, odd_mask: bool = False) -> Case:
    caches = _caches(layers, 3)
    pairs = {name: name.replace("past_key_values", "present") for name in caches}
    given = {"input_ids": torch.randint(0, 11, (B, 2))} if ids else {"x": normal(B, 2, H)}
    given |= {"attention_mask": torch.ones(B, 5, dtype=torch.int64)} if mask else {}
    free = {name: {0: "batch", 2: "past_sequence_length"} for name in caches}
    free |= {name: {0: "batch", 2: "past_sequence_length + sequence_length"} for name in pairs.values()}
    free |= {next(iter(given)): {0: "batch", 1: "sequence_length"}, "logits": {0: "batch", 1: "sequence_length"}}
    free |= {"attention_mask": {0: "batch", 1: "total_sequence_length"}} if mask else {}
    if odd_mask:
        free["attention_mask"] = {0: "batch", 1: "past_sequence_length + sequence_length"}
    return Case(step(_growing, **_heads(layers)), {**given, **caches}, ("logits", *pairs.values()), pairs, free)


def _case(
    make: Callable[[], nn.Module],
    x: Tensor,
    kind: str,
    shapes: Sequence[tuple[int, ...]],
    free: dict[int, str] | None = None,
    named: bool = False,
) -> Case:
    """A case of one array of data, some states and one result; `free` are the open axes of all arrays."""
    given = {f"{kind}_{at}": normal(*shape).to(x.dtype) for at, shape in enumerate(shapes)}
    pairs = {name: f"new_{name}" for name in given}
    every = dict.fromkeys(("x", "y", *given, *pairs.values()), free) if free else None
    return Case(make, {"x": x, **given}, ("y", *pairs.values()), pairs, every, named)


def _both(rows: str, h: int) -> dict[str, dict[int, str]]:
    """Batch and positions of x and y open, and the batch of the states."""
    time = {0: "batch", 1: rows} if h == 0 else {0: rows, 1: "batch"}
    return {"x": time, "y": time, "h": {1: "batch"}, "c": {1: "batch"}, "hn": {1: "batch"}, "cn": {1: "batch"}}


_HC, _PAIRS = {"h": "hn", "c": "cn"}, ("y", "hn", "cn")
STATEFUL: dict[str, Case] = {
    "lstm": Case(_lstm(True), {"x": normal(B, T, D), "h": normal(1, B, H), "c": normal(1, B, H)}, _PAIRS, _HC),
    "lstm time first": Case(
        _lstm(False),
        {"c": normal(T, B, D), "h": normal(1, B, H), "d": normal(1, B, H)},
        ("y", "p", "q"),
        {"h": "p", "d": "q"},
    ),
    "lstm open": Case(
        _lstm(True), {"x": normal(B, T, D), "h": normal(1, B, H), "c": normal(1, B, H)}, _PAIRS, _HC, _both("time", 0)
    ),
    "lstm of two layers": Case(
        _lstm(True, 2), {"x": normal(B, 1, D), "h": normal(2, B, H), "c": normal(2, B, H)}, _PAIRS, _HC
    ),
    "gru": Case(_gru(nn.GRU), {"x": normal(T, B, D), "h": normal(1, B, H)}, ("y", "hn"), {"h": "hn"}),
    "gru of one step, bare": Case(
        _gru(nn.GRU, bare=True), {"x": normal(1, B, D), "h": normal(1, B, H)}, ("y", "hn"), {"h": "hn"}
    ),
    "rnn": Case(_gru(nn.RNN), {"x": normal(T, B, D), "h": normal(1, B, H)}, ("y", "hn"), {"h": "hn"}),
    "lstm cell": _case(
        step(_cells, cells=lambda: nn.ModuleList([nn.LSTMCell(D, H)]), o=linear(H, 3)),
        normal(B, D),
        "state",
        [(B, H)] * 2,
        named=True,
    ),
    "lstm cell, packed": _case(
        step(_packed, cell=lambda: nn.LSTMCell(D, H), o=linear(H, 1)), normal(B, D), "state", [(2, B, H)]
    ),
    "gru cell": _case(
        step(_gru_cell, cell=lambda: nn.GRUCell(D, H), o=linear(H, 3)), normal(B, D), "h", [(B, H)], BATCH
    ),
    "gru cell as wide as its input": _case(
        step(_gru_cell, cell=lambda: nn.GRUCell(H, H), o=linear(H, H)), normal(B, H), "h", [(B, H)]
    ),
    "gru of convolutions": _case(
        step(
            _conv_gru,
            z=lambda: nn.Conv2d(2 * D, D, 3, padding=1),
            n=lambda: nn.Conv2d(2 * D, D, 3, padding=1),
            o=lambda: nn.Conv2d(D, 1, 1),
        ),
        normal(1, D, 5, 5),
        "r",
        [(1, D, 5, 5)],
    ),
    "convolution": _case(_convolved(1, 3), normal(B, D, T), "cache", [(B, D, 2)], BATCH),
    "convolutions": _case(_convolved(3, 3), normal(B, D, T), "cache", [(B, D, 2)] * 3),
    "convolutions, a position a call": _case(_convolved(3, 3), normal(B, D, 1), "cache", [(B, D, 2)] * 3),
    "convolution, tail of its input": _case(
        step(_tail_of_input, layer=lambda: nn.Conv1d(D, D, 3)), normal(B, D, T), "cache", [(B, D, 2)]
    ),
    "convolutions, in place": _case(
        step(_in_place, a=lambda: nn.Conv1d(D, D, 3), b=lambda: nn.Conv1d(D, D, 3)),
        normal(B, D, 1),
        "cache",
        [(2, B, D, 2)],
    ),
    "window of keys and values": _case(
        step(_windowed, layers=lambda: nn.ModuleList([nn.Linear(H, 3 * H)])), normal(B, 2, H), "kv", [(B, M, H)] * 2
    ),
    "windows in half precision, whose numbers are alike by chance": _case(
        step(_windowed, layers=lambda: nn.ModuleList(nn.Linear(64, 3 * 64).half() for _ in range(3))),
        normal(B, 2, 64).half(),
        "kv",
        [(B, M, 64)] * 6,
    ),
    "growing cache": _grown(1),
    "growing caches of tokens": _grown(2, ids=True),
    "growing caches and a mask": _grown(1, ids=True, mask=True),
    "growing caches and a mask of both lengths": _grown(1, ids=True, mask=True, odd_mask=True),
    "memories, packed": _case(
        step(_memories, layers=lambda: nn.ModuleList(nn.Linear(H, H) for _ in range(3)), o=linear(H, 3)),
        normal(2, B, H),
        "mem",
        [(3, M, B, H)],
    ),
    "linear attention": _case(
        step(_linear_attention, l=linear(H, 3 * H)), normal(B, H), "state", [(B, H, H)], BATCH, named=True
    ),
    "elman": _case(
        step(_elman, i=linear(D, H), h=linear(H, H), o=linear(H, 2)), normal(B, D), "h", [(B, H)], named=True
    ),
    "average": _case(step(_average, o=linear()), normal(B, D), "prev_mean", [(B, D)], named=True),
    "ring": Case(
        step(_ring, k=linear(H, H)),
        {"x": normal(B, H), "at": torch.tensor([2]), "rows": normal(B, M, H)},
        ("y", "at_out", "rows_out"),
        {"at": "at_out", "rows": "rows_out"},
    ),
    "history of tokens": Case(
        step(_history, embed=lambda: nn.Embedding(50, 4), o=linear(4 * M, 50)),
        {"token": torch.tensor([[3], [4]]), "before": torch.randint(0, 50, (B, M))},
        ("y", "after"),
        {"before": "after"},
    ),
    "delay line": _case(step(_delay, o=linear(2 * D, 3)), normal(B, D), "line", [(B, 7, D)]),
    "lstm with resets": Case(
        step(_reset, l=lambda: nn.LSTM(D, H), o=linear(H, 3)),
        {"x": normal(1, B, D), "h": normal(1, B, H), "c": normal(1, B, H), "done": torch.zeros(B)},
        _PAIRS,
        _HC,
    ),
    "gru and a rate": Case(
        step(_rated, l=lambda: nn.GRU(D, H), o=linear(H, 3)),
        {"x": normal(T, B, D), "h": normal(1, B, H), "rate": torch.tensor(16000)},
        ("y", "hn"),
        {"h": "hn"},
    ),
    "keys at a place that is given": Case(
        step(_static, k=linear(H, H)),
        {"x": normal(B, H), "position": torch.tensor(2), "key_cache": normal(B, M, H)},
        ("y", "key_cache_out"),
        {"key_cache": "key_cache_out"},
        named=True,
    ),
    "convolution and lstm": Case(
        step(_mixed, conv=lambda: nn.Conv1d(D, D, 3), l=lambda: nn.LSTM(D, H, batch_first=True), o=linear(H, 2)),
        {"x": normal(B, D, T), "cache": normal(B, D, 2), "h": normal(1, B, H), "c": normal(1, B, H)},
        ("y", "c_out", "cache_out", "h_out"),
        {"cache": "cache_out", "h": "h_out", "c": "c_out"},
    ),
}
"""Modules with state: those that do not need their names are exported with odd ones, too."""


def _net(
    function: Callable[..., Any], given: dict[str, Tensor], returned: tuple[str, ...], free: Any = None, **layers: Any
) -> Case:
    return Case(step(function, **layers), given, returned, {}, free)


_PICTURE, _SOUND = (1, 3, 8, 8), (1, 1, 64)
STATELESS: dict[str, Case] = {
    "residual net": _net(
        lambda self, x: x + self.a(x),
        {"input": normal(*_PICTURE)},
        ("output",),
        a=lambda: nn.Conv2d(3, 3, 3, padding=1),
    ),
    "autoencoder with a state's names": _net(
        lambda self, x: (self.b(torch.relu(self.a(x))), self.a(x)),
        {"state": normal(B, D)},
        ("next_state", "code"),
        a=linear(D, 2),
        b=linear(2, D),
    ),
    "denoiser": _net(
        lambda self, x, t: x - self.a(x) * t[:, None],
        {"sample": normal(B, D), "timestep": torch.rand(B)},
        ("out_sample",),
        a=linear(),
    ),
    "preconditioned denoiser": _net(
        lambda self, x, t: torch.sigmoid(t)[:, None] * x + (1 - torch.sigmoid(t))[:, None] * self.a(x),
        {"noisy": normal(B, D), "sigma": torch.rand(B)},
        ("denoised",),
        a=linear(),
    ),
    "fusion": _net(
        lambda self, x, y: self.a(x) * x + (1 - self.a(x)) * y,
        {"x": normal(B, D), "other": normal(B, D)},
        ("fused",),
        a=linear(),
    ),
    "blend with sides in the names": _net(
        lambda self, a, b: (
            torch.sigmoid(self.a(a + b)) * a + (1 - torch.sigmoid(self.a(a + b))) * b,
            torch.sigmoid(self.a(a + b)),
        ),
        {"image_in": normal(*_PICTURE), "background_in": normal(*_PICTURE)},
        ("image_out", "alpha"),
        a=lambda: nn.Conv2d(3, 1, 1),
    ),
    "flow with a condition, halves changed over": _net(
        lambda self, x, e: (
            torch.cat([x[:, 3:] * torch.exp(self.a(x[:, :3]) + self.b(e)), x[:, :3]], 1),
            self.a(x[:, :3]).sum(1),
        ),
        {"x": normal(B, D), "cond": normal(B, H)},
        ("z", "logdet"),
        a=linear(3, 3),
        b=linear(H, 3),
    ),
    "classifier": _net(lambda self, x: self.a(x), {"x": normal(B, D)}, ("logits",), a=linear(D, 3)),
    "gru that starts anew": _net(
        lambda self, x: self.o(self.l(x)[0]),
        {"x": normal(B, T, D)},
        ("y",),
        l=lambda: nn.GRU(D, H, batch_first=True),
        o=linear(H, D),
    ),
    "lstm in both directions": _net(
        lambda self, x: self.l(x)[0][..., :D],
        {"x": normal(T, B, D)},
        ("y",),
        l=lambda: nn.LSTM(D, H, bidirectional=True),
    ),
    "causal convolutions": _net(
        lambda self, x: self.a(functional.pad(x, (2, 0))), {"x": normal(B, D, T)}, ("y",), a=lambda: nn.Conv1d(D, D, 3)
    ),
    "two towers, unnamed": _net(
        lambda self, a, b: (self.a(a) + b, self.b(b) + a),
        {"a": normal(B, D), "b": normal(B, D)},
        ("c", "d"),
        a=linear(),
        b=linear(),
    ),
    "points and more points": _net(
        lambda self, a, b: (torch.cat([a, b], 1), self.a(torch.cat([a, b], 1)).sum(-1)),
        {"points": normal(B, T, 3), "more": normal(B, 2, 3)},
        ("all", "scores"),
        {"points": {1: "n"}, "more": {1: "m"}, "all": {1: "k"}, "scores": {1: "k"}},
        a=linear(3, 3),
    ),
    "layer of memory of any length": _net(
        lambda self, x, e: (x + self.a(x) + self.b(e)[:, None], self.a(x).mean(-1)),
        {"memory": normal(B, T, D), "cond": normal(B, H)},
        ("memory_out", "scores"),
        {"memory": {1: "time"}, "memory_out": {1: "time"}, "scores": {1: "time"}},
        a=linear(),
        b=linear(H, D),
    ),
    "shift of tokens": _net(
        lambda self, ids, w: ((ids + 1) % 9, self.e(ids) * w),
        {"ids": torch.randint(0, 9, (B, T)), "w": normal(1)},
        ("ids_out", "y"),
        e=lambda: nn.Embedding(9, 4),
    ),
    "picture that is returned": _net(
        lambda self, x, e: (x.clone() * 1, self.a(x) + e),
        {"state_in": normal(B, D), "e": normal(B, D)},
        ("state_out", "y"),
        a=linear(),
    ),
}
"""Modules without state, many of which return arrays of their inputs' shapes."""


def scanned() -> bytes:
    """A sum with decay in a Scan, its state taken from an input and returned; made without an exporter."""
    made = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        graph (float[n, {D}] a, float[{D}] b) => (float[n, {D}] c, float[{D}] d) <float decay = {{0.5}}> {{
            [scan] d, c = Scan <
                num_scan_inputs = 1,
                body = body (float[{D}] s, float[{D}] x) => (float[{D}] t, float[{D}] y) {{
                    kept = Mul(s, decay)
                    t = Add(kept, x)
                    y = Identity(t)
                }}> (b, a)
        }}""")
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


def branched() -> bytes:
    """A GRU in both branches of an If that a rate decides, the other one from zeros; made without an exporter."""
    made = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 16]>
        graph (float[n, batch, {D}] x, float[1, batch, {H}] h, int64 rate)
            => (float[n, 1, batch, {H}] y, float[1, batch, {H}] hn) <int64 most = {{16000}}> {{
            which = Equal(rate, most)
            [if] y, hn = If (which) <
                then_branch = a () => (y_a, h_a) {{ [a] y_a, h_a = GRU <hidden_size = {H}> (x, w, r, "", "", h) }},
                else_branch = b () => (y_b, h_b) {{ [b] y_b, h_b = GRU <hidden_size = {H}> (x, w, r) }}>
        }}""")
    numbers = np.random.default_rng(0)
    for name, shape in {"w": (1, 3 * H, D), "r": (1, 3 * H, H)}.items():
        made.graph.initializer.append(numpy_helper.from_array(numbers.normal(0, 0.5, shape).astype(np.float32), name))
    return bytes(made.SerializeToString())


def wide() -> bytes:
    """A step that takes so long that its state is followed for seconds."""
    case = STATEFUL["linear attention"]
    given = {"x": normal(32, 512), "state": normal(32, 512, 512)}
    make = step(_linear_attention, l=linear(512, 3 * 512))
    return exported(Case(make, given, ("y", "next_state"), case.pairs))[0]


class Here:
    """A graph in ONNX Runtime in this process: what `Runner` is, for graphs that are known, and quicker."""

    left, runs, memory = 30.0, 0, 0

    def __init__(self, path: Path, folder: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folder / "folded.onnx")
        self._session = onnxruntime.InferenceSession(str(path), options)
        self._names = [output.name for output in self._session.get_outputs()]

    def check(self) -> None:
        """There is always time."""

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """See `Runner.run`."""
        try:
            return dict(zip(self._names, self._session.run(self._names, dict(feeds)), strict=True))
        except Exception as error:
            raise RunError(str(error)) from None


def paired(data: bytes, folder: Path) -> tuple[Paired, Structure]:
    """Return the pairs that are found in a file, with its graph run in this process."""
    path = folder / "graph.onnx"
    path.write_bytes(data)
    foreign, runner = read_foreign(path), Here(path, folder)
    structure = read_structure(ir.load(folder / "folded.onnx").graph, foreign.inputs)
    inputs = Inputs(foreign, structure)
    inputs.find(runner)  # type: ignore[arg-type]
    return pair(inputs, runner), structure  # type: ignore[arg-type]
