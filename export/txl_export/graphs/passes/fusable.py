"""Rewrites GELU and RMS norms into the forms that ONNX Runtime fuses into one operator each."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet


def write_what_fuses(graph: ir.Graph) -> None:
    """Rewrite x (0.5 (1 + erf)) as x (1 + erf) 0.5, and x (1 / root) as x / root."""
    RULES.apply_to_model(ir.Model(graph, ir_version=10))


def _gelu(op: Any, x: Any, root: Any, one: Any, half: Any) -> Any:
    return op.Mul(x, op.Mul(half, op.Add(op.Erf(op.Div(x, root)), one)))


def _gelu_known(op: Any, x: Any, root: Any, one: Any, half: Any) -> Any:
    return op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, root)), one)), half)


def _norm(op: Any, x: Any, two: Any, axes: Any, small: Any) -> Any:
    mean = op.ReduceMean(op.Pow(x, two), axes, _outputs=["mean"])
    return op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean, small))))


def _keeps_axes(context: object, mean: Any, **_: object) -> bool:
    """Return whether a mean keeps the axis that it reduces, with size 1.

    ONNX Runtime also fuses means that drop the axis, and then computes a wrong result.
    """
    return bool(mean.producer().attributes.get_int("keepdims", 1))


def _norm_known(op: Any, x: Any, two: Any, axes: Any, small: Any, **_: object) -> Any:
    return op.Div(x, op.Sqrt(op.Add(op.ReduceMean(op.Pow(x, two), axes, keepdims=1), small)))


RULES = RewriteRuleSet([RewriteRule(_gelu, _gelu_known), RewriteRule(_norm, _norm_known, _keeps_axes)], commute=True)
