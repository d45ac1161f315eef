"""A small step with state as arrays of NumPy, in the place of a bundle: a stream that can be given faults.

Its sequences share no operation that a library could round in another way for another batch, so they are independent to
the bit, as those of a bundle have to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from txl_export.proof.references import Reference
from txl_runtime.bundle.manifest import FORMAT, FORMAT_VERSION, Manifest
from txl_runtime.bundle.tables import Input, Output, Program, StateTensor
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.streaming.state import RowState

B, LENGTHS, FEATURES, WIDTH, ROWS = 3, (4, 1), 3, 4, 6
DRAWS = np.random.default_rng(5)
INSIDE, WITHIN, OUT = (DRAWS.normal(0, 0.5, size) for size in ((FEATURES, WIDTH), (WIDTH, WIDTH), (WIDTH, 5)))


def state_tensor(name: str, shape: tuple[int, ...], batch_axis: int, dtype: Any = "float32") -> StateTensor:
    """A row of the state table."""
    return StateTensor(
        name=name,
        input=f"state.{name}.in",
        output=f"state.{name}.out",
        dtype=dtype,
        shape=shape,
        batch_axis=batch_axis,
        update="replace",
    )


MANIFEST = Manifest(
    format=FORMAT,
    format_version=FORMAT_VERSION,
    model_id="0" * 64,
    batch_size=B,
    precision="fp32",
    inputs=(
        Input(name="x", dtype="float32", shape=("B", "L", FEATURES), role="feature"),
        Input(name="valid", dtype="int32", shape=("B",), role="valid"),
    ),
    outputs=(
        Output(name="words", dtype="float32", shape=("B", "L", 5), role="logprobs"),
        Output(name="mean", dtype="float32", shape=("B", FEATURES)),
    ),
    states=(
        state_tensor("count", (B,), 0, "int32"),
        state_tensor("h", (1, B, WIDTH), 1),
        state_tensor("rows", (B, ROWS, FEATURES), 0),
    ),
    programs=tuple(
        Program(
            name=f"step-{length}",
            kind="step",
            segment_length=length,
            update="replace",
            file=f"step-{length}.onnx",
            inputs=(),
            outputs=(),
        )
        for length in LENGTHS
    ),
    streams="independent",
    lengths="exact",
    weights="weights.safetensors",
    files={},
    parameters=100,
)
AXES = {state.name: state.batch_axis or 0 for state in MANIFEST.states}


def fresh(count: int, dtype: Any) -> dict[str, np.ndarray]:
    """The states before the first step."""
    return {
        "count": np.zeros(count, np.int32),
        "h": np.zeros((1, count, WIDTH), dtype),
        "rows": np.zeros((count, ROWS, FEATURES), dtype),
    }


def times(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A product of matrices whose rows are summed one by one."""
    return (left[:, :, None] * right.astype(left.dtype)).sum(1)


