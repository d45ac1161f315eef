"""Every row of `ladder.LIMITS` decides something: a verdict changes where the number is half or twice as large."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from stand_ins.step_stream import ArrayModel, ArrayStream, NumpyReference
from txl_export.proof.comparing import ChainErrors, TensorErrors
from txl_export.proof.distributions import Distributions
from txl_export.proof.gates import drifting
from txl_export.proof.parity import Parity
from txl_export.proof.selftest_vectors import selftest_vectors
from txl_export.proof.verification import verify_model
from txl_report.schema.verification import Chain
from txl_runtime import load
from txl_runtime.ladder import LIMITS, Limit, float32_limit, limit_of
from txl_runtime.selftest import run_selftest


def test_documentation_has_the_same_rows_and_numbers():
    text = (Path(__file__).parents[3] / "docs" / "decisions.md").read_text("utf-8")
    table = text.partition("## The limits")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert {name.strip(): float(value) for name, value in rows[1:]} == {n: row.value for n, row in LIMITS.items()}


# ---- what each limit decides: whether something passes that is `size` times as large as its limit


def near_tie(size: float) -> bool:
    """A bundle likes the second of two best tokens."""
    chain = ChainErrors(Chain(name="", streams=1, segments=0, positions=0))
    scores = np.log([[0.4, 0.4 * np.exp(-0.02 * size), 0.2]])
    Distributions(chain, TensorErrors(nats=True), 3).compare(scores, scores[:, [1, 0, 2]])
    return chain.chain.agreeing == chain.chain.decided


def mask(size: float) -> bool:
    """An error beside a large value."""
    errors = TensorErrors()
    errors.add((np.array([-1e3 * size, 0.5]), np.array([-1e3 * size, 0.51])))
    return errors.largest <= float32_limit()


def drift(early: float, late: float, size: float) -> bool:
    """A chain whose error grows."""
    errors = TensorErrors()
    errors.tensor.mean = [early] * 20 + [late * size] * 20
    chain = ChainErrors(
        Chain("", streams=1, segments=40, positions=640, rows=[16] * 40, full_from=0), {}, {"h": errors}
    )
    return not drifting(ArrayModel().manifest, "fp32", "cpu", chain)


class Offset(NumpyReference):
    """In float32 a state is off by `single` after every segment."""

    def __init__(self, single: float, off: float = 0.0) -> None:
        self.single, self.off = single, off

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        outputs, after = super().step(inputs, states, valid)
        return outputs, after | {"rows": after["rows"] + self.off}

    def in_single(self) -> Any:
        return Offset(self.single, self.single)


class OffsetStream(ArrayStream):
    """As much as six segments, the rows that the state has, make 1.5 times the limit."""

    def compute(self, x: Any, states: Any) -> Any:
        outputs, after = super().compute(x, states)
        return outputs, after | {"rows": after["rows"] + np.float32(0.25 * float32_limit())}


def explained(size: float) -> bool:
    """A bundle beyond the limit, of a model whose own rounding is half of the limit, divided by `size`."""
    model, own = ArrayModel(OffsetStream), float32_limit() / 2 / size
    samples = {"x": np.random.default_rng(0).uniform(-0.5, 0.5, (2, 50, 3)).astype(np.float32)}
    return verify_model(lambda: model, Offset(own / 6), "the test", samples, segments=16).passed


def gain(size: float) -> bool:
    """Quantised matrices of another size."""
    return Parity("", "int4", "", (), None, ()).with_gain(0.02 * size).passed


def further(size: float) -> bool:
    """The self-test of a bundle that reached a tenth where it was made."""

    class Further(ArrayStream):
        def compute(self, x: Any, states: Any) -> Any:
            outputs, after = super().compute(x, states)
            return outputs | {"words": outputs["words"] + np.float32(0.2 * size)}, after

    model = ArrayModel(precision="int8")
    vectors = selftest_vectors(model.manifest, NumpyReference()) | {"reached": np.array([0.1, 0.1])}
    return run_selftest(ArrayModel(Further, vectors, "int8")).passed


def rows(size: float) -> bool:
    """The self-test of a bundle in half precision, one of whose rows is further than it was."""
    model = load(frozen("half"))
    vectors = model.bundle.selftest()
    reached = run_selftest(model).largest["rows"] / (3 * size)
    vectors |= {name: values * reached for name, values in vectors.items() if name.startswith("reached/")}
    model.bundle = SimpleNamespace(selftest=lambda: vectors, path=model.bundle.path, manifest=model.manifest)
    return run_selftest(model).passed


DECIDED: dict[str, Callable[..., bool]] = {
    "near tie": near_tie,
    "mask": mask,
    "drift": partial(drift, 1e-2, 1.5e-2),
    "drift floor": partial(drift, 0.0, 1e-6),
    "explained": explained,
    "gain": gain,
    "further": further,
    "rows": rows,
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_verdict_changes_where_a_limit_is_half_or_twice_as_large(name, monkeypatch):
    passes = DECIDED[name]
    assert passes(0.75)
    assert not passes(1.5)
    true = limit_of(name)
    for factor in (0.5, 2.0):
        monkeypatch.setitem(LIMITS, name, Limit(factor * true, "mutated"))
        assert passes(0.75 if factor < 1 else 1.5) == (factor > 1)
