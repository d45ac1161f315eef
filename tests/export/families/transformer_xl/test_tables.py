"""The tables of a Transformer-XL's bundle: rings, states and programs that a config implies."""

from __future__ import annotations

import msgspec
import pytest
from support import small_config
from txl_export.families.transformer_xl.tables import expected_programs, expected_states
from txl_runtime.bundle.tables import ring_slots
from txl_runtime.bundle.transformer_xl import ModelConfig

CONFIG = msgspec.convert(small_config(), ModelConfig)
ADAPTIVE = msgspec.convert(small_config(cutoffs=(20, 40), div_val=2), ModelConfig)
BOTH = ("ring", "rolled")


# --- rings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory_length", "longest", "ring", "columns"),
    [(7, 4, 11, 15), (640, 64, 704, 768), (1, 8, 9, 17), (5, 1, 6, 6), (1, 1, 2, 2)],
)
def test_a_ring_has_room_for_memory_and_segment_and_the_segment_once_more(memory_length, longest, ring, columns):
    assert ring_slots(memory_length, longest) == (ring, columns)


@pytest.mark.parametrize("memory_length", [1, 3, 7])
@pytest.mark.parametrize("longest", [1, 2, 4, 9])
def test_a_step_writes_over_no_memory_and_not_beyond_the_slots(memory_length, longest):
    """By hand: wherever the head stands, whatever counts, all M rows before the new head are still there."""
    ring, columns = ring_slots(memory_length, longest)
    for head in range(ring):
        for length in range(1, longest + 1):
            written = set(range(head, head + length))
            assert max(written) < columns
            for valid in range(length + 1):
                older = {(head - back) % ring for back in range(1, memory_length - valid + 1)}
                assert not written & older


# --- the state table ----------------------------------------------------------------------------------------------


def test_the_state_table_has_every_tensor_once_for_each_rule():
    states = expected_states(CONFIG, "kv", 3, 7, BOTH, 4)
    names = [f"layers.{i:02d}.{role}" for i in range(2) for role in ("key", "value")]
    assert [(state.update, state.name) for state in states] == [(rule, name) for rule in BOTH for name in names]
    for state in states:
        assert state.shape == ((3, 2, 15, 8) if state.update == "ring" else (3, 2, 7, 8))
        assert state.slots == (11 if state.update == "ring" else None)
        assert (state.row_axis, state.initial) == (2, None)
        assert (state.input, state.output) == (f"memory.{state.name}", f"new_memory.{state.name}")


def test_hidden_memory_is_rolled_and_no_memory_has_no_states():
    states = expected_states(CONFIG, "hidden", 3, 7, ("rolled",), 4)
    assert [(state.name, state.shape, state.row_axis) for state in states] == [
        (f"layers.{i:02d}.hidden", (3, 7, 16), 1) for i in range(2)
    ]
    assert expected_states(CONFIG, "kv", 3, 0, ("rolled",), 4) == ()


# --- programs -----------------------------------------------------------------------------------------------------


def test_programs_of_the_ring_share_a_file_and_the_softmax_is_apart():
    states = expected_states(ADAPTIVE, "kv", 3, 7, BOTH, 4)
    programs = expected_programs(ADAPTIVE, states, 3, (4, 1), BOTH)
    assert [(p.name, p.kind, p.segment_length, p.update, p.file) for p in programs] == [
        ("hidden-ring-4", "hidden", 4, "ring", "hidden-ring.onnx"),
        ("hidden-ring-1", "hidden", 1, "ring", "hidden-ring.onnx"),
        ("head", "head", 0, "none", "head.onnx"),
        ("tail.1", "tail.1", 0, "none", "tail.1.onnx"),
        ("tail.2", "tail.2", 0, "none", "tail.2.onnx"),
        ("logprobs-4", "logprobs", 4, "rolled", "logprobs-4.onnx"),
        ("logprobs-1", "logprobs", 1, "rolled", "logprobs-1.onnx"),
    ]
    ring, single, head, *tails = programs[:5]
    assert [(spec.name, spec.shape) for spec in ring.inputs[:5]] == [
        ("tokens", (3, 4)),
        ("valid", (3,)),
        ("fill", (3,)),
        ("head", (3,)),
        ("memory.layers.00.key", (3, 2, 15, 8)),
    ]
    assert [spec.shape for spec in ring.inputs[4:]] == [spec.shape for spec in ring.outputs[1:]]
    assert single.inputs[0].shape == (3, 1)
    assert single.inputs[1:] == ring.inputs[1:], "the memory is one for all lengths"
    assert (ring.outputs[0].name, ring.outputs[0].shape) == ("hidden", (3, 4, 16))
    assert [part.inputs[0].shape for part in (head, *tails)] == [("rows", 16)] * 3
    assert [part.outputs[0].shape for part in (head, *tails)] == [("rows", 22), ("rows", 20), ("rows", 20)]
    rolled = programs[5]
    assert [spec.name for spec in rolled.inputs[:4]] == ["tokens", "valid", "fill", "memory.layers.00.key"]
    assert (rolled.outputs[0].name, rolled.outputs[0].shape) == ("logprobs", (3, 4, 60))


@pytest.mark.parametrize("updates", [("ring",), ("rolled",)])
def test_each_rule_brings_its_own_programs(updates):
    states = expected_states(CONFIG, "kv", 1, 7, updates, 4)
    names = [program.name for program in expected_programs(CONFIG, states, 1, (4, 1), updates)]
    expected = {"ring": ["hidden-ring-4", "hidden-ring-1", "head"], "rolled": ["head", "logprobs-4", "logprobs-1"]}
    assert names == expected[updates[0]]


def test_sizes_that_are_open_are_not_taken_for_numbers():
    states = expected_states(CONFIG, "kv", 1, 7, BOTH, 4)
    programs = {program.name: program for program in expected_programs(CONFIG, states, 1, (4,), BOTH)}
    assert programs["logprobs-4"].inputs[0].fixed == (1, 4)
    with pytest.raises(ValueError, match="rows"):
        _ = programs["head"].inputs[0].fixed
