"""Opset 27's LinearAttention and CausalConvWithState as plain operators, beside a recurrence in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from linear_graphs import HEADS, B, attention, drawn, plain, run
from onnx import helper
from small_graphs import HALF, model, value
from txl_export.graphs import linear_attention
from txl_export.graphs.rewriting import to_forms
from txl_export.graphs.settling import infer_shapes
from txl_export.graphs.unsettled import UnsettledError

RULES = {
    "retention": ("gated", 1, {"decays": 1}),
    "linear": ("linear", 2, {}),
    "delta": ("delta", 1, {"betas": HEADS}),
    "gated delta, queries share keys": ("gated_delta", 2, {"decays": 1, "betas": 1}),
    "decays of keys": ("gated", 1, {"decays": 4, "values": 16}),
    "decays of keys with the delta rule": ("gated_delta", 2, {"decays": 4, "betas": HEADS}),
    "a state space with one value": ("gated", 2, {"decays": 4, "values": 1}),
}


def by_hand(feeds: dict[str, Any], heads: int, scale: float = 0.5) -> tuple[Any, Any]:
    """The recurrence in float64; the scale of 4 keys is 1 / 2."""
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    state, results = wide["s"], []
    for at in range(wide["q"].shape[1]):
        q, k, v = (
            wide[name][:, at].reshape(B, count, -1) for name, count in (("q", heads), ("k", HEADS), ("v", HEADS))
        )
        if "g" in wide:
            state = state * np.exp(wide["g"][:, at].reshape(B, HEADS, -1, 1))
        if "b" in wide:
            v = wide["b"][:, at].reshape(B, -1, 1) * (v - np.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * v[:, :, None]
        results.append(scale * np.einsum("bhk,bhkv->bhv", q, np.repeat(state, heads // HEADS, 1)).reshape(B, -1))
    return np.stack(results, 1), state


def check(rule: str, shared: int, kind: dict[str, int], lengths: Sequence[int], feeds: dict[str, Any]) -> None:
    """Segments of these lengths one after another beside the recurrence over all positions."""
    wanted, last = by_hand(feeds, HEADS * shared)
    state, results, first = feeds["s"], [], 0
    for length in lengths:
        part = {name: array[:, first : first + length] for name, array in feeds.items()}
        result, state = run(plain(attention(rule, shared, length, **kind)), {**part, "s": state})
        results.append(result)
        first += length
    np.testing.assert_allclose(np.concatenate(results, 1), wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)
    np.testing.assert_allclose(state, last, atol=1e-5 * np.abs(last).max(), rtol=0)


@pytest.mark.parametrize("name", RULES)
def test_segments_one_after_another_give_what_the_recurrence_gives(name):
    rule, shared, kind = RULES[name]
    lengths = (1, 6, 65)  # of 65 a chunk of one position is left
    check(rule, shared, kind, lengths, drawn(attention(rule, shared, sum(lengths), **kind), np.random.default_rng(1)))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", [1, 9])
def test_a_state_that_is_not_given_is_zeros(name, length):
    rule, shared, kind = RULES[name]
    feeds = drawn(attention(rule, shared, length, **kind), np.random.default_rng(2))
    wanted = by_hand({**feeds, "s": np.zeros_like(feeds["s"])}, HEADS * shared)
    del feeds["s"]
    for found, expected in zip(
        run(plain(attention(rule, shared, length, past=False, **kind)), feeds), wanted, strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["retention", "gated delta, queries share keys", "decays of keys"])
def test_a_decay_may_forget_everything(name):
    rule, shared, kind = RULES[name]
    feeds = drawn(attention(rule, shared, 70, **kind), np.random.default_rng(3))
    feeds["g"][:, ::7] = -np.inf
    feeds["g"][:, 3::7] = -300
    check(rule, shared, kind, [70], feeds)


def test_keys_that_are_all_the_same_lose_no_digits():
    """Powers of what stands below the diagonal would be as large as 1e18 here, and their sum is at most 1."""
    feeds = drawn(attention("delta", 1, 64, betas=HEADS), np.random.default_rng(4))
    feeds["k"][:] = 0.5
    feeds["b"][:] = 1
    check("delta", 1, {"betas": HEADS}, [64], feeds)


def test_a_scale_that_is_said_counts_and_half_precision_is_computed_in_float32():
    made = attention("gated", 1, 5, decays=1, scale=3.0, dtype=HALF)
    feeds = {name: array.astype(np.float16) for name, array in drawn(made, np.random.default_rng(5)).items()}
    found = run(plain(made), feeds)
    assert [array.dtype for array in found] == [np.float16] * 2
    for array, expected in zip(found, by_hand(feeds, HEADS, 3.0), strict=True):
        np.testing.assert_array_equal(array, expected.astype(np.float16))


def test_sixty_four_positions_with_one_decay_are_a_few_products():
    """Written position by position they were 450 nodes, and 8 times as slow."""
    assert len(plain(attention("gated_delta", 1, 64, decays=1, betas=1)).graph.node) <= 80


def test_onnx_runtime_s_own_operator_gives_the_same():
    """It is there from 1.26 on; the standard's, from 1.32 on, is run by tests/versions."""
    made = attention("gated_delta", 2, 9, decays=1, betas=HEADS)
    feeds, found = drawn(made, np.random.default_rng(6)), plain(made)
    made.graph.node[0].domain, made.opset_import[0].version = "com.microsoft", 18
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for one, other in zip(run(found, feeds), run(made, feeds), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize(("past", "bias", "activation"), [(True, True, "silu"), (False, False, "none")])
def test_a_causal_convolution_reads_its_state_in_front(length, past, bias, activation):
    draws = np.random.default_rng(7)
    given = {"x": [B, 5, length], "w": [5, 1, 4], "b": [5] * bias, "s": [B, 5, 3] * past}
    shapes = {name: sizes for name, sizes in given.items() if sizes}
    names = ["x", "w", "b" * bias, "s" * past][: 4 if past else 2]
    node = helper.make_node("CausalConvWithState", names, ["y", "new_s"], activation=activation)
    inputs = [value(name, sizes) for name, sizes in shapes.items()]
    made = model([node], inputs, [value("y", [B, 5, length]), value("new_s", [B, 5, 3])], opset=27)
    feeds = {name: draws.normal(size=sizes).astype(np.float32) for name, sizes in shapes.items()}
    row = np.concatenate([feeds.get("s", np.zeros((B, 5, 3))), feeds["x"]], 2)
    wanted = sum(row[:, :, at : at + length] * feeds["w"][:, 0, at, None] for at in range(4))
    wanted = wanted + (feeds["b"][:, None] if bias else 0)
    wanted = wanted / (1 + np.exp(-wanted)) if activation == "silu" else wanted
    result, state = run(plain(made), feeds)
    np.testing.assert_allclose(result, wanted, atol=1e-5)
    np.testing.assert_array_equal(state, row[:, :, -3:].astype(np.float32))


def test_one_of_onnx_runtime_s_own_that_says_more_is_left_as_it_is():
    node = helper.make_node("CausalConvWithState", ["x", "w"], ["y", "s"], domain="com.microsoft", channels_last=1)
    inputs = [value("x", [1, 5, 2]), value("w", [2, 1, 4])]
    given = ir.from_proto(model([node], inputs, [value("y", [1, 5, 2]), value("s", [1, 2, 3])]))
    to_forms(given)
    assert [one.op_type for one in given.graph] == ["CausalConvWithState"]


def test_more_positions_than_a_graph_has_room_for_are_refused_before_anything_is_made():
    given = ir.from_proto(attention("gated", 1, 100_000, decays=4, values=1))
    infer_shapes(given)
    with pytest.raises(UnsettledError, match="LinearAttention of 100000 positions, which are up to 6400001 operators"):
        to_forms(given)


def test_states_of_gigabytes_are_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(linear_attention, "MOST_NUMBERS", 79)
    given = ir.from_proto(attention("gated", 1, 10, decays=4, values=1))
    infer_shapes(given)
    with pytest.raises(UnsettledError, match="LinearAttention with 80 numbers of states for 10 positions, expected"):
        to_forms(given)
