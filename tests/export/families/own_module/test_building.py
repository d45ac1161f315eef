"""Files written of a user's step: programs, tables, and one weight file in which nothing stands twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from stand_ins import small_steps
from torch import nn
from torch.nn import functional as F
from txl_export.families.own_module import capture
from txl_export.families.own_module.building import write_step
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.plan import Plan, make_plan
from txl_export.families.own_module.sizes import fresh_states, random_inputs
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_runtime.bundle.agreement import contradictions
from txl_runtime.bundle.manifest import FORMAT, FORMAT_VERSION, Manifest
from txl_runtime.bundle.open_batch import BATCH
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent
from verified_steps import Heard


class Policy(nn.Module):
    """An LSTM with two heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lstm = nn.Linear(7, 16), nn.LSTM(16, 24, 2, batch_first=True)
        self.action, self.value = nn.Linear(24, 20), nn.Linear(24, 1)

    def forward(self, obs, h, c):
        hidden, (h, c) = self.lstm(torch.relu(self.embed(obs)), (h, c))
        return self.action(hidden), self.value(hidden), h, c


def policy():
    states = [StateSpec("h", (2, "B", 24)), StateSpec("c", (2, "B", 24), initial=torch.linspace(-1, 1, 24))]
    return StepSpec(Policy(), [InputSpec("obs", ("B", "L", 7))], states, ["action", "value"])


class Tied(nn.Module):
    """A GRU language model whose embedding is its softmax's table too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.gru = nn.Embedding(40, 16), nn.GRU(16, 16, batch_first=True)

    def forward(self, tokens, h):
        hidden, h = self.gru(self.embedding(tokens), h)
        return F.linear(hidden, self.embedding.weight), h


def tied():
    inputs = [InputSpec("tokens", ("B", "L"), tokens=40)]
    return StepSpec(Tied(), inputs, [StateSpec("h", (1, "B", 16))], [OutputSpec("scores", role="logits")])


class Selective(nn.Module):
    """A convolution over the last inputs and a state that decays by what is seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.taken, self.mix = nn.Linear(16, 32), nn.Conv1d(16, 16, 4, groups=16)
        self.rate, self.ways = nn.Linear(16, 16), nn.Linear(16, 16)
        self.decay = nn.Parameter(-torch.rand(16, 8) - 0.1)

    def forward(self, x, last, state):
        u, gate = self.taken(x).chunk(2, -1)
        seen = torch.cat([last, u.transpose(1, 2)], 2)
        u = F.silu(self.mix(seen)).transpose(1, 2)
        rate, (put, get) = F.softplus(self.rate(u)), self.ways(u).chunk(2, -1)
        results = []
        for t in range(x.shape[1]):
            state = state * torch.exp(rate[:, t, :, None] * self.decay)
            state = state + rate[:, t, :, None] * put[:, t, None, :] * u[:, t, :, None]
            results.append(torch.einsum("bdn,bn->bd", state, get[:, t]))
        return torch.stack(results, 1) * F.silu(gate), seen[:, :, -3:].clone(), state


def selective():
    states = [StateSpec("last", ("B", 16, 3)), StateSpec("state", ("B", 16, 8))]
    return StepSpec(Selective(), [InputSpec("x", ("B", "L", 16))], states, ["y"])


class Rotary(nn.Module):
    """Attention over a memory that grows, with rotary positions from a product of whole numbers and frequencies."""

    def __init__(self, most=6, width=16):
        super().__init__()
        torch.manual_seed(3)
        self.most, self.embedding, self.out = most, nn.Embedding(30, width), nn.Linear(width, 30)
        self.query, self.key, self.content = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("frequencies", 100 ** (-torch.arange(0, width, 2).float() / width))

    def turned(self, x, positions):
        angle = torch.einsum("i,j->ij", positions, self.frequencies)
        angle = torch.cat([angle, angle], -1)
        first, second = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    def forward(self, tokens, memory):
        x = self.embedding(tokens)
        rows = torch.cat([memory, x], 1)
        seen, new = rows.shape[1], x.shape[1]
        positions = torch.arange(seen)
        query = self.turned(self.query(x), positions[seen - new :])
        key = self.turned(self.key(rows), positions)
        scores = query @ key.transpose(1, 2) / x.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.ones(new, seen, dtype=torch.bool).tril(seen - new), -1e4)
        return self.out(x + scores.softmax(-1) @ self.content(rows)), rows[:, -self.most :].clone()


def rotary():
    inputs = [InputSpec("tokens", ("B", "L"), tokens=30)]
    states = [StateSpec("memory", ("B", 6, 16), grows=1)]
    return StepSpec(Rotary(), inputs, states, [OutputSpec("scores", role="logits")])


