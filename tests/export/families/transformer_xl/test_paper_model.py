"""Promises of the reference for any weights: memory, window, clamp and ties do what their names say.

That its numbers are the originals' is `test_code_bases.py`'s business.
"""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from support import random_state, small_config
from torch import Tensor
from txl_export.families.transformer_xl import paper_model
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.weights import Weights
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

EXACT = 1e-12  # float64, the same sums in another order
VARIANTS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"pre_lnorm": True, "final_norm": True},
    "biases and gelu": {"attention_bias": True, "activation": "gelu"},
    "projected embedding": {"d_embed": 12},
    "odd heads": {"n_head": 3, "d_head": 5},
    "adaptive, one table": {"cutoffs": (20, 40)},
    "adaptive, narrowing tables": {"cutoffs": (20, 40), "div_val": 2},
}


def make(
    memory_length: int = 7,
    state: Weights | None = None,
    dtype: torch.dtype = torch.float64,
    memory_start: str = "empty",
    window: int | None = None,
    clamp_length: int | None = None,
    **changes: Any,
) -> PaperModel:
    values = small_config(**changes)
    fields = {name: value for name, value in values.items() if name in ModelConfig.__struct_fields__}
    config = msgspec.convert(fields, ModelConfig)
    dialect = Dialect(memory_start=memory_start, window=window, clamp_length=clamp_length)
    return PaperModel(config, dialect, memory_length, state or random_state(values), dtype)


def draw(length: int, streams: int = 2, vocab_size: int = 60, seed: int = 1) -> Tensor:
    return torch.randint(0, vocab_size, (streams, length), generator=torch.Generator().manual_seed(seed))


