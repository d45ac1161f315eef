"""The inputs and outputs of a graph or an engine, held against those that its program promises."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BundleError

__all__ = ["Binding", "check_bindings"]


_name = attrgetter("name")


class Binding(NamedTuple):
    """An input or output as a library or a file tells it; a size that is left open has a name."""

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
) -> None:
    """Hold what was found against a program.

    Args:
        where: what was looked at, for the message.
        inputs, outputs: what was found there.
        program: what was promised.
        advice: what to do when they differ.
        order: whether the order has to be the program's; libraries tell their tensors in an order of their own.

    Raises:
        BundleError: they differ; the first difference is named.
    """
    for side, found, specs in (("inputs", inputs, program.inputs), ("outputs", outputs, program.outputs)):
        wanted: Sequence[Binding] = [Binding(spec.name, spec.dtype, spec.shape) for spec in specs]
        if not order:
            found, wanted = sorted(found, key=_name), sorted(wanted, key=_name)
        for has, wants in zip(found, wanted, strict=False):
            if has != wants:
                raise BundleError(
                    f"{where}: one of its {side} is {has}, expected {wants} as the manifest has it; {advice}"
                )
        if len(found) != len(wanted):
            raise BundleError(f"{where}: has {len(found)} {side}, expected the {len(wanted)} of the manifest; {advice}")
