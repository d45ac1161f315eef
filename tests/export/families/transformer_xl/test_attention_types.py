"""Attention types 1 to 3 (and 0 beside them): the fixed-shape step against the reference over chained segments."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from txl_export.families.transformer_xl.folding import fold, unfold
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.step import Step, StepShape, memory_shapes
from txl_export.families.transformer_xl.weights import Weights, canonical_shapes, check_weights
from txl_runtime.bundle.format1 import Dialect, ModelConfig
from txl_runtime.errors import UsageError

LENGTH, BATCH = 4, 2
# Rows that count per stream and segment: full, partial, idle, and long enough for memory to fill and roll over.
VALID = [(4, 2), (1, 4), (0, 3), (4, 0), (3, 4), (4, 4)]
FORMS = {0: ("kv", "hidden"), 1: ("kv", "hidden"), 2: ("hidden",), 3: ("hidden",)}


def model(
    attn_type: int, pre_lnorm: bool = False, position_rows: int = 9, n_head: int = 2, attention_bias: bool = False
) -> tuple[ModelConfig, Weights]:
    config = ModelConfig(
        vocab_size=17,
        n_layer=2,
        n_head=n_head,
        d_model=12,
        d_head=5,
        d_inner=16,
        d_embed=12,
        attn_type=attn_type,
        position_rows=position_rows if attn_type in (1, 3) else 0,
        pre_lnorm=pre_lnorm,
        attention_bias=attention_bias,
        embedding_scale=12**0.5,
    )
    generator = torch.Generator().manual_seed(attn_type)
    must, _ = canonical_shapes(config)
    state = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in must.items()}
    return config, check_weights(config, state, "a random model")


def segments() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 17, (BATCH, LENGTH), generator=generator, dtype=torch.int32) for _ in VALID]


def by_step(config: ModelConfig, dialect: Dialect, state: Weights, shape: StepShape, tokens: list[Tensor]):
    """Log-probabilities, memory and fill after each segment, as a runtime would drive the step."""
    step, fill = Step(config, dialect, shape, fold(config, state)), torch.zeros(BATCH, dtype=torch.int32)
    memory = tuple(torch.zeros(size) for size in memory_shapes(config, shape))
    for ids, counts in zip(tokens, VALID, strict=True):
        valid = torch.tensor(counts, dtype=torch.int32)
        logprobs, *memory = step(ids, valid, fill, *memory)
        fill = (fill + valid).clamp(max=shape.memory_length)
        yield logprobs, memory, fill


@pytest.mark.parametrize("attn_type", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("memory_length", "window", "clamp", "pre_lnorm"),
    [
        (6, None, None, False),
        (6, 5, None, True),
        (6, None, 3, False),
        (3, 4, 2, True),
        (0, None, None, False),
        (0, None, 2, True),
        (9, 7, 20, False),
    ],
)
def test_the_step_is_the_reference(attn_type, memory_length, window, clamp, pre_lnorm):
    config, state = model(attn_type, pre_lnorm)
    check(config, Dialect(window=window, clamp_length=clamp), state, memory_length, segments())


@pytest.mark.parametrize("attn_type", [0, 1, 2, 3])
@pytest.mark.parametrize("pre_lnorm", [False, True], ids=["post", "pre"])
def test_biases_are_added_wherever_queries_come_from(attn_type, pre_lnorm):
    config, state = model(attn_type, pre_lnorm, attention_bias=True)
    check(config, Dialect(), state, 3, segments())


@pytest.mark.parametrize(("position_rows", "n_head"), [(9, 1), (1, 2), (1, 1)])
def test_what_is_computed_of_a_parameter_is_no_second_name_of_it(position_rows, n_head, tmp_path):
    """A weight file holds every tensor once, and is not written where two of them are the same memory."""
    config, state = model(1, position_rows=position_rows, n_head=n_head)
    folded = fold(config, state)
    step = Step(config, Dialect(), StepShape(BATCH, LENGTH, 3, "kv"), folded)
    save_file(folded | step.position_tables(), tmp_path / "weights.safetensors")
    check(config, Dialect(), state, 3, segments())


def check(config: ModelConfig, dialect: Dialect, state: Weights, memory_length: int, tokens: list[Tensor]) -> None:
    """Hold the step of every memory form against the reference, stream by stream."""
    for form in FORMS[config.attn_type]:
        shape = StepShape(BATCH, LENGTH, memory_length, form)
        reference = PaperModel(config, dialect, memory_length, state, torch.float64)
        remembered = [reference.initial_memory() for _ in range(BATCH)]
        results = by_step(config, dialect, state, shape, tokens)
        for s, (logprobs, memory, fill) in enumerate(results):
            for row, count in enumerate(VALID[s]):
                if count:  # an idle stream's reference stands still
                    expected, remembered[row] = reference(tokens[s][row : row + 1, :count], remembered[row])
                    torch.testing.assert_close(logprobs[row, :count].double(), expected[0], rtol=0, atol=2e-5)
                assert fill[row] == remembered[row][0].shape[1]
            if form == "hidden" and memory_length:
                for row, i in itertools.product(range(BATCH), range(config.n_layer)):
                    rows = memory[i][row, memory_length - int(fill[row]) :]
                    torch.testing.assert_close(rows.double(), remembered[row][i][0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("attn_type", [0, 1, 2, 3])
@pytest.mark.parametrize("memory_length", [0, 3, 6])
def test_a_window_of_the_segment_is_the_reference(attn_type, memory_length):
    config, state = model(attn_type)
    check(config, Dialect(segment_window=True), state, memory_length, segments())


@pytest.mark.parametrize("attn_type", [1, 2, 3])
def test_an_idle_stream_keeps_its_memory_to_the_bit(attn_type):
    config, state = model(attn_type)
    step = Step(config, Dialect(), StepShape(BATCH, LENGTH, 6, "hidden"), fold(config, state))
    before = [torch.randn(BATCH, 6, 12).index_fill(1, torch.tensor([2]), -0.0) for _ in range(config.n_layer)]
    idle = torch.tensor([0, 3], dtype=torch.int32)
    _, *after = step(segments()[0], idle, torch.tensor([6, 6], dtype=torch.int32), *before)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[0].view(torch.int32), new[0].view(torch.int32))
        assert not torch.equal(old[1], new[1])


@pytest.mark.parametrize(("attn_type", "pre_lnorm"), [(1, False), (2, True), (3, True)])
def test_padding_unfilled_slots_and_neighbours_change_no_bit(attn_type, pre_lnorm):
    config, state = model(attn_type, pre_lnorm)
    step = Step(config, Dialect(), StepShape(BATCH, LENGTH, 6, "hidden"), fold(config, state))
    tokens, memory = segments()[0], [torch.randn(BATCH, 6, 12) for _ in range(config.n_layer)]
    valid, fill = torch.tensor([2, 4], dtype=torch.int32), torch.tensor([3, 6], dtype=torch.int32)
    others = tokens.clone()
    others[0, 2:], others[1] = torch.tensor([-5, 10**6], dtype=torch.int32), 3
    disturbed = [rows.clone() for rows in memory]
    for rows in disturbed:
        rows[0, :3], rows[1] = 1e30, float("nan")
    logprobs, *after = step(tokens, valid, fill, *memory)
    again, *after_again = step(others, valid, fill, *disturbed)
    assert torch.equal(logprobs[0, :2], again[0, :2])
    for rows, rows_again in zip(after, after_again, strict=True):
        assert torch.equal(rows[0, 1:], rows_again[0, 1:])  # 3 filled rows and 2 new ones of 6


@pytest.mark.parametrize("attn_type", [1, 2, 3])
def test_unfold_undoes_fold(attn_type):
    config, state = model(attn_type)
    again = unfold(config, fold(config, state))
    assert set(again) == set(state)
    for name, tensor in state.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("attn_type", [2, 3])
def test_keys_and_values_cannot_follow_absolute_positions(attn_type):
    config, state = model(attn_type)
    with pytest.raises(UsageError, match="--memory hidden"):
        Step(config, Dialect(), StepShape(BATCH, LENGTH, 6, "kv"), fold(config, state))


@pytest.mark.parametrize("clamp", [1, 4, 50, None])
def test_a_clamp_on_learned_distances_counts_rows(clamp):
    """With attn_type 1 a clamp of N is the table's first N distances, and no clamp a table of N rows."""
    config, state = model(1)
    cut_config, _ = model(1, position_rows=min(clamp or 9, 9))
    kept = cut_config.position_rows
    cut = {name: tensor[:kept] if ".distance." in name else tensor for name, tensor in state.items()}
    tokens = segments()[0]
    full, _ = PaperModel(config, Dialect(clamp_length=clamp), 6, state)(tokens, [torch.ones(BATCH, 6, 12)] * 2)
    short, _ = PaperModel(cut_config, Dialect(), 6, cut)(tokens, [torch.ones(BATCH, 6, 12)] * 2)
    assert torch.equal(full, short)
