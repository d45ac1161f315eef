"""Names that a file shares with a step: equal ones, those that the user says, and one message for all that miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn
from txl_export import InputSpec, StateSpec, StepSpec
from txl_export.families.graph.against_module import _step
from txl_export.families.graph.matching import FileOptions, Wiring, _guess, match
from txl_export.families.graph.take.reading import Foreign, Port
from txl_runtime.errors import CheckError, UsageError

SPEC = StepSpec(
    nn.Identity(),
    [InputSpec("x", ("B", "L", 4), lookahead=1), InputSpec("ids", ("B", "L"), tokens=9)],
    [StateSpec("h", (1, "B", 6)), StateSpec("past", ("B", 5, 3), grows=1)],
    ["y"],
)
SIZES = {"x": ("B", 4, 4), "ids": ("B", 3), "h": (1, "B", 6), "past": ("B", "rows", 3)}
NOTHING = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
GIVEN = ("x", "ids", "h", "past")
RETURNED = ("y", "h_out", "next_past")


def ports(*names: str, batch: int | str = 2) -> list[Port]:
    sizes = [tuple(batch if size == "B" else size for size in shape) for shape in SIZES.values()]
    return [Port(*one) for one in zip(names, ("float32", "int64", "float16", "float32"), sizes, strict=True)]


def file(inputs: list[Port], outputs: tuple[str, ...] = RETURNED, optional: tuple[Port, ...] = ()) -> Foreign:
    like = {"h_out": (1, 2, 6), "next_past": (2, "rows", 3), "v.5": (1, 2, 6)}
    returned = [
        Port(name, "float16" if name in ("h_out", "v.5") else "float32", like.get(name, ())) for name in outputs
    ]
    return Foreign(Path("a.onnx"), "", b"", NOTHING, tuple(inputs), tuple(returned), 0, optional)


def matched(foreign: Foreign, more: bool = False, **options: Any) -> Wiring:
    step = _step(SPEC)
    if more:  # as of a bundle, which need not have the file's states
        step = type(step)("the bundle", {name: step.takes[name] for name in ("x", "ids")}, ["h"], step.gives, True)
    return match(foreign, step, FileOptions(**({"rename": {}, "pairs": {}, "given": {}} | options)))


def test_equal_names_are_one_thing_and_sizes_say_how_many_sequences_and_positions_there_are() -> None:
    way = matched(file(ports(*GIVEN)))
    assert way.takes == {name: name for name in GIVEN}
    assert (way.returns, way.after) == ({"y": "y"}, {"h": "h_out", "past": "next_past"})
    assert way.fixed == {"B": 2, "L": 3}
    assert matched(file(ports(*GIVEN, batch="N"))).fixed == {"L": 3}


def test_what_the_user_says_comes_before_names() -> None:
    inputs = ports("input.1", "tokens", "hx", "past")
    rename = {"input.1": "x", "tokens": "ids", "hx": "h", "logits": "y"}
    way = matched(file(inputs, ("logits", "12", "next_past")), rename=rename, pairs={"hx": "12"})
    assert way.takes == {"x": "input.1", "ids": "tokens", "h": "hx", "past": "past"}
    assert (way.returns["y"], way.after["hx"]) == ("logits", "12")
    way = matched(file(inputs, ("logits", "12", "next_past")), rename=rename | {"12": "h"})
    assert way.after["hx"] == "12", "an output that is called like a state is its next value"


def test_one_message_lists_what_has_no_match_on_both_sides_and_options_that_mend_it() -> None:
    foreign = file([*ports("input.1", "ids", "h 0", "past"), Port("sr", "int64", ())], ("logits", "v.5", "next_past"))
    with pytest.raises(UsageError) as refusal:
        matched(foreign)
    assert str(refusal.value) == (
        "a.onnx: takes input.1, h 0, sr and gives logits, v.5 beside what has equal names, and the module has x, h, y, "
        "expected one name for each thing; give --rename input.1=x --rename 'h 0=h' --rename logits=y "
        "--state 'h 0=v.5' what is always the same (sr?) by --inputs FILE.npz"
    )
    way = matched(
        foreign,
        rename={"input.1": "x", "h 0": "h", "logits": "y"},
        pairs={"h 0": "v.5"},
        given={"sr": np.array(16000)},
    )
    assert way.feeds({name: np.array(at) for at, name in enumerate(GIVEN)}) == {
        "sr": 16000, "input.1": 0, "ids": 1, "h 0": 2, "past": 3
    }  # fmt: skip


def test_the_options_to_paste_follow_names_that_are_alike() -> None:
    with pytest.raises(UsageError, match=r"expected one name for each thing; give --rename h_in=h$"):
        matched(file(ports("x", "ids", "h_in", "past")))
    assert _guess(["c_in", "h_in"], ["h", "c"], lambda *_: True) == {"h_in": "h", "c_in": "c"}


def test_a_file_may_lack_what_it_does_not_read_or_change_and_give_more_than_is_asked() -> None:
    way = matched(file(ports(*GIVEN)[1:], ("y", "attention", "next_past")))
    assert "x" not in way.takes
    assert "h" not in way.after
    _, ids, _, past = ports(*GIVEN)
    assert matched(file([ids, past])).after == {"h": "h_out", "past": "next_past"}, "h is returned, but not taken"
    with pytest.raises(UsageError, match=r"a\.onnx: gives v\.5 beside .*has a next value of h, .* give --state h=v\.5"):
        matched(file(ports(*GIVEN), ("y", "v.5", "next_past")))
    with pytest.raises(UsageError, match=r"a\.onnx: has nothing .*the module has y, expected .*; give another file"):
        matched(file(ports(*GIVEN), ("h_out", "next_past")))


def test_a_file_beside_a_bundle_may_have_states_that_the_bundle_has_not() -> None:
    inputs = [*ports(*GIVEN)[:2], Port("cell", "float32", (2, 6)), Port("h_in", "float32", (2, 6))]
    outputs = ("y", "cell_out", "h_out")
    way = matched(file(inputs, outputs), more=True)
    assert (way.takes, way.after) == ({"x": "x", "ids": "ids"}, {"cell": "cell_out", "h_in": "h_out"})
    way = matched(file(inputs, ("y", "cell_out", "12")), more=True, rename={"h_in": "h", "12": "h"})
    assert way.after["h_in"] == "12"
    with pytest.raises(UsageError, match=r"takes h_in beside .*the bundle has nothing.*always the same"):
        matched(file(inputs, ("y", "cell_out")), more=True)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rename": {"z": "x"}}, "z"),
        ({"rename": {"x": "z"}}, "=z"),
        ({"pairs": {"h": "z"}}, "z"),
        ({"pairs": {"y": "h_out"}}, "y"),
        ({"given": {"sr": np.array(1)}}, "sr"),
    ],
)
def test_names_that_are_nobodys_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError) as refusal:
        matched(file(ports(*GIVEN)), **options)
    assert str(refusal.value) == (
        f"a.onnx: --rename, --state or --inputs name {name}; the file takes x, ids, h, past and gives y, h_out, "
        "next_past, the module has x, ids, h, past, y; check them"
    )


@pytest.mark.parametrize(
    ("port", "said"),
    [
        (
            Port("x", "float32", (2, 4, 7)),
            r"takes x float32 \[2, 4, 7\], expected the module's x float32 \['B', 'L', 4\]",
        ),
        (Port("x", "int64", (2, 4, 4)), r"takes x int64 \[2, 4, 4\], expected the module's x"),
        (Port("x", "float32", (2, 4)), r"takes x float32 \[2, 4\], expected the module's x"),
        (Port("past", "float32", (2, 5, 3)), r"takes past float32 \[2, 5, 3\], expected the module's past"),
        (
            Port("x", "float32", (3, 4, 4)),
            r"takes ids int64 \[2, 3\], expected the module's ids int64 \['B', 'L'\], B 3, L 3",
        ),
        (
            Port("x", "float32", (2, 1, 4)),
            r"takes x float32 \[2, 1, 4\], expected the module's x float32 \['B', 'L', 4\], B 2",
        ),
    ],
    ids=str,
)
def test_other_types_and_sizes_under_one_name_are_refused(port: Port, said: str) -> None:
    inputs = [port if one.name == port.name else one for one in ports(*GIVEN)]
    with pytest.raises(CheckError, match=said):
        matched(file(inputs))


def test_an_input_that_has_a_value_in_the_file_is_a_state_where_it_has_its_name() -> None:
    x, ids, h, past = ports(*GIVEN)
    assert matched(file([x, ids, past], optional=(h, Port("weight", "float32", (1, 2, 6))))).takes["h"] == "h"
