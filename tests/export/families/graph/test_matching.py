"""Inputs and outputs of a graph that are those of a step: what names tell, what sizes tell, what has to be tried."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn
from txl_export import InputSpec, StateSpec, StepSpec
from txl_export.families.graph.matching import Wiring, the_right, ways_in, ways_out
from txl_export.families.graph.naming import kinship
from txl_export.families.graph.reading import Port
from txl_runtime.errors import CheckError, UsageError

SPEC = StepSpec(
    nn.Identity(),
    [InputSpec("x", ("B", "L", 4), lookahead=1), InputSpec("ids", ("B", "L"), tokens=9)],
    [StateSpec("h", (1, "B", 6)), StateSpec("c", (1, "B", 6)), StateSpec("past", ("B", 5, 3), grows=1)],
    ["y"],
)
OURS = {"x": ("B", 4, 4), "ids": ("B", 3), "h": (1, "B", 6), "c": (1, "B", 6), "past": ("B", "rows", 3)}


def ports(names: tuple[str, ...] = ("x", "ids", "h_in", "c0", "past"), batch: int | str = 2) -> list[Port]:
    shapes = (tuple(batch if size == "B" else size for size in shape) for shape in OURS.values())
    dtypes = ("float32", "int64", "float16", "float32", "float32")
    return [Port(*port) for port in zip(names, dtypes, shapes, strict=True)]


def matched(inputs: list[Port], spec: StepSpec = SPEC, **more: object) -> list[Wiring]:
    options = {"optional": (), "pairs": {}, "given": {}} | more
    return ways_in("a.onnx", spec, inputs, **options)


def test_names_and_sizes_tell_inputs_states_and_how_many_there_are() -> None:
    (way,) = matched(ports())
    assert way.takes == {"x": "x", "ids": "ids", "h": "h_in", "c": "c0", "past": "past"}
    assert (way.batch, way.length) == (2, 3)
    (way,) = matched(ports(batch="N"))
    assert (way.batch, way.length) == (None, 3)


def test_what_names_do_not_tell_is_left_open_in_the_order_of_both() -> None:
    ways = matched(ports(("1", "2", "3", "4", "5")))
    assert [(way.takes["h"], way.takes["c"]) for way in ways] == [("3", "4"), ("4", "3")]
    assert all(way.takes["x"] == "1" and way.takes["past"] == "5" for way in ways)


def test_outputs_have_the_names_and_shapes_of_what_a_step_returns() -> None:
    (way,) = matched(ports())
    wanted = {"output y": np.zeros(3), "state h": np.zeros((1, 2)), "state c": np.zeros((1, 2))}
    found = {
        "c_next": np.zeros((1, 2)),
        "99": np.zeros(3, np.float64),
        "hn": np.zeros((1, 2)),
        "mask": np.ones(3, bool),
    }
    (out,) = ways_out("a.onnx", way, wanted, found)
    assert out.returns == {"output y": "99", "state h": "hn", "state c": "c_next"}
    (way,) = matched(ports(), pairs={"h_in": "c_next"})
    (out,) = ways_out("a.onnx", way, wanted, found)
    assert out.returns["state h"] == "c_next", "the user says it"
    with pytest.raises(UsageError, match=r"a\.onnx: has no output hn, it gives c_next; check --state"):
        ways_out("a.onnx", matched(ports(), pairs={"h_in": "hn"})[0], wanted, {"c_next": np.zeros(1)})
    with pytest.raises(CheckError, match=r"gives hn \[1, 2\], expected the module's output y \[3\]; call the inputs"):
        ways_out("a.onnx", way := matched(ports())[0], wanted, {"hn": np.zeros((1, 2))})


def test_several_ways_are_tried_and_the_error_names_the_choices() -> None:
    ways = matched(ports(("1", "2", "3", "4", "5")))
    assert the_right("a.onnx", ways, lambda way: way.takes["h"] == "4") is ways[1]
    assert the_right("a.onnx", ways[:1], lambda way: False) is ways[0], "there is nothing to tell apart"
    with pytest.raises(CheckError, match="no name tells which of 3, 4 is the module's h, c, and in none of 2 orders"):
        the_right("a.onnx", ways, lambda way: False)


def test_what_is_missing_is_left_out_and_what_is_too_much_is_refused() -> None:
    (way,) = matched(ports()[1:])
    assert "x" not in way.takes
    extra = Port("sr", "int64", ())
    with pytest.raises(UsageError, match=r"takes sr int64 \[\] besides, .*; give constants by --inputs FILE\.npz"):
        matched([*ports(), extra])
    (way,) = matched([*ports(), extra], given={"sr": np.array(16000)})
    assert way.given["sr"] == 16000
    with pytest.raises(UsageError, match=r"has no input rate, it takes x, ids, h_in, c0, past, sr; check --state"):
        matched([*ports(), extra], given={"rate": np.array(16000)})
    other = Port("x", "float32", (2, 4, 7))
    with pytest.raises(
        CheckError, match=r"takes x float32 \[2, 4, 7\], expected the module's x float32 \['B', 'L', 4\]"
    ):
        matched([other, *ports()[1:]])
    with pytest.raises(CheckError, match=r"takes x int64 \[2, 4, 4\], expected the module's x"):
        matched([Port("x", "int64", (2, 4, 4)), *ports()[1:]])
    fixed = [*ports()[:4], Port("past", "float32", (2, 5, 3))]
    with pytest.raises(CheckError, match=r"takes past float32 \[2, 5, 3\], expected the module's past"):
        matched(fixed)  # of a cache that grows the size is open
    with pytest.raises(CheckError, match=r"takes 2, 3 sequences \(B\) at once, expected one number"):
        matched([Port("x", "float32", (3, 4, 4)), *ports()[1:]])
    with pytest.raises(CheckError, match=r"takes 0 positions \(L\) at once, expected one number"):
        matched([Port("x", "float32", (2, 1, 4)), Port("ids", "int64", (2, "T")), *ports()[2:]])


def test_an_input_that_has_a_value_in_the_file_is_a_state_where_it_is_called_like_one() -> None:
    given = ports()
    (way,) = matched([*given[:2], *given[3:]], optional=[given[2], Port("weight", "float32", (1, 2, 6))])
    assert way.takes["h"] == "h_in"


def test_names_are_of_one_thing_but_for_words_of_time_and_sides() -> None:
    alike = [("h", "h"), ("h", "state.h.in"), ("cache_key", "new_cache_key"), ("h", "h0"), ("state", "state_in")]
    assert [kinship(*pair) for pair in alike] == [3, 2, 2, 1, 2]
    assert not any(kinship(*pair) for pair in (("h", "c"), ("key", "value"), ("cache_0", "cache_1"), ("x", "h_in")))
