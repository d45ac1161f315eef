"""The step that is exported, run as plain PyTorch: the reference's function in fixed shapes, over chained segments."""

from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from support import random_state, small_config
from torch import Tensor
from txl_export.families.transformer_xl.folding import fold, unfold
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.step import Step, StepShape, memory_shapes
from txl_export.families.transformer_xl.weights import Weights
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.errors import UsageError

TOLERANCE = 2e-5  # the step is float32, the reference float64
BATCH = 3
CALLS: list[tuple[int, list[int]]] = [
    # L of the program, valid rows per stream: empty, filling, full, rolled over; partial and idle
    (4, [4, 4, 4]),
    (4, [3, 0, 1]),
    (1, [1, 1, 0]),
    (4, [0, 4, 2]),
    (4, [4, 4, 4]),
    (1, [0, 1, 1]),
    (4, [2, 1, 4]),
    (4, [4, 0, 3]),
    (4, [4, 4, 4]),
]
CASES: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"pre_lnorm": True},
    "pre-norm, final norm": {"pre_lnorm": True, "final_norm": True},
    "window": {"window": 7},
    "window of M + 1": {"window": 8},
    "window shorter than memory": {"window": 3, "pre_lnorm": True},
    "clamp": {"clamp_length": 4},
    "clamp and window": {"clamp_length": 2, "window": 5},
    "zeros": {"memory_start": "zeros"},
    "zeros, pre-norm": {"memory_start": "zeros", "pre_lnorm": True, "attention_bias": True},
    "no memory": {"memory_length": 0},
    "one row of memory": {"memory_length": 1},
    "projected embedding": {"d_embed": 12},
    "wide heads": {"n_head": 3, "d_head": 8},
    "odd heads": {"n_head": 3, "d_head": 5},
    "adaptive, one table": {"cutoffs": (20, 40)},
    "adaptive, one projected table": {"cutoffs": (20, 40), "d_embed": 12},
    "adaptive, narrowing tables": {"cutoffs": (20, 40), "div_val": 2},
    "biases": {"attention_bias": True, "n_head": 3, "d_head": 5},
    "gelu": {"activation": "gelu"},
    "approximate gelu, no output bias": {"activation": "gelu_tanh", "softmax_bias": False},
    "segment window": {"segment_window": True},
    "segment window, short memory": {"segment_window": True, "memory_length": 3},
    "single steps": {"single_steps": 4},
    "single steps, longer segments": {"single_steps": 2, "pre_lnorm": True},
    "single steps, zeros": {"single_steps": 2, "memory_start": "zeros"},
    "single steps, segment window": {"single_steps": 2, "segment_window": True},
    "single steps, learned distances": {"single_steps": 3, "attn_type": 1, "position_rows": 9, "clamp_length": 3},
    "learned distances": {"attn_type": 1, "position_rows": 9},
    "learned distances, pre-norm, window": {"attn_type": 1, "position_rows": 9, "pre_lnorm": True, "window": 5},
    "learned distances, clamp, biases": {"attn_type": 1, "position_rows": 9, "clamp_length": 3, "attention_bias": True},
    "learned distances, segment window": {"attn_type": 1, "position_rows": 9, "segment_window": True},
    "added sinusoids": {"attn_type": 2},
    "added sinusoids, pre-norm, clamp, window": {"attn_type": 2, "pre_lnorm": True, "clamp_length": 3, "window": 5},
    "added sinusoids, biases": {"attn_type": 2, "attention_bias": True, "memory_length": 9, "clamp_length": 20},
    "added sinusoids, no memory": {"attn_type": 2, "memory_length": 0, "clamp_length": 2},
    "added sinusoids, segment window": {"attn_type": 2, "segment_window": True},
    "learned positions": {"attn_type": 3, "position_rows": 9},
    "learned positions, pre-norm, window": {"attn_type": 3, "position_rows": 9, "pre_lnorm": True, "window": 5},
    "learned positions, biases": {"attn_type": 3, "position_rows": 9, "attention_bias": True, "pre_lnorm": True},
    "learned positions, no memory": {"attn_type": 3, "position_rows": 9, "memory_length": 0},
    "learned positions, segment window": {"attn_type": 3, "position_rows": 9, "segment_window": True},
}
ABSOLUTE = {2, 3}
"""Types of attention whose keys and values cannot be kept."""


