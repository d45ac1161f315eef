"""A comparison of the inputs and outputs of a graph or an engine with its program's row in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BundleError


class Binding(NamedTuple):
    """An input or output as an engine library or a file describes it; an open size is a name, e.g. ("batch", 8)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


def check_bindings(
    where: str,
    inputs: Sequence[Binding],
    outputs: Sequence[Binding],
    program: Program,
    advice: str,
    order: bool = False,
    open_size: str | None = None,
) -> None:
    """Compare the inputs and outputs of a graph or engine with the inputs and outputs in a program's row.

    Args:
        order: whether the order must be the same; engine libraries list tensors in an order of their own.
        open_size: a name, e.g. "batch", that the graph may have for a size that is a number in the program's row.

    Raises:
        BundleError: an input or output differs; the message names the first difference.
    """
    for side, found, specs in (("inputs", inputs, program.inputs), ("outputs", outputs, program.outputs)):
        has = {binding.name: binding for binding in found}
        wants = {spec.name: Binding(spec.name, spec.dtype, spec.shape) for spec in specs}
        for name in sorted({*has, *wants}):
            if name not in has:
                raise BundleError(
                    f"{where}: lacks {wants[name]} among its {side}, expected it as in the manifest; {advice}"
                )
            if name not in wants:
                raise BundleError(
                    f"{where}: has {has[name]} among its {side}, which the manifest does not know; {advice}"
                )
            if not _fits(has[name], wants[name], open_size, side == "outputs"):
                raise BundleError(
                    f"{where}: one of its {side} is {has[name]}, expected {wants[name]} as in the manifest; {advice}"
                )
        if len(found) != len(specs):
            raise BundleError(f"{where}: has {len(found)} {side}, expected the {len(specs)} of the manifest; {advice}")
        if order and list(has) != list(wants):
            raise BundleError(
                f"{where}: has its {side} in another order than the manifest, expected the same; {advice}"
            )


def _fits(has: Binding, wants: Binding, open_size: str | None, returned: bool) -> bool:
    """Return whether a tensor of the graph has the type and shape in the table.

    In the table, "rows" is a number of rows that may change. A graph's output may have a number there: an engine
    library computes it when the rows are constant, e.g. of a full cache.
    """
    same = has[:2] == wants[:2] and len(has.shape) == len(wants.shape)
    return same and all(
        size in (wanted, open_size if isinstance(wanted, int) else wanted)
        or (wanted == "rows" and (returned or not isinstance(size, int)))
        for size, wanted in zip(has.shape, wants.shape, strict=True)
    )
