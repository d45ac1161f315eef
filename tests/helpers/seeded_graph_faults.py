"""Faults that an engine of a Transformer-XL could have, each put into graphs that `torch_engine` interprets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Fault = Callable[[Any, str], None]
"""Changes an interpreter of a program, whose update rule is the second argument."""


def _steps(interpreter: Any, operator: str) -> list[int]:
    return [place for place, (node, *_) in enumerate(interpreter._steps) if node.operator == operator]


def _around(interpreter: Any, place: int, change: Callable[..., Any]) -> None:
    """Replace a step by one that is given the old one first."""
    node, before, inputs, outputs = interpreter._steps[place]
    interpreter._steps[place] = (node, lambda item, *given: change(before, item, *given), inputs, outputs)


def _oldest_row(by: int) -> Fault:
    def put(interpreter: Any, update: str) -> None:
        place = _steps(interpreter, "GreaterOrEqual")[-1 if update == "ring" else 0]
        _around(interpreter, place, lambda old, node, row, first: old(node, row, first + by))

    return put


def _newest_row(by: int) -> Fault:
    def put(interpreter: Any, update: str) -> None:
        if update == "ring":
            place = _steps(interpreter, "GreaterOrEqual")[1]
            _around(interpreter, place, lambda old, node, distance, least: old(node, distance, least + by))
            return
        (name,) = (key for key, held in interpreter._constants.items() if held.dtype == torch.bool and held.numel() > 1)
        seen = interpreter._constants[name].roll(-by, dims=-1)
        seen[..., 0 if by < 0 else -1] = by < 0
        interpreter._constants[name] = seen

    return put


def _scale(interpreter: Any, update: str) -> None:
    """Queries as they were before 1/sqrt(d_head), of a head of 16 at least."""
    for place in _steps(interpreter, "Split"):
        _around(interpreter, place, lambda old, *given: _first_times(old(*given), 4.0))


def _first_times(parts: Any, factor: float) -> list[Any]:
    first, *others = parts
    return [first * factor, *others]


def _embedding_scale(interpreter: Any, update: str) -> None:
    _around(interpreter, _steps(interpreter, "Mul")[0], lambda old, node, rows, factor: rows)


def _stale(layer: int, part: int) -> Fault:
    """The last row of a longer segment is not written, in the keys (0) or values (1) of a layer."""

    def put(interpreter: Any, update: str) -> None:
        if update == "ring":
            place = _steps(interpreter, "TensorScatter")[2 * layer + part]
            _around(
                interpreter,
                place,
                lambda old, node, held, rows, start: old(node, held, rows[:, :, : max(1, rows.shape[2] - 1)], start),
            )
            return
        name = f"new_memory.layers.{layer:02d}.{('key', 'value')[part]}"
        (place,) = (at for at, (*_, outputs) in enumerate(interpreter._steps) if name in outputs)
        _around(interpreter, place, lambda old, *given: _last_twice(old(*given)))

    return put


def _last_twice(rows: Any) -> Any:
    return torch.cat([rows[:, :, :-1], rows[:, :, -2:-1]], dim=2)


def _swapped(interpreter: Any, update: str) -> None:
    held = interpreter._constants
    for name in [name for name in held if name.startswith("layers.00.")]:
        other = name.replace("layers.00.", "layers.01.")
        held[name], held[other] = held[other], held[name]


def _position(distance: int) -> Fault:
    """One row of all tables of positions is its neighbour's."""

    def put(interpreter: Any, update: str) -> None:
        for name, held in interpreter._constants.items():
            if ".position.table." in name:
                changed = held.clone()
                changed[..., distance] = changed[..., distance + 1]
                interpreter._constants[name] = changed

    return put


def graph_faults(layers: int) -> dict[str, Fault]:
    """Return the faults by title, for a model of `layers` layers."""
    return {
        "the oldest row is not seen": _oldest_row(1),
        "a row older than the oldest is seen": _oldest_row(-1),
        "a token does not see itself": _newest_row(1),
        "a token sees the next": _newest_row(-1),
        "no scale of the scores": _scale,
        "no scale of the embedding": _embedding_scale,
        "a stale row among the first keys": _stale(0, 0),
        "a stale row among the last values": _stale(layers - 1, 1),
        "two layers swapped": _swapped,
        "one row of positions is another's": _position(1),
    }
