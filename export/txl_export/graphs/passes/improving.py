"""All passes over a step's graph, in their order.

A pass replaces operators of the standard by operators of the standard, so that every engine reads the result. What a
pass has made is not compared here: the ladder compares the whole bundle with the reference, step by step.
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
"""Each changes a graph in place whose values have types and shapes; what it leaves unread is taken out afterwards."""


QUANTISERS = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})


def improve(model: ir.Model) -> None:
    """Run all passes over a settled graph, in place.

    A graph with quantisers stays as it is: where a pass rounds differently by 1e-7, a quantiser behind it makes a step
    of that, such as 1/255 of the largest value.
    """
    for one in PASSES if QUANTISERS.isdisjoint(node.op_type for node in model.graph) else ():
        one(model.graph)
        RemoveUnusedNodesPass()(model)
        infer_shapes(model)