def chain(reference: PaperModel, tokens: Tensor, cuts: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of all tokens, fed in segments of the lengths `cuts`, and the memory after them."""
    assert sum(cuts) == tokens.shape[1]
    memory, parts = reference.initial_memory(tokens.shape[0]), []
    for segment in tokens.split(list(cuts), dim=1):
        logprobs, memory = reference(segment, memory)
        parts.append(logprobs)
    return torch.cat(parts, dim=1), memory


def apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max())


# ---- segments


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_chained_segments_equal_one_long_segment_where_memory_suffices(changes):
    reference, tokens = make(memory_length=12, **changes), draw(12)
    whole, after_whole = chain(reference, tokens, (12,))
    pieces, after_pieces = chain(reference, tokens, (5, 1, 4, 2))
    assert apart(pieces, whole) <= EXACT
    assert all(apart(*layers) <= EXACT for layers in zip(after_pieces, after_whole, strict=True))


def test_a_short_memory_makes_the_result_depend_on_the_cuts():
    reference, tokens = make(memory_length=3), draw(12)
    whole, pieces = (chain(reference, tokens, cuts)[0] for cuts in ((12,), (4, 4, 4)))
    assert apart(pieces[:, :4], whole[:, :4]) <= EXACT
    assert apart(pieces[:, 4:], whole[:, 4:]) > 1e-3


@pytest.mark.parametrize("memory_start", ["empty", "zeros"])
@pytest.mark.parametrize("beyond", [0, 1])
def test_with_a_window_the_result_does_not_depend_on_the_cuts(beyond, memory_start):
    reference, tokens = make(memory_length=5, window=5 + beyond, memory_start=memory_start), draw(20)
    whole, _ = chain(reference, tokens, (20,))
    pieces, _ = chain(reference, tokens, (7, 1, 4, 1, 7))
    assert apart(pieces, whole) <= EXACT


def test_streams_do_not_see_each_other():
    reference, tokens = make(), draw(10)
    together, _ = chain(reference, tokens, (4, 6))
    for row in range(2):
        assert apart(chain(reference, tokens[row : row + 1], (4, 6))[0], together[row : row + 1]) <= EXACT


# ---- memory


def test_without_memory_segments_know_nothing_of_each_other():
    reference, tokens = make(memory_length=0), draw(8)
    chained, memory = chain(reference, tokens, (4, 4))
    alone, _ = chain(reference, tokens[:, 4:], (4,))
    assert torch.equal(chained[:, 4:], alone)
    assert [layer.shape[1] for layer in memory] == [0, 0]


def test_a_memory_of_zeros_is_attended_to():
    empty, zeros, tokens = make(), make(memory_start="zeros"), draw(6)
    assert [layer.shape[1] for layer in empty.initial_memory()] == [0, 0]
    assert [tuple(layer.shape) for layer in zeros.initial_memory(3)] == [(3, 7, 16)] * 2
    first, _ = empty(tokens, empty.initial_memory(2))
    second, _ = zeros(tokens, zeros.initial_memory(2))
    assert apart(first, second) > 1e-3
    third, _ = empty(tokens, zeros.initial_memory(2))
    assert torch.equal(second, third)


def test_once_the_zeros_have_left_the_window_nothing_remembers_them():
    tokens = draw(30)
    empty, zeros = (make(memory_length=4, window=4, memory_start=start) for start in ("empty", "zeros"))
    first, second = (chain(reference, tokens, (5,) * 6)[0] for reference in (empty, zeros))
    assert apart(first[:, :3], second[:, :3]) > 1e-3
    reach = 2 * 4  # layers x window
    assert apart(first[:, reach:], second[:, reach:]) <= EXACT


@pytest.mark.parametrize(
    ("changes", "zero"), [({}, True), ({"pre_lnorm": True}, False), ({"attention_bias": True}, False)]
)
def test_keys_and_values_of_zero_rows_are_zero_only_without_norm_and_bias(changes, zero):
    reference = make(memory_start="zeros", **changes)
    for key, value in reference.keys_and_values(reference.initial_memory(2)):
        assert key.shape == value.shape == (2, 7, 2, 8)
        assert bool((key == 0).all()) == bool((value == 0).all()) == zero


# ---- window and clamp


@pytest.mark.parametrize("window", [1, 2, 4, 6])
@pytest.mark.parametrize("position", [4, 7, 9], ids=["first of a segment", "last of a segment", "end"])
def test_a_query_sees_exactly_window_keys(window, position):
    # One layer, so that nothing is seen at second hand; segments of 4, 4 and 2.
    reference, tokens = make(memory_length=7, window=window, n_layer=1), draw(10, streams=1)
    before, _ = chain(reference, tokens, (4, 4, 2))
    for distance in range(1, position + 1):
        altered = tokens.clone()
        altered[0, position - distance] = (altered[0, position - distance] + 1) % 60
        after, _ = chain(reference, altered, (4, 4, 2))
        same = torch.equal(after[0, position], before[0, position])
        assert same == (distance >= window), f"distance {distance}"


def test_a_clamp_beyond_every_distance_changes_nothing():
    tokens = draw(12)
    plain, _ = chain(make(), tokens, (4, 4, 4))
    largest = 7 + 4 - 1
    assert torch.equal(chain(make(clamp_length=largest), tokens, (4, 4, 4))[0], plain)
    assert apart(chain(make(clamp_length=largest - 1), tokens, (4, 4, 4))[0], plain) > 1e-6


@pytest.mark.parametrize(("clamp_length", "told_apart"), [(None, True), (5, True), (4, False), (1, False)])
def test_distances_from_the_clamp_on_are_one_distance(clamp_length, told_apart):
    reference = make(n_layer=1, clamp_length=clamp_length)
    tokens = draw(1)
    memory = [torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)]
    # Rows 2 and 3 of seven are 5 and 4 tokens before the query.
    swapped = [memory[0][:, [0, 1, 3, 2, 4, 5, 6]]]
    difference = apart(reference(tokens, memory)[0], reference(tokens, swapped)[0])
    assert difference > 1e-6 if told_apart else difference <= EXACT


# ---- parameters


def test_a_projected_embedding_is_the_plain_one_of_the_product():
    values = small_config(d_embed=12)
    state, tokens = random_state(values), draw(10)
    projection = state["embedding.projections.0"].double()
    plain = {name: tensor for name, tensor in state.items() if name != "embedding.projections.0"}
    plain["embedding.tables.0"] = state["embedding.tables.0"].double() @ projection.T
    projected, _ = chain(make(state=state, d_embed=12), tokens, (4, 6))
    product, _ = chain(make(state=plain), tokens, (4, 6))
    assert apart(projected, product) <= EXACT


@pytest.mark.parametrize("changes", [{}, {"d_embed": 12}, {"cutoffs": (20, 40)}, {"cutoffs": (20, 40), "div_val": 2}])
def test_an_absent_output_table_is_tied_to_the_embedding(changes):
    values, tokens = small_config(**changes), draw(10)
    state = random_state(values)
    tied, _ = chain(make(state=state, **changes), tokens, (4, 6))
    edges, untied = (0, *changes.get("cutoffs", ()), 60), dict(state)
    for cluster, (first, last) in enumerate(pairwise(edges)):
        own = changes.get("div_val", 1) > 1
        table = state[f"embedding.tables.{cluster}"] if own else state["embedding.tables.0"][first:last]
        untied[f"softmax.tables.{cluster}"] = table.clone()
    copied, _ = chain(make(state=untied, **changes), tokens, (4, 6))
    assert torch.equal(copied, tied)
    untied["softmax.tables.0"] = untied["softmax.tables.0"] * 1.1
    altered, _ = chain(make(state=untied, **changes), tokens, (4, 6))
    assert apart(altered, tied) > 1e-3


@pytest.mark.parametrize("changes", [{"cutoffs": (20, 40)}, {"cutoffs": (20, 40), "div_val": 2}])
def test_an_adaptive_softmax_is_the_same_computed_some_rows_at_a_time(changes, monkeypatch):
    tokens = draw(40)
    some, _ = chain(make(**changes), tokens, (25, 15))
    monkeypatch.setattr(paper_model, "ROWS", 1000)
    whole, _ = chain(make(**changes), tokens, (25, 15))
    assert apart(some, whole) <= EXACT
    assert torch.allclose(some.exp().sum(dim=-1), torch.ones(()).double())
