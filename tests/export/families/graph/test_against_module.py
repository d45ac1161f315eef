"""Files that others exported, held against their modules: right ones pass, and each mistake is found and placed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import txl_export
from onnxruntime.transformers.float16 import convert_float_to_float16
from outside_exports import (
    SPECS,
    D,
    Outside,
    batch_of_one,
    dropout_in_training,
    exported,
    not_returned,
    optional,
    other_gate,
    other_weights,
    said,
    spec_of,
    starts_anew,
    without_input,
)
from txl_export.families.graph import standing_in
from txl_export.families.graph.against_module import _told
from txl_report.schema.verification import Gate
from txl_runtime.errors import BackendError, CheckError, UsageError

ODD = None
RIGHT = {
    **{f"{model}, one sequence": Outside(model, opset=17 + at % 7) for at, model in enumerate(SPECS)},
    **{f"{model}, four sequences": Outside(model, 4, 2, opset=17 + at % 5) for at, model in enumerate(SPECS)},
    **{
        f"{model}, all open": Outside(model, 2, free="B" if model == "counted" else "BL", opset=20 - at % 4)
        for at, model in enumerate(SPECS)
    },
    "lstm, without names": Outside("lstm", 2, 2, free="B", names=ODD),
    "lstm, names of exporters": Outside("lstm", 2, names={"h_in": "hx", "h_out": "hy", "c_in": "cx", "c_out": "cy"}),
    "average, with the first state in the file": Outside("average", edit=optional("mean_in", 0)),
    "lstm, optional states": Outside("lstm", edit=optional("h_in", 0)),
}
"""Right exports."""

START = "first state of the file max abs (relative)"
REFUSED = {
    "not cut off": r"a\.onnx: gives past_key_out of the shape .*, expected the module's at most",
    "fixed": r"a\.onnx: (gives|does not run with) .*look whether a size was fixed",
}
FIRST = r"they part first in segment 1 of .*"
LATER = r"they part first in segment ([2-9]|1\d) of .*"
WRONG: dict[str, tuple[Outside, str]] = {
    # A state that is forgotten, or begins otherwise than it should.
    "a GRU that begins with zeros in every call": (Outside("gru", edit=starts_anew), FIRST + "output logits"),
    "a hidden state that is wiped before each segment": (Outside("lstm", wrong="hidden state wiped"), LATER),
    "a state that is returned as it was": (Outside("lstm", wrong="state before the update"), "h as it was given"),
    "a state that is not returned": (Outside("gru", edit=not_returned("h_out")), "h as it was given"),
    "a cache of zeros": (Outside("convolutions", wrong="zeros before"), LATER + "output y"),
    "a first state that is not the module's": (
        Outside("lstm", wrong="first state that is not the module's"),
        FIRST + "a single step",
    ),
    "a first state in the file that is another": (Outside("lstm", edit=optional("c_in", 1)), START),
    "a reset to zeros": (Outside("reset", wrong="reset to zeros"), "they part first"),
    "a reset that is ignored": (Outside("reset", wrong="flag ignored"), "they part first"),
    # A state that is a different one.
    "states swapped": (Outside("lstm", wrong="states swapped"), FIRST + "state h, state c: the outputs agree"),
    "layers upside down": (Outside("lstm", wrong="layers upside down"), LATER),
    "the first layer's state for both": (Outside("lstm", wrong="state of the first layer"), FIRST + "state h"),
    "the state of the position before": (Outside("lstm", wrong="state of the position before"), FIRST + "state h"),
    "memories of the other layer": (Outside("memories", wrong="memories of the other layer"), LATER),
    "the memory of the segment before": (Outside("memories", wrong="memory of the segment before"), "as it was given"),
    "sequences mixed": (Outside("lstm", 4, wrong="sequences mixed"), FIRST + "state h"),
    "wrong from the second step on": (Outside("average", 2, wrong="wrong from the second step on"), "in segment 2 of"),
    # Windows, caches, counters.
    "a mask that is off by one": (Outside("window", wrong="mask off by one"), "output y"),
    "rows that do not exist": (Outside("window", wrong="mask of empty rows lost"), FIRST + "output y"),
    "a counter that stands still": (Outside("window", wrong="counter stuck"), "seen as it was given"),
    "a counter of segments": (Outside("window", wrong="counter by one"), FIRST + "state seen"),
    "a window that grows": (Outside("growing", wrong="window that grows"), "not cut off"),
    "a growing cache cut at the wrong end": (Outside("growing", wrong="cut at the wrong end"), LATER + "past_key"),
    "a cache of positions ahead": (Outside("ahead", wrong="look-ahead kept"), FIRST + "state cache"),
    "positions that do not count": (Outside("counted", wrong="padding counted"), "look at resets, at idle"),
    # Arithmetic, modes, inputs, sizes.
    "half precision inside": (Outside("lstm", wrong="half precision inside"), "they part first"),
    "dropout in training mode": (Outside("lstm", edit=dropout_in_training), FIRST + "output y"),
    "batch norm in training mode": (Outside("convolutions", wrong="batch norm in training mode"), FIRST + "output y"),
    "a normaliser that is lost": (Outside("lstm", wrong="normaliser lost"), FIRST + "a single step"),
    "another form of gate": (Outside("gru", edit=other_gate), FIRST),
    "other weights": (Outside("lstm", edit=other_weights), FIRST),
    "noise": (Outside("average", 2, wrong="noise"), FIRST),
    "ids cut off": (Outside("gru", wrong="ids cut off"), "they part first"),
    "an input that was folded": (Outside("reset", edit=without_input("gain")), FIRST),
    "a number of sequences that was folded": (Outside("gru", free="B", edit=batch_of_one), "fixed"),
    "a length that was folded": (Outside("window", free="L", wrong="length folded"), "fixed"),
}
"""Wrong exports, and what is said of them: where they part, or that a size does not fit."""
QUICK = {
    "gru, all open",
    "lstm, without names",
    "growing, one sequence",
    "lstm, optional states",
    "a state that is not returned",
    "states swapped",
    "wrong from the second step on",
    "a first state in the file that is another",
    "sequences mixed",
}


def verified(case: Outside, folder: Path, **options: Any) -> Any:
    path = exported(case, folder / "a.onnx")
    return txl_export.verify(path, module=spec_of(case.model), **(said(case, path) | options))


def marked(table: dict[str, Any], keep: int) -> list[Any]:
    """The names of a table; what is not quick is slow."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow(keep=keep)) for name in sorted(table)]