def plan_of(spec, batch=2, lengths=(3, 1)):
    return make_plan(spec, batch, lengths, Silent())


def manifest_of(plan: Plan, written, precision="fp32") -> Manifest:
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        model_id=written.model_id,
        batch_size=plan.batch_size,
        precision=precision,
        inputs=written.inputs,
        outputs=written.outputs,
        states=written.states,
        programs=tuple(written.programs),
        streams=plan.streams,
        lengths="exact",
        commits="rows",
        family={"name": "own_module"},
        weights="weights.safetensors",
        files={},
        parameters=written.parameters,
    )


def chain(folder: Path, plan: Plan, written, segments=8):
    """The largest relative difference from the module, over segments of all lengths in turns from the start."""
    sessions = {program.name: onnxruntime.InferenceSession(folder / program.file) for program in written.programs}
    eager, draws, worst = Eager(plan.spec), np.random.default_rng(5), 0.0
    theirs = fresh_states(plan.spec, plan.batch_size)
    ours = dict(theirs)
    for number in range(segments):
        length = plan.segment_lengths[number % len(plan.segment_lengths)]
        inputs = random_inputs(plan.spec, plan.batch_size, length, draws)
        outputs, theirs = eager(inputs, theirs)
        feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
        feeds["valid"] = np.full(plan.batch_size, length, np.int32)
        feeds |= {f"state.{name}.in": np.asarray(value) for name, value in ours.items() if value is not None}
        program = next(one for one in written.programs if takes(one, feeds, length))
        names = [spec.name for spec in program.inputs]
        results = sessions[program.name].run(None, {name: feeds[name] for name in names})
        found = dict(zip([spec.name for spec in program.outputs], results, strict=True))
        for entry in plan.outputs:
            if entry.role == "logits":
                outputs[entry.name] = outputs[entry.name].log_softmax(-1)
        wanted = {**outputs, **{f"state.{name}.out": value for name, value in theirs.items()}}
        for name, value in wanted.items():
            assert found[name].shape == tuple(value.shape), name
            worst = max(worst, float(np.abs(found[name] - value.numpy()).max() / max(1, value.abs().max())))
        ours = {name: found[f"state.{name}.out"] for name in ours}
    return worst


def takes(program, feeds, length):
    """The rule by which the runtime chooses."""
    specs = {spec.name: spec.shape for spec in program.inputs}
    for name, value in feeds.items():
        if name.startswith("state.") and name not in specs:
            if value.size:
                return False
        elif name in specs:
            fits = len(value.shape) == len(specs[name])
            if not fits or any(size not in ("rows", had) for size, had in zip(specs[name], value.shape, strict=True)):
                return False
    return program.segment_length == length


@pytest.mark.parametrize("step", [policy, tied, selective], ids=lambda step: step.__name__)
def test_programs_compute_what_the_module_computes_and_the_tables_hold(step, tmp_path):
    plan = plan_of(step())
    written = write_step(tmp_path, plan, "fp32", "auto", Silent())
    assert [program.name for program in written.programs] == ["step-3", "step-1"]
    assert set(written.routes.values()) <= {"export", "decomposed"}
    assert chain(tmp_path, plan, written) < 1e-5
    files = [program.file for program in written.programs]
    assert not [*contradictions(manifest_of(plan, written), files, files)]
    assert written.parameters == sum(p.numel() for p in plan.spec.module.parameters())
    every_value_has_a_shape(tmp_path, written)


def every_value_has_a_shape(folder, written):
    for program in written.programs:
        graph = onnx.load(folder / program.file, load_external_data=False).graph
        shapes = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
        for node in graph.node:
            for name in node.output:
                assert not name or shapes[name].HasField("shape"), (program.name, node.op_type, name)
                if name and "rows" not in str(program.inputs):
                    sizes = {dim.dim_param or type(dim.dim_value) for dim in shapes[name].shape.dim}
                    assert all(dim.WhichOneof("value") for dim in shapes[name].shape.dim), (program.name, name)
                    assert sizes <= {int, BATCH}, (program.name, name)