class Both:
    """A reference and the steps of L = 4 and L = 1 over the same weights."""

    def __init__(self, form: str = "kv", untie: bool = False, **changes: Any) -> None:
        dialect = {name: changes.pop(name) for name in Dialect.__struct_fields__ if name in changes}
        self.memory_length = changes.pop("memory_length", 7)
        values = small_config(**changes)
        names = ModelConfig.__struct_fields__
        self.config = msgspec.convert({name: values[name] for name in values if name in names}, ModelConfig)
        self.form, self.dialect, self.state = form, Dialect(**dialect), random_state(values)
        if untie:
            self.state["softmax.tables.0"] = torch.randn(60, 16, generator=torch.Generator().manual_seed(5)) * 0.3
        self.reference = PaperModel(self.config, self.dialect, self.memory_length, self.state, torch.float64)
        folded = fold(self.config, self.state)
        self.steps = {
            length: Step(self.config, self.dialect, StepShape(BATCH, length, self.memory_length, form), folded)
            for length in (4, 1)
        }

    def initial(self) -> tuple[list[Tensor], Tensor]:
        """The memory arguments and fill of streams that have seen nothing."""
        shapes = memory_shapes(self.config, self.steps[4].shape)
        if self.dialect.memory_start == "empty" or not shapes:
            return [torch.zeros(shape) for shape in shapes], torch.zeros(BATCH, dtype=torch.int32)
        rows = self.in_graph_layout(self.reference.initial_memory(BATCH))
        return [layer.float() for layer in rows], torch.full((BATCH,), self.memory_length, dtype=torch.int32)

    def in_graph_layout(self, memory: list[Tensor]) -> list[Tensor]:
        """A hidden memory of the reference as the step's arguments: [B, rows, D], or K and V [B, H, rows, d_head]."""
        if self.form == "hidden":
            return list(memory)
        return [part.transpose(1, 2) for pair in self.reference.keys_and_values(memory) for part in pair]


def draw(length: int, seed: int) -> Tensor:
    return torch.randint(0, 60, (BATCH, length), generator=torch.Generator().manual_seed(seed)).int()


def run(both: Both) -> None:
    """Chain CALLS through both sides, each stream of the reference alone, and compare everything that counts."""
    memory, fill = both.initial()
    truth = [both.reference.initial_memory(1) for _ in range(BATCH)]
    m = both.memory_length
    for number, (length, counts) in enumerate(CALLS):
        tokens, valid = draw(length, number), torch.tensor(counts, dtype=torch.int32)
        logprobs, *memory = both.steps[length](tokens, valid, fill, *memory)
        assert logprobs.shape == (BATCH, length, 60)
        assert logprobs.dtype == torch.float32
        fill = (fill + valid).clamp(max=m)
        for row, count in enumerate(counts):
            if count:
                expected, truth[row] = both.reference(tokens[row : row + 1, :count], truth[row])
                assert float((logprobs[row, :count] - expected[0]).abs().max()) <= TOLERANCE, f"call {number}"
            filled = int(fill[row])
            assert truth[row][0].shape[1] == filled
            for found, layer in zip(memory, both.in_graph_layout(truth[row]) if m else [], strict=True):
                kept = found[row, ..., m - filled :, :]
                assert float((kept - layer[0]).abs().max() if filled else 0) <= TOLERANCE, f"call {number}"


@pytest.mark.parametrize("form", ["kv", "hidden"])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_step_is_the_reference_over_chained_and_partial_segments(changes, form):
    if form == "kv" and changes.get("attn_type") in ABSOLUTE and changes.get("memory_length") != 0:
        with pytest.raises(UsageError, match="--memory hidden"):
            Both(form, **changes)
    else:
        run(Both(form, **changes))


def test_the_step_is_the_reference_with_an_output_table_of_its_own():
    run(Both(untie=True))


