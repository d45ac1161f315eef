"""Names: those that are alike, and those that only look so."""

from __future__ import annotations

import pytest
from txl_export.families.graph.find.naming import likeness, means_data, speaks_of


@pytest.mark.parametrize(
    "names",
    [
        "h hn", "h0 hn", "h_0 h_n", "hx hy", "state stateN", "cache_in cache_out", "memory.3 new_memory.3", "prev new",
        "past_key_values.0.key present.0.key", "past_key_values.11.value present_key_values.11.value", "h_in h_out",
        "state_0 next_state_0", "foo_prev foo_next", "conv_cache new_conv_cache", "hiddenIn hiddenOut",
        "cached_avg_0 new_cached_avg_0", "cache_last_channel cache_last_channel_next", "prev_state state",
        "att_cache r_att_cache",
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
        "new_state old_state", "r_cache cache", "h h", "kv_in_0 kv_out_1",
    ],
)  # fmt: skip
def test_names_of_data_or_of_two_states_are_not(names):
    assert likeness(*names.split()) == 0


def test_a_name_speaks_of_a_word_that_one_of_its_parts_begins_with():
    assert speaks_of("position_ids", "pos")
    assert speaks_of("attentionMask", "mask")
    assert not speaks_of("composition", "pos")


def test_words_of_data_alone_mean_data():
    assert all(map(means_data, ("noisy_frame", "x", "image_0")))
    assert not any(map(means_data, ("input", "state", "h_0", "7")))
