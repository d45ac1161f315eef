"""Inputs and outputs of a graph that are those of a step: what names tell, what sizes tell, what has to be tried."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn
from txl_export import InputSpec, StateSpec, StepSpec
from txl_export.families.graph.find.naming import kinship
from txl_export.families.graph.matching import Wiring, way_in, way_out
from txl_export.families.graph.take.reading import Port
from txl_runtime.errors import CheckError, UsageError

SPEC = StepSpec(
    nn.Identity(),
    [InputSpec("x", ("B", "L", 4), lookahead=1), InputSpec("ids", ("B", "L"), tokens=9)],
    [StateSpec("h", (1, "B", 6)), StateSpec("c", (1, "B", 6)), StateSpec("past", ("B", 5, 3), grows=1)],
    ["y"],
)
FLAG = InputSpec("flag", ("B",), "bool")
OURS = {"x": ("B", 4, 4), "ids": ("B", 3), "h": (1, "B", 6), "c": (1, "B", 6), "past": ("B", "rows", 3)}


def ports(names: tuple[str, ...] = ("x", "ids", "h_in", "c0", "past"), batch: int | str = 2) -> list[Port]:
    shapes = (tuple(batch if size == "B" else size for size in shape) for shape in OURS.values())
    dtypes = ("float32", "int64", "float16", "float32", "float32")
    return [Port(*port) for port in zip(names, dtypes, shapes, strict=True)]


def matched(inputs: list[Port], spec: StepSpec = SPEC, **more: object) -> Wiring:
    options = {"optional": (), "pairs": {}, "given": {}, "shown": {}} | more
    return way_in("a.onnx", spec, inputs, **options)


def returned(way: Wiring, wanted: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> Wiring:
    return way_out("a.onnx", way, [(wanted, found)])


def test_names_and_sizes_tell_inputs_states_and_how_many_there_are() -> None:
    way = matched(ports())
    assert way.takes == {"x": "x", "ids": "ids", "h": "h_in", "c": "c0", "past": "past"}
    assert (way.batch, way.length) == (2, 3)
    way = matched(ports(batch="N"))
    assert (way.batch, way.length) == (None, 3)


def test_what_names_do_not_tell_has_the_order_of_both_or_what_values_show() -> None:
    way = matched(nameless := ports(("1", "2", "3", "4", "5")))
    assert way.takes == {"x": "1", "ids": "2", "h": "3", "c": "4", "past": "5"}
    assert way.unsure == ["h", "c"], "sizes tell the others"
    assert matched(ports()).unsure == []
    way = matched(nameless, shown={("h", "3"): 1, ("h", "4"): 3, ("c", "3"): 2, ("c", "4"): 2})
    assert (way.takes["h"], way.takes["c"]) == ("4", "3")


def test_what_can_be_one_thing_alone_is_not_taken_by_another() -> None:
    spec = StepSpec(nn.Identity(), [FLAG], [StateSpec("h", ("B", 6)), StateSpec("c", (2, 6))], ["y"])
    way = matched([Port("1", "float32", ("N", "M")), Port("2", "float32", (3, 6)), Port("flag", "bool", (3,))], spec)
    assert way.takes == {"flag": "flag", "c": "1", "h": "2"}


def test_layers_are_counted_from_where_each_side_counts_them() -> None:
    layers = [StateSpec(f"cache{number}", ("B", 6)) for number in (1, 2, 3)]
    inputs = [Port(f"cache_{number}", "float32", (2, 6)) for number in (2, 0, 1)]
    way = matched([Port("flag", "bool", (2,)), *inputs], StepSpec(nn.Identity(), [FLAG], layers, ["y"]))
    assert way.takes == {"flag": "flag", "cache1": "cache_0", "cache2": "cache_1", "cache3": "cache_2"}
    wanted = {f"state cache{number}": np.zeros((2, 6)) for number in (1, 2, 3)}
    way = returned(way, wanted, {f"new_cache_{number}": np.ones((2, 6)) for number in (3, 2, 1)})
    assert way.returns == {f"state cache{number}": f"new_cache_{number}" for number in (1, 2, 3)}
    assert not way.unsure


def test_outputs_have_the_names_and_shapes_of_what_a_step_returns() -> None:
    way = matched(ports())
    wanted = {"output y": np.zeros(3), "state h": np.zeros((1, 2)), "state c": np.zeros((1, 2))}
    found = {
        "c_next": np.zeros((1, 2)),
        "99": np.zeros(3, np.float64),
        "hn": np.zeros((1, 2)),
        "mask": np.ones(3, bool),
    }
    out = returned(way, wanted, found)
    assert out.returns == {"output y": "99", "state h": "hn", "state c": "c_next"}
    way = matched(ports(), pairs={"h_in": "c_next"})
    out = returned(way, wanted, found)
    assert out.returns["state h"] == "c_next", "the user says it"
    with pytest.raises(UsageError, match=r"a\.onnx: has no output hn, it gives c_next; check --state"):
        returned(matched(ports(), pairs={"h_in": "hn"}), wanted, {"c_next": np.zeros(1)})
    gives = r"gives hn float64 \[1, 2\], expected the module's output y float64 \[3\]; call the inputs"
    with pytest.raises(CheckError, match=gives):
        returned(matched(ports()), wanted, {"hn": np.zeros((1, 2))})


def test_outputs_that_names_do_not_tell_have_the_nearest_values_of_all_calls() -> None:
    draws = np.random.default_rng(0)
    calls = [{key: draws.random((1, 2)) for key in ("output y", "state h", "state c")} for _ in range(3)]
    calls[0]["state h"][:] = calls[0]["state c"]  # one call alone does not tell them apart
    found = [{"1": each["state c"], "2": each["output y"] + 0.01, "3": each["state h"]} for each in calls]
    way = way_out("a.onnx", matched(ports()), [*zip(calls, found, strict=True)])
    assert way.returns == {"output y": "2", "state h": "3", "state c": "1"}
    assert way.unsure == ["output y", "state h", "state c"]


def test_a_type_that_differs_is_said_and_no_other_name_is_asked_for() -> None:
    spec = StepSpec(nn.Identity(), [FLAG], [StateSpec("position", ("B",), "int64")], ["y"])
    expected = r"takes position float32 \[2\], expected the module's position int64 \['B'\]; the types differ, so"
    with pytest.raises(CheckError, match=expected):
        matched([Port("flag", "bool", (2,)), Port("position", "float32", (2,))], spec)
    floats = Port("ids", "float32", (2, 3))
    with pytest.raises(CheckError, match=r"takes ids float32 \[2, 3\], expected the module's ids int64 \['B', 'L'\]"):
        matched([ports()[0], floats, *ports()[2:]])
    gives = r"gives action float32 \[2\], h float32 \[3\], expected the module's output action int32 \[2\]; the types"
    wanted = {"output action": np.zeros(2, np.int32), "state h": np.zeros(3, np.float32)}
    with pytest.raises(CheckError, match=gives):
        returned(matched(ports()), wanted, {"action": np.zeros(2, np.float32), "h": np.zeros(3, np.float32)})


def test_an_input_of_the_module_is_no_state() -> None:
    with pytest.raises(UsageError, match="--state names x, an input of the module's, expected a state; correct"):
        matched(ports(), pairs={"x": "y"})


def test_what_is_missing_is_left_out_and_what_is_too_much_is_refused() -> None:
    way = matched(ports()[1:])
    assert "x" not in way.takes
    extra = Port("sr", "int64", ())
    with pytest.raises(CheckError, match=r"takes sr int64 \[\] besides, .*; give constants by --inputs FILE\.npz"):
        matched([*ports(), extra])
    way = matched([*ports(), extra], given={"sr": np.array(16000)})
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
    way = matched([*given[:2], *given[3:]], optional=[given[2], Port("weight", "float32", (1, 2, 6))])
    assert way.takes["h"] == "h_in"


def test_names_are_of_one_thing_but_for_words_of_time_and_sides() -> None:
    alike = [("h", "h"), ("h", "state.h.in"), ("cache_key", "new_cache_key"), ("h", "h0"), ("state", "state_in")]
    assert [kinship(*pair) for pair in alike] == [3, 2, 2, 1, 2]
    assert not any(kinship(*pair) for pair in (("h", "c"), ("key", "value"), ("cache_0", "cache_1"), ("x", "h_in")))