@pytest.mark.parametrize("name", marked(RIGHT, 6))
def test_no_right_file_is_accused(name: str, tmp_path: Path) -> None:
    parity = verified(RIGHT[name], tmp_path, segments=12 if name in QUICK else None)
    assert parity.passed, parity.gate_advice


@pytest.mark.parametrize("name", marked(WRONG, 8))
def test_every_mistake_is_found_and_placed(name: str, tmp_path: Path) -> None:
    case, said = WRONG[name]
    segments = 12 if name in QUICK else None
    if said in REFUSED:
        with pytest.raises(CheckError, match=REFUSED[said]) as error:
            verified(case, tmp_path, segments=segments)
        assert "\n" not in str(error.value)
        return
    parity = verified(case, tmp_path, segments=segments)
    gates = [gate.name for gate in parity.gates if gate.passed is False]
    assert gates
    assert said in gates or re.search(said, parity.gate_advice), parity.gate_advice


def test_what_cannot_be_run_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, spec = exported(Outside("gru"), tmp_path / "a.onnx"), spec_of("gru")
    absent = replace(spec, states=[replace(spec.states[0], initial=None)])
    with pytest.raises(UsageError, match="state h is absent before the first step, expected one that is there"):
        txl_export.verify(path, module=absent, rename={"h_in": "h"})
    with pytest.raises(UsageError, match="h_in is float32, which no array is made of <U4; see --inputs"):
        verified(Outside("gru"), tmp_path, inputs=_arrays(tmp_path, h_in=np.array(["text"])))
    monkeypatch.setattr(standing_in, "SECONDS", 0.0)
    with pytest.raises(BackendError, match=r"a\.onnx: took more than 0 s of processor time; try fewer --segments"):
        txl_export.verify(path, module=spec, rename={"h_in": "h"})
    monkeypatch.undo()
    model = onnx.load(path)
    model.graph.node[0].domain = "nowhere"
    onnx.save(model, path)
    with pytest.raises(UsageError, match=r"a\.onnx: ONNX Runtime does not open it: .*; export it again") as refusal:
        txl_export.verify(path, module=spec, rename={"h_in": "h"})
    assert "\n" not in str(refusal.value)