def test_weights_are_shared_between_lengths_and_stored_once_under_their_names(tmp_path):
    plan = plan_of(tied())
    written = write_step(tmp_path, plan, "fp32", "auto", Silent())
    stored = load_file(tmp_path / "weights.safetensors")
    own = dict(plan.spec.module.named_parameters())
    assert torch.equal(stored["embedding.weight"], own["embedding.weight"]), "read as it is and turned: stored once"
    values = [tensor.flatten() for tensor in stored.values()]
    assert not any(
        torch.equal(one.sort().values, other.sort().values)
        for i, one in enumerate(values)
        for other in values[:i]
        if one.shape == other.shape
    )
    assert sum(tensor.numel() for tensor in stored.values()) <= written.parameters
    kinds = [{node.op_type for node in model.graph} for model in written.models]
    assert ["GRU" in found for found in kinds] == [True, False], "of one position it is taken apart"
    for program in written.programs:
        graph = onnx.load(tmp_path / program.file, load_external_data=False).graph
        for tensor in graph.initializer:
            if not tensor.external_data:
                assert len(tensor.raw_data) < 1024
        assert {t.name for t in graph.initializer if t.external_data} <= stored.keys()
        assert (tmp_path / program.file).stat().st_size < 40_000


def test_the_same_step_gives_the_same_bytes(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write_step(tmp_path / name, plan_of(tied(), lengths=(3,)), "fp32", "auto", Silent())
    one, other = (sorted((tmp_path / name).iterdir()) for name in ("one", "other"))
    assert [file.name for file in one] == [file.name for file in other]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, other, strict=True))
    assert not any(str(Path.cwd()).encode() in file.read_bytes() for file in one), "paths of this machine"


@pytest.mark.slow
@pytest.mark.parametrize("step", [tied, selective], ids=lambda step: step.__name__)
def test_the_model_id_is_that_of_the_function(step, tmp_path):
    written = [
        write_step(tmp_path, plan_of(step(), batch, lengths), precision, "auto", Silent()).model_id
        for batch, lengths, precision in ((1, (1,), "fp32"), (3, (4, 2), "fp32"), (2, (3,), "fp16"))
    ]
    assert len(set(written)) == 1
    spec = step()
    with torch.no_grad():
        next(spec.module.parameters()).mul_(1.01)
    other = write_step(tmp_path, plan_of(spec, 1, (1,)), "fp32", "auto", Silent()).model_id
    spec = replace(step(), outputs=["renamed"])
    renamed = write_step(tmp_path, plan_of(spec, 1, (1,)), "fp32", "auto", Silent()).model_id
    assert len({written[0], other, renamed}) == 3


@pytest.mark.slow
def test_rows_are_left_open_where_one_graph_serves_every_number_of_them(tmp_path):
    plan = plan_of(rotary(), lengths=(4,))
    written = write_step(tmp_path, plan, "fp32", "auto", Silent())
    assert written.growth == "symbolic"
    (program,) = written.programs
    assert program.name == "step-4"
    assert program.inputs[1].shape == program.outputs[1].shape == (2, "rows", 16)
    assert chain(tmp_path, plan, written) < 1e-5
    (state,) = written.states
    assert (state.rows, state.row_axis, state.initial) == ((0, 6), 1, None)
    files = [program.file]
    assert not [*contradictions(manifest_of(plan, written), files, files)]
    every_value_has_a_shape(tmp_path, written)


def test_one_graph_serves_more_numbers_of_rows_than_there_may_be_graphs_whatever_b_is(tmp_path):
    """It is captured with most rows, also where another axis is shorter: with fewer, the cut would not be in it."""
    plan = plan_of(small_steps.window(70), 1, lengths=(1,))
    assert plan.too_many
    written = write_step(tmp_path, plan, "fp32", "symbolic", Silent())
    assert (written.growth, len(written.programs)) == ("symbolic", 1)
    assert chain(tmp_path, plan, written, 75) < 1e-5


