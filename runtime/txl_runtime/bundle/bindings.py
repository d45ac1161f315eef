"""A comparison of a graph's or an engine's inputs and outputs with those in its program's row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BundleError


class Binding(NamedTuple):
    """An input or output as a library or a file describes it; an open size is a name, e.g. ("batch", 8)."""

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
    """Compare the inputs and outputs that were found with a program's.

    Args:
        order: whether the order has to be the program's; engine libraries list tensors in an order of their own.
        open_size: the name of a size, e.g. "batch", that a graph may leave open although the program has a number.

    Raises:
        BundleError: they differ; the first difference is named.
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
    """Return whether a tensor of the graph is the one in the table.

    The table says "rows" for a number of rows that changes. An engine's library may say a number for a result whose
    rows are constant, such as a full cache.
    """
    same = has[:2] == wants[:2] and len(has.shape) == len(wants.shape)
    return same and all(
        size in (wanted, open_size if isinstance(wanted, int) else wanted)
        or (wanted == "rows" and (returned or not isinstance(size, int)))
        for size, wanted in zip(has.shape, wants.shape, strict=True)
    )
