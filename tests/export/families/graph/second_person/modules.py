"""Steps with state as people write them, and how a file is made of each; `verify --module` is given this very file.

`RIGHTS` are exported as they are. `SURPRISES` try what a verifier may not think of; some are changed before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

Call = Callable[..., Any]
Layers = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """How a file is made of a step: its names in its own order, and the sizes of the example."""

    build: Callable[..., StepSpec]
    names: str
    """Inputs, an arrow, outputs; behind an equals sign what the step calls it, with a prime for the next state."""
    opset: int = 17
    batch: int = 2
    length: int = 4
    open: str = ""
    """Which of the axes B and L the file leaves open."""
    change: Call | None = None
    """What happens to the module before the export."""
    edit: Call | None = None
    """What happens to the graph after it."""
    fails: tuple[str, ...] = ()
    """Words that stand in what is said of a wrong file; none where the file is right."""
    command: tuple[str, ...] = ()
    """What verify is given besides."""


RIGHTS: dict[str, Case] = {}
SURPRISES: dict[str, Case] = {}


class Step(nn.Module):
    """Some layers and a function that calls them."""

    def __init__(self, call: Call, layers: dict[str, Any]) -> None:
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            if isinstance(layer, torch.Tensor):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, *given: torch.Tensor) -> Any:
        return self.call(self, *given)


def specified(kind: type, text: str) -> list[Any]:
    """What a line declares, such as `x B L 3; tokens B L tokens=31`."""
    found = []
    for part in text.split(";"):
        name, *words = part.split()
        shape = tuple(int(word) if word.isdigit() else word for word in words if "=" not in word)
        more = dict(word.split("=") for word in words if "=" in word)
        read = {key: int(value) if value.isdigit() else value for key, value in more.items()}
        if str(read.get("initial")).startswith("-"):
            read["initial"] = float(read["initial"])
        found.append(kind(name, **read) if kind is OutputSpec and not shape else kind(name, shape, **read))
    return found


def right(
    names: str, parts: str, layers: Layers = dict, *, table: dict[str, Case] = RIGHTS, **more: Any
) -> Callable[[Call], Callable[..., StepSpec]]:
    """Enter a step as a case: its inputs, states and outputs between bars. Its weights are the same in each build."""
    inputs, states, outputs = f"{parts} | y".split("|")[:3]

    def enter(call: Call) -> Callable[..., StepSpec]:
        @functools.wraps(call)
        def build(weights: str | None = None) -> StepSpec:
            with torch.random.fork_rng():
                torch.manual_seed(7)
                module = Step(call, layers())
            kinds = (InputSpec, inputs), (StateSpec, states), (OutputSpec, outputs)
            return StepSpec(module, *(specified(*kind) for kind in kinds))

        del build.__wrapped__
        table[call.__name__] = Case(build, names, **more)
        return build

    return enter


surprise = functools.partial(right, table=SURPRISES)


def calling(call: Call) -> Call:
    """A change of a module: what is called in place of its function, which it is given."""

    def change(module: Any) -> None:
        own = module.call
        module.call = lambda m, *given: call(m, own, *given)

    return change


class _Ordered(nn.Module):
    """A step as a file has it: arguments and results in another order, nothing else."""

    def __init__(self, spec: StepSpec, given: list[str], returned: list[str]) -> None:
        super().__init__()
        self.module, self.given, self.returned = spec.module, given, returned
        self.arguments = [part.name for part in (*spec.inputs, *spec.states)]
        self.results = [part.name for part in spec.outputs] + [f"{part.name}'" for part in spec.states]

    def forward(self, *values: torch.Tensor) -> Any:
        named = dict(zip(self.given, values, strict=True))
        results = dict(zip(self.results, self.module(*(named.pop(key) for key in self.arguments)), strict=True))
        for constant in named.values():  # what a file takes besides
            results[self.returned[0]] = results[self.returned[0]] * (constant / 16000)
        return tuple(results[name] for name in self.returned)


def export(case: Case, file: Path) -> Path:
    """Write the file of a case."""
    spec = case.build()
    if case.change is not None:
        case.change(spec.module)
    before, after = ([part.partition("=") for part in side.split()] for side in case.names.split("->"))
    given, returned = ([own or name for name, _, own in side] for side in (before, after))
    sizes, parts = {"B": case.batch, "L": case.length}, {part.name: part for part in (*spec.inputs, *spec.states)}
    example, dynamic = [], []
    for name in given:
        part = parts.get(name)
        if part is None:
            example.append(torch.tensor(16000))
            dynamic.append({})
            continue
        shape = [sizes.get(size, size) for size in part.shape]
        axes = {axis: str(size) for axis, size in enumerate(part.shape) if size in sizes and str(size) in case.open}
        kind = getattr(torch, "int64" if getattr(part, "tokens", None) else part.dtype)
        example.append(torch.rand(shape) if kind == torch.float32 else torch.ones(shape, dtype=kind))
        dynamic.append(axes)
    names = [[name for name, _, _ in side] for side in (before, after)]
    module = _Ordered(spec, given, returned).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what PyTorch says of its own exporter
        torch.onnx.export(
            module,
            tuple(example),
            str(file),
            input_names=names[0],
            output_names=names[1],
            opset_version=case.opset,
            dynamic_axes={name: axes for name, axes in zip(names[0], dynamic, strict=True) if axes},
            dynamo=False,
        )
    if case.edit is not None:
        model = onnx.load(file)
        case.edit(model.graph)
        onnx.save(model, file)
    return file


# Recurrent cells


@right("x h -> y h_out=h'", "x B 6 | h B 7", lambda: {"cell": nn.GRUCell(6, 7), "head": nn.Linear(7, 3)}, opset=14)
def gru_cell(m, x, h):
    h = m.cell(x, h)
    return m.head(h), h


@right(
    "obs=x done h_in=h c_in=c -> action=y value=v h_out=h' c_out=c'",
    "x B 9; done B dtype=bool | h B 13; c B 13 | y; v B",
    lambda: {
        "norm": nn.BatchNorm1d(9),
        "cell": nn.LSTMCell(9, 13),
        "actor": nn.Linear(13, 4),
        "critic": nn.Linear(13, 1),
    },
    open="B",
)
def policy_that_takes_done(m, x, done, h, c):
    keep = (~done).float()[:, None]
    h, c = m.cell(m.norm(x), (h * keep, c * keep))
    return m.actor(h), m.critic(h).squeeze(-1), h, c


@right(
    "input=x state sr -> output=y stateN=state'",
    "x B 12 | state 2 B 10",
    lambda: {"cell": nn.LSTMCell(12, 10), "head": nn.Linear(10, 1)},
    opset=16,
    command=("--inputs", "sr.npz"),
)
def stacked_state_and_sampling_rate(m, x, state):
    h, c = m.cell(x, (state[0], state[1]))
    return torch.sigmoid(m.head(torch.relu(h))), torch.stack([h, c])


# Windows of the past


@right(
    "x window.0=w0 window.1=w1 -> y next.0=w0' next.1=w1'",
    "x B 4 | w0 B 5 4; w1 B 9 4",
    lambda: {"first": nn.Linear(12, 4), "second": nn.Linear(12, 2)},
    opset=15,
)
def dilated_windows(m, x, w0, w1):
    w0 = torch.cat([w0[:, 1:], x[:, None]], 1)
    w1 = torch.cat([w1[:, 1:], torch.relu(m.first(w0[:, ::2].flatten(1)))[:, None]], 1)
    return m.second(w1[:, ::4].flatten(1)), w0, w1


# Surprises: right files


@surprise(
    "x cache_0=cache_0 cache_1=cache_1 -> y new_cache_1=cache_0' new_cache_2=cache_1'",
    "x B 4 | cache_0 B 4; cache_1 B 4",
    lambda: {name: nn.GRUCell(4, 4) for name in ("first", "second")},
)
def next_states_counted_from_one(m, x, cache_0, cache_1):
    cache_0 = m.first(x, cache_0)
    cache_1 = m.second(cache_0, cache_1)
    return cache_1 * 2, cache_0, cache_1


@surprise("x gain -> y gain_out=gain'", "x B 4 | gain", batch=1)
def state_of_one_number(m, x, gain):
    gain = 0.9 * gain + 0.1 * x.abs().mean()
    return x * gain, gain


# Surprises: wrong files


def _gru(m, x, h):
    h = m.cell(x, h)
    return m.head(h), h


def _cell(outputs: int = 3) -> dict[str, nn.Module]:
    return {"cell": nn.GRUCell(6, 7), "head": nn.Linear(7, outputs)}


@surprise(
    "x power -> y power_out=power'",
    "x B 6 | power B 6",
    lambda: {"mix": nn.Linear(6, 6)},
    change=calling(lambda m, own, x, power: (own(m, x, power)[0], power * 0)),
    fails=("state power",),
)
def power_of_quiet_sound_that_stays_zero(m, x, power):
    power = 0.9 * power + 0.1 * (x * 1e-3).square()
    return m.mix(x) + power, power


@surprise(
    "x position h -> y h_out=h'",
    "x B 6; position B dtype=int32 | h B 7",
    lambda: _cell() | {"table": torch.randn(64, 6)},
    change=lambda m: m.table[2:].neg_(),
    fails=("output y",),
)
def positions_beyond_one(m, x, position, h):
    return _gru(m, x + m.table[torch.clamp(position, 0, 63)], h)


@surprise(
    "tokens h -> y h_out=h'",
    "tokens B tokens=50000 | h B 7",
    lambda: _cell() | {"table": nn.Embedding(50000, 6)},
    change=lambda m: m.table.weight.data[777].neg_(),
    fails=("output y",),
)
def one_of_many_tokens(m, tokens, h):
    return _gru(m, m.table(tokens), h)
