"""A module is tried before a graph is made of it; what no step does is refused in one line."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from stand_ins import small_steps
from torch import Tensor, nn
from torch.nn import functional as F
from txl_export.families.own_module import attributes
from txl_export.families.own_module.module_call import Eager, Tries
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.probing import UndeclaredError
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_runtime.errors import UsageError
from verified_steps import Heard


def plan_of(spec, batch=2, lengths=()):
    return make_plan(spec, batch, lengths, Heard())


def spec_of(forward, **attributes):
    """A step of x and h [B, 4] with one output, by what it computes."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in attributes.items():
                if type(value) is Tensor:
                    self.register_buffer(name, value)
                else:
                    setattr(self, name, value)

    Own.forward = forward
    return StepSpec(Own(), [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"])


def refusal(spec, batch=2, lengths=()):
    with pytest.raises(UsageError) as caught:
        plan_of(spec, batch, lengths)
    said, *more = str(caught.value).splitlines()
    assert more == [f"    {line}" for line in getattr(caught.value, "details", {}).get("declare", [])]
    return said


def test_a_policy_is_independent_at_the_usual_lengths():
    plan = plan_of(small_steps.policy(), 3)
    assert (plan.segment_lengths, plan.streams, plan.reason, plan.warnings) == ((64, 1), "independent", "", ())
    assert plan.outputs == (
        OutputSpec("action", ("B", "L", 3), "feature"),
        OutputSpec("value", ("B", "L", 1), "feature"),
    )
    assert [transition.length for transition in plan.transitions] == [64, 1]


def test_the_specification_says_which_lengths_are_usual_for_its_module():
    spec = replace(small_steps.policy(), segment_lengths=[3, 7])
    assert plan_of(spec).segment_lengths == (7, 3)
    assert plan_of(spec, lengths=(2,)).segment_lengths == (2,), "what is asked for comes first"


def test_a_cell_that_keeps_its_state_itself_takes_one_position():
    spec = small_steps.cell()
    training = spec.module.training
    plan = plan_of(spec, 3)
    assert (plan.segment_lengths, plan.streams) == ((1,), "independent")
    assert plan.outputs == (OutputSpec("scores", ("B", 7), "logits"),)
    assert spec.module.training is training


def test_growth_and_absence_run_in_lockstep():
    plan = plan_of(small_steps.window(), 2, (4,))
    assert (plan.streams, plan.reason, len(plan.transitions)) == ("lockstep", "state rows grows", 3)
    plan = plan_of(small_steps.absent(), 1)
    assert (plan.streams, plan.reason, len(plan.transitions)) == ("lockstep", "state h is absent at first", 2)
    assert plan.warnings == ("the sequences run all or none, and are reset together: state h is absent at first",)


def test_a_length_among_the_usual_ones_that_the_module_cannot_take_is_left_out_with_the_reason():
    def pairs(self, x, h):
        return x.reshape(x.shape[0], x.shape[1] // 2, 2, 4).sum(2).repeat_interleave(2, 1) + h[:, None], h + x.sum(1)

    spec = replace(spec_of(pairs), inputs=[InputSpec("x", ("B", "L", 4))])
    plan = plan_of(spec)
    assert plan.segment_lengths == (64,)
    assert plan.warnings[0].startswith("no program takes segments of 1: the module failed with a segment of 1: ")
    assert "the module failed with a segment of 7" in refusal(spec, lengths=(64, 7))


def test_a_module_that_takes_none_of_the_usual_lengths_asks_for_its_own():
    def forward(self, x, h):
        return x.reshape(2, 5, 4) + h[:, None], h + x.sum(1)

    spec = replace(spec_of(forward), inputs=[InputSpec("x", ("B", "L", 4))])
    assert "it takes segments of 5: give --segment-length 5, or look whether an axis is where" in refusal(spec)
    assert plan_of(spec, lengths=(5,)).segment_lengths == (5,)


def test_nothing_is_said_of_lengths_where_another_does_not_help():
    def forward(self, x, h):
        return self.table[x].sum(1) + h, h + 1

    spec = replace(spec_of(forward, table=torch.zeros(9, 4)), inputs=[InputSpec("x", ("B", "L"))])
    told = refusal(spec)
    assert "declare token ids as such: InputSpec(..., tokens=V)" in told
    assert "--segment-length" not in told


def test_look_ahead_and_lengths_are_tried():
    assert plan_of(small_steps.ahead(), 2).streams == "independent"
    assert plan_of(small_steps.counted(), 2).outputs[0].shape == ("B", "L", 2)


def test_samples_take_the_place_of_random_inputs():
    seen = []

    def forward(self, x, h):
        seen.append(float(x.abs().min()))
        return x + h, h + x

    spec = spec_of(forward)
    plan_of(replace(spec, samples={"x": np.full((5, 4), 8.0, np.float32)}), batch=1)
    assert set(seen) == {8.0, 8e4}, "once they are large"


def test_dropout_left_on_is_refused_with_its_line():
    def forward(self, x, h):
        return F.dropout(x, 0.5) + h, h + x

    assert plan_of(spec_of(lambda self, x, h: (self.off(x) + h, h + x), off=nn.Dropout(0.5))), "a layer is off"
    told = refusal(spec_of(forward))
    assert "two calls of the module with the same inputs and states differ in output y: random numbers" in told
    assert "test_probing.py:" in told
    assert "F.dropout(x, 0.5)" in told


def test_what_changes_outside_the_module_is_noticed():
    calls = []

    def forward(self, x, h):
        calls.append(1)
        return x + len(calls) + h, h + x

    assert "something outside it has changed" in refusal(spec_of(forward))


MUTATED = {
    "state h": lambda self, x, h: (h.mul_(0.5).add_(x) * 2, h),
    "input x": lambda self, x, h: (x.add_(h) * 2, h + 1),
}


@pytest.mark.parametrize("what", MUTATED)
def test_what_a_module_changes_in_place_is_refused(what):
    assert f"{what} is changed in place by the module; clone it first" in refusal(spec_of(MUTATED[what]))


@pytest.mark.parametrize("view", [lambda h, new: new, lambda h, new: new[:, :2], lambda h, new: h.T.T])
def test_outputs_that_share_memory_with_a_state_are_refused(view):
    def forward(self, x, h):
        new = h + x
        return view(h, new), new

    assert "output y shares its memory with state h" in refusal(spec_of(forward))


def test_undeclared_state_is_named_wherever_it_is_kept():
    def copied(self, x, h):
        self.kept.add_(x)
        return self.kept + h, h + x

    def listed(self, x, h):
        rows, self.past[-1]["rows"] = self.past[-1]["rows"], x * 2
        return x + h if rows is None else rows + h, h + x

    def turn(self, x, h):
        self.calls = (self.calls + 1) % 4  # it is what it was after eight segments
        return x + h + self.calls, h + x

    def queued(self, x, h):
        self.queue.append(x * 2)
        return x + self.queue[0] + h, h + x

    def array(self, x, h):
        self.counts[0] += 1
        return x + h + float(self.counts[0]), h + x

    for forward, held, path in (
        (queued, {"queue": deque(maxlen=2)}, "queue.0"),
        (array, {"counts": np.zeros(3)}, "counts.values"),
        (copied, {"kept": torch.zeros(2, 4)}, "kept"),
        (listed, {"past": [{"rows": None}]}, "past.0.rows"),
        (turn, {"calls": 0}, "calls"),
    ):
        told = refusal(spec_of(forward, **held))
        assert f"a call changes {path}" in told
        assert "of the module, which no state declares, and a later call reads it" in told


class Forgetful(nn.Module):
    """Keeps 14 things, two of which nobody reads."""

    def __init__(self):
        super().__init__()
        self.cell, self.h, self.first, self.pair = nn.GRUCell(4, 8), None, None, None
        self.register_buffer("smooth", torch.zeros(1, 4))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.layers[1].memory, self.layers[1].v = torch.ones(1, 4), 0.0
        self.cache, self.count = torch.zeros(1, 0, 4), torch.zeros(1, dtype=torch.int32)
        self.offset, self.gain, self.odd, self.unread, self.drawn = 0, 1.5, False, 0, None

    def forward(self, x):
        if self.h is None:
            self.h = torch.zeros(x.shape[0], 8)
        if self.first is None:
            self.first = x.abs().amax(1)
        self.h = self.cell(x, self.h)
        self.smooth = self.smooth * 0.5 + x
        self.layers[1].memory = torch.tanh(self.layers(x) + self.layers[1].memory)
        self.layers[1].v = self.layers[1].v * 0.5 + x
        self.cache = torch.cat([self.cache.expand(len(x), -1, -1), x[:, None]], 1)[:, -6:]
        self.count = self.count.expand(len(x)) + 1
        self.new = getattr(self, "new", 0) + x
        y = self.h[:, :4] + self.smooth + self.layers[1].memory + self.layers[1].v + self.cache.sum(1) + self.new
        y = y + self.first[:, None] + self.count[:, None] + self.offset * 0.1 + self.gain + 1.0 * self.odd
        self.offset, self.gain, self.odd = self.offset + 1, self.gain * 0.9, self.odd ^ True
        self.pair = [x + k if one is None else one * k - x for k, one in enumerate(self.pair or [None, None], 2)]
        y = y + self.pair[0] * self.pair[1]
        self.unread, self.drawn = self.unread + 1, x * 2
        return y


def test_all_undeclared_state_is_told_at_once_with_a_list_that_declares_it():
    module, spec = Forgetful(), StepSpec(Forgetful(), [InputSpec("x", ("B", 4))], [], ["y"])
    module.load_state_dict(spec.module.state_dict())
    with pytest.raises(UndeclaredError, match="a call changes cache, count, first and 10 more of the module") as caught:
        plan_of(spec, 3)
    names = {"model": spec.module, "torch": torch, "StateSpec": StateSpec}
    exec("\n".join(caught.value.details["declare"]), names)
    by_name = {state.name: state for state in names["states"]}
    assert sorted(by_name) == [
        *("cache", "count", "first", "gain", "h", "layers_1_memory", "layers_1_v", "new", "odd", "offset", "pair_0"),
        *("pair_1", "smooth"),
    ]
    assert by_name["cache"] == StateSpec("cache", ("B", 6, 4), grows=1, attribute="cache")
    assert by_name["first"] == StateSpec("first", ("B",), initial=None, attribute="first")
    assert by_name["count"] == StateSpec("count", ("B",), dtype="int32", attribute="count")
    assert by_name["h"] == StateSpec("h", ("B", 8), attribute="h")
    assert by_name["odd"] == StateSpec("odd", (), dtype="bool", attribute="odd")
    spec = replace(spec, states=names["states"])
    assert plan_of(spec, 3).warnings[0].startswith("a call leaves drawn and 1 more in the module, which no later call")
    eager, tries = Eager(spec), Tries(Eager(spec), 3)
    carried = tries.fresh()
    for _ in range(9):
        x = tries.inputs(1)["x"]
        outputs, carried = eager({"x": x}, carried, tries.valid(1))
        with torch.no_grad():
            torch.testing.assert_close(outputs["y"], module(x))


def test_what_depends_on_earlier_calls_is_state_where_no_output_shows_it_yet():
    def silent(self, x, h):
        self.potential = 0.5 * self.potential + x
        return (self.potential > 1e9).float() + h, h + x

    def longer(self, x, h):
        self.past = [*self.past, x]
        return sum(self.past[-3:]) + h, h + x

    def late(self, x, h):
        self.seen = self.seen + 1
        return x * (self.seen > 500) + h, h + x

    def unread(self, x, h):
        self.seen = self.seen + 1
        return x + h, h + x

    for seen in (0, torch.tensor(0)):
        assert refusal(spec_of(late, seen=seen)).startswith(
            "a call changes seen of the module, which no state declares"
        )
    told = "a call leaves seen in the module, which no later call reads; the bundle has none of it"
    assert plan_of(spec_of(unread, seen=0)).warnings == (told,)
    told = refusal(spec_of(silent, potential=0.0))
    assert told.startswith("a call changes potential of the module, which no state declares")
    with pytest.raises(UndeclaredError) as caught:
        plan_of(spec_of(longer, past=[]))
    assert caught.value.details == {
        "declare": ["# model.past gets longer: keep its rows in one tensor, and declare it with grows="]
    }


def every_tenth(self, x, h):
    self.frame = self.frame + 1
    return torch.where(torch.as_tensor(self.frame % 10 == 0), x * 0, x * 2) + h, h + x


def held(self, x, h):
    x = torch.where((x == 0).all(-1, keepdim=True), self.last, x)  # a sample that was lost
    self.last = x
    return x * 2 + h, h + x


def begins(self, x, h):
    self.mean = torch.where(self.begun, 0.9 * self.mean + 0.1 * x, x)
    self.begun.fill_(True)
    return x - self.mean + h, h + x


@pytest.mark.parametrize(
    ("forward", "attributes", "named"),
    [
        (every_tenth, {"frame": torch.tensor(0)}, "frame"),
        (every_tenth, {"frame": 0}, "frame"),
        (every_tenth, {"frame": np.int64(0)}, "frame"),
        (held, {"last": torch.zeros(1, 4)}, "last"),
        (begins, {"begun": torch.tensor(False), "mean": torch.zeros(1, 4)}, "begun, mean"),
    ],
)
def test_state_that_the_usual_inputs_do_not_need_is_state(forward, attributes, named):
    assert refusal(spec_of(forward, **attributes)).startswith(f"a call changes {named} of the module")


def test_what_can_be_no_state_as_it_is_is_told_with_what_to_do():
    def forward(self, x, h):
        self.pair = (self.pair[0] * 0.5 + x, self.pair[1])
        self.low = self.low * 0.5 + x.half()
        self.cache["k"] = self.cache.get("k", 0) * 0.5 + x
        return self.pair[0] + self.low + self.cache["k"] + h, h + x

    half = torch.zeros(1, 4, dtype=torch.float16)
    with pytest.raises(UndeclaredError) as caught:
        plan_of(spec_of(forward, pair=(torch.zeros(1, 4), 0), low=half, cache={}))
    assert caught.value.details["declare"] == [
        'model.cache["k"] = torch.zeros((1, 4))',
        "states=[  # beside those that are declared",
        '    StateSpec("cache_k", ("B", 4), attribute="cache.k"),',
        "]",
        "# model.low is torch.float16, and a state is float32, int32, int64, bool: keep it as one of these",
        "# model.pair[0] is in a tuple, which cannot be set in part: keep it in an attribute, or see step=",
    ]


def test_a_sparse_tensor_has_no_memory_to_be_watched():
    def forward(self, x, h):
        self.seen = x * 2
        return torch.sparse.mm(self.sparse, x.T).T + h, h + x

    told = "a call leaves seen in the module, which no later call reads; the bundle has none of it"
    module = spec_of(forward, seen=None).module
    module.sparse = torch.eye(4).to_sparse()
    spec = replace(spec_of(forward), module=module)
    assert told in plan_of(spec).warnings


def test_a_module_whose_weights_are_too_many_to_be_copied_is_looked_at_without_them(monkeypatch):
    def forward(self, x, h):
        self.kept = x * 2
        return self.layer(x) + h, h + x

    monkeypatch.setattr(attributes, "_MOST", 79)
    spec = spec_of(forward, kept=None, layer=nn.Linear(4, 4))
    assert plan_of(spec).warnings[0].startswith("the module has more than 2 GB of parameters: it was not tried whether")
    monkeypatch.setattr(attributes, "_MOST", 80)
    assert plan_of(spec).warnings[0].startswith("a call leaves kept in the module")


def test_state_whose_value_happens_not_to_change_is_state():
    """A largest value, an episode's mark, a queue of old rows: none of them changes while the module is tried."""

    class Plain:
        pass

    def assigned(self, x, h):
        self.kept = torch.maximum(self.kept, x.abs().max())
        return x / self.kept + h, h + x

    def copied(self, x, h):
        self.kept.copy_(torch.maximum(self.kept, x.abs().max()))
        return x / self.kept + h, h + x

    def marked(self, x, h):
        self.plain.kept = torch.where((x > 1e3).any(), x[0] * 0 + 5, self.plain.kept)
        return x + self.plain.kept + h, h + x

    def masked(self, x, h):
        self.plain.kept[:2].masked_fill_(h[0, :2] > 1e3, 1.0)
        return x + self.plain.kept + h, h + x

    plain = Plain()
    plain.kept = torch.zeros(4)
    for forward, held, path in (
        (assigned, {"kept": torch.tensor(10.0)}, "kept"),
        (copied, {"kept": torch.tensor(10.0)}, "kept"),
        (marked, {"plain": plain}, "plain.kept"),
        (masked, {"plain": plain}, "plain.kept"),
    ):
        assert f"a call changes {path} of the module" in refusal(spec_of(forward, **held))


def test_a_table_made_again_from_sizes_alone_is_no_state():
    def forward(self, x, h):
        self.table = torch.arange(x.shape[1]).to(x) + torch.zeros_like(x[0])
        self.mask = x.new_ones(4)
        return x + h + self.table + self.mask, h + x

    assert plan_of(spec_of(forward, table=None, mask=None)).streams == "independent"


_PEAK = torch.tensor(10.0)


class Holder:
    largest = torch.tensor(10.0)


def test_state_outside_the_module_is_refused():
    around = [torch.tensor(10.0)]

    def of_the_file(self, x, h):
        global _PEAK
        _PEAK = torch.maximum(_PEAK, x.abs().max())
        return x / _PEAK + h, h + x

    def of_a_class(self, x, h):
        Holder.largest = torch.maximum(Holder.largest, x.abs().max())
        return x / Holder.largest + h, h + x

    def of_a_function(self, x, h):
        around[0] = torch.maximum(around[0], x.abs().max())
        return x / around[0] + h, h + x

    for forward in (of_the_file, of_a_class, of_a_function):
        told = refusal(spec_of(forward))
        assert "same inputs and states differ in output y: something outside it has changed" in told


def test_tensors_outside_the_module_that_calls_leave_alone_are_constants():
    def forward(self, x, h):
        return x * _TABLE["gain"] + h, h + x

    assert plan_of(spec_of(forward)).streams == "independent"


_TABLE = {"gain": torch.tensor(2.0)}


def test_what_an_object_has_in_slots_is_looked_at():
    class Slots:
        __slots__ = ("__kept", "first")

        def __init__(self):
            self.__kept = None
            self.first = None

        def keep(self, x):
            if self.__kept is None:
                self.__kept = x.clone()
            return self.__kept

    def forward(self, x, h):
        return x + h + self.slots.keep(x), h + x

    assert "a call changes slots._Slots__kept of the module" in refusal(spec_of(forward, slots=Slots()))


def test_a_cache_that_depends_on_sizes_alone_is_no_state():
    def forward(self, x, h):
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1]).float()
        return x + h + self.tables[x.shape[1]][None, :, None], h + x.mean(1, keepdim=True)

    spec = replace(spec_of(forward, tables={}), inputs=[InputSpec("x", ("B", "L", 4))])
    spec = replace(spec, states=[StateSpec("h", ("B", 1, 4))])
    assert plan_of(spec).streams == "independent"
    assert spec.module.tables == {}


def test_a_state_that_changes_nothing_is_told():
    spec = replace(small_steps.ahead(), step=lambda module, given, states: _without_bank(module, given, states))
    plan = plan_of(spec)
    assert plan.warnings == ("state bank changes no output of the segments that were tried; look whether it is needed",)


def test_a_state_that_only_late_segments_read_is_not_told():
    def forward(self, x, older, count):
        return x + torch.where(count > 9, older, 0), older + x, count + 1

    states = [StateSpec("older", ("B", 4)), StateSpec("count", ("B", 1))]
    assert plan_of(replace(spec_of(forward), states=states)).warnings == ()


def _without_bank(module, given, states):
    new, bank, seen = module(given["frames"], torch.zeros_like(states["bank"]), states["seen"])
    return {"features": new + seen[:, None, None]}, {"bank": bank, "seen": seen}


def test_a_state_that_comes_back_as_it_went_in_is_told():
    def forgotten(self, x, h):
        return self.cell(x, h), h

    spec = spec_of(forgotten, cell=nn.GRUCell(4, 4))
    told = ("state h comes back as it went in: did the module forget to return the new one?",)
    assert plan_of(spec).warnings == told

    def late(self, x, h, seen):
        new = torch.where((seen >= 3)[:, None], self.cell(x, h), h)
        return new * 2, new, seen + 1

    states = [StateSpec("h", ("B", 4)), StateSpec("seen", ("B",), dtype="int32")]
    assert plan_of(replace(spec_of(late, cell=nn.GRUCell(4, 4)), states=states)).warnings == ()


def test_nan_is_refused_with_what_could_be_given_instead():
    def forward(self, x, h):
        return torch.log(x) + h, h + x

    spec = spec_of(forward)
    assert "output y of the module holds NaN for random inputs, expected numbers; give real ones with" in refusal(spec)
    assert plan_of(replace(spec, samples={"x": np.ones((2, 4), np.float32)}))

    def state(self, x, h):
        return x.clone(), torch.sqrt(x)

    assert "state h of the module holds NaN" in refusal(spec_of(state))


def test_training_mode_is_told_where_it_may_matter():
    def forward(self, x, h):
        return self.part(x) + h, h + x

    def asks(self, x, h):
        return F.dropout(x, training=self.training) + h, h + x

    told = "the module was in training mode; it is exported in evaluation mode, without dropout and the like"
    for spec in (spec_of(forward, part=nn.Dropout(0.5)), spec_of(forward, part=nn.BatchNorm1d(4)), spec_of(asks)):
        assert plan_of(spec).warnings == (told,)
        spec.module.eval()
        assert plan_of(spec).warnings == ()
    for part in (nn.Dropout(0.0), nn.Linear(4, 4), nn.MultiheadAttention(4, 1)):
        spec = spec_of(lambda self, x, h: (x + h, h + x), part=part)
        assert plan_of(spec).warnings == ()


@pytest.mark.parametrize(("role", "near"), [("logit", "logits"), ("Logits", "logits"), ("log_probs", "logprobs")])
def test_a_role_that_is_nearly_a_known_one_is_told(role, near):
    spec = replace(spec_of(lambda self, x, h: (x + h, h + x)), outputs=[OutputSpec("y", role=role)])
    assert plan_of(spec).warnings == (
        f"output y has the role {role}, which is a word like any other; for the next token's it is {near}",
    )
    assert plan_of(replace(spec, outputs=[OutputSpec("y", role="value")])).warnings == ()


def test_an_output_and_an_input_may_be_called_as_a_state_is():
    def forward(self, x, h):
        return h * 2, h + x

    spec = replace(spec_of(forward), outputs=["h"])
    assert plan_of(spec).outputs == (OutputSpec("h", ("B", 4), "feature"),)
    spec = replace(spec_of(forward), inputs=[InputSpec("h", ("B", 4))])
    assert plan_of(spec).streams == "independent"


NEIGHBOURS = {
    "other values in its neighbours": lambda self, x, h: (x + h.mean(0), h + x),
    "NaN in its neighbours": lambda self, x, h: (x + h + 0 * h[-1:].sum(), h + x),
    "its place in the batch": lambda self, x, h: (x + h + torch.arange(x.shape[0])[:, None], h + x),
    "large values in its neighbours": lambda self, x, h: (x + h * (1 - (x > 20).any().float()), h + x),
}


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_sequences_that_look_at_one_another_run_in_lockstep(what):
    plan = plan_of(spec_of(NEIGHBOURS[what]), 3)
    assert (plan.streams, plan.reason) == ("lockstep", f"output y of a sequence changes with {what}")
    assert plan_of(spec_of(NEIGHBOURS[what]), 1).streams == "independent"


def test_nan_in_a_neighbour_that_no_table_has_a_row_for_stops_all():
    def forward(self, x, h):
        return x + torch.zeros(9)[h.sigmoid().floor().long()], h + x

    plan = plan_of(spec_of(forward), 3)
    assert plan.streams == "lockstep"
    assert re.match(r"a batch cannot be run where one sequence holds NaN: .*IndexError: index -\d+ is out", plan.reason)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (torch.all, "output y of a sequence that was just reset changes with later states in its neighbours"),
        (torch.any, "output y of a sequence changes with the first state in its neighbours"),
    ],
)
def test_sequences_that_depend_on_one_another_after_a_reset_alone_run_in_lockstep(asked, reason):
    """As xLSTM's do, which asks whether all of them are at their first step."""

    def forward(self, x, h):
        h = torch.where(asked(h == 0), torch.sigmoid(x), 0.9 * h + 0.5 * torch.sigmoid(x))
        return h * 2, h

    plan = plan_of(spec_of(forward), 3)
    assert (plan.streams, plan.joint, plan.reason) == ("lockstep", True, reason)
    assert plan_of(spec_of(forward), 1).streams == "independent"


