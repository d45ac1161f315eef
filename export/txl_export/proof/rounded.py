"""Compares a bundle with its copy of rounded matrices, which stands in for engines of TensorRT-RTX.

The engines multiply activations of half precision by codes (rounded numbers); the copy multiplies them by the values
that the codes stand for, in ONNX Runtime on the CPU. So a step without its module has a reference, too: the bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from txl_runtime.errors import UsageError
from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays, Ids

from txl_export.proof.references import Reference, States, hand_over


def opened_for_rtx(opener: Callable[[], Model], precision: str) -> Model:
    """Open a copy on the CPU; the ladder judges it by the limits of engines of TensorRT-RTX in this precision."""
    model = opener()
    backend = model.backend
    backend.description += f", which stands in for TensorRT-RTX with matrices in {precision}"
    backend.name, backend.precision = "rtx", precision
    return model


class BundleReference(Reference):
    """A bundle of steps that return their whole state, as the reference of its copy.

    Raises:
        UsageError: the bundle's steps count rows of memory.
    """

    described = "in ONNX Runtime on the CPU"
    small = False

    def __init__(self, model: Model) -> None:
        self._model = model
        if model.manifest.can.count_rows:
            raise UsageError(
                f"{model.bundle.path}: its states count their rows, expected states that steps return as a whole for "
                "--precision; leave it out"
            )

    def fresh(self, count: int) -> States:
        return dict(self._model.stream(count).state())

    def step(
        self, inputs: Arrays, states: States, valid: Ids | None
    ) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        manifest = self._model.manifest
        axes = ((entry.name, entry.axes.batch) for entry in manifest.given)
        name, batch = next((name, axis) for name, axis in axes if axis is not None)
        stream = self._model.stream(inputs[name].shape[batch])
        hand_over(stream, manifest, states)
        return stream.run(inputs, lengths=valid), stream.state()

    def in_single(self) -> None:
        return None