class Cutting(nn.Module):
    """Cuts its rows where they are too many; `leaves` says whether those that are cut off count."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.read, self.leaves = nn.Linear(4, 4), leaves

    def forward(self, x, rows):
        rows = torch.cat([rows, self.read(x)], 1)
        left = rows.sum(1, keepdim=True)
        if rows.shape[1] > 6:
            left = left * 2 if self.leaves else left
            rows = rows[:, -6:]
        return x + left, rows.clone()


def cutting(leaves: bool) -> StepSpec:
    states = [StateSpec("rows", ("B", 6, 4), grows=1)]
    return StepSpec(Cutting(leaves), [InputSpec("x", ("B", "L", 4))], states, ["y"])


def test_a_graph_that_torch_holds_for_narrower_than_it_is_serves_every_number_of_rows(tmp_path):
    """torch.export notes that its branch is for more than six rows; the graph is right for fewer, too."""
    plan = plan_of(cutting(leaves=False), lengths=(3,))
    assert write_step(tmp_path, plan, "fp32", "auto", Silent()).growth == "symbolic"


def test_where_a_branch_is_for_some_sizes_alone_the_second_route_is_not_tried(tmp_path, monkeypatch):
    tried, convert = [], capture._to_onnx
    monkeypatch.setattr(capture, "_to_onnx", lambda *given: (tried.append(given[-1]), convert(*given))[1])
    written = write_step(tmp_path, plan_of(cutting(leaves=True), lengths=(3,)), "fp32", "auto", Silent())
    assert written.growth == "stages"
    assert "a value was taken for a constant" in written.note
    assert set(tried) == {"export"}


@pytest.mark.slow
def test_or_a_graph_is_written_for_each_number_of_them(tmp_path):
    plan = plan_of(rotary(), lengths=(6,))
    written = write_step(tmp_path, plan, "fp32", "stages", Silent())
    assert [program.name for program in written.programs] == ["step-6.0", "step-6.1"]
    assert written.growth == "stages"
    assert set(written.routes.values()) == {"decomposed"}, "the product of int64 and float32 is repaired there"
    shapes = [[spec.shape for spec in program.inputs[1:]] for program in written.programs]
    assert shapes == [[], [(2, 6, 16)]]
    assert chain(tmp_path, plan, written) < 1e-5
    stored = load_file(tmp_path / "weights.safetensors")
    assert {"embedding.weight", "out.weight", "query.weight", "key.weight", "content.weight"} <= stored.keys()
    assert len([name for name in stored if not name.startswith("constants.")]) == 5
    files = [program.file for program in written.programs]
    assert not [*contradictions(manifest_of(plan, written), files, files)]
    for program in written.programs:
        for node in onnx.load(tmp_path / program.file, load_external_data=False).graph.node:
            assert node.op_type not in ("If", "Loop", "Scan")


def test_a_state_that_is_absent_at_first_has_a_program_without_it(tmp_path):
    class Maybe(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, h):
            h = self.linear(x if h is None else x + h).tanh()
            return h * 2, h

    states = [StateSpec("h", ("B", 4), initial=None)]
    plan = plan_of(StepSpec(Maybe(), [InputSpec("x", ("B", 4))], states, ["y"]), lengths=())
    written = write_step(tmp_path, plan, "fp32", "auto", Silent())
    assert [program.name for program in written.programs] == ["step-1.0", "step-1.1"]
    assert [len(program.inputs) for program in written.programs] == [1, 2]
    assert written.states[0].absent
    with pytest.raises(UsageError, match="state h is absent at first"):
        write_step(tmp_path, replace(plan, spec=growing_too(plan.spec)), "fp32", "symbolic", Silent())


def growing_too(spec):
    return replace(spec, states=[*spec.states, StateSpec("rows", ("B", 3, 4), grows=1)])


def test_initial_tensors_are_in_the_weight_file(tmp_path):
    written = write_step(tmp_path, plan_of(policy(), lengths=(1,)), "fp32", "auto", Silent())
    stored = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(stored["initial.c"], torch.linspace(-1, 1, 24))
    assert [state.initial for state in written.states] == [None, "initial.c"]
    assert [state.batch_axis for state in written.states] == [1, 1]


class Counting(nn.Module):
    def forward(self, x, n, m):
        return x + (n + m)[:, None], n + 1, m + 2


def test_all_counters_of_int64_are_one_note(tmp_path):
    states, heard = [StateSpec(name, ("B",), dtype="int64") for name in ("n", "m")], Heard()
    plan = plan_of(StepSpec(Counting(), [InputSpec("x", ("B", 4))], states, ["y"]), lengths=(1,))
    write_step(tmp_path, plan, "fp32", "auto", heard)
    assert heard.warnings == ["state n, m: int32 in the bundle, beyond 2147483647 it begins again at -2147483648"]


def test_an_idle_sequence_keeps_its_state_bit_for_bit(tmp_path):
    plan = plan_of(selective(), lengths=(3,))
    written = write_step(tmp_path, plan, "fp32", "auto", Silent())
    session = onnxruntime.InferenceSession(tmp_path / written.programs[0].file)
    draws = np.random.default_rng(0)
    feeds = {
        spec.name: draws.normal(size=spec.shape).astype(np.float32)
        for spec in written.programs[0].inputs
        if spec.name != "valid"
    }
    results = dict(
        zip(
            [spec.name for spec in written.programs[0].outputs],
            session.run(None, {**feeds, "valid": np.array([3, 0], np.int32)}),
            strict=True,
        )
    )
    for name in ("last", "state"):
        np.testing.assert_array_equal(results[f"state.{name}.out"][1], feeds[f"state.{name}.in"][1])
        assert np.abs(results[f"state.{name}.out"][0] - feeds[f"state.{name}.in"][0]).max() > 0.1