@pytest.mark.parametrize("changes", [{"window": 6}, {"clamp_length": 3}, {"pre_lnorm": True}, {"memory_length": 6}])
def test_a_step_of_another_model_is_not_the_reference(changes):
    both, other = Both(window=7, clamp_length=4), Both(**({"window": 7, "clamp_length": 4} | changes))
    both.reference, both.in_graph_layout = other.reference, other.in_graph_layout
    with pytest.raises(AssertionError):
        run(both)


@pytest.mark.parametrize("wrong", [None, 2])
def test_a_step_of_other_single_steps_is_not_the_reference(wrong):
    both, other = Both(single_steps=4), Both(single_steps=wrong)
    both.reference = other.reference
    with pytest.raises(AssertionError):
        run(both)


# ---- what must not matter


FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "kv": ("kv", {"pre_lnorm": True}),
    "kv, adaptive": ("kv", {"pre_lnorm": True, "cutoffs": (20, 40), "div_val": 2}),
    "kv, learned distances": ("kv", CASES["learned distances"]),
    "hidden": ("hidden", {"pre_lnorm": True}),
    "hidden, learned distances": ("hidden", CASES["learned distances"]),
    "hidden, added sinusoids": ("hidden", CASES["added sinusoids, pre-norm, clamp, window"]),
    "hidden, learned positions": ("hidden", CASES["learned positions, pre-norm, window"]),
}


@pytest.fixture(params=FULL.values(), ids=FULL)
def full(request: pytest.FixtureRequest) -> tuple[Both, list[Tensor], Tensor]:
    """Both sides, and a memory in which the streams have 4, 2 and 0 rows."""
    form, changes = request.param
    both = Both(form, **changes)
    memory, fill = both.initial()
    valid = torch.tensor([4, 2, 0], dtype=torch.int32)
    _, *memory = both.steps[4](draw(4, 0), valid, fill, *memory)
    return both, memory, valid


def test_an_idle_stream_gets_its_memory_back_bit_for_bit(full):
    both, memory, fill = full
    _, *after = both.steps[4](draw(4, 1), torch.zeros(BATCH, dtype=torch.int32), fill, *memory)
    assert all(torch.equal(*layers) for layers in zip(after, memory, strict=True))


def test_the_new_memory_is_the_old_one_moved_up_by_the_valid_rows(full):
    both, memory, fill = full
    if both.config.absolute_positions:
        pytest.skip("positions are added to the rows that are kept, as in the released code")
    _, *after = both.steps[4](draw(4, 1), torch.tensor([3, 1, 2], dtype=torch.int32), fill, *memory)
    for old, new in zip(memory, after, strict=True):
        for row, count in enumerate([3, 1, 2]):
            assert torch.equal(new[row, ..., : 7 - count, :], old[row, ..., count:, :])


@pytest.mark.parametrize("token", [-1, 60, 2**31 - 1, -(2**31), 0])
def test_padding_changes_no_bit(full, token):
    both, memory, fill = full
    tokens, valid = draw(4, 1), torch.tensor([3, 1, 2], dtype=torch.int32)
    padded = torch.where(torch.arange(4) < valid[:, None], tokens, token).int()
    before, after = both.steps[4](tokens, valid, fill, *memory), both.steps[4](padded, valid, fill, *memory)
    for row, count in enumerate(valid.tolist()):
        assert torch.equal(after[0][row, :count], before[0][row, :count])
    assert all(torch.equal(*layers) for layers in zip(after[1:], before[1:], strict=True))


@pytest.mark.parametrize("value", [1.0, -1e4, 3e4, 1e30])
def test_what_stands_in_unfilled_slots_changes_no_bit(full, value):
    both, memory, fill = full
    tokens, valid = draw(4, 1), torch.tensor([3, 1, 2], dtype=torch.int32)
    unfilled = torch.arange(7) < 7 - fill[:, None]  # [B, M]
    dirty = [
        torch.where(unfilled.reshape(BATCH, *[1] * (layer.dim() - 3), 7, 1), torch.tensor(value), layer)
        for layer in memory
    ]
    assert any(not torch.equal(*layers) for layers in zip(dirty, memory, strict=True))
    before, after = both.steps[4](tokens, valid, fill, *memory)[0], both.steps[4](tokens, valid, fill, *dirty)[0]
    assert torch.equal(after, before)


