"""Steps with state as people write them, and how a file is made of each; `verify --module` is given this very file.

`RIGHTS` are exported as they are. `SURPRISES` try what a verifier may not think of; some are changed before.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
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
    dynamo: int = 0
    """The opset of an export by the newer exporter; 0 where the tracer makes the file."""
    batch: int = 2
    length: int = 4
    open: str = ""
    """Which of the axes B and L the file leaves open."""
    undecided: str = ""
    """States that inspect leaves to the user, because neither the graph nor their names show them."""
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
    """What a line declares, such as `x B L 3 lookahead=2; tokens B L tokens=31`."""
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
    declared = {key: more.pop(key) for key in ("lengths", "segment_lengths") if key in more}

    def enter(call: Call) -> Callable[..., StepSpec]:
        @functools.wraps(call)
        def build(weights: str | None = None) -> StepSpec:
            with torch.random.fork_rng():
                torch.manual_seed(7)
                module = Step(call, layers())
            kinds = (InputSpec, inputs), (StateSpec, states), (OutputSpec, outputs)
            return StepSpec(module, *(specified(*kind) for kind in kinds), **declared)

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
        self.arguments = [part.name for part in (*spec.inputs, *spec.states)] + ["valid"] * spec.lengths
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
        part = parts.get(name, InputSpec("valid", ("B",), dtype="int32") if name == "valid" else None)
        if part is None:
            example.append(torch.tensor(16000))
            dynamic.append({})
            continue
        ahead, grown = getattr(part, "lookahead", 0), getattr(part, "grows", None)
        shape = [sizes.get(size, size) + (ahead if size == "L" else 0) for size in part.shape]
        axes = {axis: str(size) for axis, size in enumerate(part.shape) if size in sizes and str(size) in case.open}
        if grown is not None:
            shape[grown], axes[grown] = 3, f"rows_{name}"
        kind = getattr(torch, "int64" if getattr(part, "tokens", None) else part.dtype)
        example.append(torch.rand(shape) if kind == torch.float32 else torch.ones(shape, dtype=kind))
        dynamic.append(axes)
    names = [[name for name, _, _ in side] for side in (before, after)]
    options: dict[str, Any] = {
        "input_names": names[0],
        "output_names": names[1],
        "opset_version": case.dynamo or case.opset,
    }
    if case.dynamo:
        open_axes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) or None for axes in dynamic)
        options |= {"dynamic_shapes": (open_axes,), "external_data": False, "verbose": False}
    else:
        options["dynamic_axes"] = {name: axes for name, axes in zip(names[0], dynamic, strict=True) if axes}
    module = _Ordered(spec, given, returned).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what PyTorch says of its own exporter
        torch.onnx.export(module, tuple(example), str(file), dynamo=bool(case.dynamo), **options)
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
    "input=x h0=h c0=c -> output=y hn=h' cn=c'",
    "x B L 5 | h 2 B 9; c 2 B 9",
    lambda: {"lstm": nn.LSTM(5, 9, num_layers=2, batch_first=True)},
    open="BL",
)
def lstm_two_layers(m, x, h, c):
    y, (h, c) = m.lstm(x, (h, c))
    return y, h, c


@right(
    "frames=x h_0=h -> out=y h_n=h'",
    "x L B 4 | h 1 B 5 | y L B 5",
    lambda: {"rnn": nn.RNN(4, 5, nonlinearity="relu")},
    opset=15,
    length=3,
    open="L",
)
def rnn_time_first(m, x, h):
    return m.rnn(x, h)


@right(
    "x h -> y new_h=h'", "x B L 6 | h 2 B 7", lambda: {"gru": nn.GRU(6, 7, num_layers=2, batch_first=True)}, dynamo=18
)
def gru_two_layers(m, x, h):
    return m.gru(x, h)


@right(
    "x hidden=h cell=c -> y hidden_out=h' cell_out=c'",
    "x B 4 | h B 7; c B 7",
    lambda: {"gates": nn.Linear(11, 28), "head": nn.Linear(7, 2)},
    dynamo=20,
    open="B",
)
def lstm_written_out(m, x, h, c):
    f, g, a, o = m.gates(torch.cat([x, h], -1)).chunk(4, -1)
    c = torch.sigmoid(f + 0.3 * c) * c + torch.sigmoid(a + 0.2 * c) * torch.tanh(g)
    h = torch.sigmoid(o + 0.1 * c) * torch.tanh(c)
    return m.head(h), h, c


@right(
    "h x -> h_next=h' y", "x B 3 | h B 11", lambda: {"inner": nn.Linear(3, 11), "outer": nn.Linear(11, 11)}, opset=16
)
def state_first(m, x, h):
    h = torch.tanh(m.inner(x) + m.outer(h))
    return h.sum(-1, keepdim=True) + x, h


@right(
    "x a b -> y b_next=b' a_next=a'",
    "x B 5 | a B 5; b B 5",
    lambda: {"first": nn.GRUCell(5, 5), "second": nn.GRUCell(5, 5)},
)
def states_crosswise(m, x, a, b):
    a, b = m.first(x, a), m.second(a, b)
    return a * b, a, b


@right(
    "input.1=x onnx::GRU_1=h1 input.5=h2 -> _77=y _81=h1' onnx::Add_90=h2'",
    "x B 6 | h1 B 6; h2 B 6",
    lambda: {"first": nn.GRUCell(6, 6), "second": nn.GRUCell(6, 6), "head": nn.Linear(6, 6)},
)
def names_that_say_nothing(m, x, h1, h2):
    h1 = m.first(x, h1)
    h2 = m.second(h1, h2)
    return m.head(h2), h1, h2


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


@right(
    "tokens hidden -> logits hidden_out=hidden'",
    "tokens B L tokens=31 | hidden 1 B 8 | logits role=logits",
    lambda: {"table": nn.Embedding(31, 8), "gru": nn.GRU(8, 8, batch_first=True), "head": nn.Linear(8, 31)},
    opset=14,
    open="L",
    batch=1,
)
def tokens_through_a_gru(m, tokens, hidden):
    y, hidden = m.gru(m.table(tokens), hidden)
    return m.head(y), hidden


# Windows of the past


@right(
    "x cache1 cache2 -> y cache1_out=cache1' cache2_out=cache2'",
    "x B L 3 | cache1 B 3 4; cache2 B 6 2",
    lambda: {"first": nn.Conv1d(3, 6, 5), "second": nn.Conv1d(6, 3, 3)},
    dynamo=18,
    open="B",
)
def convolution_caches(m, x, cache1, cache2):
    x = torch.cat([cache1, x.transpose(1, 2)], 2)
    cache1, x = x[:, :, -4:], torch.relu(m.first(x))
    x = torch.cat([cache2, x], 2)
    return m.second(x).transpose(1, 2), cache1, x[:, :, -2:]


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


@right(
    "x past_key=k past_value=v fill -> y present_key=k' present_value=v' fill_out=fill'",
    "x B L 8 | k B 6 8; v B 6 8; fill B dtype=int64",
    lambda: {"project": nn.Linear(8, 24)},
    open="B",
)
def keys_and_values(m, x, k, v, fill):
    query, key, value = m.project(x).chunk(3, -1)
    k, v = torch.cat([k, key], 1)[:, -6:], torch.cat([v, value], 1)[:, -6:]
    fill = torch.clamp(fill + x.shape[1], max=6)
    seen = torch.arange(6) >= 6 - fill[:, None]
    score = query @ k.transpose(1, 2) / math.sqrt(8) + torch.where(seen, 0.0, -1e4)[:, None]
    return score.softmax(-1) @ v, k, v, fill


def attend(m, number, x, memory):
    rows, length = torch.cat([memory, x], 1), x.shape[1]
    query, (key, value) = m.query[number](x), m.key_value[number](rows).chunk(2, -1)
    distance = torch.arange(rows.shape[1])[None] - torch.arange(length)[:, None] - memory.shape[1]
    score = (query @ key.transpose(1, 2)) / math.sqrt(8) + 0.2 * distance
    y = x + score.masked_fill(distance > 0, -1e9).softmax(-1) @ value
    return m.norm[number](y), rows[:, -memory.shape[1] :]


@right(
    "x mems.0=m0 mems.1=m1 -> y new_mems.0=m0' new_mems.1=m1'",
    "x B L 8 | m0 B 6 8; m1 B 6 8",
    lambda: {
        "query": nn.ModuleList(nn.Linear(8, 8) for _ in range(2)),
        "key_value": nn.ModuleList(nn.Linear(8, 16) for _ in range(2)),
        "norm": nn.ModuleList(nn.LayerNorm(8) for _ in range(2)),
    },
    dynamo=18,
)
def transformer_xl_memory(m, x, m0, m1):
    x, m0 = attend(m, 0, x, m0)
    x, m1 = attend(m, 1, x, m1)
    return x, m0, m1


@right(
    "x past -> y present=past'", "x B L 5 | past B 8 5 grows=1", lambda: {"query": nn.Linear(5, 5)}, batch=1, length=2
)
def memory_that_grows(m, x, past):
    rows = torch.cat([past, x], 1)
    return (m.query(x) @ rows.transpose(1, 2)).softmax(-1) @ rows, rows[:, -8:]


@right(
    "x ring pointer -> y ring_out=ring' pointer_out=pointer'",
    "x B 3 | ring B 7 3; pointer B dtype=int64",
    lambda: {"mix": nn.Linear(3, 3)},
    dynamo=18,
)
def ring_and_pointer(m, x, ring, pointer):
    ring = torch.where((torch.arange(7) == pointer[:, None])[:, :, None], x[:, None], ring)
    pointer = torch.remainder(pointer + 1, 7)
    oldest = torch.gather(ring, 1, pointer[:, None, None].expand(-1, 1, 3))[:, 0]
    return m.mix(oldest - x), ring, pointer


@right(
    "x seen -> y seen_out=seen'",
    "x B 5 | seen B 5 dtype=bool",
    lambda: {"mix": nn.Linear(5, 5)},
    opset=16,
    open="B",
    undecided="seen",
)
def mask_of_bool(m, x, seen):
    seen = seen | (x > 1.2)
    return torch.where(seen, m.mix(x), x), seen


@right(
    "x position -> y position_out=position'",
    "x B 6 | position B dtype=int64",
    lambda: {"mix": nn.Linear(6, 6), "rates": torch.tensor([1.0, 0.1, 0.01])},
    dynamo=19,
    open="B",
)
def counter_of_steps(m, x, position):
    angle = position[:, None].float() * m.rates
    return m.mix(x + torch.cat([angle.sin(), angle.cos()], -1)), position + 1


# Recurrences of sums


@right(
    "u=x conv ssm -> y conv_state=conv' ssm_state=ssm'",
    "x B 5 | conv B 10 3; ssm B 10 4",
    lambda: {
        "inner": nn.Linear(5, 20),
        "select": nn.Linear(10, 18),
        "outer": nn.Linear(10, 5),
        "kernel": torch.randn(10, 3),
        "a": -torch.rand(10, 4),
    },
    undecided="ssm",
)
def selective_state(m, x, conv, ssm):
    inner, gate = m.inner(x).chunk(2, -1)
    conv = torch.cat([conv[:, :, 1:], inner[:, :, None]], -1)
    inner = F.silu((conv * m.kernel).sum(-1))
    step, b, c = m.select(inner).split([10, 4, 4], -1)
    step = F.softplus(step)[:, :, None]
    ssm = torch.exp(step * m.a) * ssm + step * inner[:, :, None] * b[:, None]
    return m.outer((ssm @ c[:, :, None])[:, :, 0] * F.silu(gate)), conv, ssm


@right(
    "x aa bb pp -> y aa_out=aa' bb_out=bb' pp_out=pp'",
    "x B 6 | aa B 6; bb B 6; pp B 6 initial=-1e30",
    lambda: {"kvr": nn.Linear(6, 18), "first": torch.rand(6), "decay": torch.rand(6)},
    open="B",
    undecided="aa bb pp",
)
def rwkv_like(m, x, aa, bb, pp):
    k, v, r = m.kvr(x).chunk(3, -1)
    top = torch.maximum(pp, k + m.first)
    old, new = torch.exp(pp - top), torch.exp(k + m.first - top)
    y = torch.sigmoid(r) * (old * aa + new * v) / (old * bb + new)
    top = torch.maximum(pp - m.decay, k)
    old, new = torch.exp(pp - m.decay - top), torch.exp(k - top)
    return y, old * aa + new * v, old * bb + new, top


@right(
    "x s=kv -> y s_out=kv'",
    "x B L 6 | kv B 2 3 3",
    lambda: {"project": nn.Linear(6, 18), "decay": torch.tensor([0.9, 0.7])},
    dynamo=18,
    length=3,
    undecided="kv",
)
def retention(m, x, kv):
    query, key, value = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in m.project(x).chunk(3, -1))
    ages = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    inside = torch.where(ages >= 0, m.decay[:, None, None] ** ages.clamp(min=0), 0.0)
    steps = torch.arange(1, x.shape[1] + 1)
    y = (query @ key.mT * inside) @ value + query @ kv * (m.decay[:, None] ** steps)[:, :, None]
    fade = m.decay[:, None] ** (x.shape[1] - steps)
    kv = kv * (m.decay ** x.shape[1])[:, None, None] + (key * fade[:, :, None]).mT @ value
    return y.transpose(1, 2).flatten(2), kv


@right(
    "x s0=matrix -> y s1=matrix'",
    "x B 5 | matrix B 4 4",
    lambda: {"project": nn.Linear(5, 13)},
    dynamo=21,
    undecided="matrix",
)
def delta_rule(m, x, matrix):
    query, key, value, rate = m.project(x).split([4, 4, 4, 1], -1)
    key, rate = F.normalize(key, dim=-1), torch.sigmoid(rate)
    wrong = value - (matrix @ key[:, :, None])[:, :, 0]
    matrix = matrix + rate[:, :, None] * wrong[:, :, None] * key[:, None]
    return (matrix @ query[:, :, None])[:, :, 0], matrix


@right(
    "q=x c_state=c n_state=n m_state=top -> h=y c_new=c' n_new=n' m_new=top'",
    "x B 5 | c B 4 4; n B 4; top B",
    lambda: {"project": nn.Linear(5, 14)},
    open="B",
    undecided="c n top",
)
def matrix_lstm(m, x, c, n, top):
    query, key, value, gates = m.project(x).split([4, 4, 4, 2], -1)
    a, f = gates[:, 0], -F.softplus(-gates[:, 1])
    new = torch.maximum(f + top, a)
    a, f = torch.exp(a - new), torch.exp(f + top - new)
    c = f[:, None, None] * c + a[:, None, None] * value[:, :, None] * key[:, None]
    n = f[:, None] * n + a[:, None] * key
    under = torch.maximum((n * query).sum(-1).abs(), torch.exp(-new))
    return (c @ query[:, :, None])[:, :, 0] / under[:, None], c, n, new


@right(
    "x h -> y h_last=h'",
    "x B L 5 | h B 7",
    lambda: {"inner": nn.Linear(5, 14), "outer": nn.Linear(7, 5)},
    dynamo=18,
    length=8,
    undecided="h",
)
def parallel_scan(m, x, h):
    gate, value = m.inner(x).chunk(2, -1)
    keep = torch.cumsum(-F.softplus(gate), 1)
    h = torch.exp(keep) * (h[:, None] + torch.cumsum(torch.exp(-F.softplus(-gate) - keep) * value, 1))
    return m.outer(h), h[:, -1].clone()


# Filters, controllers and the rest


@right(
    "x mean var count -> y mean_out=mean' var_out=var' count_out=count'",
    "x B 4 | mean B 4; var B 4 initial=ones; count B dtype=int32",
    lambda: {"mix": nn.Linear(4, 4), "ones": torch.ones(4)},
    undecided="mean var",
)
def running_normaliser(m, x, mean, var, count):
    mean = mean + 0.05 * (x - mean)
    var = var + 0.05 * ((x - mean) ** 2 - var)
    return m.mix((x - mean) * torch.rsqrt(var + 1e-3)), mean, var, torch.clamp(count + 1, max=50)


@right(
    "z=x mean cov -> estimate=y mean_next=mean' cov_next=cov'",
    "x B 1 | mean B 3; cov B 3 3 initial=start",
    lambda: {
        "move": torch.eye(3) + torch.eye(3).roll(1, 1).triu() * 0.1,
        "look": torch.eye(3)[:1],
        "start": torch.eye(3),
    },
    undecided="cov",
)
def kalman_filter(m, x, mean, cov):
    mean, cov = mean @ m.move.T, m.move @ cov @ m.move.T + 0.1 * torch.eye(3)
    gain = (cov @ m.look.T) / ((m.look @ cov @ m.look.T) + 0.5)
    mean = mean + ((x - mean @ m.look.T)[:, None] * gain.transpose(1, 2))[:, 0]
    return mean.clone(), mean, cov - gain @ m.look @ cov


@right(
    "error=x integral last -> u=y integral_out=integral' last_out=last'",
    "x B 2 | integral B 2; last B 2",
    dynamo=23,
    undecided="integral last",
)
def controller(m, x, integral, last):
    integral = torch.clamp(integral + 0.02 * x, -1, 1)
    return x * 2 + integral * 0.5 + (x - last) * 0.1, integral, x.clone()


@right(
    "x total valid -> y total_out=total'",
    "x B L 3 | total B 3",
    lambda: {"mix": nn.Linear(3, 3)},
    open="B",
    lengths=True,
    undecided="total",
)
def sums_of_valid_positions(m, x, total, valid):
    counts = torch.arange(x.shape[1]) < valid[:, None]
    sums = total[:, None] + torch.cumsum(torch.where(counts[:, :, None], m.mix(x), 0), 1)
    return sums, sums[:, -1].clone()


@right(
    "frames=x h -> y h_out=h'",
    "x B L 3 lookahead=2 | h 1 B 6",
    lambda: {"ahead": nn.Conv1d(3, 6, 3), "gru": nn.GRU(6, 6, batch_first=True)},
)
def frames_with_lookahead(m, x, h):
    return m.gru(m.ahead(x.transpose(1, 2)).transpose(1, 2), h)


@right("x mean -> y mean_out=mean'", "x B 4 | mean 4", lambda: {"mix": nn.Linear(4, 4)}, batch=3, undecided="mean")
def state_of_all_sequences(m, x, mean):
    mean = 0.9 * mean + 0.1 * x.mean(0)
    return m.mix(x - mean), mean


# Surprises: right files


@surprise(
    "x i1=h1 i2=h2 i3=h3 i4=c1 i5=c2 i6=c3 -> y o1=h1' o2=h2' o3=h3' o4=c1' o5=c2' o6=c3'",
    "x B 4 | h1 B 4; c1 B 4; h2 B 4; c2 B 4; h3 B 4; c3 B 4",
    lambda: {name: nn.LSTMCell(4, 4) for name in ("first", "second", "third")},
)
def all_h_before_all_c_without_names(m, x, h1, c1, h2, c2, h3, c3):
    h1, c1 = m.first(x, (h1, c1))
    h2, c2 = m.second(h1, (h2, c2))
    h3, c3 = m.third(h2, (h3, c3))
    return h3 * 2, h1, c1, h2, c2, h3, c3


@surprise(
    "x cache_0=cache1 cache_1=cache2 cache_2=cache3 -> y new_cache_0=cache1' new_cache_1=cache2' new_cache_2=cache3'",
    "x B 4 | cache1 B 4; cache2 B 4; cache3 B 4",
    lambda: {name: nn.GRUCell(4, 4) for name in ("first", "second", "third")},
)
def layers_counted_from_zero_and_from_one(m, x, cache1, cache2, cache3):
    cache1 = m.first(x, cache1)
    cache2 = m.second(cache1, cache2)
    cache3 = m.third(cache2, cache3)
    return cache3 * 2, cache1, cache2, cache3


@surprise(
    "x cache_0=cache_0 cache_1=cache_1 -> y new_cache_1=cache_0' new_cache_2=cache_1'",
    "x B 4 | cache_0 B 4; cache_1 B 4",
    lambda: {name: nn.GRUCell(4, 4) for name in ("first", "second")},
)
def next_states_counted_from_one(m, x, cache_0, cache_1):
    cache_0 = m.first(x, cache_0)
    cache_1 = m.second(cache_0, cache_1)
    return cache_1 * 2, cache_0, cache_1


@surprise(
    "x s1=total s2=squares n -> y s1_out=total' s2_out=squares' n_out=n'",
    "x B 3 | total B 3; squares B 3; n B dtype=int64",
)
def variance_by_difference(m, x, total, squares, n):
    n, total, squares = n + 1, total + x + 10, squares + (x + 10) ** 2
    return squares / n[:, None] - (total / n[:, None]) ** 2, total, squares, n


@surprise("x h -> y h_out=h'", "x B 8 | h B 4096", lambda: {"inner": nn.Linear(8, 4096)})
def state_on_a_grid_of_127(m, x, h):
    h = torch.round(torch.tanh(m.inner(x) + 0.5 * h) * 127) / 127
    return h * 2, h


@surprise("x gain -> y gain_out=gain'", "x B 4 | gain", batch=1)
def state_of_one_number(m, x, gain):
    gain = 0.9 * gain + 0.1 * x.abs().mean()
    return x * gain, gain


@surprise("x done h -> y h_out=h'", "x B 4; done B dtype=bool | h B 4", lambda: {"mix": nn.Linear(8, 4)})
def done_clears_the_state(m, x, done, h):
    h = torch.tanh(m.mix(torch.cat([x, h * (~done).float()[:, None]], 1)))
    return h * 2, h


@surprise("x h0=h1 c0=c1 -> y h1=h1' c1=c1'", "x B 4 | h1 B 4; c1 B 4", lambda: {"cell": nn.LSTMCell(4, 4)})
def steps_counted_in_the_names(m, x, h, c):
    h, c = m.cell(x, (h, c))
    return h * 2, h, c


@surprise("x v -> y v_out=v'", "x B 3 | v B 3 initial=start", lambda: {"start": torch.tensor(0.3)})
def chaos(m, x, v):
    v = 3.9 * v * (1 - v) * 0.999 + 0.0005 * torch.sigmoid(x)
    return v * 2, v


@surprise("x top -> y top_out=top'", "x B 3 | top B 3 initial=-inf", lambda: {"mix": nn.Linear(3, 3)})
def largest_from_minus_infinity(m, x, top):
    top = torch.maximum(top, x)
    return m.mix(top), top


# Surprises: wrong files


def _gru(m, x, h):
    h = m.cell(x, h)
    return m.head(h), h


def _cell(outputs: int = 3) -> dict[str, nn.Module]:
    return {"cell": nn.GRUCell(6, 7), "head": nn.Linear(7, outputs)}


@surprise(
    "x h -> y h_out=h'",
    "x B 6 | h B 7",
    _cell,
    change=calling(lambda m, own, x, h: (-own(m, x, h)[0], own(m, x, h)[1])),
    fails=("output y",),
)
def small_units_with_the_other_sign(m, x, h):
    y, h = _gru(m, x, h)
    return y * 1e-5, h


@surprise(
    "x h -> p h_out=h'",
    "x B 6 | h B 7 | p",
    lambda: _cell(50000),
    change=lambda m: m.head.weight.data.neg_(),
    fails=("output p",),
)
def many_probabilities_of_another_training(m, x, h):
    y, h = _gru(m, x, h)
    return y.softmax(-1), h


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
    "x h -> y h_out=h'",
    "x B 6 | h B 7",
    lambda: _cell(2),
    change=lambda m: m.head.weight.data[1].neg_(),
    fails=("output y",),
)
def newtons_beside_metres_with_the_other_sign(m, x, h):
    y, h = _gru(m, x, h)
    return y * torch.tensor([900.0, 0.01]), h


@surprise(
    "x h -> y h_out=h'", "x B 6 | h B 7", _cell, change=calling(lambda m, own, x, h: _gru(m, x, h)), fails=("output y",)
)
def observations_not_clipped(m, x, h):
    return _gru(m, torch.clamp(x, -5, 5), h)


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


@surprise(
    "x h -> y h_out=h'",
    "x B 6 | h B 7",
    _cell,
    change=calling(lambda m, own, x, h: (own(m, x, h)[0], own(m, x, h)[1] + 0 * h.mean(0, keepdim=True))),
    dynamo=18,
    fails=("sequences",),
)
def rows_that_infect_their_neighbours(m, x, h):
    return _gru(m, x, h)


@surprise(
    "x h -> y h_out=h'",
    "x B 6 | h B 7",
    _cell,
    change=calling(lambda m, own, x, h: (own(m, x, h)[0], own(m, x, h)[1] + torch.randn_like(h) * 1e-6)),
    fails=("repeated",),
)
def noise_in_the_state(m, x, h):
    return _gru(m, x, h)


@surprise(
    "x position -> y position_out=position'",
    "x B 6 | position B dtype=int32",
    lambda: {"table": torch.randn(512, 6)},
    change=lambda m: setattr(m, "turn", lambda p: p.clamp(max=511)),
    fails=("output y",),
    command=("--segments", "600"),
)
def position_beyond_the_table(m, x, position):
    turn = getattr(m, "turn", lambda p: torch.remainder(p, 512))
    return x + m.table[turn(position)], position + 1