def test_where_every_segment_is_near_the_gate_that_failed_is_named(tmp_path: Path) -> None:
    right = verified(RIGHT["gru, all open"], tmp_path, segments=4)
    for gate, why in (("idle rows (bits)", "a segment that is repeated"), ("drift of h", "see the table")):
        found = replace(right, gates=(*right.gates, Gate(gate, 3.0, 0.0, False)))
        assert _told(found, set(), 1e-4).startswith(f"{gate} failed: {why}")
    assert _told(right, set(), 1e-4) == ""


def test_real_inputs_are_read_and_constants_given(tmp_path: Path) -> None:
    real = {"x": np.ones((2, D), np.float32), "gain": np.zeros((2, 1), np.float32), "done": np.zeros(2, bool)}
    wrong = Outside("reset", wrong="an input folded")
    assert not verified(wrong, tmp_path, segments=8).passed
    assert verified(
        wrong, tmp_path, segments=8, inputs=_arrays(tmp_path, **(real | {"gain": real["gain"] + 0.5}))
    ).passed
    assert not verified(wrong, tmp_path, segments=8, inputs=_arrays(tmp_path, **real)).passed


def test_a_constant_that_the_file_takes_besides_is_given(tmp_path: Path) -> None:
    def rated(model: onnx.ModelProto) -> None:
        """The outputs are multiplied by a sampling rate over 16000, as files for speech have it."""
        graph, cast = model.graph, onnx.helper.make_node("Cast", ["sr"], ["rate"], to=onnx.TensorProto.FLOAT)
        whole = onnx.numpy_helper.from_array(np.array(16000, np.float32), "whole")
        nodes = [onnx.helper.make_node("Div", ["rate", "whole"], ["share"])]
        nodes += [onnx.helper.make_node("Mul", ["unrated", "share"], ["action"])]
        for node in graph.node:
            node.output[:] = ["unrated" if name == "action" else name for name in node.output]
        graph.initializer.append(whole)
        graph.input.append(onnx.helper.make_tensor_value_info("sr", onnx.TensorProto.INT64, []))
        graph.node.extend([cast, *nodes])

    rates = [
        verified(Outside("reset", edit=rated), tmp_path, segments=8, inputs=_arrays(tmp_path, sr=np.array(rate)))
        for rate in (16000, 8000)
    ]
    assert [rate.passed for rate in rates] == [True, False]


def test_a_file_in_half_precision_is_judged_by_the_limits_of_fp16(tmp_path: Path) -> None:
    def halved(model: onnx.ModelProto) -> None:
        model.CopyFrom(convert_float_to_float16(model))

    parity = verified(Outside("lstm", edit=halved), tmp_path, segments=12)
    assert (parity.passed, parity.precision) == (True, "fp16"), parity.gate_advice
    worst = max(most for chain in parity.chains for most in chain.states["h"].tensor.most)
    assert worst > 1e-4, "by fp32's it would fail"
    parity = verified(Outside("lstm", edit=halved, wrong="layers upside down"), tmp_path, segments=12)
    assert re.match(LATER, parity.gate_advice)


def _arrays(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "real.npz", **arrays)
    return folder / "real.npz"