def test_a_neighbour_full_of_nan_changes_no_bit(full):
    both, memory, fill = full
    tokens, valid = draw(4, 1), torch.tensor([3, 1, 2], dtype=torch.int32)
    before = both.steps[4](tokens, valid, fill, *memory)
    ill = [layer.clone() for layer in memory]
    for layer in ill:
        layer[1] = torch.nan
    after = both.steps[4](tokens, valid, fill, *ill)
    assert after[0][1].isnan().any()
    for found, expected in zip(after, before, strict=True):
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


# ---- folding


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"d_head": 5, "n_head": 3, "attention_bias": True},
        {"cutoffs": (20, 40), "div_val": 2},
        {"d_embed": 12},
        {"attn_type": 1, "position_rows": 9},
        {"attn_type": 2, "memory": "hidden"},
        {"attn_type": 3, "position_rows": 9, "memory": "hidden"},
    ],
)
def test_unfolding_gives_the_parameters_back_to_one_rounding(changes):
    both = Both(changes.pop("memory", "kv"), **changes)
    back = unfold(both.config, fold(both.config, both.state))
    assert back.keys() == both.state.keys()
    for name, tensor in both.state.items():
        assert back[name].is_contiguous(), name
        torch.testing.assert_close(back[name], tensor, rtol=3e-7, atol=0)


def test_a_scale_that_is_a_power_of_two_loses_nothing():
    both = Both(d_head=16)
    back = unfold(both.config, fold(both.config, both.state))
    assert all(torch.equal(back[name], tensor) for name, tensor in both.state.items())


def test_folding_joins_the_projections_and_scales_the_queries():
    both = Both()
    folded: Weights = fold(both.config, both.state)
    name = "layers.00.attention"
    joined = folded[f"{name}.query_key_value.weight"]
    assert joined.shape == (16, 3 * 16)
    assert torch.equal(joined[:, :16], (both.state[f"{name}.query.weight"] * 8**-0.5).T)
    assert torch.equal(joined[:, 16:32], both.state[f"{name}.key.weight"].T)
    assert torch.equal(folded[f"{name}.content_bias"], both.state[f"{name}.content_bias"] * 8**-0.5)
    assert not {f"{name}.{part}.weight" for part in ("query", "key", "value")} & folded.keys()


@pytest.mark.parametrize(
    ("dialect", "rows"), [({}, 11), ({"window": 5}, 5), ({"clamp_length": 2}, 3), ({"clamp_length": 8, "window": 4}, 4)]
)
def test_positions_are_folded_into_one_table_per_layer_with_a_row_per_distance(dialect, rows):
    step = Both(**dialect).steps[4]
    tables = step.position_tables()
    assert list(tables) == [f"layers.{i:02d}.attention.position.table.{rows:05d}" for i in range(2)]
    assert all(table.shape == (2, 8, rows) for table in tables.values())


@pytest.mark.parametrize(("position_rows", "n_head"), [(9, 1), (1, 2), (1, 1)])
def test_what_is_computed_of_a_parameter_is_no_second_name_of_it(position_rows, n_head, tmp_path):
    """A weight file holds every tensor once, and is not written where two of them are the same memory."""
    both = Both(attn_type=1, position_rows=position_rows, n_head=n_head)
    tables = both.steps[4].position_tables()
    save_file(fold(both.config, both.state) | tables, tmp_path / "weights.safetensors")
    run(both)


@pytest.mark.parametrize("clamp", [1, 4, 50, None])
def test_a_clamp_on_learned_distances_counts_rows(clamp):
    """With attn_type 1 a clamp of N is the table's first N distances, and no clamp a table of N rows."""
    both = Both(attn_type=1, position_rows=9)
    kept = min(clamp or 9, 9)
    cut = {name: tensor[:kept] if ".distance." in name else tensor for name, tensor in both.state.items()}
    short = msgspec.structs.replace(both.config, position_rows=kept)
    memory = [torch.ones(BATCH, 6, 16)] * 2
    found, _ = PaperModel(both.config, Dialect(clamp_length=clamp), 6, both.state)(draw(4, 0), memory)
    expected, _ = PaperModel(short, Dialect(), 6, cut)(draw(4, 0), memory)
    assert torch.equal(found, expected)
