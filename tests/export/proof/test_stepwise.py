"""Segments that are as many steps: models whose answer is known, and Transformer-XL's rule beside its reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from support import random_state, small_config
from torch import Tensor, nn
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.reference import ModuleReference
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_export.families.transformer_xl.building import Builder
from txl_export.families.transformer_xl.parity.oracle import Oracle
from txl_export.families.transformer_xl.settings import Sizes
from txl_export.families.transformer_xl.tables import expected_programs
from txl_export.proof.stepwise import MOST, rows_of, stepwise
from txl_runtime.bundle.tables import Program
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.listener import Silent

WORDS, WIDTH, ROWS = 7, 4, 12
EACH = (5, 4, 3, 2, 1)


class Words(nn.Module):
    """Embeds tokens [B, L]; of its rows and a memory [B, ROWS, WIDTH] it makes scores and the next memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.embed(tokens)
        mixed, after = self.mixed(rows, memory)
        return self.out(mixed), after

    def mixed(self, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the last ROWS rows up to each position, which stays the same for one step and for many."""
        every = torch.cat((memory, rows), 1)
        seen = every.unfold(1, ROWS, 1)[:, 1:].sum(-1)
        return torch.tanh(seen), every[:, -ROWS:]


class WholeMemory(Words):
    """As a Transformer-XL: position i of a segment sees i rows more than a step, once the memory is full."""

    def mixed(self, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        every = torch.cat((memory, rows), 1)
        return torch.tanh(every.cumsum(1)[:, ROWS:]), every[:, -ROWS:]


class BothWays(Words):
    """Every position sees the whole segment."""

    def mixed(self, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        seen, after = super().mixed(rows, memory)
        return seen + rows.mean(1, keepdim=True), after


class Convolution(Words):
    """A position sees the one before it, but for the first of a segment."""

    def mixed(self, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        seen, after = super().mixed(rows, memory)
        return seen + nn.functional.pad(rows, (0, 0, 1, 0))[:, :-1], after


class UpToThree(Words):
    """Segments of more than three positions are computed in a different way."""

    def mixed(self, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        seen, after = super().mixed(rows, memory)
        return seen + float(rows.shape[1] > 3), after


class OtherState(Words):
    """Scores are those of steps; a row that no score reads yet holds the segment's length."""

    def mixed(self, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        seen, after = super().mixed(rows, torch.cat((torch.zeros_like(memory[:, :1]), memory[:, 1:]), 1))
        return seen, torch.cat((torch.full_like(after[:, :1], float(rows.shape[1])), after[:, 1:]), 1)


class Recurrent(nn.Module):
    """A language model of one LSTM that takes `valid`; the last valid position's state is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell, self.out = nn.Embedding(WORDS, 8), nn.LSTMCell(8, 8), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor, h: Tensor, c: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = []
        for at, row in enumerate(self.embed(tokens).unbind(1)):
            new_h, new_c = self.cell(row, (h, c))
            h, c = (torch.where((at < valid)[:, None], new, old) for new, old in ((new_h, h), (new_c, c)))
            found.append(h)
        return self.out(torch.stack(found, 1)), h, c


def words(module: nn.Module) -> StepSpec:
    tokens, scores = InputSpec("tokens", ("B", "L"), tokens=WORDS), OutputSpec("scores", ("B", "L", WORDS), "logits")
    return StepSpec(module, [tokens], [StateSpec("memory", ("B", ROWS, WIDTH))], [scores])


def recurrent() -> StepSpec:
    states = [StateSpec(name, ("B", 8)) for name in ("h", "c")]
    tokens, scores = InputSpec("tokens", ("B", "L"), tokens=WORDS), OutputSpec("scores", ("B", "L", WORDS), "logits")
    return StepSpec(Recurrent(), [tokens], states, [scores], lengths=True)


def features() -> StepSpec:
    """A step that reads no tokens."""
    module = nn.GRUCell(4, 4)

    def step(_: nn.Module, inputs: dict[str, Tensor], states: dict[str, Tensor]) -> Any:
        h = module(inputs["x"], states["h"])
        return {"y": h.tanh()}, {"h": h}

    return StepSpec(module, [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"], step=step)


def found(spec: StepSpec, lengths: tuple[int, ...], batch_size: int = 2) -> int | None:
    plan = make_plan(spec, batch_size, lengths, Silent())
    programs = [
        Program(name=f"step-{n}", kind="step", segment_length=n, update="replace", file="", inputs=(), outputs=())
        for n in plan.segment_lengths
    ]
    manifest = plan.manifest(programs, model_id="0" * 64, precision="fp32", weights="")
    return stepwise(manifest, partial(ModuleReference, plan))


@pytest.mark.parametrize(
    ("module", "expected"),
    [(Words, 5), (WholeMemory, 1), (BothWays, 1), (Convolution, 1), (UpToThree, 3), (OtherState, 1)],
)
def test_segments_are_compared_with_steps_in_outputs_and_states(module: type[Words], expected: int) -> None:
    assert found(words(module()), EACH) == expected


def test_an_lstm_that_takes_counts_gives_what_steps_give_up_to_the_longest_that_is_compared() -> None:
    assert found(recurrent(), (16, 1)) == MOST
    assert found(recurrent(), (6,)) == 6


@pytest.mark.parametrize(
    ("lengths", "expected"), [((64, 1), 64), ((1,), 1), ((5,), None), ((64, 4, 1), 4), ((9, 8, 2, 1), 8)]
)
def test_of_exact_lengths_short_ones_are_compared_or_the_shortest(
    lengths: tuple[int, ...], expected: int | None
) -> None:
    assert found(words(Words()), lengths, batch_size=1) == expected


def test_nothing_is_run_where_nobody_reads_tokens() -> None:
    assert found(features(), ()) is None


def test_sequences_in_lockstep_run_together() -> None:
    spec = words(Words())
    summed = StateSpec("count", (), dtype="int32")

    def step(module: nn.Module, inputs: dict[str, Tensor], states: dict[str, Tensor]) -> Any:
        scores, memory = module(inputs["tokens"], states["memory"])
        return {"scores": scores}, {"memory": memory, "count": states["count"] + inputs["tokens"].shape[1]}

    shared = StepSpec(spec.module, spec.inputs, [*spec.states, summed], spec.outputs, step=step)
    assert found(shared, EACH) == 5


# ---- Transformer-XL: the rule is what the reference does

M = 6
DIALECTS: dict[str, tuple[dict[str, Any], int]] = {
    "no window": ({}, 1),
    "window of M": ({"window": M}, MOST),
    "window of M + 1": ({"window": M + 1}, MOST),
    "short window": ({"window": 3}, MOST),
    "wide window": ({"window": M + 2}, 1),
    "segment window": ({"segment_window": True}, 1),
    "single steps": ({"single_steps": 5}, 5),
    "single steps, clamp": ({"single_steps": 5, "clamp_length": 3}, 5),
    "single steps, segment window": ({"single_steps": 5, "segment_window": True}, 5),
    "single steps, learned distances": ({"single_steps": 5, "attn_type": 1, "position_rows": 9}, 5),
    "single steps, more than there are": ({"single_steps": 12}, MOST),
    "added sinusoids": ({"attn_type": 2, "window": M}, 1),
    "learned positions": ({"attn_type": 3, "position_rows": 30, "window": M}, 1),
    "no memory": ({"memory_length": 0}, 1),
    "no memory, window of one": ({"memory_length": 0, "window": 1}, MOST),
}


@pytest.mark.parametrize("start", ["empty", "zeros"])
@pytest.mark.parametrize(("changes", "expected"), DIALECTS.values(), ids=DIALECTS)
def test_the_rule_of_a_transformer_xl_is_what_its_reference_does(
    changes: dict[str, Any], expected: int, start: str
) -> None:
    chosen = {name: changes[name] for name in Dialect.__struct_fields__ if name in changes}
    values = small_config(**{name: value for name, value in changes.items() if name in ModelConfig.__struct_fields__})
    names = ModelConfig.__struct_fields__
    config = msgspec.convert({name: values[name] for name in values if name in names}, ModelConfig)
    sizes = Sizes(1, (10, 1), changes.get("memory_length", M))
    form: Any = "hidden" if config.absolute_positions else "kv"
    builder = Builder(config, Dialect(**chosen, memory_start=start), sizes, random_state(values), form, "fp32", ())
    manifest = builder.manifest(
        expected_programs(config, builder.manifest([]).states, 1, sizes.segment_lengths, ("rolled",))
    )
    assert manifest.stepwise is not None
    assert min(manifest.stepwise, MOST) == expected
    assert stepwise(manifest, lambda: Oracle(builder.reference(), form)) == expected
    assert rows_of(manifest) == sizes.memory_length