def step(x: np.ndarray, states: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """One segment, in the precision of its arguments: outputs and states."""
    h, rows, words = states["h"][0], states["rows"], []
    for place in range(x.shape[1]):
        mean = rows.sum(1) / ROWS
        h = np.tanh(times(h, WITHIN) + times(x[:, place] + mean, INSIDE))
        rows = np.concatenate([rows[:, 1:], x[:, place : place + 1]], axis=1)
        scores = times(h, OUT)
        words.append(scores - np.log(np.exp(scores).sum(1, keepdims=True)))
    outputs = {"words": np.stack(words, 1), "mean": rows.sum(1) / ROWS}
    return outputs, {"count": states["count"] + np.int32(x.shape[1]), "h": h[None], "rows": rows}


class NumpyReference(Reference):
    """See `proof.references.Reference`."""

    described, small = "computed in float64", True

    def fresh(self, count: int) -> dict[str, Any]:
        return fresh(count, np.float64)

    def step(self, inputs: Mapping[str, Any], states: Mapping[str, Any], valid: Any) -> Any:
        assert valid is None
        wrong = int((~np.isfinite(inputs["x"])).sum())
        assert wrong <= 1, "nobody shows the reference what does not count, and what counts holds one NaN at most"
        with np.errstate(invalid="ignore"):
            return step(inputs["x"].astype(np.float64), states)

    def in_single(self) -> Any:
        return None


class ArrayStream:
    """The methods of a bundle's `Stream`; faults are made by overriding `compute` and the operations."""

    def __init__(self, count: int) -> None:
        self.count, self.steps = count, 0
        self.held = fresh(B, np.float32)

    def compute(self, x: np.ndarray, states: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Compute the graph's results for all B sequences."""
        return step(x, states)

    def keep(self, live: np.ndarray, after: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the states that the graph keeps, those of idle sequences unchanged."""
        kept = {}
        for name, values in after.items():
            mask = live.reshape([-1 if axis == AXES[name] else 1 for axis in range(values.ndim)])
            kept[name] = np.where(mask, values, self.held[name])
        return kept

    def run(self, inputs: Mapping[str, Any], lengths: Any = None, commit: bool = True) -> dict[str, np.ndarray]:
        x = np.asarray(inputs["x"], np.float32)
        counts = np.full(self.count, x.shape[1]) if lengths is None else np.asarray(lengths)
        given = np.zeros((B, *x.shape[1:]), np.float32)
        given[: self.count][counts > 0] = x[counts > 0]
        live = np.zeros(B, np.bool_)
        live[: self.count] = counts > 0
        with np.errstate(all="ignore"):
            outputs, after = self.compute(given, self.held)
        if commit:
            self.steps += 1
            self.held = self.keep(live, after)
        found = {name: values[: self.count].copy() for name, values in outputs.items()}
        for values in found.values():
            values[counts == 0] = 0
        return found

    def state(self) -> dict[str, np.ndarray]:
        return {name: np.take(values, range(self.count), AXES[name]) for name, values in self.held.items()}

    def reset(self, rows: Any = None) -> None:
        which = list(range(B)) if rows is None else rows
        which = np.flatnonzero(which) if np.asarray(which).dtype == np.bool_ else np.asarray(which)
        for name, start in fresh(B, np.float32).items():
            self.place(name, which, np.take(start, which, AXES[name]))

    def select(self, rows: Any) -> None:
        before = self.held
        self.held, self.count = fresh(B, np.float32), len(rows)
        for name, values in before.items():
            self.place(name, np.arange(self.count), np.take(values, rows, AXES[name]))

    def take(self, row: int) -> RowState:
        return RowState(0, 0, {name: np.take(values, row, AXES[name]) for name, values in self.held.items()})

    def put(self, row: int, state: RowState) -> None:
        for name, values in state.tensors.items():
            self.place(name, np.array([row]), np.expand_dims(values, AXES[name]))

    def snapshot(self) -> StreamState:
        return StreamState("0" * 64, np.zeros(self.count, np.int32), {}, None, ArrayStream.state(self))

    def restore(self, state: StreamState) -> None:
        assert state.states is not None
        for name, values in state.states.items():
            self.place(name, np.arange(self.count), values)

    def place(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Write some sequences of a state."""
        held = self.held[name] = self.held[name].copy()
        held[(*[slice(None)] * AXES[name], rows)] = values


class ArrayModel:
    """The methods of a `Model`, over arrays."""

    def __init__(
        self, stream: type[ArrayStream] = ArrayStream, vectors: Mapping[str, Any] | None = None, precision: Any = "fp32"
    ) -> None:
        self.manifest, self._stream = msgspec.structs.replace(MANIFEST, precision=precision), stream
        self.batch_size, self.segment_lengths = B, LENGTHS
        facts = {"description": "arrays of NumPy", "programs": MANIFEST.programs, "precision": None, "reached": None}
        self.backend = SimpleNamespace(name="cpu", **facts)
        self.bundle = SimpleNamespace(path="arrays", selftest=lambda: dict(vectors or {}))

    def stream(self, count: int | None = None) -> ArrayStream:
        return self._stream(B if count is None else count)