def test_a_shared_state_runs_in_lockstep():
    def forward(self, x, h):
        return x + h, h + x.detach()[:1].reshape(4) * 0 + 1

    spec = replace(spec_of(forward), states=[StateSpec("h", (4,))])
    assert plan_of(spec, 2).reason == "state h has no batch axis"


def test_outputs_say_where_the_batch_stands_if_it_is_not_first():
    def forward(self, x, h):
        return (x + h).T, h + x

    assert "output y is 4 × 2 for B = 2, expected the batch first" in refusal(spec_of(forward))
    assert plan_of(replace(spec_of(forward), outputs=[OutputSpec("y", (4, "B"))])).streams == "independent"


def test_logits_have_the_vocabulary_last():
    def forward(self, x, h):
        return (x + h)[:, 0].clone(), h + x

    spec = replace(spec_of(forward), outputs=[OutputSpec("y", role="logits")])
    assert "output y has the role logits and is float32 ('B',)" in refusal(spec)


def leaving(read):
    """Attention that keeps its map to be drawn; `read` is what it does with the last call's."""

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.map = nn.Linear(4, 4), None
            self.inner, self.past = nn.Module(), []
            self.inner.last, self.plain = None, torch.zeros(2, 4)
            self.register_buffer("copied", torch.zeros(2, 4))

        def forward(self, x, h):
            added = read(self.map)
            weights = (self.query(x) * h).softmax(-1)
            self.map, self.inner.last, self.gate = weights.detach(), x * 2, x.sigmoid()
            self.copied.copy_(x[:2])
            self.plain.copy_(x[:2])
            self.past.append(weights * 1)
            return weights * self.gate + added, h + weights

    return StepSpec(Drawn(), [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"])


def test_what_no_later_call_reads_is_left_out_and_told(tmp_path: Path) -> None:
    spec, heard = leaving(lambda last: 0.0), Heard()
    plan = make_plan(spec, 2, (), heard)
    assert plan.streams == "independent"
    assert heard.warnings == [
        "a call leaves copied and 5 more in the module, which no later call reads; the bundle has none of it"
    ]
    made = txl_export.export(spec, tmp_path / "drawn.txl", batch_size=2)
    assert (spec.module.map, spec.module.inner.last, spec.module.past) == (None, None, [])
    assert not hasattr(spec.module, "gate")
    assert not spec.module.copied.any()
    assert not spec.module.plain.any()
    stream = txl_runtime.load(made.path, "cpu").stream()
    x, h = torch.randn(2, 4), torch.zeros(2, 4)
    for _ in range(3):
        with torch.no_grad():
            y, h = spec.module(x, h)
        assert np.allclose(stream.run({"x": x.numpy()})["y"], y.numpy(), atol=1e-6)


READS = {
    "in the graph": lambda last: 0.0 if last is None else last,
    "its presence": lambda last: 0.0 if last is None else 1.0,
    "where a value says so": lambda last: 0.0 if last is None else torch.where(last > 0.3, last, 0.0),
    "its size alone": lambda last: 0.0 if last is None else 0.1 * last.shape[0],
    "outside of torch": lambda last: 0.0 if last is None else float(last.numpy().max() > 0.3),
    "by another view": lambda last: 0.0 if last is None else torch.where(last[0] > 0.3, last[0], 0.0),
}


@pytest.mark.parametrize("read", READS)
def test_what_a_later_call_reads_is_refused_and_what_lies_beside_it_is_not_named(read: str) -> None:
    with pytest.raises(UsageError, match="a call changes map of the module, which no state declares"):
        make_plan(leaving(READS[read]), 2, (), Heard())
