"""Runs all passes over a step's graph, in a fixed order.

Passes write only operators of the standard, which every engine reads. The passes' results are not compared here: the
parity ladder compares the whole bundle with the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from txl_export.graphs.passes.cells import take_cells_apart
from txl_export.graphs.passes.einsums import einsums_to_products
from txl_export.graphs.passes.few_queries import take_queries_to_rows
from txl_export.graphs.passes.fusable import write_what_fuses
from txl_export.graphs.passes.joins import join_once
from txl_export.graphs.passes.moves import join_moves
from txl_export.graphs.passes.needed_parts import compute_what_is_read
from txl_export.graphs.passes.single_convs import compute_one_position
from txl_export.graphs.passes.stacks import put_stacks_together, take_stacks_apart
from txl_export.graphs.passes.writes import join_writes
from txl_export.graphs.settling import infer_shapes

PASSES: tuple[Callable[[ir.Graph], None], ...] = (
    join_writes,
    join_once,
    take_cells_apart,
    einsums_to_products,
    take_queries_to_rows,
    compute_what_is_read,
    compute_one_position,
    join_moves,
    take_stacks_apart,
    put_stacks_together,
    write_what_fuses,
)
"""All passes in order. Each changes a graph whose values have types and shapes; unused nodes are removed after it."""


QUANTISERS = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})


def improve(model: ir.Model) -> None:
    """Run all passes over a settled graph, in place.

    A graph with quantisers stays unchanged: a quantiser can turn a difference of 1e-7 in rounding into a whole step,
    e.g. 1/255 of the largest value.
    """
    for one in PASSES if QUANTISERS.isdisjoint(node.op_type for node in model.graph) else ():
        one(model.graph)
        RemoveUnusedNodesPass()(model)
        infer_shapes(model)
