"""What names say: which are alike, and which only look so."""

from __future__ import annotations

import pytest
from txl_export.families.graph.find.naming import counted_alike, likeness, most_alike, speaks_of


@pytest.mark.parametrize(
    "names",
    [
        "h hn", "h0 hn", "h_0 h_n", "hx hy", "state stateN", "cache_in cache_out", "memory.3 new_memory.3", "prev new",
        "past_key_values.0.key present.0.key", "past_key_values.11.value present_key_values.11.value", "h_in h_out",
        "state_0 next_state_0", "foo_prev foo_next", "conv_cache new_conv_cache", "hiddenIn hiddenOut",
        "cached_avg_0 new_cached_avg_0", "cache_last_channel cache_last_channel_next", "prev_state state",
    ],
)  # fmt: skip
def test_names_of_one_state_are_alike(names):
    assert likeness(*names.split()) == 2


@pytest.mark.parametrize("names", ["r1i r1o", "foo_in foo_out", "zq_i zq_o"])
def test_names_that_differ_by_a_side_alone_are_a_hint(names):
    assert likeness(*names.split()) == 1


@pytest.mark.parametrize(
    "names",
    [
        "x x_out", "input output", "in out", "image_in image_out", "audio audioOut", "sample out_sample", "h0 cn",
        "hidden_states last_hidden_state", "hidden_state last_hidden_state", "in1 out1", "mem0 mem1", "h0_in h1_out",
        "past_key_values.0.key present.0.value", "past_key_values.10.key present.1.key", "r1i r2o", "q7 zz",
        "new_state old_state", "h h", "kv_in_0 kv_out_1",
    ],
)  # fmt: skip
def test_names_of_data_or_of_two_states_are_not(names):
    assert likeness(*names.split()) == 0


def test_a_name_speaks_of_a_word_that_one_of_its_parts_begins_with():
    assert speaks_of("position_ids", "pos")
    assert speaks_of("attentionMask", "mask")
    assert not speaks_of("composition", "pos")


def test_of_two_names_the_nearer_one_is_taken_and_of_two_that_are_as_near_none() -> None:
    scores = {("r1i", "r1o"): 1, ("r1i", "updated_r1i"): 2}
    assert most_alike(scores) == {"r1i": "updated_r1i"}
    assert most_alike({**scores, ("r2i", "updated_r1i"): 2}) == {}
    assert most_alike({("a", "x"): 2, ("a", "y"): 1, ("b", "y"): 1}) == {"a": "x", "b": "y"}, (
        "what it ruled out is gone"
    )


def test_pairs_that_names_say_nothing_of_are_taken_where_they_are_alone_and_that_is_asked_for() -> None:
    scores = {("r1i", "zq"): 0, ("r1i", "wq"): 0, ("r2i", "vq"): 0}
    assert most_alike(scores) == {}
    assert most_alike(scores, alone=True) == {"r2i": "vq"}


def test_names_that_differ_by_a_number_alone_get_the_numbers_of_the_others_in_their_order() -> None:
    layers = ["cache2", "cache1", "cache10", "h"]
    assert counted_alike(layers, ["x", "cache_9", "cache_0", "new_cache_1"]) == {
        "cache1": "cache0", "cache2": "cache1", "cache10": "cache9", "h": "h",
    }  # fmt: skip
    past = [f"past_key_values.{layer}.key" for layer in (0, 1)]
    assert [*counted_alike(past, ["present.1.key", "present.2.key"]).values()] == [
        "past_key_values.1.key", "past_key_values.2.key",
    ]  # fmt: skip


@pytest.mark.parametrize("others", ["c_2 c_1", "c_2 c_3 c_4", "c_2", "d_2 d_3", "c_2_a c_3_a", "c_1_1 c_1_2", ""])
def test_numbers_stay_where_the_others_have_them_too_or_are_not_as_many(others: str) -> None:
    assert counted_alike(["c_1", "c_2"], others.split()) == {"c_1": "c_1", "c_2": "c_2"}


def test_one_name_alone_is_not_counted() -> None:
    assert counted_alike(["h_in_0"], ["h_out_1"]) == {"h_in_0": "h_in_0"}
